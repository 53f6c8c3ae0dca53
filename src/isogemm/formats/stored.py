"""What the bytes of a quantized matrix have to be: their number, their rows, their strides; errors by name."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arguments import shown
from ..base.dtypes import BFLOAT16, DTYPES
from ..errors import DTypeError, FormatError, LayoutError, LimitError, ShapeError
from .blocks import BlockFormat

Array = npt.NDArray[Any]


def prefix(name: str) -> str:
    """The start of a message about a tensor."""
    return f"{name}: " if name else ""


def in_blocks(size: int, fmt: BlockFormat) -> str:
    """A number of bytes, in blocks."""
    whole, rest = divmod(size, fmt.nbytes)
    return f"{size} bytes = {whole} blocks of {fmt.nbytes}" + (f" and {rest}" if rest else "")


def checked_shape(shape: Any, name: str) -> tuple[int, int]:
    """(n, k), if it is one."""
    try:
        n, k = (operator.index(x) for x in shape)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{prefix(name)}shape", limit="(n, k)", value=shape, nearest="(n, k)") from error
    if n < 0 or k < 0:
        raise ShapeError(f"{prefix(name)}shape", limit="at least 0", value=(n, k), nearest=(max(n, 0), max(k, 0)))
    if n * k >= 2**62:
        raise LimitError(f"{prefix(name)}elements", limit="fewer than 2**62", value=n * k, nearest="fewer rows")
    return n, k


def wrong_stride(stride: Any, row: int, fmt: BlockFormat, k: int, name: str) -> LayoutError:
    """A producer's stride that is not the format's."""
    value = in_blocks(int(stride), fmt) if isinstance(stride, int | np.integer) else shown(stride)
    return LayoutError(
        f"{prefix(name)}row stride of {fmt} with k = {k}", limit=in_blocks(row, fmt), value=value,
        nearest=f"write rows of {row} bytes, row i at i * {row}",
    )  # fmt: skip


def rows_of(data: Any, n: int, row: int, fmt: BlockFormat, name: str, origin: int) -> Array:
    """The bytes [n, row], as a view; every way in which they can be too few or too many, by name."""
    flat = _bytes(data, name)
    if flat.ndim == 2:
        if flat.shape != (n, row) or (n and row > 1 and flat.strides[1] != 1):
            raise LayoutError(
                f"{prefix(name)}bytes of {fmt} rows", limit=f"[{n}, {row}], a row's bytes adjacent",
                value=f"{list(flat.shape)}, strides {flat.strides}", nearest=f"rows of {in_blocks(row, fmt)}",
            )  # fmt: skip
        return flat
    if flat.size != n * row:
        raise _wrong_size(flat.size, n, row, fmt, name, origin)
    return flat.reshape(n, row)


def _wrong_size(size: int, n: int, row: int, fmt: BlockFormat, name: str, origin: int) -> FormatError:
    value, nearest = f"{size} bytes", f"{n * row} bytes"
    if n and size % n == 0 and size % fmt.nbytes == 0 and size != n * row:
        nearest = f"rows of {in_blocks(row, fmt)}; these bytes are {n} rows of {in_blocks(size // n, fmt)}"
    elif size < n * row and row:
        whole, rest = divmod(size, row)
        value += f": row {whole} ends after {rest} bytes, at byte {origin + size}"
    return FormatError(
        f"{prefix(name)}bytes of a {fmt} matrix of {n} rows, from byte {origin}",
        limit=f"{n} x {row} = {n * row}", value=value, nearest=nearest,
    )  # fmt: skip


def _bytes(data: Any, name: str) -> Array:
    if isinstance(data, np.ndarray):
        found = data.view(np.ndarray)
        if found.dtype != np.uint8 and found.flags.c_contiguous and not found.dtype.hasobject:
            found = found.reshape(-1).view(np.uint8)
        if found.dtype == np.uint8 and found.ndim in (1, 2) and (found.ndim == 2 or found.flags.c_contiguous):
            return found
    else:
        try:
            return np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError):
            pass
    raise LayoutError(
        f"{prefix(name)}data", limit="contiguous bytes, or a uint8 array [n, row bytes]",
        value=type(data).__name__, nearest="np.frombuffer(data, np.uint8)",
    )  # fmt: skip


def writable(rows: Array) -> bool:
    """Whether memory can be written without harm: nobody marked it read-only, or what is written stays in the process.

    The pages of a file that is mapped read-only cannot: a write ends the process. Views of a private mapping are
    marked, so that NumPy refuses to write into them, and could be.
    """
    if rows.flags.writeable:
        return True
    base: Any = rows
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return bool(base.mode == "c")
        base = base.base
    return False


class Unmarked:
    """An array's memory for `numpy.asarray`, without the mark that it is read-only."""

    def __init__(self, rows: Array) -> None:
        self.owner = rows
        self.__array_interface__ = {**rows.__array_interface__, "data": (rows.ctypes.data, False)}


def check_into(out: Any, shape: tuple[int, int]) -> None:
    """Raise unless a weight of that shape can be written into `out`."""
    if type(out) is not np.ndarray or out.dtype not in DTYPES:
        value = str(out.dtype) if isinstance(out, np.ndarray) else type(out).__name__
        raise DTypeError("out", limit="an ndarray of float32, bfloat16 or float16", value=value, nearest="float32")
    if out.shape != shape or (out.size and out.strides[1] != out.itemsize) or not out.flags.writeable:
        raise LayoutError(
            "out", limit=f"{list(shape)}, writable, columns adjacent",
            value=f"{list(out.shape)}, strides {out.strides}", nearest="np.empty(w.shape, np.float32)",
        )  # fmt: skip


def unquantizable(x: Array, fmt: BlockFormat, name: str) -> FormatError:
    """Why a weight has no blocks: an element that is no number, or a scale too large for float16."""
    wide = x.astype(np.float32)
    bad = ~np.isfinite(wide)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        return FormatError(
            f"{prefix(name)}w[{row}, {column}]", limit="finite numbers", value=wide[row, column],
            nearest="np.nan_to_num(w)",
        )  # fmt: skip
    row, column = (int(i) for i in np.unravel_index(np.abs(wide).argmax(), wide.shape))
    return FormatError(
        f"{prefix(name)}w[{row}, {column}]: its block's scale in {fmt}", limit="at most 65504, float16's largest",
        value=f"the scale of a block with {wide[row, column]}", nearest="BF16, or weights scaled down",
    )  # fmt: skip


def too_large(x: Array, lost: Array, fmt: BlockFormat, name: str) -> FormatError:
    """Why a weight does not convert: a finite element that the format's type would round to infinity."""
    row, column = (int(i) for i in np.argwhere(lost)[0])
    value = float(x[row, column])
    with np.errstate(over="ignore"):
        fits = fmt.name == "F16" and np.isfinite(np.float32(value).astype(BFLOAT16))
    largest = "65504, float16's largest" if fmt.name == "F16" else "3.3895e38, bfloat16's largest"
    return FormatError(
        f"{prefix(name)}w[{row}, {column}] in {fmt}", limit=f"at most {largest}", value=value,
        nearest=f"{'BF16' if fits else 'F32'}, or weights scaled down",
    )  # fmt: skip

"""The call that was made, described so that one wrong word in the description is one mistake.

    C[p] = alpha * op(A[p]) @ op(B[p]) + beta * C[p] + bias          p = 0 .. items - 1

Every matrix lies in a flat buffer: element (i, j) of item p is at ``offsets[p] + i * row + j * column``. A leading
dimension is whichever of `row` and `column` is not 1. A mistake of layout is another of these numbers, so mistakes
compose: two of them are two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.arguments import extent
from ..base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..errors import DTypeError, LayoutError, ShapeError
from ..formats import reference
from ..formats.blocks import BlockFormat

Array = npt.NDArray[Any]
BYTES = 64  # that probes and a diagnosis take for each element: float64 several times, and where it lies
FLOATS = (np.dtype(np.float64), FLOAT32, BFLOAT16, FLOAT16)


@dataclass(frozen=True)
class StoredMatrix:
    """op(A), op(B) or C of every item, as they lie in one buffer."""

    flat: Array  # array [elements]
    # rows, columns: of op's result
    rows: int
    columns: int
    # row, column: elements from one row, one column to the next
    row: int
    column: int
    offsets: tuple[int, ...] = (0,)  # where element (0, 0) of each item lies

    @property
    def ld(self) -> int:
        """The leading dimension."""
        return self.row if self.by_rows else self.column

    @property
    def by_rows(self) -> bool:
        """Whether elements of a row of op's result are adjacent."""
        return self.column == 1 and (self.row != 1 or self.columns > 1)

    @property
    def step(self) -> int | None:
        """The constant stride between items; None where there is none."""
        found = set(np.diff(self.offsets).tolist())
        return found.pop() if len(found) == 1 else None

    def with_ld(self, ld: int) -> StoredMatrix:
        """The same with another leading dimension."""
        return replace(self, row=ld) if self.by_rows else replace(self, column=ld)

    def with_step(self, step: int) -> StoredMatrix:
        """The same with another stride between items."""
        first = self.offsets[0]
        return replace(self, offsets=tuple(first + step * p for p in range(len(self.offsets))))

    def positions(self) -> npt.NDArray[np.int64]:
        """Where every element lies in the buffer, [items, rows, columns]."""
        p = np.asarray(self.offsets, np.int64)[:, None, None]
        return p + np.arange(self.rows)[:, None] * self.row + np.arange(self.columns) * self.column

    def take(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Values at positions of the buffer; NaN outside of it."""
        inside = (at >= 0) & (at < self.flat.size)
        found = np.full(at.shape, np.nan)
        found[inside] = self.flat[at[inside]]
        return found

    def values(self) -> npt.NDArray[np.float64]:
        """Every element, [items, rows, columns]."""
        return self.take(self.positions())

    @cached_property
    def owner(self) -> npt.NDArray[np.int64]:
        """For each place of the buffer, which element is written there last, counted over items, rows and columns."""
        at = self.positions().reshape(-1)
        found = np.full(self.flat.size, -1, np.int64)
        inside = (at >= 0) & (at < self.flat.size)
        found[at[inside]] = np.flatnonzero(inside)
        return found


@dataclass(frozen=True)
class Blocks:
    """Quantized weights [n, k] behind B: their bytes, and how they were meant to be read."""

    data: Array  # uint8 array [bytes]
    fmt: BlockFormat
    # n, k, stride: `stride` bytes lie between rows
    n: int
    k: int
    stride: int

    def rows(self, stride: int) -> Array:
        """The rows' bytes [n, row bytes] for a stride; zeros outside of the buffer."""
        size = self.fmt.row_bytes(self.k)
        at = np.arange(self.n)[:, None] * stride + np.arange(size)
        return np.where(at < self.data.size, self.data[np.minimum(at, self.data.size - 1)], np.uint8(0))

    def codes(self) -> Any:
        """Integers and floats, see `isogemm.contract.int32.Codes`."""
        return reference.decode(self.rows(self.stride), self.fmt)

    def matrix(self, weights: Array) -> StoredMatrix:
        """op(B) [k, n] over dequantized weights [n, k]."""
        return StoredMatrix(np.ascontiguousarray(weights, np.float32).reshape(-1), self.k, self.n, 1, self.k)


@dataclass(frozen=True)
class GemmCall:
    """A call, and what it left behind."""

    # a, b, c: op(A) [m, k], op(B) [k, n], and C [m, n] in the buffer that was observed
    a: StoredMatrix
    b: StoredMatrix
    c: StoredMatrix
    before: Array | None = None  # the buffer of C before the call; None where nobody kept it
    alpha: float = 1.0
    beta: float = 0.0
    bias: Array | None = None  # of the columns of C
    # bias_axis, bias_times: 1 for columns; how often it is added
    bias_axis: int = 1
    bias_times: int = 1
    weights: Blocks | None = None  # where B is quantized
    counts: tuple[tuple[int, int, int], ...] = ()  # ranges of K that are not summed exactly once
    written: tuple[int, int] = (1 << 62, 1 << 62)  # rows and columns of C that are written
    rounded: str = ""  # the type that operands are rounded to; "" for their own
    between: str = ""  # the type that results are rounded to before their own; "" for none
    # the type of the accumulator, and the products it takes at a time, 0 for one that was rounded before; None for
    # float32 or better
    sums: tuple[str, int] | None = None
    alias: str = ""  # the operand whose memory C was, in a call that wrote while it read; "" for none

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k."""
        return self.a.rows, self.b.columns, self.a.columns

    @property
    def items(self) -> int:
        """How many products."""
        return len(self.c.offsets)

    @property
    def out(self) -> np.dtype[Any]:
        """The element type of results."""
        return self.c.flat.dtype

    def read(self, name: str, matrix: StoredMatrix) -> GemmCall:
        """The same with operand `name` read another way."""
        changes: dict[str, Any] = {name: matrix}
        return replace(self, **changes)


class Variant(NamedTuple):
    """One way to make a mistake."""

    parameter: str  # what was used where, in words
    case: GemmCall  # the call that was really made


def check_floats(name: str, x: Array, limit: str = "", nearest: str = "float32") -> Array:
    """`x`, whose elements have to be floats. Raises DTypeError."""
    if x.dtype not in FLOATS:
        legal = limit or ", ".join(kind.name for kind in FLOATS)
        raise DTypeError(f"dtype of {name}", limit=legal, value=x.dtype.name, nearest=nearest)
    return x


def buffer_of(x: Array) -> tuple[Array, int]:
    """The widest contiguous buffer behind an array, flat, and where in it the array begins; in elements."""
    base = x
    while isinstance(base.base, np.ndarray) and base.base.dtype == x.dtype:
        base = base.base
    if not (base.flags.c_contiguous or base.flags.f_contiguous) or any(s < 0 or s % x.itemsize for s in x.strides):
        x = base = np.ascontiguousarray(x)
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return base.reshape(-1, order="A"), start


def matrix_of(name: str, x: Array, trans: str = "N", items: int | None = None) -> StoredMatrix:
    """op of the matrices of an array [rows, columns] or [items, rows, columns].

    Of the items of a call, one matrix serves all, and fewer serve a group each. Raises ShapeError: neither 2-D nor 3-D,
    or a number of matrices that does not divide the items, or none.
    """
    if x.ndim not in (2, 3):
        raise ShapeError(f"dimensions of {name}", limit="2, or 3 with items first", value=list(x.shape), nearest=2)
    flat, start = buffer_of(x)
    if flat.size == x.size and not np.shares_memory(flat, x):
        x = flat.reshape(x.shape)
    steps = [s // x.itemsize for s in x.strides]
    rows, columns = (x.shape[-1], x.shape[-2]) if trans != "N" else (x.shape[-2], x.shape[-1])
    row, column = (steps[-1], steps[-2]) if trans != "N" else (steps[-2], steps[-1])
    held = extent(f"items of {name}", x.shape[0]) if x.ndim == 3 else 1
    wanted = items or held
    if wanted % held:
        raise ShapeError(f"items of {name}", limit=f"1 or a divisor of {wanted}", value=held, nearest=1)
    step = steps[0] if x.ndim == 3 else 0
    offsets = tuple(start + step * (p * held // wanted) for p in range(wanted))
    return StoredMatrix(flat, rows, columns, row, column, offsets)


def resized(name: str, flat: Array, stored: tuple[int, int], ld: int, order: str, trans: str, offsets: Sequence[int],
            ) -> StoredMatrix:  # fmt: skip
    """op of stored matrices in a flat buffer: the BLAS view, column-major ("F") or row-major ("C").

    Raises LayoutError: the leading dimension is below the stored rows (columns, where row-major).
    """
    rows, columns = stored
    least = rows if order == "F" else columns
    if ld < least:
        raise LayoutError(f"ld{name}", limit=f"at least {least}", value=ld, nearest=least)
    row, column = (1, ld) if order == "F" else (ld, 1)
    if trans != "N":
        rows, columns, row, column = columns, rows, column, row
    made = StoredMatrix(np.asarray(flat).reshape(-1), rows, columns, row, column, tuple(offsets))
    first, last = min(made.offsets, default=0), max(made.offsets, default=0)
    need = (rows - 1) * row + (columns - 1) * column + 1 if rows and columns else 0
    if first < 0 or last + need > made.flat.size:
        limit, value = f"0 to {made.flat.size - 1}, those of its buffer", f"{first} to {last + need - 1}"
        raise LayoutError(f"elements of {name}", limit=limit, value=value, nearest=f"a buffer of {last + need}")
    return made

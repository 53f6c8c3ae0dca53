"""Kernels of quantized weights run on small operands and are compared with the definition, bit by bit.

A result depends on its row of x and its row of W alone. So a few rows of each, of every kind of number, say what a
product of any size is in which they are repeated: many tiles, more than one turn of a persistent block and ragged edges
cost the definition nothing. K is the call's own, up to a length: a configuration may be made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ....contract import int32, reference
from ....formats.blocks import FORMATS, BlockFormat
from ....formats.reference import decode, dequantize
from ....planner.kernel_admission import difference
from ....planner.trials import POISON, Machine
from .layout import ROWS

if TYPE_CHECKING:
    from .family import Case, Kernel

__all__ = ["activations", "expected", "try_dequantize", "try_kernel", "try_pack", "weights"]

Array = NDArray[Any]
WEIGHTS, ACTIVATIONS = 37, 19  # different rows; coprime to every tile, so that a tile in a wrong place shows
LONGEST = 6144  # of K; a multiple of every block and of every chunk of a kernel
WAVE = 3 * 132 * ROWS  # rows of W that are several turns of every block of an H200
MARGIN = 64  # elements around results that must stay as they are
TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def weights(fmt: BlockFormat, k: int) -> Array:
    """Rows of blocks [37, row bytes]: random bytes with finite scales of every size; one row of zeros, one of ones.

    The second half of every third row is its first half again, see `activations`.
    """
    rng = np.random.default_rng((11, len(fmt.name), fmt.nbytes, k))
    rows = rng.integers(0, 256, (WEIGHTS, fmt.row_bytes(k)), dtype=np.uint8)
    rows[0], rows[1] = 0, 255
    held = rows.reshape(WEIGHTS, k // fmt.block, fmt.nbytes).view(fmt.dtype)[..., 0]
    spread = np.where(np.arange(WEIGHTS)[:, None] % 3, 4, 20)  # ordinary rows, and rows of every exponent
    for field in fmt.scales:
        scale = rng.standard_normal(held.shape) * np.exp2(rng.integers(-spread, spread // 2, held.shape))
        held[field.name] = np.clip(scale, -65504, 65504)
    half = k // fmt.block // 2 * fmt.nbytes
    rows[2::3, rows.shape[1] - half :] = rows[2::3, :half]
    return rows


def activations(k: int, dtype: str) -> Array:
    """Rows of x [19, k]: normal, of every exponent, with zeros of both signs, tiny, huge, and without a finite sum.

    The second half of some is the first half's negative: with the weights that repeat themselves all terms cancel, and
    what is left are the roundings of every step, which a result of 16 bits would hide otherwise.
    """
    rng = np.random.default_rng((13, k))
    x = rng.standard_normal((ACTIVATIONS, k))
    for i in range(ACTIVATIONS):
        kind = i % 7
        if kind == 1:
            x[i] *= np.exp2(rng.integers(-20, 12, k))
        elif kind == 2:
            x[i] = np.where(rng.random(k) < 0.6, np.where(rng.random(k) < 0.5, 0.0, -0.0), x[i])
        elif kind == 3:
            x[i] = rng.integers(-8, 9, k) / 2
        elif kind == 4:
            x[i] *= 2.0**-130 if dtype != "float16" else 2.0**-22
        elif kind == 5:
            x[i] = np.clip(x[i], -2, 2) * 2.0**14
        elif kind in (0, 6) and i:
            half = k // 256 // 2 * 256 if k % 256 == 0 else k // 32 // 2 * 32
            x[i, half : k - half], x[i, k - half :] = 0, -x[i, :half]
    x[8, k // 2], x[15, k - 1] = np.inf, np.nan
    x[16] = 0
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(TYPES[dtype])


@lru_cache(maxsize=8)
def expected(path: str, fmt: str, dtype: str, k: int, arithmetic: str) -> Array:
    """Accumulators [19, 37] by the definition, in float32."""
    rows, x = weights(FORMATS[fmt], k), activations(k, dtype)
    if path == "q8":
        return int32.evaluate(x, decode(rows, FORMATS[fmt]))
    with np.errstate(over="ignore"):
        w = dequantize(rows, FORMATS[fmt]).astype(TYPES[dtype if path == "same" else "float32"])
    wide = x if path == "same" else x.astype(np.float32)
    return reference.evaluate(wide, np.ascontiguousarray(w.T), f"{arithmetic}/chain")


def try_kernel(machine: Machine, kernel: Kernel, case: Case, arithmetic: str, pack: Any = None) -> str:
    """Run a kernel in the configuration of a case on products that have it.

    Parameters
    ----------
    machine : Machine
    kernel, case
        As `quant_choose` pairs them.
    arithmetic : str
        What its bits have to be.
    pack : callable, optional
        In place of `quant_pack.pack`.

    Returns
    -------
    str
        Empty where every bit was right, else the first difference.
    """
    where = "cpu" if machine.device < 0 else f"cuda:{machine.device}"
    if pack is None:
        from .pack import pack
    k = min(case.k, LONGEST + case.k % 256)
    acc = expected(case.path, case.format, case.dtype, k, arithmetic)
    rows = _tensor(weights(FORMATS[case.format], k), where)
    x = _tensor(activations(k, case.dtype), where)
    bias = None if case.dtype_bias is None else np.linspace(-3, 5, WEIGHTS).astype(TYPES[case.dtype_bias])
    want = reference.epilogue(acc, bias=bias, out_dtype=TYPES[case.dtype_out])
    for n in _columns(case):
        column = np.arange(n) % WEIGHTS
        packed = pack(rows[_index(column, where)], case.format, n, k)
        added = None if bias is None else _tensor(bias[column], where)
        for m in _rows(case, kernel):
            row = (np.arange(m) * 5 + m) % ACTIVATIONS
            flat, out = _poisoned(m, n, case.dtype_out, where)
            kernel.run(x[_index(row, where)], packed, out, added, kernel.config)
            found = _read(flat)
            got = found[MARGIN : MARGIN + m * n].reshape(m, n)
            said = difference("out", np.ascontiguousarray(got), want[row[:, None], column])
            stray = int((np.delete(found, np.s_[MARGIN : MARGIN + m * n]) != POISON[found.itemsize]).sum())
            if said or stray:
                return f"{m} x {n} x {k}: {said or f'{stray} words beside the result were written'}"
    return ""


def _columns(case: Case) -> Iterator[int]:
    """Rows of W: few, and more than blocks take in a turn; as well aligned as the case's."""
    for count in (WEIGHTS, WAVE + WEIGHTS):
        if count >= case.n:
            yield case.n
            return
        yield count // 8 * 8 if case.wide else count


def _rows(case: Case, kernel: Kernel) -> list[int]:
    """Rows of x with the tiles of the case: a ragged last one, and whole ones."""
    if case.m == 1:
        return [1]
    if case.m <= 32:
        last = -(-case.m // 8) * 8
        return sorted({max(2, last - 7), case.m, last})
    return sorted({33, min(case.m, 2 * kernel.few + 5), min(case.m, 4 * kernel.few)})


def try_pack(machine: Machine, fmt: str, pack: Callable[..., Any]) -> str:
    """Compare packed bytes with those of `quant_layout.pack`, for whole and ragged sizes."""
    from . import layout as quant_layout

    where = "cpu" if machine.device < 0 else f"cuda:{machine.device}"
    for k in (96, 2080) if FORMATS[fmt].block == 32 else (256, 1280):
        rows = weights(FORMATS[fmt], k)
        for n in (WEIGHTS, 32, 1):
            found = pack(_tensor(rows[:n], where), fmt, n, k).data
            said = difference("packed", found.cpu().numpy(), quant_layout.pack(rows[:n], fmt))
            if said:
                return f"{n} x {k}: {said}"
    return ""


def try_dequantize(machine: Machine, fmt: str, dtype: str, run: Callable[..., None], pack: Callable[..., Any]) -> str:
    """Compare floats of packed weights with the definition's, signs of zeros too."""
    where = "cpu" if machine.device < 0 else f"cuda:{machine.device}"
    for k in (96, 2080) if FORMATS[fmt].block == 32 else (256, 1280):
        rows = weights(FORMATS[fmt], k)
        with np.errstate(over="ignore"):
            want = dequantize(rows, FORMATS[fmt]).astype(TYPES[dtype])
        flat, out = _poisoned(WEIGHTS, k, dtype, where)
        run(pack(_tensor(rows, where), fmt, WEIGHTS, k), out)
        found = _read(flat)
        got = np.ascontiguousarray(found[MARGIN : MARGIN + WEIGHTS * k].reshape(WEIGHTS, k))
        said = difference("weights", got, want)
        if (
            said
            or (found[:MARGIN] != POISON[found.itemsize]).any()
            or (found[-MARGIN:] != POISON[found.itemsize]).any()
        ):
            return f"k {k}: {said or 'words beside the result were written'}"
    return ""


def _tensor(x: Array, where: str) -> Any:
    import torch

    if x.dtype == TYPES["bfloat16"]:
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).to(where).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)).to(where)


def _index(at: Array, where: str) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(at)).to(where)


def _poisoned(m: int, n: int, dtype: str, where: str) -> tuple[Any, Any]:
    """NaNs that no product returns, and the result [m, n] among them."""
    import torch

    word = torch.int32 if dtype == "float32" else torch.int16
    size = 4 if dtype == "float32" else 2
    flat = torch.full((m * n + 2 * MARGIN,), POISON[size], dtype=word, device=where)
    return flat, flat[MARGIN : MARGIN + m * n].view(getattr(torch, dtype)).view(m, n)


def _read(flat: Any) -> Array:
    words: Array = flat.cpu().numpy()
    return words.view(f"u{words.itemsize}")

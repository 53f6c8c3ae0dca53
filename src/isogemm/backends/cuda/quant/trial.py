"""Kernels of quantized weights run on small operands and are compared with the definition, bit by bit.

A result depends on its row of x and its row of W alone. So a few rows of each, of every kind of number, say what a
product of any size is in which they are repeated: many tiles, more than one turn of a persistent block and ragged edges
cost the definition nothing. K is the call's own, up to a length: a configuration may be made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import ITEMSIZE, NUMPY
from ....contract import int32, reference
from ....formats.blocks import FORMATS, BlockFormat
from ....formats.reference import decode, dequantize
from ....planner.bench import MARGIN, Bench, Output
from .case import QuantCase
from .layout import ROWS, Packed, layout
from .layout import pack as packed_by_host

HOME = "backends/cuda/quant"
"""Where all lies that reaches the bits of these kernels: what verdicts on them are about."""

Array = NDArray[Any]
WEIGHTS, ACTIVATIONS = 37, 19  # different rows; coprime to every tile, so that a tile in a wrong place shows
LONGEST = 6144  # of K; a multiple of every block and of every chunk of a kernel
WAVE = 3 * 132 * ROWS  # rows of W that are several turns of every block of an H200


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
        return x.astype(np.float32).astype(NUMPY[dtype])


@lru_cache(maxsize=8)
def expected(path: str, fmt: str, dtype: str, k: int, arithmetic: str) -> Array:
    """Accumulators [19, 37] by the definition, in float32."""
    rows, x = weights(FORMATS[fmt], k), activations(k, dtype)
    if path == "q8":
        return int32.evaluate(x, decode(rows, FORMATS[fmt]))
    with np.errstate(over="ignore"):
        w = dequantize(rows, FORMATS[fmt]).astype(NUMPY[dtype if path == "same" else "float32"])
    wide = x if path == "same" else x.astype(np.float32)
    return reference.evaluate(wide, np.ascontiguousarray(w.T), f"{arithmetic}/chain")


def try_product(bench: Bench, case: QuantCase, tile: int, run: Callable[..., None], pack: Callable[..., Packed]) -> str:
    """Run a kernel on products with the case's configuration: empty where all bits were right, else the difference.

    `tile` are the rows of x of which it makes one tile, `run` is ``run(x, packed, out, bias)`` and `pack`
    ``pack(raw, format, n, k)``.
    """
    k = min(case.k, LONGEST + case.k % 256)
    acc = expected(case.path, case.format, case.dtype, k, case.arithmetic)
    rows, x = _tensor(bench, weights(FORMATS[case.format], k)), _tensor(bench, activations(k, case.dtype))
    bias = None if case.dtype_bias is None else np.linspace(-3, 5, WEIGHTS).astype(NUMPY[case.dtype_bias])
    want = reference.epilogue(acc, bias=bias, out_dtype=NUMPY[case.dtype_out])
    for n in _columns(case):
        column = np.arange(n) % WEIGHTS
        packed = pack(rows[_tensor(bench, column)], case.format, n, k)
        added = None if bias is None else _tensor(bench, bias[column])
        for m in _rows(case, tile):
            row = (np.arange(m) * 5 + m) % ACTIVATIONS
            out = bench.output((m, n), ITEMSIZE[case.dtype_out], shift=int(case.out_align < 16))
            run(x[_tensor(bench, row)], packed, _result(out, (m, n), case.dtype_out), added)
            if said := out.compare("out", want[row[:, None], column]):
                return f"{m} x {n} x {k}: {said}"
    return ""


def _columns(case: QuantCase) -> Iterator[int]:
    """Rows of W: few, and more than blocks take in a turn; as well aligned as the case's."""
    for count in (WEIGHTS, WAVE + WEIGHTS):
        if count >= case.n:
            yield case.n
            return
        yield count // 8 * 8 if case.wide else count


def _rows(case: QuantCase, tile: int) -> list[int]:
    """Rows of x with the tiles of the case: a ragged last one, and whole ones."""
    if case.m == 1:
        return [1]
    if case.m <= 32:
        last = -(-case.m // 8) * 8
        return sorted({max(2, last - 7), case.m, last})
    return sorted({33, min(case.m, 2 * tile + 5), min(case.m, 4 * tile)})


def try_pack(bench: Bench, fmt: str, write: Callable[..., None]) -> str:
    """Compare packed bytes with those of `layout.pack`, for whole and ragged sizes."""
    lay = layout(fmt)
    for k in _lengths(fmt):
        rows = weights(FORMATS[fmt], k)
        for n in (WEIGHTS, 32, 1):
            out = bench.output((lay.nbytes(n, k),), 1)
            write(_tensor(bench, rows[:n]), _result(out, (lay.nbytes(n, k),), "uint8"), lay, n, k)
            if said := out.compare("packed", packed_by_host(rows[:n], fmt)):
                return f"{n} x {k}: {said}"
    return ""


def try_dequantize(bench: Bench, fmt: str, dtype: str, run: Callable[..., None], pack: Callable[..., Packed]) -> str:
    """Compare floats of packed weights with the definition's, signs of zeros too."""
    for k in _lengths(fmt):
        rows = weights(FORMATS[fmt], k)
        with np.errstate(over="ignore"):
            want = dequantize(rows, FORMATS[fmt]).astype(NUMPY[dtype])
        out = bench.output((WEIGHTS, k), ITEMSIZE[dtype])
        run(pack(_tensor(bench, rows), fmt, WEIGHTS, k), _result(out, (WEIGHTS, k), dtype))
        if said := out.compare("weights", want):
            return f"k {k}: {said}"
    return ""


def _lengths(fmt: str) -> tuple[int, int]:
    return (96, 2080) if FORMATS[fmt].block == 32 else (256, 1280)


def _tensor(bench: Bench, x: Array) -> Any:
    """An array on the bench's device, as a tensor."""
    import torch

    flat: Any = bench.put(x)
    return flat.tensor.view(getattr(torch, x.dtype.name)).view(x.shape)


def _result(out: Output, shape: tuple[int, ...], dtype: str) -> Any:
    """The result between the margins, as a tensor."""
    import torch

    flat: Any = out.buffer
    begin = (out.address - flat.address) // flat.tensor.element_size()
    return flat.tensor[begin : len(flat.tensor) - MARGIN].view(getattr(torch, dtype)).view(shape)

"""Products with quantized weights on the host: integers from panels, few rows by floats in registers, else pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import FLOAT32
from ....contract.spec import Contract
from ....operands.shapes import matrices
from .linear import gemm, gemm_floats, prepare, rounds_to, values
from .run import dequantize, quantize

__all__ = ["dequantize", "gemm", "pieces", "prepare", "product", "quantize"]

Array = NDArray[Any]

# Rows up to which weights are dequantized in registers; above, pieces feed the products' own kernels. One thread on
# Zen 4: 90 against 60 GFLOP/s at 33 rows, 95 against 85 at 128, level at 256, 95 against 101 at 512.
# Weights rounded to 16 bits first: 5 times as fast at one row, level at 100.
_FEW, _FEW_ROUNDED = 256, 64
_PIECE = 2**21  # dequantized elements at a time: they stay in the last cache, and few pieces pack x anew


def product(how: str, x: Array, w: Any, out: Array, bias: Array | None, contract: Contract) -> bool:
    """x @ w.T + bias into out, if kernels that read the blocks, or the definition, serve it.

    Parameters
    ----------
    how : {"q8", "fp32", "same"}
    w : QuantizedMatrix
    """
    dtype = FLOAT32 if how == "fp32" else x.dtype
    chain = contract.order.kind == "chain"
    if how == "q8":
        for rows, into in matrices(x, out):
            if chain:
                gemm(rows, w.panels(), w.format, into, bias)
            else:
                _by_definition(rows, w, into, bias, contract)
        return True
    few = _FEW if dtype == FLOAT32 else _FEW_ROUNDED
    if not (_in_panels(w) and chain and contract.arithmetic == "fma"):
        return False
    if out.size > few * len(w) or not rounds_to(dtype):
        return False
    for rows, into in matrices(x, out):
        gemm_floats(rows, w.panels(), w.format, into, bias, dtype)
    return True


def pieces(how: str, x: Array, w: Any) -> Iterator[tuple[Array, slice, Array]]:
    """x as it is, and weights as floats [k, columns], some columns at a time, in memory that the next takes again."""
    n, k = w.shape
    dtype = FLOAT32 if how == "fp32" else x.dtype
    if not w.format.quantized:
        plain = w.array()
        if plain.flags.aligned and (plain.dtype == dtype or dtype == x.dtype == FLOAT32):  # widened exactly, in place
            yield x, slice(0, n), plain.T
            return
    columns = max(32, _PIECE // max(1, k) // 32 * 32)
    transposed = _in_panels(w) and dtype == FLOAT32
    room = np.empty((k, columns) if transposed else (min(n, columns), k), dtype)
    for first in range(0, n, columns):
        here = slice(first, min(n, first + columns))
        width = here.stop - first
        if transposed:
            values(w.panels(), w.format, k, first, room[:, : -(-width // 16) * 16])
            yield x, here, room[:, :width]
        else:
            w[here].dequantize_into(room[:width])
            yield x, here, room[:width].T


def _by_definition(x: Array, w: Any, out: Array, bias: Array | None, contract: Contract) -> None:
    from ....contract import int32, reference
    from ....formats.reference import decode

    acc = int32.evaluate(x, decode(w.rows, w.format), str(contract))
    out[...] = reference.epilogue(acc, bias=bias, out_dtype=out.dtype)


def _in_panels(w: Any) -> bool:
    return bool(w.format.activations) and w.layout == "panels"

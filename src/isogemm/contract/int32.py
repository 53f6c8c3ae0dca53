"""Products with quantized weights: exact integers inside a block, one fused multiply-add chain over blocks.

An activation row is quantized block by block (`quantize_activations`); a weight row is what its format stores
(`Codes`). For block b of one row of x and one column of the result, with codes a of x and q of w,

    S = sum_j s_j * sum_{i in j} q_i * a_i          exact
    T = sum_j t_j * sum_{i in j} a_i                exact, only where the format has an offset
    acc = fma(float(S), d_w * d_x, acc)
    acc = fma(float(T), o_w * d_x, acc)             only where the format has an offset

float() and both products are rounded once, to nearest even, in float32; b ascends from 0; acc starts at +0. S is less
than 2**31 in every format, so 32 bits hold it, and its order of summation does not matter. The result depends on one
row of x, one row of w and the format: nothing else enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ContractError, DTypeError, ShapeError
from .reference import canonical, walk
from .spec import Contract, ContractLike, as_contract

__all__ = ["ActivationCodes", "Codes", "evaluate", "quantize_activations"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

SHORT, LONG = 32, 256


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight [n, k] as integers and floats."""

    # block, sub: elements of a block, and of a sub-block, which share an integer scale and offset
    block: int
    sub: int
    q: Ints  # [n, k]: codes, the zero point taken off
    scales: Ints  # [n, k / sub]: s; 1 where the format has none
    d: Floats  # [n, k / block]: scales of blocks
    mins: Ints | None  # [n, k / sub]: t, where there is an offset
    offset: Floats | None  # [n, k / block]: o, with the sign with which it is added


@dataclass(frozen=True, slots=True)
class ActivationCodes:
    """Quantized activations [m, k]."""

    q: npt.NDArray[np.int8]  # [m, k]
    d: Floats  # [m, k / block]


def quantize_activations(x: Array, block: int) -> ActivationCodes:
    """ActivationCodes [m, k] in blocks of 32 (Q8_0) or 256 (Q8_K), each step rounded once in float32.

    With A the largest magnitude of the block:

    - 32: ``d = A / 127``; codes are ``x * (1 / d)`` rounded to the nearest integer, halves away from zero. The product
      uses d rounded to float16.
    - 256: ``r = 127 / A``, ``d = 1 / r``; codes are ``x * r`` rounded to the nearest integer, halves to even.

    Where 1 / d (or r) is not finite, every code is 0, and so is a d of 256. A block that holds an infinity or a NaN has
    zero codes and d = NaN, so that the row's results are NaN. bfloat16 and float16 are widened, which is exact.
    """
    from ..base.floating import ieee_defaults

    wide = np.asarray(x).astype(np.float32)
    if block not in (SHORT, LONG) or wide.ndim != 2 or wide.shape[1] % block:
        limit, value = f"[m, k] with k a multiple of the block, {SHORT} or {LONG}", f"{wide.shape} and {block}"
        raise ShapeError("activations and their block", limit=limit, value=value, nearest=f"block={SHORT}")
    m, k = wide.shape
    blocks = wide.reshape(m, k // block, block)
    with np.errstate(all="ignore"), ieee_defaults():
        finite: Array = np.asarray(np.isfinite(blocks).all(-1))
        largest = np.abs(np.where(finite[..., None], blocks, np.float32(0))).max(-1, initial=0)
        if block == SHORT:
            d = largest / np.float32(127)
            r = np.float32(1) / d
            y = blocks * np.where(np.isfinite(r) & finite, r, np.float32(0))[..., None]
            below = np.floor(np.abs(y))
            q = np.copysign(below + (np.abs(y) - below >= np.float32(0.5)), y)
            d = d.astype(np.float16).astype(np.float32)
        else:
            r = np.float32(127) / largest
            usable = np.isfinite(r) & finite
            q = np.rint(blocks * np.where(usable, r, np.float32(0))[..., None])
            d = np.where(usable, np.float32(1) / r, np.float32(0))
        q = np.where(finite[..., None], q, np.float32(0))
        d = np.where(finite, d, np.float32(np.nan))
    return ActivationCodes(q.astype(np.int8).reshape(m, k), d.astype(np.float32))


def evaluate(x: Array, w: Codes, contract: ContractLike = "int32/chain", c: Floats | None = None) -> Floats:
    """Accumulators of ``x @ w.T`` under ``int32``, in float32, before any epilogue.

    Parameters
    ----------
    x : array [m, k]
        float32, bfloat16 or float16.
    w : Codes
        Of n rows.
    contract : Contract or str
        ``int32`` with any order; leaves are multiples of 256.
    c : array [m, n] of float32, optional
        What the walk starts from.

    Returns
    -------
    array [m, n] of float32
        Every NaN is the canonical one.

    Raises
    ------
    ContractError
        Another arithmetic.
    ShapeError
        x and w do not fit.
    DTypeError
        x is not float32, bfloat16 or float16.
    """
    chosen = as_contract(contract)
    _check(x, w, chosen)
    from ..base.floating import ieee_defaults

    with np.errstate(all="ignore"), ieee_defaults():
        a = quantize_activations(x, SHORT if w.block == SHORT else LONG)
        total = np.zeros((len(x), len(w.q)), np.float32) if c is None else np.array(c, np.float32)

        def chain(acc: Floats, start: int, stop: int) -> None:
            acc[...] = _chain(a, w, acc, start, stop)

        return canonical(walk(chain, total, x.shape[1], chosen))


def _chain(a: ActivationCodes, w: Codes, acc: Floats, start: int, stop: int) -> Floats:
    """Blocks of [start, stop) in ascending order."""
    from .rows import _fma  # loads Numba, which reading a contract should not

    for first in range(start, stop, w.block):
        b, span = first // w.block, slice(first, first + w.block)
        subs = slice(first // w.sub, (first + w.block) // w.sub)
        x = a.q[:, span].astype(np.int64).reshape(len(a.q), w.block // w.sub, w.sub)
        q = w.q[:, span].astype(np.int64).reshape(len(w.q), w.block // w.sub, w.sub)
        exact = np.einsum("mji,nji,nj->mn", x, q, w.scales[:, subs].astype(np.int64))
        acc = _fma(exact.astype(np.float32), a.d[:, b, None] * w.d[None, :, b], acc)
        if w.offset is not None and w.mins is not None:
            exact = x.sum(-1) @ w.mins[:, subs].astype(np.int64).T
            acc = _fma(exact.astype(np.float32), a.d[:, b, None] * w.offset[None, :, b], acc)
    return acc


def _check(x: Array, w: Codes, contract: Contract) -> None:
    if contract.arithmetic != "int32":
        raise ContractError(
            "arithmetic of an integer product", limit="int32", value=contract.arithmetic,
            nearest=f"int32/{contract.order.kind}",
        )  # fmt: skip
    if x.ndim != 2 or x.shape[1] != w.q.shape[1]:
        raise ShapeError(
            "operands of a product", limit="x [m, k] and w [n, k]", value=f"{x.shape} and {w.q.shape}",
            nearest=f"x of [m, {w.q.shape[1]}]",
        )  # fmt: skip
    if x.dtype.name not in ("float32", "bfloat16", "float16"):
        raise DTypeError("x", limit="float32, bfloat16 or float16", value=x.dtype.name, nearest="float32")

"""The executable definition of every contract: slow by a small factor, obvious, and the judge of every kernel.

``acc = evaluate(a, b, contract)`` gives the float32 accumulator bits of ``a @ b``; `epilogue` gives the output.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.dtypes import DTYPES
from ..base.threads import available
from ..errors import ContractError, DTypeError, OptionError, ShapeError
from .compare import bits, is_nan
from .spec import ARITHMETICS, Contract, ContractLike, as_contract, check_exact

__all__ = ["canonical", "epilogue", "evaluate", "round_tf32", "split_tf32", "walk"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Chain = Callable[[Floats, int, int], None]

_LEGAL = "float32, bfloat16 or float16"
_NAN: dict[int, np.unsignedinteger[Any]] = {4: np.uint32(0x7FFFFFFF), 2: np.uint16(0x7FFF)}
_ZERO_EXPONENT = -1024  # a product with a zero operand has no exponent: it never is the largest
_GRAIN = 1 << 20  # multiply-adds below which a second thread costs more than it saves


def evaluate(
    a: Array, b: Array, contract: ContractLike, c: Array | None = None, *, threads: int | None = None
) -> Floats:
    """Accumulators of ``a @ b`` under a contract, in float32, before any epilogue.

    Parameters
    ----------
    a : array [m, k]
        float32, bfloat16 or float16, any strides.
    b : array [k, n]
        Of the dtype of `a`.
    contract : Contract or str
    c : array [m, n] of float32, optional
        What the walk over K starts from instead of +0; with leaves, what the running total starts from.
    threads : int, optional
        Threads to use, by default the CPUs of this process. Never changes a bit.

    Returns
    -------
    array [m, n] of float32
        Every NaN is 0x7fffffff.

    Raises
    ------
    ShapeError
        Operands are not two matrices that fit, or `c` is not [m, n].
    DTypeError
        The contract is not defined for the operands' dtype, or `c` is not float32.
    ContractError
        The contract is malformed, has no executable definition, or `c` is given to a tree or to lanes.
    LimitError
        K of an exact product is more than 131071.

    Notes
    -----
    The arithmetic of one chain is in `isogemm.contract.arithmetic`; docs/design/0002-tensor-core-model.md has the
    evidence for the tensor cores' one.

    Examples
    --------
    >>> import numpy as np
    >>> evaluate(np.ones((1, 3), np.float32), np.ones((3, 1), np.float32), "fma/chain")
    array([[3.]], dtype=float32)
    """
    chosen = as_contract(contract)
    if chosen.arithmetic == "tensor_core:native":
        raise ContractError(
            "evaluating tensor_core:native", limit="a contract with an executable definition",
            value="the arithmetic of a device that no model fits", nearest=f"tensor_core:sm90/{chosen.order}",
        )  # fmt: skip
    _check_operands(a, b, chosen)
    _check_start(c, (a.shape[0], b.shape[1]), chosen)
    if chosen.arithmetic == "exact":
        check_exact(a.shape[1])
        return (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    start = np.zeros((a.shape[0], b.shape[1]), np.float32) if c is None else np.array(c, np.float32, order="C")
    from ..base.floating import ieee_defaults  # loads Numba, which reading a contract should not

    with np.errstate(all="ignore"), ieee_defaults():
        if chosen.order.kind == "lanes":
            k = chosen.order.lane_by_lane(a.shape[1])
            a, b = a[:, k], b[k]
        chain = _chain(a, b, chosen, threads)
        return canonical(walk(chain, start, a.shape[1], chosen))


def epilogue(
    acc: Floats,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    bias: Array | None = None,
    out_dtype: npt.DTypeLike = np.float32,
) -> Array:
    """``alpha * acc + beta * c + bias`` rounded to `out_dtype`: float32 steps in this order, each rounded.

    ``v = acc``; if alpha != 1, ``v = alpha * v``; if beta != 0, ``v = v + beta * c`` (``v + c`` when beta == 1); with a
    bias, ``v = v + bias``; then one rounding to nearest even. beta == 0 never reads `c`; alpha == 0 still multiplies.

    Parameters
    ----------
    acc : array [..., m, n] of float32
    alpha, beta : float
        Rounded to float32 first.
    c : array of the shape of `acc`, float32, bfloat16 or float16
    bias : array [n], float32, bfloat16 or float16
    out_dtype : dtype
        float32, bfloat16 or float16.

    Returns
    -------
    array of `out_dtype`
        Every NaN is the canonical one: 0x7fffffff, or 0x7fff in 16 bits.

    Raises
    ------
    DTypeError
        A dtype other than float32, bfloat16 and float16; `acc` not float32.
    OptionError
        beta != 0 without `c`.
    ShapeError
        `c` or `bias` does not fit `acc`.
    """
    from ..base.rounding import ieee_defaults

    with np.errstate(all="ignore"), ieee_defaults():
        scale_acc, scale_c = np.float32(alpha), np.float32(beta)
        _check_epilogue(acc, scale_c, c, bias, np.dtype(out_dtype))
        value = acc if scale_acc == 1 else scale_acc * acc
        if scale_c != 0 and c is not None:
            start = np.asarray(c).astype(np.float32)
            value = value + (start if scale_c == 1 else scale_c * start)
        if bias is not None:
            value = value + np.asarray(bias).astype(np.float32)
        return canonical(value.astype(out_dtype))


def canonical(x: Array) -> Array:
    """A copy of `x` in which every NaN has the one bit pattern of every contract: 0x7fffffff, or 0x7fff in 16 bits.

    Raises
    ------
    DTypeError
        Not float32, bfloat16 or float16.
    """
    out = np.array(x, order="C")
    if out.dtype not in DTYPES:
        raise DTypeError("canonical NaN", limit=_LEGAL, value=out.dtype.name, nearest="float32")
    bits(out)[is_nan(out)] = _NAN[out.itemsize]
    return out


def round_tf32(x: Array) -> Floats:
    """float32 rounded to nearest even to tf32's 10 fraction bits, as float32.

    The exponent range is float32's: a magnitude of 2**128 - 2**116 or more becomes infinite, subnormal numbers become
    multiples of 2**-136. Every NaN becomes 0x7fffe000, a NaN that tf32 can hold.
    """
    u = np.array(x, np.float32, order="C").view(np.uint32)
    rounded = (u + (np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1)))) & np.uint32(0xFFFFE000)
    nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FFFE000), rounded).view(np.float32)


def split_tf32(x: Array) -> tuple[Floats, Floats]:
    """float32 as the sum of two tf32 numbers: ``hi`` nearest to x, ``lo`` nearest to ``x - hi``, both to even.

    A finite x has a finite hi: where rounding would overflow, hi is tf32's largest number, 2**128 - 2**117. An infinity
    or a NaN is its own hi, and its lo is +0. ``x - hi`` is exact in float32.
    """
    wide = _widen(x)
    finite = np.isfinite(wide)
    hi = round_tf32(wide)
    largest = np.copysign(np.uint32(0x7F7FE000).view(np.float32), wide)
    hi = np.where(finite & np.isinf(hi), largest, hi)
    return hi, round_tf32(np.subtract(wide, hi, out=np.zeros_like(wide), where=finite))


def walk(chain: Chain, start: Floats, k: int, contract: Contract) -> Floats:
    """K by the order of the contract: `chain` adds one range of K to its first argument, in place."""
    order = contract.order
    leaves = order.leaves(k, contract.block)
    if order.kind == "chain":
        chain(start, *leaves[0])
        return start
    sums = []
    for leaf in leaves:
        total = np.zeros_like(start)
        chain(total, *leaf)
        if order.kind == "leaf":
            start = start + total  # order-critical: ascending, each leaf rounded once into the running total
        else:
            sums.append(total)
    if order.kind == "leaf":
        return start
    while len(sums) > 1:  # order-critical: level by level, neighbours of a tree meet, and the halves of the lanes
        half = len(sums) // 2
        pairs = (sums[::2], sums[1::2]) if order.kind == "tree" else (sums[:half], sums[half:])
        sums = [left + right for left, right in zip(*pairs, strict=True)]
    return sums[0]


def _chain(a: Array, b: Array, contract: Contract, threads: int | None) -> Chain:
    """Bind operands and arithmetic: a function that walks acc over a range of K."""
    from . import arithmetic

    if contract.arithmetic == "tf32x3:sm90":
        split = _split_chain(a, b, contract)
        return lambda acc, start, stop: _over_columns(split, acc, start, stop, threads)
    narrow = round_tf32 if contract.arithmetic == "tf32:sm90" else _widen
    x, y = narrow(a), narrow(b)
    if contract.arithmetic == "fma":

        def kernel(acc: Floats, start: int, stop: int, first: int, last: int) -> None:
            arithmetic.fma_chain(x, y, acc, start, stop, first, last)
    else:
        ex, ey = _exponents(x, a.dtype), _exponents(y, b.dtype)

        def kernel(acc: Floats, start: int, stop: int, first: int, last: int) -> None:
            arithmetic.fused_chain(x, ex, y, ey, acc, start, stop, first, last, contract.block, contract.fraction_bits)

    return lambda acc, start, stop: _over_columns(kernel, acc, start, stop, threads)


def _split_chain(a: Array, b: Array, contract: Contract) -> Callable[..., None]:
    """``acc = acc + (large + small)`` for each block of 32 of K, both sums to nearest in float32.

    large is the chain from +0 of hi * hi; small that of lo * hi, then of hi * lo. A small sum that is not finite is
    dropped: it comes from an infinity times the lo of a number, which has either sign or is zero.
    """
    from . import arithmetic

    block, step, bits_kept = contract.block, 8, contract.fraction_bits
    pad = -a.shape[1] % block
    (hi_a, lo_a), (hi_b, lo_b) = (
        split_tf32(np.pad(_widen(x), width)) for x, width in ((a, ((0, 0), (0, pad))), (b, ((0, pad), (0, 0))))
    )
    # Operands of the small sums, interleaved by blocks: twice as long, so that a block is one chain over 64.
    (m, k), n = hi_a.shape, hi_b.shape[1]
    left = np.stack([x.reshape(m, k // block, block) for x in (lo_a, hi_a)], 2).reshape(m, 2 * k)
    right = np.stack([x.reshape(k // block, block, n) for x in (hi_b, lo_b)], 1).reshape(2 * k, n)
    terms = [(x, _exponents(x, x.dtype), y, _exponents(y, y.dtype)) for x, y in ((hi_a, hi_b), (left, right))]

    def kernel(acc: Floats, start: int, stop: int, first: int, last: int) -> None:
        for p in range(start, stop, block):
            large, small = sums = np.zeros((2, *acc.shape), np.float32)
            for total, factors, times in zip(sums, terms, (1, 2), strict=True):
                arithmetic.fused_chain(*factors, total, times * p, times * (p + block), first, last, step, bits_kept)
            here = slice(first, last)
            small = np.where(np.isfinite(small), small, np.float32(0))
            with np.errstate(all="ignore"):  # this thread's own
                # order-critical: small terms join before the accumulator
                acc[:, here] += large[:, here] + small[:, here]

    return kernel


def _over_columns(kernel: Callable[..., None], acc: Floats, start: int, stop: int, threads: int | None) -> None:
    """Run `kernel` over ranges of columns, on threads when there is enough to do."""
    m, n = acc.shape
    count = max(1, min(threads or available(), n, m * n * (stop - start) // _GRAIN))
    if count == 1:
        kernel(acc, start, stop, 0, n)
        return
    bounds = [n * i // count for i in range(count + 1)]
    with ThreadPoolExecutor(count) as pool:
        for job in [pool.submit(kernel, acc, start, stop, *bounds[i : i + 2]) for i in range(count)]:
            job.result()


def _widen(x: Array) -> Floats:
    """A fresh C-contiguous float32 copy: one array type, so one compilation, read-only operands included."""
    return np.array(x, np.float32, order="C")


def _exponents(x: Floats, dtype: np.dtype[Any]) -> npt.NDArray[np.int32]:
    """Exponents of operands; a subnormal has its dtype's smallest one, a zero has none."""
    smallest = -14 if dtype == np.float16 else -126
    magnitude = x.view(np.int32) & 0x7FFFFFFF
    exponent = np.maximum((magnitude >> 23) - 127, smallest)
    return np.where(magnitude == 0, _ZERO_EXPONENT, exponent).astype(np.int32)


def _check_operands(a: Array, b: Array, contract: Contract) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, np.ndarray):
            raise DTypeError(name, limit="a NumPy array", value=type(x).__name__, nearest=f"np.asarray({name})")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(
            "operands of a product", limit="a [m, k] and b [k, n]", value=f"{a.shape} and {b.shape}",
            nearest=f"b of {(a.shape[-1], b.shape[-1])}" if a.ndim and b.ndim else "two matrices",
        )  # fmt: skip
    legal = contract.operands or ("a quantized matrix, which isogemm.contract.int32 evaluates",)
    if a.dtype != b.dtype or a.dtype.name not in legal:
        peers = [name for name, other in ARITHMETICS.items() if a.dtype.name in other.operands]
        raise DTypeError(
            f"operands of {contract}", limit=f"both {' or both '.join(legal)}",
            value=f"{a.dtype.name} and {b.dtype.name}",
            nearest=f"contract {peers[0]}/{contract.order}" if peers and a.dtype == b.dtype else f"both {legal[0]}",
        )  # fmt: skip


def _check_start(c: Array | None, shape: tuple[int, int], contract: Contract) -> None:
    if c is None:
        return
    if contract.arithmetic == "exact":
        raise ContractError("start of an exact product", limit="None", value="c", nearest="the sum of two, in int64")
    if contract.order.kind in ("tree", "lanes"):
        raise ContractError(
            f"accumulate with {contract.order}", limit="chain or leafL: others have no running total to continue",
            value=str(contract), nearest=f"{contract.arithmetic}/chain",
        )  # fmt: skip
    if c.dtype != np.float32:
        raise DTypeError("start of an accumulation", limit="float32", value=c.dtype.name, nearest="float32")
    if c.shape != shape:
        raise ShapeError("start of an accumulation", limit="[m, n]", value=c.shape, nearest=shape)


def _check_epilogue(acc: Array, beta: np.float32, c: Array | None, bias: Array | None, out: np.dtype[Any]) -> None:
    if acc.dtype != np.float32:
        raise DTypeError("accumulators", limit="float32", value=acc.dtype.name, nearest="float32")
    named = {"C": None if c is None else c.dtype, "bias": None if bias is None else bias.dtype, "output": out}
    for what, dtype in named.items():
        if dtype is not None and dtype not in DTYPES:
            raise DTypeError(what, limit=_LEGAL, value=dtype.name, nearest="float32")
    if beta != 0:
        if c is None:
            raise OptionError("beta without C", limit="beta == 0 when there is no C", value=beta, nearest=0.0)
        if c.shape != acc.shape:
            raise ShapeError("C", limit="the shape of the product", value=c.shape, nearest=acc.shape)
    if bias is not None and bias.shape != acc.shape[-1:]:
        raise ShapeError("bias", limit="[n]", value=bias.shape, nearest=acc.shape[-1:])

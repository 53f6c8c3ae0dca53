"""From arguments to a validated problem to the backend: what the public functions share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import interop, problem
from .aliasing import check_items_apart
from .backends import cpu
from .contract.spec import Contract, ContractLike, as_contract
from .errors import DTypeError, LimitError, OptionError, ShapeError
from .problem import GemmProblem, Settings

__all__ = ["DEFAULT", "items", "linear", "matmul", "settings", "uniform"]

Array = NDArray[Any]

DEFAULT = Contract()


def settings(contract: ContractLike | None, alpha: float, beta: float, out_dtype: Any, accumulate: bool) -> Settings:
    """Checked settings from the public keyword arguments."""
    if (
        type(alpha) is float
        and type(beta) is float
        and alpha == 1
        and beta == 0
        and out_dtype is None
        and accumulate is False
    ):
        return _plain(DEFAULT if contract is None else as_contract(contract))
    return Settings.checked(
        DEFAULT if contract is None else as_contract(contract),
        alpha=alpha,
        beta=beta,
        accumulate=accumulate,
        out_dtype=interop.as_dtype(out_dtype),
    )


@lru_cache(maxsize=64)
def _plain(contract: Contract) -> Settings:
    return Settings.checked(contract)


def matmul(a: Any, b: Any, contract: ContractLike | None, out: Any, out_dtype: Any, accumulate: bool) -> Any:
    """`isogemm.matmul` for every kind of operand."""
    chosen = settings(contract, 1.0, 0.0, out_dtype, accumulate)
    xa, xb, target = interop.array("a", a), interop.array("b", b), _optional("out", out)
    if chosen.accumulate and target is None:
        raise OptionError("accumulate=True", limit="out, the float32 sums to start from", value=None, nearest="out=")
    ma, mb, whole, shape = matrices(xa, xb)
    ma, mb = _broadcast(ma, whole[:-2]), _broadcast(mb, whole[:-2])
    view = None if target is None else with_axes(target, shape, xa.ndim == 1, xb.ndim == 1)
    posed = problem.check_product(ma, mb, view if chosen.accumulate else None, None, view, chosen, "matmul")
    if view is None:
        view = allocate(whole, posed.dtype_out)
    run(ma, mb, view if chosen.accumulate else None, view, None, chosen)
    return out if out is not None else _returned(view.reshape(shape), a, b)


def matrices(a: Array, b: Array) -> tuple[Array, Array, tuple[int, ...], tuple[int, ...]]:
    """Operands of `numpy.matmul` as stacks of matrices, with the shape of the stack of products and of the result."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ShapeError(f"dimensions of {name}", limit="at least 1", value=0, nearest=f"{name}.reshape(1)")
    ma = a[None, :] if a.ndim == 1 else a
    mb = b[:, None] if b.ndim == 1 else b
    if ma.shape[-1] != mb.shape[-2]:
        raise problem.mismatch(ma.shape, mb.shape)
    # Not numpy.broadcast_shapes, which refuses products of sizes beyond 2**63 in words of its own.
    pairs = list(zip_longest(reversed(ma.shape[:-2]), reversed(mb.shape[:-2]), fillvalue=1))
    if any(x != y and 1 not in (x, y) for x, y in pairs):
        raise ShapeError(
            "batch dimensions",
            limit="equal or 1, aligned at the last",
            value=f"a {list(a.shape)} and b {list(b.shape)}",
            nearest=f"b {[*ma.shape[:-2], *mb.shape[-2:]]}",
        )
    batch = tuple(y if x == 1 else x for x, y in reversed(pairs))
    whole = (*batch, ma.shape[-2], mb.shape[-1])
    return ma, mb, whole, batch + whole[-2:-1] * (a.ndim > 1) + whole[-1:] * (b.ndim > 1)


def _broadcast(x: Array, batch: tuple[int, ...]) -> Array:
    """`x` with those leading dimensions; broadcast ones have stride 0."""
    if x.shape[:-2] == batch:
        return x
    try:
        return np.broadcast_to(x, batch + x.shape[-2:])
    except ValueError as error:
        raise LimitError(
            "broadcast operand", limit="2**63 - 1 bytes", value=f"batch {list(batch)}", nearest="a smaller batch"
        ) from error


def with_axes(target: Array, shape: tuple[int, ...], row: bool, column: bool) -> Array:
    """A view of `out` with the axes that a 1-D operand took away."""
    if target.shape != shape:
        raise ShapeError("shape of out", limit="that of the product", value=list(target.shape), nearest=list(shape))
    if column:
        target = target[..., None]
    return target[..., None, :] if row else target


def linear(x: Any, w: Any, bias: Any, contract: ContractLike | None, out_dtype: Any) -> Any:
    """`isogemm.linear` for every kind of operand."""
    chosen = settings(contract, 1.0, 0.0, out_dtype, False)
    xx, xbias = interop.array("x", x), _optional("bias", bias)
    packed = isinstance(w, cpu.PackedWeight)
    weight: Any = w if packed else interop.array("w", w)
    problem.check_operand("x", xx)
    if not packed:
        problem.check_operand("w", weight)
        check_ndim("w", weight, 2)
    n, k = (weight.n, weight.k) if packed else weight.shape
    if xx.ndim == 0 or xx.shape[-1] != k:
        raise ShapeError(
            "columns of x and w",
            limit="equal: x [..., k] and w [n, k]",
            value=f"x {list(xx.shape)} and w {[n, k]}",
            nearest=f"x {[*xx.shape[:-1], k]}" + _or_transposed(xx, (n, k), packed),
        )
    if xbias is not None:
        problem.check_bias(xbias, n)
    dtype = chosen.result_dtype(xx.dtype, weight.dtype)
    result = allocate((*xx.shape[:-1], n), dtype)
    if result.size:
        _run_rows(xx, weight if packed else weight.T, result, xbias, chosen)
    return _returned(result, x, w)


def _or_transposed(x: Array, shape: tuple[int, int], packed: bool) -> str:
    """The other mistake that a mismatch can be: a weight given as [k, n]."""
    if x.ndim == 0 or x.shape[-1] != shape[0]:
        return ""
    return ", or w is [n, k]: did you mean " + ("pack(w.T)?" if packed else "w.T?")


def _run_rows(x: Array, w: Any, out: Array, bias: Array | None, chosen: Settings) -> None:
    """x [..., k] @ w into a C-contiguous out [..., n], as one product wherever one row stride walks x."""
    rows = x[None, :] if x.ndim == 1 else x
    merged = rows if rows.ndim == 2 else merge(rows, 1)
    if merged is not None:
        cpu.gemm(merged, w, out.reshape(-1, out.shape[-1]), bias=bias, **_options(chosen))
    elif isinstance(w, cpu.PackedWeight):
        for i in np.ndindex(x.shape[:-2]):
            cpu.gemm(x[i], w, out[i], bias=bias, **_options(chosen))
    else:
        run(x, np.broadcast_to(w, (*x.shape[:-2], *w.shape)), None, out, bias, chosen)


def uniform(
    form: str, a: Any, b: Any, c: Any, bias: Any, out: Any, chosen: Settings, trans_a: str, trans_b: str
) -> Any:
    """`isogemm.gemm` and `isogemm.gemm_strided_batched`."""
    ndim = 2 if form == "gemm" else 3
    xa, xb = interop.array("a", a), interop.array("b", b)
    xc, xbias, target = _optional("c", c), _optional("bias", bias), _optional("out", out)
    check_ndim("a", xa, ndim)
    check_ndim("b", xb, ndim)
    xa, xb = problem.transposed("trans_a", xa, trans_a), problem.transposed("trans_b", xb, trans_b)
    if chosen.accumulate and xc is None:
        xc = target
    posed = problem.check_product(xa, xb, xc, xbias, target, chosen, form)
    if target is None:
        target = allocate((*xa.shape[:-1], posed.n), posed.dtype_out)
    run(xa, xb, xc if chosen.reads_c else None, target, xbias, chosen)
    return out if out is not None else _returned(target, a, b)


def items(form: str, a: Any, b: Any, c: Any, bias: Any, out: Any, chosen: Settings, trans_a: str, trans_b: str) -> Any:
    """`isogemm.gemm_batched` on lists and `isogemm.gemm_grouped`."""
    as_ = [problem.transposed("trans_a", x, trans_a) for x in as_matrices("a", a)]
    bs = [problem.transposed("trans_b", x, trans_b) for x in as_matrices("b", b)]
    none = [None] * len(as_)
    outs: Sequence[Array | None] = none if out is None else as_matrices("out", out)
    cs: Sequence[Array | None] = as_matrices("c", c) if c is not None else outs if chosen.accumulate else none
    for name, group in (("b", bs), ("c", cs), ("out", outs)):
        if len(group) != len(as_):
            raise ShapeError(f"items in {name}", limit="as many as in a", value=len(group), nearest=len(as_))
    xbias = _optional("bias", bias)
    posed = [
        problem.check_product(*operands, chosen, form)
        for operands in zip(as_, bs, cs, [xbias] * len(as_), outs, strict=True)
    ]
    _check_alike(form, posed)
    targets = [x for x in outs if x is not None]
    if out is None:
        targets = _allocate_items(posed)
    else:
        reads = [(name, i, x) for name, group in (("a", as_), ("b", bs)) for i, x in enumerate(group)]
        if chosen.reads_c:
            reads += [("c", i, x) for i, x in enumerate(cs) if x is not None]
        check_items_apart(targets, reads)
    run_items(as_, bs, cs if chosen.reads_c else none, targets, xbias, chosen)
    return out if out is not None else [_returned(x, *_leaders(a), *_leaders(b)) for x in targets]


def run_items(
    a: Sequence[Array],
    b: Sequence[Array],
    c: Sequence[Array | None],
    out: Sequence[Array],
    bias: Array | None,
    chosen: Settings,
) -> None:
    """Hand the items that have a result to the backend."""
    work = [(x, y, o, z) for x, y, o, z in zip(a, b, out, c, strict=True) if o.size]
    if work:
        cpu.gemm_items(work, bias=bias, **_options(chosen))


def _check_alike(form: str, posed: Sequence[GemmProblem]) -> None:
    """One dtype triple in every list, one size in a pointer array."""
    for i, p in enumerate(posed[1:], 1):
        first = posed[0]
        if (p.dtype_a, p.dtype_b) != (first.dtype_a, first.dtype_b):
            raise DTypeError(
                f"dtypes of item {i}",
                limit="those of item 0",
                value=f"{p.dtype_a} and {p.dtype_b}",
                nearest=f"{first.dtype_a} and {first.dtype_b}",
            )
        if form == "gemm_batched" and (p.m, p.n, p.k) != (first.m, first.n, first.k):
            raise ShapeError(
                f"m, n, k of item {i}",
                limit=f"those of item 0, {(first.m, first.n, first.k)}",
                value=(p.m, p.n, p.k),
                nearest="gemm_grouped, where sizes differ",
            )


def _allocate_items(posed: Sequence[GemmProblem]) -> list[Array]:
    if not posed:
        return []
    ends = np.cumsum([0] + [p.m * p.n for p in posed], dtype=object)
    flat = allocate((int(ends[-1]),), posed[0].dtype_out)
    return [flat[ends[i] : ends[i + 1]].reshape(p.m, p.n) for i, p in enumerate(posed)]


def run(a: Array, b: Array, c: Array | None, out: Array, bias: Array | None, chosen: Settings) -> None:
    """a [..., m, k] @ b [..., k, n] into out, in the form that copies nothing and makes the fewest calls."""
    if not out.size:
        return
    options = _options(chosen)
    if out.ndim == 2:
        cpu.gemm(a, b, out, c=c, bias=bias, **options)
        return
    if all(d == 1 or s == 0 for d, s in zip(b.shape[:-2], b.strides[:-2], strict=True)):
        # All items share b: one wide product, with the same bits.
        rows, target, start = merge(a, 1), merge(out, 1), None if c is None else merge(c, 1)
        if rows is not None and target is not None and (c is None or start is not None):
            cpu.gemm(rows, b[(0,) * (b.ndim - 2)], target, c=start, bias=bias, **options)
            return
    a3, b3, out3, c3 = merge(a, 2), merge(b, 2), merge(out, 2), None if c is None else merge(c, 2)
    if a3 is not None and b3 is not None and out3 is not None and (c is None or c3 is not None):
        cpu.gemm_batched(a3, b3, out3, c=c3, bias=bias, **options)
        return
    where = list(np.ndindex(out.shape[:-2]))  # no constant stride: an array of pointers
    work = [(a[i], b[i], out[i], None if c is None else c[i]) for i in where]
    cpu.gemm_items(work, bias=bias, **options)


def merge(x: Array, keep: int) -> Array | None:
    """`x` with all but its last `keep` dimensions made one, as a view; None where that takes a copy."""
    lead = x.ndim - keep
    pairs = [(d, s) for d, s in zip(x.shape[:lead], x.strides[:lead], strict=True) if d != 1]
    for (_, outer), (size, inner) in pairwise(pairs):
        if outer != size * inner:
            return None
    return x.reshape(-1, *x.shape[lead:]) if x.size else None


def _options(chosen: Settings) -> dict[str, Any]:
    return {
        "contract": chosen.contract,
        "alpha": chosen.alpha,
        "beta": chosen.beta,
        "accumulate": chosen.accumulate,
    }


def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array.

    Raises
    ------
    LimitError
        It cannot be addressed or held.
    """
    dtype = np.dtype(dtype)
    problem.check_size(shape, dtype.itemsize)
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise LimitError(
            "memory for the result", limit="what is free", value=list(shape), nearest="fewer rows"
        ) from error


def check_ndim(name: str, x: Array, ndim: int) -> None:
    """Raise `ShapeError` unless `x` has `ndim` dimensions."""
    if x.ndim != ndim:
        nearest = "matmul, which broadcasts" if ndim == 2 else f"np.broadcast_to({name}, (batch, rows, columns))"
        raise ShapeError(f"dimensions of {name}", limit=ndim, value=f"{x.ndim}, shape {list(x.shape)}", nearest=nearest)


def as_matrices(name: str, group: Any) -> list[Array]:
    """The matrices of a list or of a 3-D array."""
    if isinstance(group, list | tuple):
        found = [interop.array(f"{name}[{i}]", x) for i, x in enumerate(group)]
        for i, x in enumerate(found):
            check_ndim(f"{name}[{i}]", x, 2)
        return found
    whole = interop.array(name, group)
    check_ndim(name, whole, 3)
    return list(whole)


def _optional(name: str, x: Any) -> Array | None:
    return None if x is None else interop.array(name, x)


def _leaders(group: Any) -> tuple[Any, ...]:
    return tuple(group[:1]) if isinstance(group, list | tuple) else (group,)


def _returned(x: Array, *operands: Any) -> Any:
    """`x` as the caller's kind: a tensor if an operand is one."""
    for operand in operands:
        if interop.is_tensor(operand):
            return interop.to_tensor(x)
    return x

"""From arguments to a validated problem to the backend: what the public functions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import INT8, as_dtype
from ..base.limits import check_size
from ..contract.spec import ContractLike, as_contract
from ..errors import DTypeError, LimitError, OptionError, ShapeError
from ..operands.aliasing import check_items_apart
from ..operands.device_array import HOST
from ..operands.prepared import MatrixList, PreparedWeight
from ..operands.shapes import merge, merged_rows
from ..operands.tensors import check_untraced, uncompiled
from ..planner.device import Device
from ..problem import settings as problem
from ..problem.settings import Settings
from .operands import Operands

Array = NDArray[Any]
DType = np.dtype[Any]


class Options(NamedTuple):
    """The keyword arguments that are no operands, as given."""

    contract: ContractLike | None = None
    alpha: float = 1.0
    beta: float = 0.0
    out_dtype: Any = None
    accumulate: bool = False
    trans_a: str = "N"
    trans_b: str = "N"

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells calls without C apart, besides their operands, as a backend's `recall` gets it."""
        return self.accumulate, self.contract, self.alpha, self.out_dtype, self.trans_a, self.trans_b


def settings(given: Options, device: Device, a: Array, b: Array) -> Settings:
    """Checked settings from the public keyword arguments; the default contract is the device's for these operands."""
    contract, alpha, beta, out_dtype, accumulate, _, _ = given
    chosen = device.default(a.dtype, b.dtype) if contract is None else as_contract(contract)
    if (
        type(alpha) is float
        and type(beta) is float
        and alpha == 1
        and beta == 0
        and out_dtype is None
        and accumulate is False
    ):
        return Settings(chosen)
    return Settings.checked(chosen, alpha=alpha, beta=beta, accumulate=accumulate, out_dtype=as_dtype(out_dtype))


@uncompiled
def matmul(a: Any, b: Any, contract: ContractLike | None, out: Any, out_dtype: Any, accumulate: bool) -> Any:
    """`isogemm.matmul` for every kind of operand."""
    here = Operands()
    xa, xb, target = here.view("a", a), here.view("b", b), here.optional("out", out)
    device = here.device
    chosen = settings(Options(contract, 1.0, 0.0, out_dtype, accumulate), device, xa, xb)
    if chosen.accumulate and target is None:
        raise OptionError("accumulate=True", limit="out, the float32 sums to start from", value=None, nearest="out=")
    ma, mb, whole, shape = matrices(xa, xb)
    ma, mb = _broadcast(ma, whole[:-2]), _broadcast(mb, whole[:-2])
    view = None if target is None else with_axes(target, shape, xa.ndim == 1, xb.ndim == 1)
    dtype = problem.check_product(ma, mb, view if chosen.accumulate else None, None, view, chosen)
    if view is None:
        view = allocate(device, whole, dtype)
    run(device, ma, mb, view if chosen.accumulate else None, view, None, chosen)
    result = here.result(view.reshape(shape) if out is None else view, out, a, b)
    if here.place is not HOST:
        device.remember("matmul", (a, b, None, out), (accumulate, contract, out_dtype), result)
    return result


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
        limit, nearest = "equal or 1, aligned at the last", f"b {[*ma.shape[:-2], *mb.shape[-2:]]}"
        raise ShapeError(
            "batch dimensions", limit=limit, value=f"a {list(a.shape)} and b {list(b.shape)}", nearest=nearest
        )
    batch = tuple(y if x == 1 else x for x, y in reversed(pairs))
    whole = (*batch, ma.shape[-2], mb.shape[-1])
    return ma, mb, whole, batch + whole[-2:-1] * (a.ndim > 1) + whole[-1:] * (b.ndim > 1)


def _broadcast(x: Array, batch: tuple[int, ...]) -> Array:
    """`x` with those leading dimensions; broadcast ones have stride 0."""
    if x.shape[:-2] == batch:
        return x
    try:
        return np.broadcast_to(x, batch + x.shape[-2:], subok=True)
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


@uncompiled
def linear(x: Any, w: Any, bias: Any, contract: ContractLike | None, out_dtype: Any, out: Any = None) -> Any:
    """`isogemm.linear` for every kind of operand."""
    here = Operands()
    xx, weight = here.view("x", x), _weight(here, w)
    xbias, target = here.optional("bias", bias), here.optional("out", out)
    device, packed = here.device, isinstance(weight, PreparedWeight)
    check_linear(xx, weight.shape, xbias, "pack(w.T)" if packed else "w.T")
    chosen = settings(Options(contract, out_dtype=out_dtype), device, xx, weight)
    dtype, shape = chosen.result_dtype(xx.dtype, weight.dtype), (*xx.shape[:-1], weight.shape[0])
    problem.check_integers(weight.shape[1], xbias, chosen)
    if target is None:
        target = allocate(device, shape, dtype)
    else:
        reads = (("x", xx), ("w", None if packed else weight), ("bias", xbias))
        problem.check_out(target, shape, dtype, reads)
    if target.size:
        run_rows(device, xx, weight if packed else weight.T, target, xbias, chosen)
    result = here.result(target, out, x, w)
    if here.place is not HOST:
        device.remember("linear", (x, w, bias, out), (False, contract, out_dtype), result)
    return result


def _weight(here: Operands, w: Any) -> Any:
    """A weight [n, k]: a view, or what `isogemm.pack` made of one."""
    if isinstance(w, PreparedWeight):
        if w.array is None:
            here.note("w", w.place)
            return w
        w = w.array
    weight = here.view("w", w)
    problem.check_operand("w", weight, INT8)
    check_ndim("w", weight, 2)
    return weight


def check_linear(x: Array, shape: tuple[int, ...], bias: Array | None, turned: str = "") -> None:
    """Raise unless x [..., k] and bias [n] fit a weight [n, k]; `turned`: what a caller has who stored it as [k, n]."""
    problem.check_operand("x", x, INT8)
    n, k = shape
    if x.ndim == 0 or x.shape[-1] != k:
        other = f", or w is [n, k]: did you mean {turned}?" if turned and x.shape[-1:] == (n,) else ""
        limit, nearest = "equal: x [..., k] and w [n, k]", f"x {[*x.shape[:-1], k]}{other}"
        raise ShapeError("columns of x and w", limit=limit, value=f"x {list(x.shape)} and w {[n, k]}", nearest=nearest)
    if bias is not None:
        problem.check_bias(bias, n)


def run_rows(device: Device, x: Array, w: Any, out: Array, bias: Array | None, chosen: Settings) -> None:
    """x [..., k] @ w into out [..., n], as one product wherever one row stride walks x and out."""
    merged = merged_rows(x, out)
    if merged is not None:
        rows, into = merged
        device.gemm(rows, w, into, chosen, bias=bias)
    elif isinstance(w, PreparedWeight):
        for i in np.ndindex(x.shape[:-2]):
            device.gemm(x[i], w, out[i], chosen, bias=bias)
    else:
        run(device, x, np.broadcast_to(w, (*x.shape[:-2], *w.shape), subok=True), None, out, bias, chosen)


@uncompiled
def uniform(form: str, a: Any, b: Any, c: Any, bias: Any, out: Any, given: Options) -> Any:
    """`isogemm.gemm` and `isogemm.gemm_strided_batched`."""
    ndim = 2 if form == "gemm" else 3
    here = Operands()
    xa, xb = here.view("a", a), here.view("b", b)
    xc, xbias, target = here.optional("c", c), here.optional("bias", bias), here.optional("out", out)
    device = here.device
    chosen = settings(given, device, xa, xb)
    check_ndim("a", xa, ndim)
    check_ndim("b", xb, ndim)
    xa, xb = problem.transposed("trans_a", xa, given.trans_a), problem.transposed("trans_b", xb, given.trans_b)
    if chosen.accumulate and xc is None:
        xc = target
    dtype = problem.check_product(xa, xb, xc, xbias, target, chosen)
    if target is None:
        target = allocate(device, (*xa.shape[:-1], xb.shape[-1]), dtype)
    run(device, xa, xb, xc if chosen.reads_c else None, target, xbias, chosen)
    result = here.result(target, out, a, b)
    if here.place is not HOST and c is None and _is_key(given.alpha):
        device.remember(form, (a, b, bias, out), given.key, result)
    return result


def _is_key(alpha: object) -> bool:
    """Whether equal alphas mean the same: not of other types, and not of zeros, which have two signs."""
    return type(alpha) is float and alpha != 0


@uncompiled
def items(form: str, a: Any, b: Any, c: Any, bias: Any, out: Any, given: Options) -> Any:
    """`isogemm.gemm_batched` on lists and `isogemm.gemm_grouped`."""
    here = Operands()
    as_ = [problem.transposed("trans_a", x, given.trans_a) for x in as_matrices("a", a, here)]
    bs = [problem.transposed("trans_b", x, given.trans_b) for x in as_matrices("b", b, here)]
    none: list[Array | None] = [None] * len(as_)
    outs: Sequence[Array | None] = none if out is None else as_matrices("out", out, here)
    cs: Sequence[Array | None] = none if c is None else as_matrices("c", c, here)
    xbias = here.optional("bias", bias)
    device = here.device
    for name, group in (("b", bs), ("c", cs), ("out", outs)):
        if len(group) != len(as_):
            raise ShapeError(f"items in {name}", limit="as many as in a", value=len(group), nearest=len(as_))
    chosen = settings(given, device, *((as_[0], bs[0]) if as_ else (_NOTHING, _NOTHING)))
    if chosen.accumulate and c is None:
        cs = outs
    dtypes = [
        problem.check_product(*operands, chosen) for operands in zip(as_, bs, cs, [xbias] * len(as_), outs, strict=True)
    ]
    _check_alike(form, as_, bs)
    targets = [x for x in outs if x is not None]
    if out is None:
        targets = _allocate_items(device, as_, bs, dtypes)
    else:
        check_items_apart(targets, _reads(as_, bs, cs if chosen.reads_c else none))
    run_items(device, as_, bs, cs if chosen.reads_c else none, targets, xbias, chosen)
    results = here.results(targets, out, *_leaders(a), *_leaders(b))
    if here.place is not HOST and c is None and _is_key(given.alpha):
        device.remember(form, (a, b, bias, out), given.key, results)
    return results


_NOTHING: Array = np.empty(0, np.float32)


def _reads(a: Sequence[Array], b: Sequence[Array], c: Sequence[Array | None]) -> list[tuple[str, int, Array]]:
    return [
        (name, i, x) for name, group in (("a", a), ("b", b), ("c", c)) for i, x in enumerate(group) if x is not None
    ]


def run_items(
    device: Device,
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
        device.gemm_items(work, chosen, bias=bias)


def _check_alike(form: str, a: Sequence[Array], b: Sequence[Array]) -> None:
    """One dtype triple in every list, one size in a pointer array."""
    for i, (x, y) in enumerate(zip(a[1:], b[1:], strict=True), 1):
        if (x.dtype, y.dtype) != (a[0].dtype, b[0].dtype):
            limit, nearest = "those of item 0", f"{a[0].dtype.name} and {b[0].dtype.name}"
            raise DTypeError(
                f"dtypes of item {i}", limit=limit, value=f"{x.dtype.name} and {y.dtype.name}", nearest=nearest
            )
        if form == "gemm_batched" and (x.shape, y.shape) != (a[0].shape, b[0].shape):
            (m, k), n = a[0].shape, b[0].shape[1]
            limit, nearest = f"those of item 0, {(m, n, k)}", "gemm_grouped, where sizes differ"
            raise ShapeError(
                f"m, n, k of item {i}", limit=limit, value=(x.shape[0], y.shape[1], x.shape[1]), nearest=nearest
            )


def _allocate_items(device: Device, a: Sequence[Array], b: Sequence[Array], dtypes: Sequence[DType]) -> list[Array]:
    if not dtypes:
        return []
    shapes = [(x.shape[0], y.shape[1]) for x, y in zip(a, b, strict=True)]
    for shape in shapes:
        check_size(shape, dtypes[0].itemsize, device.memory)
    ends = np.cumsum([0] + [m * n for m, n in shapes], dtype=object)
    flat = allocate(device, (int(ends[-1]),), dtypes[0])
    return [flat[ends[i] : ends[i + 1]].reshape(shape) for i, shape in enumerate(shapes)]


def run(device: Device, a: Array, b: Array, c: Array | None, out: Array, bias: Array | None, chosen: Settings) -> None:
    """a [..., m, k] @ b [..., k, n] into out, in the form that copies nothing and makes the fewest calls."""
    if not out.size:
        return
    if out.ndim == 2:
        device.gemm(a, b, out, chosen, c=c, bias=bias)
        return
    if all(d == 1 or s == 0 for d, s in zip(b.shape[:-2], b.strides[:-2], strict=True)):
        # All items share b: one wide product, with the same bits.
        rows, target, start = merge(a, 1), merge(out, 1), None if c is None else merge(c, 1)
        if rows is not None and target is not None and (c is None or start is not None):
            device.gemm(rows, b[(0,) * (b.ndim - 2)], target, chosen, c=start, bias=bias)
            return
    a3, b3, out3, c3 = merge(a, 2), merge(b, 2), merge(out, 2), None if c is None else merge(c, 2)
    if a3 is not None and b3 is not None and out3 is not None and (c is None or c3 is not None):
        device.gemm_batched(a3, b3, out3, chosen, c=c3, bias=bias)
        return
    device.gemm_stack(a, b, out, chosen, c=c, bias=bias)


def allocate(device: Device, shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array. Raises LimitError: it cannot be addressed or held."""
    dtype = np.dtype(dtype)
    check_size(shape, dtype.itemsize, device.memory)
    return device.empty(shape, dtype)


def check_ndim(name: str, x: Array, ndim: int) -> None:
    """Raise `ShapeError` unless `x` has `ndim` dimensions."""
    if x.ndim != ndim:
        nearest = "matmul, which broadcasts" if ndim == 2 else f"np.broadcast_to({name}, (batch, rows, columns))"
        raise ShapeError(f"dimensions of {name}", limit=ndim, value=f"{x.ndim}, shape {list(x.shape)}", nearest=nearest)


def as_matrices(name: str, group: Any, here: Operands) -> list[Array]:
    """The matrices of a list, of a pointer array or of a 3-D array."""
    if isinstance(group, MatrixList):
        check_untraced(name)  # no tensor of the trace's will be looked at
        here.note(name, group.place)
        return group.views
    if isinstance(group, list | tuple):
        found = [here.view(f"{name}[{i}]", x) for i, x in enumerate(group)]
        for i, x in enumerate(found):
            check_ndim(f"{name}[{i}]", x, 2)
        return found
    if isinstance(group, Iterator):
        limit = "a list of matrices, or an array of three dimensions"
        raise DTypeError(name, limit=limit, value=f"a {type(group).__name__}", nearest=f"list({name})")
    whole = here.view(name, group)
    if whole.ndim == 2:
        raise ShapeError(
            name,
            limit="a list of matrices, or an array of three dimensions",
            value=f"one matrix {list(whole.shape)}",
            nearest=f"[{name}], or gemm for one product",
        )
    check_ndim(name, whole, 3)
    return list(whole)


def _leaders(group: Any) -> tuple[Any, ...]:
    return tuple(group[:1]) if isinstance(group, list | tuple) else (group,)

"""torch's reductions as operations along rows: what `isogemm.torch.routing.scope` puts in the place of aten's kernels.

Along the last dimension, or any dimensions that include it, a reduction is the row operation of
`isogemm.torch.reductions`, in its order of 128 lanes. A sum over dimensions before the last, as of a bias's gradient,
is a chain over them in ascending order, in float32 from +0: the product ``fma/chain`` with a row of ones. Each
function takes the arguments of the aten operator of its name and returns None where the operands are not isogemm's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...api import products as api
from ...errors import DeviceError, DTypeError, OptionError
from ..device import DTYPES, column
from ..rows.direct import direct
from ..rows.gradients import log_softmax_back, norm_back, over_row, scattered, softmax_back
from ..rows.signature import signature
from ..rows.table import ROWS
from .elementwise import written
from .products import is_composite

Tensor = Any  # torch is untyped to mypy
_FLOAT32 = torch.float32


def _elements(kind: str) -> Callable[..., Tensor | None]:
    """softmax and log_softmax over any dimension."""

    def call(x: Tensor, dim: int, half_to_float: bool) -> Tensor | None:
        out_dtype = _FLOAT32 if half_to_float else None
        if not _is_valid(x, (dim,)):
            return None
        if x.dim() == 0:
            return direct(kind, (x.reshape(1),), (out_dtype,)).reshape(())
        if dim in (-1, x.dim() - 1):
            return direct(kind, (x,), (out_dtype,))
        return direct(kind, (x.movedim(dim, -1),), (out_dtype,)).movedim(-1, dim).contiguous()

    return call


def chained_softmax(x: Tensor) -> Tensor:
    """softmax along the last dimension in float32, its exponentials added up in a chain.

    ``e = exp(x - max)``, the sum over e in ascending order, in float32 from +0, ``e / sum``. Masked keys add 0 to it,
    wherever they stand: padding on the left, and between the keys and a sink, whose place moves with their number.
    """
    wide = x.float()
    e = direct("exp", (wide - wide.amax(-1, keepdim=True),), (None,))
    total = api.matmul(e.view(-1, e.shape[-1]), e.new_ones(e.shape[-1], 1), contract="fma/chain")
    return e.div_(total.view(*e.shape[:-1], 1))


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor | None:
    """`chained_softmax` along the last of four dimensions or more, as attention's scores are."""
    if x.dim() < 4 or dim not in (-1, x.dim() - 1) or not x.numel():
        return _ALONG["softmax"](x, dim, half_to_float)
    found = chained_softmax(x)
    return found if half_to_float else found.to(x.dtype)


def _converted(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """softmax and log_softmax of x in a dtype, as their forms with ``out=`` are called."""

    def call(x: Tensor, dim: int, dtype: Any = None) -> Tensor | None:
        dtype = dtype or x.dtype
        return function(x.to(dtype), dim, False) if dtype in DTYPES else None

    return call


def _of_rows(gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A gradient along any dimension; a number is a row of one."""

    def call(dy: Tensor, y: Tensor, dim: int, dtype: Any) -> Tensor:
        if y.dim() == 0:
            return gradient(dy.reshape(1), y.reshape(1)).to(dtype).reshape(())
        return gradient(dy.movedim(dim, -1), y.movedim(dim, -1)).to(dtype).movedim(-1, dim)

    return call


def _total(kind: str) -> Callable[..., Tensor | None]:
    """sum and mean over any dimensions."""

    def call(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
        if dtype is not None and dtype not in DTYPES:
            return None
        if x.dim() and (dim == [-1] or dim == [x.dim() - 1]):
            return direct(kind, (x,), (keepdim, dtype))
        if not _is_valid(x, dim):
            return None
        rows, shape = _rows(x, dim, keepdim)
        if rows is not None:
            return over_row(kind, rows, dtype).reshape(shape)
        return _chain(kind, *_terms(x, dim), dtype).reshape(shape)

    return call


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor | None:
    """The square root of the sum of squares, each rounded: the Euclidean norm."""
    if ord != 2 or dtype not in (None, x.dtype):
        return None
    total = _sum(x.float().square(), dim, keepdim)
    return None if total is None else total.sqrt().to(x.dtype)


def _is_valid(x: Tensor, dim: Any) -> bool:
    """Whether these are dimensions of a tensor, each named once; for others torch has its errors."""
    rank = max(x.dim(), 1)
    return not dim or (all(-rank <= d < rank for d in dim) and len({d % rank for d in dim}) == len(dim))


def _rows(x: Tensor, dim: Any, keepdim: bool) -> tuple[Tensor | None, list[int]]:
    """[kept..., n] with the reduced dimensions as one row, or None where the last is not among them; and the shape."""
    rank = x.dim()
    over = {d % rank for d in dim} if dim and rank else set(range(rank))
    shape = [1 if d in over else n for d, n in enumerate(x.shape) if keepdim or d not in over]
    if rank and rank - 1 not in over:
        return None, shape
    kept = [d for d in range(rank) if d not in over]
    rows = x.permute([*kept, *sorted(over)]).reshape([*[x.shape[d] for d in kept], math.prod(x.shape[d] for d in over)])
    return rows, shape


def _terms(x: Tensor, dim: Any) -> tuple[Tensor, int, int]:
    """x as [kept..., reduced..., n] for sums over rows, n being the last dimension; how many, and the rows of each."""
    rank = x.dim()
    over = sorted({d % rank for d in dim})
    kept = [d for d in range(rank - 1) if d not in over]
    groups, rows = (math.prod(x.shape[d] for d in dims) for dims in (kept, over))
    return x.permute(*kept, *over, rank - 1), groups, rows


def _chain(kind: str, terms: Tensor, groups: int, rows: int, dtype: Any) -> Tensor:
    """[groups, n]: the sum or mean of every `rows` rows of terms, as a chain over them."""
    n = terms.shape[-1]
    if terms.is_cuda:
        found = terms.new_zeros(groups, n, dtype=_FLOAT32)
        if terms.numel():
            column("row_sums", terms.device.type).groups(terms.resolve_neg(), rows, found)
    else:
        ones = terms.new_ones(1, 1, 1).expand(groups, 1, rows)
        wide = terms.reshape(groups, rows, n)
        found = api.gemm_strided_batched(ones, wide, contract="fma/chain", out_dtype=_FLOAT32)
    if kind == "mean":
        found = found / torch.full_like(found, rows)  # a number's reciprocal would be multiplied by, on a GPU
    return found.to(dtype or terms.dtype)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    """``max + log(sum(exp(x - max)))``: where x is largest, log_softmax is minus the logarithm of that sum."""
    dtype = dtype or x.dtype
    if dtype not in DTYPES or not _is_valid(x, dim):
        return None
    if x.dim() and not (dim or keepdim):  # torch's own error: its steps do not agree on what no dimensions are
        return None
    rows, shape = _rows(x, dim, keepdim)
    if rows is None:
        rows = x.movedim(tuple(dim), tuple(range(-len(dim), 0))).flatten(-len(dim))
    if not rows.shape[-1]:
        return None
    rows = rows.float()
    largest = rows.amax(-1)
    found = largest - direct("log_softmax", (rows,), (None,)).amax(-1)
    return torch.where(largest.isinf(), largest, found).to(dtype).reshape(shape)


def is_normed(x: Tensor, shape: Any, *parameters: Tensor | None) -> bool:
    """Whether the last dimensions of x are those that a norm is over, and parameters have their shape."""
    shape = tuple(shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        return False
    return all(w is None or tuple(w.shape) == shape for w in parameters)


def _flat(x: Tensor, shape: Any) -> Tensor:
    """[..., n] for the normalized dimensions `shape`."""
    return x.reshape(*x.shape[: x.dim() - len(shape)], math.prod(shape))


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor] | None:
    if not is_normed(x, shape, weight, bias):
        return None
    rows = _flat(x, shape)
    weight, bias = (None if w is None else w.reshape(-1) for w in (weight, bias))
    y = direct("layer_norm", (rows, weight, bias), (eps, None))
    mean = over_row("mean", rows, _FLOAT32)
    d = rows.float() - mean
    rstd = 1 / torch.sqrt(over_row("mean", d * d) + eps)
    stats = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    return y.view(x.shape), mean.view(stats), rstd.view(stats)


def _layer_norm_backward(
    dy: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Any, bias: Any, mask: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`norm_back` with ``h = (x - mean) * rstd``, ``g = dy * weight``."""
    rows, dy = _flat(x, shape).float(), _flat(dy, shape).float()
    mean, rstd = (s.reshape(*rows.shape[:-1], 1).float() for s in (mean, rstd))
    h = (rows - mean) * rstd
    dx = None
    if mask[0]:
        g = dy if weight is None else dy * weight.reshape(-1).float()
        dx = norm_back(g, h, rstd, centered=True).to(x.dtype).view(x.shape)
    dw = _over_rows(dy * h, weight, x) if mask[1] else None
    return dx, dw, _over_rows(dy, bias, x) if mask[2] else None


def _over_rows(terms: Tensor, parameter: Any, x: Tensor) -> Tensor:
    like = x if parameter is None else parameter
    found = _chain("sum", terms, 1, math.prod(terms.shape[:-1]), like.dtype)
    return found.reshape(-1 if parameter is None else parameter.shape)


def _embedding_backward(
    dy: Tensor, ids: Tensor, count: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor | None:
    """Rows of dy added, in ascending order in float32, to the rows of the table that they came from."""
    if scale_grad_by_freq:
        return None
    total = scattered(ids, dy, count, dy.dtype)
    if padding_idx >= 0:
        total[padding_idx] = 0  # each row of the table is a sum of its own
    return total


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor | None:
    """The gradient of rows that were picked, of which some may be the same: as that of an embedding, added to x."""
    (ids,) = indices if len(indices) == 1 and x.dim() else (None,)
    if ids is None or values.dtype is not x.dtype or values.shape != ids.shape + x.shape[1:] or not values.numel():
        return None
    count = len(x)
    rows = values.reshape(ids.numel(), -1)
    places = torch.arange(count, device=x.device)[ids]  # counted from 0, with torch's own error where there is none
    return x + scattered(places, rows, count, rows.dtype).view(x.shape)


def _index_put_(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Any:
    """The same in place; without a dispatch mode autograd calls it, on zeros."""
    found = _index_put(x, indices, values)
    return None if found is None else x.copy_(found)


def _nll_loss(
    x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor] | None:
    """Minus the targets' elements, added up in the order of the targets; and how many they are."""
    if weight is not None or x.dim() not in (2, 4) or target.shape != x.shape[:1] + x.shape[2:]:
        return None
    used = target != ignore_index
    places = torch.where(used, target, 0).to(torch.int64)
    found = -x.gather(1, places[:, None])[:, 0].float()
    found = torch.where(used, found, 0.0)
    count = used.sum().to(_FLOAT32)
    if reduction:
        found = over_row("sum", found.reshape(-1)).reshape(())
        if reduction == 1:
            found = found / count
    return found.to(x.dtype), count.to(x.dtype)


def _rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor | None:
    """Without an eps, torch takes float32's for all three dtypes."""
    if not is_normed(x, shape, weight):
        return None
    weight = None if weight is None else weight.reshape(-1)
    eps = torch.finfo(_FLOAT32).eps if eps is None else eps
    return direct("rms_norm", (_flat(x, shape), weight), (eps, None)).view(x.shape)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor] | None:
    """The first of equals first, which torch leaves to its kernels and to how long a row is."""
    if not x.dim() or k > x.shape[dim]:  # a number; torch's own error
        return None
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()


def has_no_order(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a reduction has one result in any order: integers added to integers, or values put each in its place."""
    x, dtype = args[0], _wanted(kwargs)
    if function in _PUTS:  # without sums: values that are written, or added where a mask says, each once
        picked = [i for i in args[1] if i is not None]
        return len(args) < 4 or not args[3] or not x.is_floating_point() or any(i.dtype in _MASKS for i in picked)
    return function is _sum and not any(d.is_floating_point or d.is_complex for d in (x.dtype, dtype or x.dtype))


def _wanted(kwargs: Any) -> Any:
    """The dtype that a reduction is asked for, by name or by `out`."""
    out = kwargs.get("out")
    return kwargs.get("dtype") or (None if out is None else out.dtype)


def _floating(function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """Integers as the numbers that torch adds up for them, rounded to float32 once; None where it adds up others."""
    if args[0].dtype.is_complex:
        return None
    if function is _logsumexp:
        return args[0].float() if torch.get_default_dtype() is _FLOAT32 else None
    return args[0].float() if function in _TOTALS and _wanted(kwargs) in DTYPES else None


def reduced(function: Callable[..., Any], contract: Any, args: Any, kwargs: Any) -> Any:
    """The result of one aten operator, or None where the operands are not isogemm's."""
    found, outs = [], [x for x in kwargs.values() if isinstance(x, torch.Tensor)]
    if function in _TYPED and (outs or args[0].dtype not in DTYPES):
        kwargs = {**kwargs, "dtype": _wanted(kwargs)}
    for x in args:
        if isinstance(x, torch.Tensor):
            if not (x.is_cpu or x.is_cuda) or x.layout is not torch.strided or x.is_nested:
                return None
            if x is args[0] and x.dtype not in DTYPES and function is not _topk:
                x = None if x.is_floating_point() else _floating(function, args, kwargs)
                if x is None:
                    return None
            x = x.detach()
        found.append(x)
    if function in _PUTS and has_no_order(function, args, kwargs):
        return None
    if outs:
        kwargs = {k: x for k, x in kwargs.items() if not isinstance(x, torch.Tensor)}
    if found[0].is_cuda and found[0].numel() > _LONGEST and function in _TOTALS and len(found) == 1:
        return None
    try:
        result = function(*found, **kwargs)
    except (DeviceError, DTypeError, OptionError):  # mixed devices, an integer weight, an eps below 0: torch's to judge
        return None
    return result if result is None or not outs else _written(outs, result)


def _written(outs: list[Tensor], result: Any) -> Any:
    """Results in the tensors that were asked for; None where torch refuses these."""
    results = result if isinstance(result, tuple) else (result,)
    pairs = list(zip(outs, results, strict=True))
    if any(x is None or x.dtype is not out.dtype or x.device != out.device for out, x in pairs):
        return None
    written_to = tuple(written(out, x) for out, x in pairs)
    return written_to if isinstance(result, tuple) else written_to[0]


_LONGEST = 2**22  # elements of a whole CUDA tensor that are added up as one row, which is never cut
_PUTS = (_index_put, _index_put_)
_MASKS = (torch.bool, torch.uint8)
_ALONG = {kind: (_total if signature(kind).reduces else _elements)(kind) for kind, row in ROWS.items() if row.aten}
_sum = _ALONG["sum"]
_TOTALS = (_sum, _ALONG["mean"])
_TYPED = (*_TOTALS, _logsumexp)  # the dtype of what they are written to is that of their result


def _table() -> dict[Any, tuple[Callable[..., Any], str]]:
    functions: dict[str, Callable[..., Any]] = {
        "_softmax_backward_data": _of_rows(lambda dy, y: softmax_back(y.float(), dy.float())),
        # The exponential of the result is its softmax, by the pinned exp.
        "_log_softmax_backward_data": _of_rows(
            lambda dy, y: log_softmax_back(direct("softmax", (y,), (_FLOAT32,)), dy.float())
        ),
        **{name: _ALONG[kind] for kind, row in ROWS.items() for name in row.aten},
        **dict.fromkeys(ROWS["softmax"].aten, _softmax),
        "softmax.int_out": _converted(_softmax),
        "log_softmax.int_out": _converted(_ALONG["log_softmax"]),
        "logsumexp": _logsumexp,
        "linalg_vector_norm": _vector_norm,
        "nll_loss_forward": _nll_loss,
        "nll_loss2d_forward": _nll_loss,
        "native_layer_norm": _layer_norm,
        "native_layer_norm_backward": _layer_norm_backward,
        "embedding_dense_backward": _embedding_backward,
        "index_put": _index_put,
        "index_put_": _index_put_,
        "_index_put_impl_": _index_put_,
        "rms_norm": _rms_norm,
        "topk": _topk,
    }
    table = {}
    for name, function in functions.items():
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base)
        table[getattr(packet, overload or "default")] = (function, name)
        for other in packet.overloads():
            func = getattr(packet, other)
            if any(x.is_out for x in func._schema.arguments) and not is_composite(func):
                table[func] = (function, f"{base}.{other}")
    return table


# The overloads of aten's reductions that isogemm computes, with their names. rms_norm comes in inference mode only.
REDUCTIONS = _table()

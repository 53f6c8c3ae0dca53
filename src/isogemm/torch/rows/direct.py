"""Operations along rows without gradients: on the host on views of memory, on a device by a launch.

A call on a device that is like one before goes straight to its launch; others are checked first. Operands stand in the
order of `isogemm.contract.rows.OPERATIONS`, options are the operation's own, then ``out_dtype``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract.rows import OPERATIONS
from ...errors import DTypeError, ShapeError
from ...operands import memory
from ...operands.tensors import rounded
from ..device import DTYPES, column
from ..routing.elementwise import subnormals_kept
from .signature import (
    check_eps,
    check_extent,
    check_ids,
    dtype_of,
    integers,
    looked_at,
    named,
    on_device,
    on_host,
    signature,
)


def direct(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """The result of an operation."""
    try:
        there = tensors[0].is_cuda
    except AttributeError:  # no tensor: the host's way says so
        there = False
    if kind == "embedding":
        return _embedding(*tensors)
    if there:
        found: Tensor = _on_device(kind, tensors, options)
        return found
    return _add(*tensors, *options) if kind == "add" else _on_host(kind, tensors, options)


def _on_host(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    found = looked_at(kind, tensors, options, on_host)
    x, about, out_dtype = found[0], signature(kind), options[-1]
    dtype, option = found[about.like].dtype, about.option
    if out_dtype is not None:
        dtype = named(out_dtype)
    first, second = (*found[1:], None, None)[:2]
    if option == "keepdim":
        result, out = memory.empty((*x.shape[:-1], *(1,) * bool(options[0])), dtype)
        out = out if options[0] else out[..., None]
    else:
        result, out = memory.empty(x.shape, dtype)
        if option == "interleaved":
            pairs = (*x.shape[:-1], x.shape[-1] // 2)
            first, second = (t if t.shape == pairs else np.broadcast_to(t, pairs) for t in (first, second))
            kind = "rope_interleaved" if options[0] else kind
    column("rows", "cpu").run(kind, x, out, first, second, options[0] if option == "eps" else 0.0)
    return result


def _on_device(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    while tensors[-1] is None:
        tensors = tensors[:-1]
    x, count, tag = tensors[0], len(tensors), kind
    rows = column("rows", "cuda")
    if count == 1:
        found = rows.known_one(kind, x, options)
    elif count == 2:
        found = rows.known_two(kind, x, tensors[1], options)
    elif tensors[1] is None:
        tag = f"{kind} without its second"
        found = rows.known(tag, (tensors[0], *tensors[2:]), options)
    else:
        found = rows.known(kind, tensors, options)
    return _launch(kind, tensors, options, tag) if found is None else found


def _launch(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...], tag: str) -> Any:
    """A call that is not like one before."""
    about = signature(kind)
    tensors += (None,) * (len(about.operands) - len(tensors))
    looked_at(kind, tensors, options, on_device)
    x, reduces = tensors[0], about.reduces
    shape = x.shape[:-1] + ((1,) if options[0] else ()) if reduces else x.shape
    outs = [(shape, dtype_of(tensors[about.like], options[-1]))]
    names: list[str | None] = [operand.name for operand in about.operands]
    outs += [(x.shape, tensors[names.index(result.like)].dtype) for result in OPERATIONS[kind].results[1:]]
    rest = {about.option: options[0]} if about.option in ("eps", "interleaved") else {}
    found = column("rows", "cuda").run(kind, _slots(kind, tensors), options, outs, tag=tag, **rest)
    if found is None:  # leading dimensions that are too many for one launch of a rotation
        each = [_on_device(kind, (part, *_at(x, i, tensors[1:])), options) for i, part in enumerate(x)]
        return torch.stack(each)
    return found


def _slots(kind: str, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands where kernels look for them: x, another of its shape, a weight and a bias; or x, none, angles.

    Those of elements and of losses look for them as they come.
    """
    kernels = OPERATIONS[kind].kernels
    if kernels == "rope":
        return (tensors[0], None, *tensors[1:3], None, None)
    if kernels in ("each", "loss") or len(tensors) == 1:
        return tensors
    extents = [operand.extent for operand in signature(kind).operands]
    other = tensors[1:2] if extents[1] == "rows" else (None,)
    parameters = tuple(t for t, extent in zip(tensors, extents, strict=True) if extent == "row")
    return (tensors[0], *other, *(*parameters, None, None)[:2])


def _at(x: Tensor, i: int, tables: tuple[Tensor, ...]) -> list[Tensor]:
    """Tables for ``x[i]``."""
    return [t if t.dim() < x.dim() else t[min(i, len(t) - 1)] for t in tables]


def launched(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...], outs: list[Any], **rest: Any) -> Any:
    """An operation of gradients on a device, of operands that are known to fit."""
    rows = column("rows", "cuda")
    found = rows.known(kind, tuple([t for t in tensors if t is not None]), options)
    return rows.run(kind, _slots(kind, tensors), options, outs, **rest) if found is None else found


def fused(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Both results of several operations in one launch on a device; None where no kernel fits."""
    if kind == "norm_rope_pair":
        q, k, *weights, cos, sin = tensors
        tensors = (q, k, cos, sin, *weights)  # as the kernel has them
    found = column("rows", "cuda").known(kind, tuple([t for t in tensors if t is not None]), options)
    if found is not None:
        return found
    return _launch(kind, tensors, options, kind) if kind == "add_rms_norm" else _rotated(kind, tensors, options)


def _rotated(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Two rotated tensors of a call that is not like one before: q, k, cos, sin, and the weights of their norms."""
    (q, k, cos, sin), (*eps, interleaved, out_dtype) = tensors[:4], options
    weights = (*tensors[4:], None, None)[:2]
    for number in eps:
        check_eps(number)
    for name, t, weight in (("q", q, weights[0]), ("k", k, weights[1])):
        on_device(name, t, q)
        if not t.shape:
            raise ShapeError(f"dimensions of {name}", limit="at least 1", value=0, nearest=f"{name}.reshape(1)")
        if t.shape[-1] != q.shape[-1] or t.dtype != q.dtype:
            kinds = [str(v.dtype) + str(tuple(v.shape)) for v in (t, q)]
            raise ShapeError(
                f"rows of {name}", limit="the length and dtype of those of q", value=kinds[0], nearest=kinds[1]
            )
        rest = (("cos", "angles", cos), ("sin", "angles", sin), (f"weight of {name}", "row", weight))
        for what, extent, other in rest:
            if other is not None or extent != "row":
                check_extent(what, extent, tuple(on_device(what, other, q).shape), tuple(t.shape))
    if len({None if w is None else w.dtype for w in weights}) > 1:
        return None
    outs = [(t.shape, dtype_of(q, out_dtype)) for t in (q, k)]
    return column("rows", "cuda").run(
        kind, (q, k, cos, sin, *weights), options, outs, interleaved=bool(interleaved), eps=eps[0] if eps else 0.0
    )


def _add(x: Tensor, y: Tensor, out_dtype: Any) -> Tensor:
    """One sum for each element, which torch rounds correctly; in the dtype of y, and with the NaN of a result."""
    looked_at("add", (x, y), (out_dtype,), on_host)
    dtype = dtype_of(y, out_dtype)
    with subnormals_kept(x):
        return rounded(x.detach().float() + y.detach().float(), dtype)


def _embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows copied. On a device ids out of range are torch's to report: looking at them here would wait for it."""
    there = isinstance(weight, Tensor) and weight.is_cuda
    rows = weight if there else on_host("weight", weight, weight)
    index = integers("ids", ids, weight.device)
    if len(rows.shape) != 2:
        value = tuple(rows.shape)
        raise ShapeError("shape of weight", limit="(rows, n)", value=value, nearest="weight.reshape(-1, n)")
    if there:
        if weight.dtype not in DTYPES:
            limit = "float32, bfloat16 or float16"
            raise DTypeError("dtype of weight", limit=limit, value=weight.dtype, nearest="float32")
        return torch.embedding(weight, index if index.dtype is torch.int32 else index.to(torch.int64))
    check_ids(index, len(rows))
    flat = index.reshape(-1).to(torch.int64)
    return weight.detach().index_select(0, flat).reshape(*index.shape, rows.shape[1])

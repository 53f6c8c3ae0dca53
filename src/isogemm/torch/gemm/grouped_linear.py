"""Linear layers of groups of rows, a weight for each group: isogemm::grouped_linear, grouped_outer and grouped_walk_.

Rows stand in the order of their groups, and `counts` says how many each has. For group g with the rows i up to j

- ``grouped_linear``: out[i:j] = x[i:j] @ w[g].T + bias[g], each row with the bits that `linear` gives it alone;
- ``grouped_outer``: out[g] = a[i:j].T @ b[i:j], the gradient of a weight;
- ``grouped_walk_``: the same, continued from float32 values, so that micro-batches may cut a group anywhere.

Each is the other's gradient: dx is a grouped_linear by w[g].T, a `chain`; dw and dbias are grouped_outers in
`grad_order`. Rows behind the last group belong to none: they are zero in a result, and are not read.

Lengths are no part of what is traced, so compiled code takes any counts. On Hopper's tensor cores kernels read them on
the device (the column `grouped` of CUDA's backend): nothing is waited for, and a graph may be captured. Elsewhere they
are read by the host, once in a call.
"""

from __future__ import annotations

from itertools import accumulate as running
from typing import Any

import torch

from ...api import products as api
from ...errors import ShapeError
from .. import operator
from ..device import column
from ..gradient_buffers import asked_for, written_between
from ..operator import Tensor, define, define_call, refuse_meta, refuse_vmap
from .products import fit, refuse_recorded, remember_orders, resolved, walk, wider, with_order
from .ragged import on_host


def grouped_linear(x: Tensor, w: Tensor, bias: Tensor | None, counts: Tensor, contract: str, out_dtype: Any) -> Tensor:
    """x[i:j] @ w[g].T + bias[g] for the rows of each group, outside the gradient's graph."""
    lengths = on_device(counts, x)
    if lengths is not None:
        kernel = column("grouped", "cuda").multiplied
        out = kernel(x, w, bias, lengths, contract, out_dtype, lambda: resolved(contract, x, w))
        if out is not None:
            return out
    with torch.no_grad():
        groups = _groups(counts, len(x))
        out = x.new_empty(x.shape[0], w.shape[1], dtype=out_dtype or wider(x, w))
        out[groups[-1][1] if groups else 0 :].zero_()
        rows = [(g, i, j) for g, (i, j) in enumerate(groups) if i < j]
        if rows:
            outs = [out[i:j] for _, i, j in rows]
            c = None if bias is None else [bias[g].expand(j - i, -1) for g, i, j in rows]
            a, b = [x[i:j] for _, i, j in rows], [w[g].mT for g, _, _ in rows]
            beta = None if c is None else 1.0
            api.gemm_grouped(a, b, c, beta=beta, out=outs, contract=contract or None, out_dtype=out_dtype)
        return out


def grouped_outer(a: Tensor, b: Tensor, counts: Tensor, contract: str, out_dtype: Any) -> Tensor:
    """a[i:j].T @ b[i:j] of each group, outside the gradient's graph; zeros where a group has no rows."""
    dtype = out_dtype or wider(a, b)
    lengths = on_device(counts, a)
    if lengths is not None:
        kernel = column("grouped", "cuda").outer
        out = kernel(a, b, lengths, contract, dtype, lambda: resolved(contract, a, b))
        if out is not None:
            return out
    with torch.no_grad():
        groups = _groups(counts, len(a))
        out = a.new_empty(len(groups), a.shape[1], b.shape[1], dtype=dtype)
        if groups:
            left, right = [a[i:j].mT for i, j in groups], [b[i:j] for i, j in groups]
            api.gemm_grouped(left, right, out=list(out), contract=contract or None, out_dtype=out_dtype)
        return out


def grouped_walk(a: Tensor, b: Tensor, counts: Tensor, out: Tensor, contract: str) -> None:
    """`grouped_outer` continued from the float32 values in `out`."""
    lengths = on_device(counts, a)
    if lengths is None or not column("grouped", "cuda").continued(
        a, b, out, lengths, contract, lambda: resolved(contract, a, b)
    ):
        for g, (i, j) in enumerate(_groups(counts, len(a))):
            if i < j:
                walk(a[i:j].mT, b[i:j], out[g], contract)
    torch.autograd.graph.increment_version(out)  # also where no group has rows


def on_device(counts: Tensor, x: Tensor) -> Tensor | None:
    """The lengths on x's device, where kernels read them; None where the host has to cut the groups itself.

    Lengths that the host has are checked before they are copied, which costs nothing. While a graph is captured they
    stay with the host: each replay would copy them anew, from memory that may hold something else by then.
    """
    if not x.is_cuda or x.dtype not in _HALVES or not len(x):
        return None
    if counts.device != x.device:
        if torch.cuda.is_current_stream_capturing():
            return None
        _groups(counts, len(x))
        # Page-locked memory is read when the copy comes to pass, and its owner may write to it before.
        counts = (counts.clone() if counts.is_pinned() else counts).to(x.device, non_blocking=True)
    return counts if counts.is_contiguous() else counts.contiguous()


_HALVES = (torch.bfloat16, torch.float16)


def recalled(x: Tensor, w: Tensor, bias: Any, counts: Any, contract: Any, out_dtype: Any) -> Tensor | None:
    """The result of a call like one before on a GPU, which nothing watches and nothing records; else None."""
    try:
        there = x.is_cuda and operator.is_direct(x, w, bias) and counts.is_cuda
    except AttributeError:  # no tensor: who checks says so
        return None
    if not there:
        return None
    asked = "" if contract is None else contract
    found: Tensor | None = column("grouped", "cuda").recalled(x, w, bias, counts, asked, out_dtype)
    return found


def continued(a: Tensor, b: Tensor, counts: Tensor, out: Tensor, contract: str) -> None:
    """`grouped_walk` as part of a backward pass. Raises OptionError: the pass is recorded itself."""
    refuse_recorded()
    (grouped_walk if operator.watched(a, b, out) == "direct" else walk_op)(a, b, counts, out, contract)


def _groups(counts: Tensor, rows: int) -> list[tuple[int, int]]:
    """Where each group begins and ends; a ShapeError where counts are below 0, or of more rows than there are."""
    lengths = on_host(counts)
    if any(n < 0 for n in lengths) or sum(lengths) > rows:
        raise ShapeError(
            "counts", limit=f"from 0 on, {rows} together at most", value=lengths, nearest=_nearest(lengths, rows)
        )
    ends = list(running(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=False)) if ends else []


def _nearest(lengths: list[int], rows: int) -> list[int]:
    found = []
    for n in lengths:
        found.append(min(max(n, 0), rows))
        rows -= found[-1]
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, counts, contract, order, _, ctx.main_grad, ctx.bias_main_grad = inputs
    written_between(ctx.main_grad, ctx.bias_main_grad)
    ctx.save_for_backward(x, w, counts)
    remember_orders(ctx, x, w, contract, order)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _back(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, w, counts), order = ctx.saved_tensors, ctx.grad_order
    dx = dw = db = None
    # The usual pass, which nobody records or watches, is looked at once.
    usual = not torch.is_grad_enabled() and operator.watched(dy, x, w, counts) == "direct"
    linear, outer = (_body, _body_outer) if usual else (call_grouped_linear, call_outer)
    if ctx.needs_input_grad[0]:
        dx = linear(fit(dy, w, ctx.contract), w.mT, None, counts, ctx.chain, order, x.dtype, None, None)
    rows = fit(dy, x, ctx.contract)
    if ctx.needs_input_grad[1]:
        buffer = asked_for(ctx, 1, ctx.main_grad)
        if buffer is None:
            dw = outer(rows, x, counts, ctx.rows, order, w.dtype)
        else:
            continued(rows, x, counts, buffer, ctx.rows)
    if ctx.needs_input_grad[2]:
        # A column of eight: lines of a whole word of the copy engine's.
        ones = rows.new_ones(len(rows), 8)[:, :1]
        buffer = asked_for(ctx, 2, ctx.bias_main_grad)
        if buffer is None:
            db = call_outer(ones, rows, counts, ctx.rows, order, ctx.bias_dtype).squeeze(1)
        else:
            continued(ones, rows, counts, buffer.unsqueeze(1), ctx.rows)
    return dx, dw, db, *[None] * 6


def _setup_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, counts, contract, order, _ = inputs
    ctx.save_for_backward(a, b, counts)
    remember_orders(ctx, a, b, contract, order)


def _back_outer(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (a, b, counts), order = ctx.saved_tensors, ctx.grad_order
    da = db = None
    if ctx.needs_input_grad[0]:
        da = call_grouped_linear(b, fit(dy, b, ctx.contract), None, counts, ctx.chain, order, a.dtype, None, None)
    if ctx.needs_input_grad[1]:
        db = call_grouped_linear(a, fit(dy, a, ctx.contract).mT, None, counts, ctx.chain, order, b.dtype, None, None)
    return da, db, *[None] * 4


def _body(
    x: Tensor, w: Tensor, bias: Any, counts: Tensor, contract: str, order: str, out_dtype: Any, *_: Any
) -> Tensor:
    return grouped_linear(x, w, bias, counts, contract, out_dtype)


def _body_outer(a: Tensor, b: Tensor, counts: Tensor, contract: str, order: str, out_dtype: Any) -> Tensor:
    return grouped_outer(a, b, counts, contract, out_dtype)


def _fake(
    x: Tensor, w: Tensor, bias: Any, counts: Tensor, contract: str, order: str, out_dtype: Any, *_: Any
) -> Tensor:
    refuse_meta(x, w, bias)
    with_order(resolved(contract, x, w), order)
    torch._check(x.shape[1] == w.shape[2], lambda: f"inner dimensions differ: {tuple(x.shape)} and {tuple(w.shape)}")
    return x.new_empty(x.shape[0], w.shape[1], dtype=out_dtype or wider(x, w))


def _fake_outer(a: Tensor, b: Tensor, counts: Tensor, contract: str, order: str, out_dtype: Any) -> Tensor:
    refuse_meta(a, b)
    torch._check(a.shape[0] == b.shape[0], lambda: f"rows differ: {tuple(a.shape)} and {tuple(b.shape)}")
    return a.new_empty(counts.shape[0], a.shape[1], b.shape[1], dtype=out_dtype or wider(a, b))


_NO_VMAP = refuse_vmap("grouped_linear", "one call whose rows are those of all items, with counts of all")
_OPTIONS = 'str contract="", str grad_order="leaf4096", ScalarType? out_dtype=None'
call_grouped_linear = define_call(
    "grouped_linear",
    f"(Tensor x, Tensor w, Tensor? bias, Tensor counts, {_OPTIONS}, Tensor? main_grad=None, "
    "Tensor? bias_main_grad=None) -> Tensor",
    slice(4), _body, _fake, setup=_setup, backward=_back, vmap=_NO_VMAP,
)  # fmt: skip
call_outer = define_call(
    "grouped_outer", f"(Tensor a, Tensor b, Tensor counts, {_OPTIONS}) -> Tensor", slice(3), _body_outer, _fake_outer,
    setup=_setup_outer, backward=_back_outer, vmap=_NO_VMAP,
)  # fmt: skip
walk_op = define(
    "grouped_walk_", "(Tensor a, Tensor b, Tensor counts, Tensor(a!) out, str contract) -> ()", grouped_walk,
    lambda a, b, counts, out, contract: None, vmap=_NO_VMAP,
)  # fmt: skip

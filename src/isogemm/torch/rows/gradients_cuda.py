"""Gradients of operations along rows on CUDA: kernels with the bits of `row_gradients`' formulas.

Sums over rows are chains in ascending order, column by column, that start from +0 or from the buffer that takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...backends.cuda.rows import run as rows
from ...backends.cuda.rows import sums as row_sums

__all__ = ["BACKWARD", "over_rows"]

Grads = tuple[Tensor | None, ...]


def _run(kind: str, operands: tuple[Any, ...], options: tuple[Any, ...], outs: list[Any], **rest: Any) -> Any:
    found = rows.known(kind, tuple(t for t in operands if t is not None), options)
    return rows.run(kind, operands, options, outs, **rest) if found is None else found


def over_rows(
    ctx: Any, place: int, like: Tensor, buffer: Tensor | None, term: int, x: Tensor, dy: Tensor, stats: Tensor | None
) -> Tensor | None:
    """The sum over rows of a term of `row_sums.columns`, or into the buffer."""
    if not ctx.needs_input_grad[3 + place]:
        return None
    total = torch.empty(like.shape, dtype=like.dtype, device=like.device) if buffer is None else buffer
    row_sums.columns(term, x, dy, stats, total, start=buffer is not None)
    return total if buffer is None else None


def _rms_norm(ctx: Any, buffers: Callable[..., Any], dy: Tensor, x: Tensor, weight: Tensor | None) -> Grads:
    dx, stats = _normed("rms_norm_back", ctx, dy, x, weight)
    if weight is None:
        return dx, None
    return dx, over_rows(ctx, 1, weight, buffers(ctx, 1, weight), 1, x, dy, stats)


def _layer_norm(
    ctx: Any, buffers: Callable[..., Any], dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Grads:
    dx, stats = _normed("layer_norm_back", ctx, dy, x, weight)
    dw = None if weight is None else over_rows(ctx, 1, weight, buffers(ctx, 1, weight), 2, x, dy, stats)
    db = None if bias is None else over_rows(ctx, 2, bias, buffers(ctx, 2, bias), 0, x, dy, None)
    return dx, dw, db


def _normed(kind: str, ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of x, and (1 / root, mean) of each row."""
    eps = ctx.options["eps"]
    outs = [(x.shape, x.dtype), ((*x.shape[:-1], 2), torch.float32)]
    found: tuple[Tensor, Tensor] = _run(kind, (x, dy, weight, None), (eps,), outs, eps=eps)
    return found


def _along(kind: str) -> Callable[..., Grads]:
    def backward(ctx: Any, buffers: Callable[..., Any], dy: Tensor, x: Tensor) -> Grads:
        return (_run(kind, (x, dy, None, None), (), [(x.shape, x.dtype)]),)

    return backward


def _average(ctx: Any, buffers: Callable[..., Any], dy: Tensor, x: Tensor) -> Grads:
    """``dy / n``; the divisor is a tensor, because torch multiplies by the reciprocal of a number."""
    divisor = torch.full((), max(x.shape[-1], 1), dtype=torch.float32, device=x.device)
    each = dy.float() / divisor
    each = each if ctx.options["keepdim"] else each.unsqueeze(-1)
    return (each.to(x.dtype).expand(x.shape),)


def _silu_mul(ctx: Any, buffers: Callable[..., Any], dy: Tensor, x: Tensor, y: Tensor) -> Grads:
    found: Grads = _run("silu_mul_back", (x, y, dy), (), [(x.shape, x.dtype), (x.shape, y.dtype)])
    return found


def _embedding(ctx: Any, buffers: Callable[..., Any], dy: Tensor, weight: Tensor, ids: Tensor) -> Grads:
    """Ids sorted, equal ones in their order, so that each row of the table is one chain."""
    buffer = buffers(ctx, 0, weight)
    total = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) if buffer is None else buffer
    if ids.numel() and weight.shape[1]:
        found, order = torch.sort(ids.reshape(-1).to(torch.int64), stable=True)
        row_sums.table(found, order, dy, total, start=buffer is not None)
    return (total if buffer is None else None), None


BACKWARD: dict[str, Callable[..., Grads]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _along("softmax_back"),
    "log_softmax": _along("log_softmax_back"),
    "mean": _average,
    "silu_mul": _silu_mul,
    "embedding": _embedding,
}

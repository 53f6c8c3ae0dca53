"""vmap over the products: a batch dimension more is a stack of products, with the bits of each alone."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..ops import Tensor
from .backward import refused

__all__: list[str] = []


def _lead(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The batch dimension first; a tensor that has none gets one of stride 0."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _vmap_mm(info: Any, in_dims: Any, a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, int]:
    a, b = _lead(a, in_dims[0], info.batch_size), _lead(b, in_dims[1], info.batch_size)
    return ops.bmm_op(a, b, *options), 0


def _vmap_bmm(info: Any, in_dims: Any, a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, int]:
    size = info.batch_size
    a, b = _lead(a, in_dims[0], size), _lead(b, in_dims[1], size)
    return ops.bmm_op(a.flatten(0, 1), b.flatten(0, 1), *options).unflatten(0, (size, a.shape[1])), 0


def _vmap_addmm(info: Any, in_dims: Any, c: Tensor, a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, int]:
    size = info.batch_size
    a, b = _lead(a, in_dims[1], size), _lead(b, in_dims[2], size)
    c = _lead(c, in_dims[0], size)
    c = c.reshape(size, *[1] * (3 - c.dim()), *c.shape[1:])  # missing dimensions go behind that of the batch
    return ops.baddbmm_op(c, a, b, *options), 0


def _vmap_baddbmm(info: Any, in_dims: Any, c: Tensor, a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, int]:
    size = info.batch_size
    a, b, c = _lead(a, in_dims[1], size), _lead(b, in_dims[2], size), _lead(c, in_dims[0], size)
    c = c.reshape(size, *[1] * (4 - c.dim()), *c.shape[1:]).expand(size, *a.shape[1:-1], b.shape[-1])
    flat = ops.baddbmm_op(c.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), *options)
    return flat.unflatten(0, (size, a.shape[1])), 0


def _vmap_linear(info: Any, in_dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Any:
    defaults: tuple[Any, ...] = ("", "leaf4096", None)
    contract, grad_order, out_dtype, *buffers = options + defaults[len(options) :]
    if any(buffer is not None for buffer in buffers):
        return refused("linear with main_grad", "call it outside vmap: one buffer has one order of writers")
    size = info.batch_size
    x = _lead(x, in_dims[0], size)
    if in_dims[1] is None and (bias is None or in_dims[2] is None):
        return ops.linear_op(x, w, bias, *options), 0
    w, shape = _lead(w, in_dims[1], size), x.shape
    x = x.reshape(size, -1, shape[-1])
    if bias is None:
        y = ops.bmm_op(x, w.mT, 1.0, contract, grad_order, out_dtype)
    else:
        c = _lead(bias, in_dims[2], size).unsqueeze(1)
        y = ops.baddbmm_op(c, x, w.mT, 1.0, 1.0, contract, grad_order, out_dtype)
    return y.reshape(*shape[:-1], w.shape[1]), 0


def _vmap_product_forward(
    info: Any, in_dims: Any, c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, *options: Any
) -> tuple[Tensor, int]:
    stack = a.dim() - (in_dims[1] is not None) == 3
    contract, out_dtype = options
    end = (contract, "chain", out_dtype)  # of gradients, which there are none of
    if c is None:
        return (_vmap_bmm if stack else _vmap_mm)(info, in_dims[1:], a, b, alpha, *end)
    return (_vmap_baddbmm if stack else _vmap_addmm)(info, in_dims, c, a, b, alpha, beta, *end)


def _vmap_linear_forward(
    info: Any, in_dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, contract: str, out_dtype: Any
) -> Any:
    return _vmap_linear(info, in_dims, x, w, bias, contract, "chain", out_dtype)


def _vmap_grouped(info: Any, in_dims: Any, *operands: Any) -> Any:
    return refused("grouped", "bmm, or one longer list")


def _vmap_walk(info: Any, in_dims: Any, *operands: Any) -> Any:
    return refused("walk_", "a loop over the batch, which has an order")


_RULES: tuple[tuple[Any, Any], ...] = (
    (ops.mm_op, _vmap_mm),
    (ops.bmm_op, _vmap_bmm),
    (ops.addmm_op, _vmap_addmm),
    (ops.baddbmm_op, _vmap_baddbmm),
    (ops.linear_op, _vmap_linear),
    (ops.product_forward_op, _vmap_product_forward),
    (ops.linear_forward_op, _vmap_linear_forward),
    (ops.grouped_op, _vmap_grouped),
    (ops.walk_op, _vmap_walk),
)
for _op, _rule in _RULES:
    torch.library.register_vmap(_op, _rule)

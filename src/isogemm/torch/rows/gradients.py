"""Gradients of operations along rows, in pinned orders.

Everything is float32 until the one rounding to the operand's dtype. Sums along rows, exp and sigmoid are those of
`isogemm.contract.rows`; what torch itself computes here are single sums, products and quotients of elements, which are
correctly rounded and know no order; roots are NumPy's. Sums over rows are ``fma/chain`` products with a row of ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...api.products import matmul
from ...errors import OptionError, ShapeError
from ...operands.tensors import is_traced, memory
from ..ops import Reverse, check_no_ddp, refuse_forward_mode
from ..routing.elementwise import subnormals_kept
from . import gradients_cuda as row_gradients_cuda
from . import ops as row_ops
from .cpu import FORWARD
from .cuda import FORWARD as CUDA

__all__ = ["along", "records"]

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_transforms, _forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
_trace, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack

Grads = tuple[Tensor | None, ...]


def along(kind: str, *tensors: Tensor | None, **options: Any) -> Tensor:
    """An operation of `row_calls.FORWARD`, recorded for its gradients where torch records them.

    While torch.compile or a trace looks on, it is an operator that they do not look into, and so is its gradient.
    """
    if is_compiling():
        return _as_operator(kind, tensors, options)
    if _transforms() or _forward_ad._current_level >= 0:
        _refuse(kind, tensors)
    if _trace() is not None or (_depth() and is_traced()):
        return _as_operator(kind, tensors, options)
    if is_grad_enabled():
        for t in tensors:
            if isinstance(t, Tensor) and t.requires_grad:
                buffers = _buffers(tensors)
                return _Along.apply(kind, options, buffers, *tensors)
    try:
        there = tensors[0].is_cuda  # type: ignore[union-attr]
    except AttributeError:
        there = False
    return CUDA[kind](*tensors, **options) if there else FORWARD[kind](*tensors, **options)


def _as_operator(kind: str, tensors: Grads, options: dict[str, Any]) -> Tensor:
    """`along` where a compiler or a trace looks on."""
    if not (is_grad_enabled() if is_compiling() else _recorded(*tensors)):
        return row_ops.OPERATORS[kind](*tensors, *options.values())
    three = (*tensors, None, None)[:3]
    flag = options.get("keepdim", options.get("interleaved", False))
    buffers = _buffers(three)
    return along_rows(kind, *three, *buffers, options.get("eps", 0.0), flag, options.get("out_dtype"))


def _buffers(tensors: Grads) -> Grads:
    """Of each operand the float32 buffer that takes its gradient, or None."""
    found = tuple([getattr(t, "main_grad", None) for t in tensors])
    if any(buffer is not None for buffer in found):
        check_no_ddp()
    return found


def _refuse(kind: str, tensors: Grads) -> None:
    """Raise where torch.func would see nothing of an operation along rows, or a tangent would be lost.

    Raises
    ------
    OptionError
    """
    given = [t for t in tensors if isinstance(t, Tensor)]
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if _transforms() and (_recorded(*given) or any(wrapped(t.detach()) for t in given)):  # as they will be read
        raise OptionError(
            f"{kind} under a transform of torch.func", limit="autograd, torch.compile, no_grad", value="a transform",
            nearest="backward() or torch.autograd.grad",
        )  # fmt: skip
    if any(_forward_ad.unpack_dual(t).tangent is not None for t in given):
        refuse_forward_mode()


def records(*tensors: Any) -> bool:
    """Whether operations have to be seen one by one: for gradients, by a transform, or while torch.compile traces."""
    if is_compiling() or is_traced() or _transforms() or _forward_ad._current_level >= 0:
        return True
    return _recorded(*tensors)


def _recorded(*tensors: Any) -> bool:
    return is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


_OPERANDS = "Tensor first, Tensor? second, Tensor? third"
_BUFFERS = "Tensor? buffer, Tensor? second_buffer, Tensor? third_buffer"
_WRITTEN = "Tensor(a!)? buffer, Tensor(b!)? second_buffer, Tensor(c!)? third_buffer"
_OPTIONS = "float eps, bool flag, ScalarType? out_dtype"
_SCHEMA = f"(str kind, {_OPERANDS}, {_BUFFERS}, {_OPTIONS}) -> Tensor"
# Three results: an operator that writes into its arguments may not return a list.
_BACKWARD_SCHEMA = (
    f"(str kind, Tensor dy, {_OPERANDS}, bool[] needs, {_WRITTEN}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
# Operands of an operation; two of the others.
_COUNTS = {"layer_norm": 3, "rope": 3} | dict.fromkeys(
    ("softmax", "log_softmax", "silu", "sigmoid", "exp", "sum", "mean"), 1
)


def _options(kind: str, eps: float, flag: bool, out_dtype: Any) -> dict[str, Any]:
    """What an operation is called with, of the options that an operator has for all of them."""
    if kind == "embedding":
        return {}
    options: dict[str, Any] = {"out_dtype": out_dtype}
    if kind.endswith("norm"):
        options["eps"] = eps
    elif kind in ("sum", "mean"):
        options["keepdim"] = flag
    elif kind == "rope":
        options["interleaved"] = flag
    return options


@torch.library.custom_op("isogemm::along_rows", mutates_args=(), schema=_SCHEMA)  # type: ignore[untyped-decorator]
def along_rows(kind: str, *given: Any) -> Tensor:
    """Any of `row_calls.FORWARD` as an operator; `flag` is keepdim of a sum, interleaved of a rotation."""
    return FORWARD[kind](*given[: _COUNTS.get(kind, 2)], **_options(kind, *given[6:]))


@along_rows.register_fake  # type: ignore[untyped-decorator]
def _(kind: str, x: Tensor, second: Any, third: Any, *rest: Any) -> Tensor:
    flag, out_dtype = rest[-2:]
    shape = (*second.shape, x.shape[1]) if kind == "embedding" else tuple(x.shape)
    if kind in ("sum", "mean"):
        shape = (*shape[:-1], 1) if flag else shape[:-1]
    return x.new_empty(shape, dtype=out_dtype or (second if kind == "add" else x).dtype)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "isogemm::along_rows_backward", mutates_args=("buffer", "second_buffer", "third_buffer"), schema=_BACKWARD_SCHEMA
)
def along_rows_backward(kind: str, dy: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the operands of `along_rows`, empty where there is none; a buffer takes what is its."""
    tensors, needs, buffers, count = given[:3], given[3], given[4:7], _COUNTS.get(kind, 2)
    about = SimpleNamespace(
        kind=kind, options=_options(kind, *given[7:]), buffers=buffers, needs_input_grad=(False, False, False, *needs)
    )
    found = (*_gradients(about, dy, *tensors[:count]), None, None)
    first, second, third = (
        grad.clone(memory_format=torch.contiguous_format) if need and grad is not None else dy.new_empty(0)
        for grad, need in zip(found, needs, strict=False)
    )
    return first, second, third


@along_rows_backward.register_fake  # type: ignore[untyped-decorator]
def _(kind: str, dy: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (
        t.new_empty(t.shape) if need and buffer is None else dy.new_empty(0)
        for t, need, buffer in zip(given[:3], given[3], given[4:7], strict=True)
    )
    return first, second, third


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kind, tensors, ctx.buffers, ctx.rest = inputs[0], inputs[1:4], inputs[4:7], inputs[7:]
    _check_constants(ctx.kind, ctx.needs_input_grad[1:4])
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1:4])
    buffers = [buffer if need else None for buffer, need in zip(ctx.buffers, needs, strict=True)]
    found = along_rows_backward(ctx.kind, dy, *ctx.saved_tensors, needs, *buffers, *ctx.rest)
    places = zip(found, needs, buffers, strict=True)
    return None, *[grad if need and buffer is None else None for grad, need, buffer in places], *[None] * 6


along_rows.register_autograd(_differentiate, setup_context=_remember)


def _check_constants(kind: str, needs: Sequence[bool]) -> None:
    if kind == "rope" and any(needs[1:]):
        raise OptionError("cos and sin", limit="constants", value="requires_grad=True", nearest="cos.detach()")


class _Along(Reverse):
    @staticmethod
    def forward(ctx: Any, kind: str, options: dict[str, Any], buffers: Grads, *tensors: Tensor | None) -> Tensor:
        ctx.kind, ctx.options, ctx.buffers = kind, options, buffers
        _check_constants(kind, ctx.needs_input_grad[3:])
        ctx.save_for_backward(*tensors)
        return FORWARD[kind](*tensors, **options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        grads = _gradients(ctx, dy, *ctx.saved_tensors)
        if is_grad_enabled():  # create_graph=True
            found = iter(_Once.apply(ctx.kind, len(grads), *grads, dy, *ctx.saved_tensors))
            grads = tuple([None if grad is None else next(found) for grad in grads])
        return (None, None, None, *grads)


def _gradients(ctx: Any, dy: Tensor, *tensors: Tensor | None) -> Grads:
    """Of each operand, from what autograd or the operator says of the call; none where a buffer takes it."""
    with torch.no_grad():
        if dy.is_cuda and ctx.kind in row_gradients_cuda.BACKWARD:
            return row_gradients_cuda.BACKWARD[ctx.kind](ctx, _buffer, dy, *tensors)
        with nullcontext() if dy.is_cuda else subnormals_kept():
            return _BACKWARD[ctx.kind](ctx, dy.float(), *tensors)


class _Once(Reverse):
    """Gradients as they are, with an error for who differentiates them: cut off, they would pass for constants."""

    @staticmethod
    def forward(ctx: Any, kind: str, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.kind = kind
        return tuple([grad.detach() for grad in tensors[:count] if grad is not None])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise OptionError(
            f"gradients of {ctx.kind}", limit="one derivative", value="a second one", nearest="create_graph=False"
        )


def _mean(x: Tensor) -> Tensor:
    return FORWARD["mean"](x, keepdim=True)


def _sum(x: Tensor) -> Tensor:
    return FORWARD["sum"](x, keepdim=True)


def _over_rows(ctx: Any, place: int, terms: Tensor, like: Tensor) -> Tensor | None:
    """The sum of [..., n] over all rows as the gradient of operand `place`, or into that operand's buffer."""
    if not ctx.needs_input_grad[3 + place]:
        return None
    flat = terms.reshape(math.prod(terms.shape[:-1]), terms.shape[-1])
    ones, buffer = torch.ones(1, len(flat)), _buffer(ctx, place, like)
    if buffer is not None:
        matmul(ones, flat, out=buffer.unsqueeze(0), accumulate=True, contract="fma/chain")
        return None
    found: Tensor = matmul(ones, flat, contract="fma/chain").reshape(-1).to(like.dtype)
    return found


def _buffer(ctx: Any, place: int, like: Tensor) -> Tensor | None:
    buffer: Tensor | None = ctx.buffers[place]
    if buffer is not None and (buffer.shape != like.shape or buffer.dtype is not torch.float32):
        value = f"{buffer.dtype} {tuple(buffer.shape)}"
        raise ShapeError("main_grad", limit="float32, the parameter's shape", value=value, nearest=tuple(like.shape))
    return buffer


def _inverse_root(square: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(square + eps)``, by NumPy: torch's square root is not correctly rounded everywhere."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.float32(1) / np.sqrt(square.numpy() + np.float32(eps)))


def _rms_norm(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None) -> Grads:
    """``r = 1 / sqrt(mean(x**2) + eps)``, ``h = x * r``, ``g = dy * weight``, ``dx = (g - h * mean(g * h)) * r``."""
    wide = x.float()
    r = _inverse_root(_mean(wide * wide), ctx.options["eps"])
    h = wide * r
    g = dy if weight is None else dy * weight.float()
    dx = (g - h * _mean(g * h)) * r
    return dx.to(x.dtype), None if weight is None else _over_rows(ctx, 1, dy * h, weight)


def _layer_norm(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Grads:
    """As `_rms_norm` of ``x - mean(x)``, and ``dx = (g - mean(g) - h * mean(g * h)) * r``."""
    wide = x.float()
    d = wide - _mean(wide)
    r = _inverse_root(_mean(d * d), ctx.options["eps"])
    h = d * r
    g = dy if weight is None else dy * weight.float()
    dx = (g - _mean(g) - h * _mean(g * h)) * r
    dw = None if weight is None else _over_rows(ctx, 1, dy * h, weight)
    return dx.to(x.dtype), dw, None if bias is None else _over_rows(ctx, 2, dy, bias)


def _softmax(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """``p * (dy - sum(p * dy))``."""
    p = FORWARD["softmax"](x, out_dtype=torch.float32)
    return ((p * (dy - _sum(p * dy))).to(x.dtype),)


def _log_softmax(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """``dy - p * sum(dy)``."""
    p = FORWARD["softmax"](x, out_dtype=torch.float32)
    return ((dy - p * _sum(dy)).to(x.dtype),)


def _total(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """dy for every element of its row."""
    dy = dy if ctx.options["keepdim"] else dy.unsqueeze(-1)
    return (dy.to(x.dtype).expand(x.shape),)


def _average(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """``dy / n`` for every element of its row."""
    return _total(ctx, dy / max(x.shape[-1], 1), x)


def _silu_mul(ctx: Any, dy: Tensor, x: Tensor, y: Tensor) -> Grads:
    """``s = sigmoid(x)``, ``dx = (dy * y) * (s * (1 + x * (1 - s)))``, ``dy * (x * s)`` for y."""
    wide = x.float()
    s = FORWARD["sigmoid"](wide)
    dx = (dy * y.float()) * (s * (1 + wide * (1 - s)))
    return dx.to(x.dtype), (dy * (wide * s)).to(y.dtype)


def _silu(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """``s = sigmoid(x)``, ``dy * (s * (1 + x * (1 - s)))``."""
    wide = x.float()
    s = FORWARD["sigmoid"](wide)
    return ((dy * (s * (1 + wide * (1 - s)))).to(x.dtype),)


def _sigmoid(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """``s = sigmoid(x)``, ``dy * (s * (1 - s))``."""
    s = FORWARD["sigmoid"](x, out_dtype=torch.float32)
    return ((dy * (s * (1 - s))).to(x.dtype),)


def _exp(ctx: Any, dy: Tensor, x: Tensor) -> Grads:
    """``dy * exp(x)``."""
    return ((dy * FORWARD["exp"](x, out_dtype=torch.float32)).to(x.dtype),)


def _add(ctx: Any, dy: Tensor, x: Tensor, y: Tensor) -> Grads:
    """dy for both."""
    return dy.to(x.dtype), dy.to(y.dtype)


def _rope(ctx: Any, dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Grads:
    """Turned back: the same with -sin."""
    options = ctx.options | {"out_dtype": x.dtype}
    return FORWARD["rope"](dy, cos, -sin, **options), None, None


def _embedding(ctx: Any, dy: Tensor, weight: Tensor, ids: Tensor) -> Grads:
    """Rows of dy added, in ascending order, to the rows of the table that they came from."""
    buffer = _buffer(ctx, 0, weight)
    total = torch.zeros(weight.shape) if buffer is None else buffer
    rows = dy.reshape(ids.numel(), weight.shape[1])
    np.add.at(memory("sums", total), memory("ids", ids.reshape(-1)), memory("dy", rows))
    return (total.to(weight.dtype) if buffer is None else None), None


_BACKWARD: dict[str, Callable[..., Grads]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "sum": _total,
    "mean": _average,
    "silu_mul": _silu_mul,
    "silu": _silu,
    "sigmoid": _sigmoid,
    "exp": _exp,
    "add": _add,
    "rope": _rope,
    "embedding": _embedding,
}

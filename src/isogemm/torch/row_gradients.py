"""Gradients of operations along rows, in pinned orders.

Everything is float32 until the one rounding to the operand's dtype. Sums along rows, exp and sigmoid are those of
`isogemm.contract.rows`; what torch itself computes here are single sums, products and quotients of elements, which are
correctly rounded and know no order; roots are NumPy's. Sums over rows are ``fma/chain`` products with a row of ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..api import matmul
from ..errors import OptionError, ShapeError
from ..floating import ieee_defaults
from ..interop import is_traced
from . import row_gradients_cuda, row_ops
from .ops import Reverse, refuse_forward_mode
from .row_calls import FORWARD
from .row_cuda import FORWARD as CUDA

__all__ = ["along", "records"]

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_transforms, _forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
_trace, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack

Grads = tuple[Tensor | None, ...]


def along(kind: str, *tensors: Tensor | None, **options: Any) -> Tensor:
    """An operation of `row_calls.FORWARD`, recorded for its gradients where torch records them.

    While torch.compile traces, it is an operator that torch does not look into. That one has no gradient, and says so.
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
                buffers = tuple(getattr(t, "main_grad", None) for t in tensors)
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
    if _trace() is not None:  # TorchScript has no lists of tensors that may be missing
        raise OptionError(
            f"{kind} under torch.jit.trace", limit="no gradients", value="an operand that requires one",
            nearest="torch.no_grad() around the trace, or torch.compile",
        )  # fmt: skip
    flag = options.get("keepdim", options.get("interleaved", False))
    return along_rows(kind, list(tensors), options.get("eps", 0.0), flag, options.get("out_dtype"))


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


_SCHEMA = "(str kind, Tensor?[] tensors, float eps, bool flag, ScalarType? out_dtype) -> Tensor"


@torch.library.custom_op("isogemm::along_rows", mutates_args=(), schema=_SCHEMA)  # type: ignore[untyped-decorator]
def along_rows(kind: str, tensors: list[Tensor | None], eps: float, flag: bool, out_dtype: Any) -> Tensor:
    """Any of `row_calls.FORWARD` as an operator; `flag` is keepdim of a sum, interleaved of a rotation."""
    if kind == "embedding":
        return FORWARD[kind](*tensors)
    options: dict[str, Any] = {"out_dtype": out_dtype}
    if kind.endswith("norm"):
        options["eps"] = eps
    elif kind in ("sum", "mean"):
        options["keepdim"] = flag
    elif kind == "rope":
        options["interleaved"] = flag
    return FORWARD[kind](*tensors, **options)


@along_rows.register_fake  # type: ignore[untyped-decorator]
def _(kind: str, tensors: list[Tensor], eps: float, flag: bool, out_dtype: Any) -> Tensor:
    x = tensors[0]
    shape = (*tensors[1].shape, x.shape[1]) if kind == "embedding" else tuple(x.shape)
    if kind in ("sum", "mean"):
        shape = (*shape[:-1], 1) if flag else shape[:-1]
    return x.new_empty(shape, dtype=out_dtype or tensors[kind == "add"].dtype)


class _Along(Reverse):
    @staticmethod
    def forward(ctx: Any, kind: str, options: dict[str, Any], buffers: Grads, *tensors: Tensor | None) -> Tensor:
        ctx.kind, ctx.options, ctx.buffers = kind, options, buffers
        if kind == "rope" and any(ctx.needs_input_grad[4:]):
            raise OptionError("cos and sin", limit="constants", value="requires_grad=True", nearest="cos.detach()")
        ctx.save_for_backward(*tensors)
        return FORWARD[kind](*tensors, **options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            if dy.is_cuda and ctx.kind in row_gradients_cuda.BACKWARD:
                grads = row_gradients_cuda.BACKWARD[ctx.kind](ctx, _buffer, dy, *ctx.saved_tensors)
            else:
                grads = _BACKWARD[ctx.kind](ctx, dy.float(), *ctx.saved_tensors)
        if is_grad_enabled():  # create_graph=True
            found = iter(_Once.apply(ctx.kind, len(grads), *grads, dy, *ctx.saved_tensors))
            grads = tuple([None if grad is None else next(found) for grad in grads])
        return (None, None, None, *grads)


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
    with ieee_defaults(), np.errstate(all="ignore"):
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
    np.add.at(total.numpy(), ids.reshape(-1).numpy(), dy.reshape(ids.numel(), weight.shape[1]).numpy())
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

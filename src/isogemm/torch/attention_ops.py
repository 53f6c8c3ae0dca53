"""Attention as torch operators: isogemm::attention and isogemm::attention_backward, with fake kernels.

The direct call and the operator have the same body, `forward`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from ..backends.cpu import attention as cpu
from ..contract.attention import factor
from ..contract.spec import ARITHMETICS, Contract
from ..errors import ContractError, OptionError
from ..interop import array, as_dtype, to_tensor
from . import attention_gradients
from .backward import refused
from .ops import Tensor, resolved

__all__ = ["attention_backward_op", "attention_op", "chosen", "forward"]


def chosen(contract: str, q: Tensor, k: Tensor) -> Contract:
    """The contract of a call: the one asked for, or that of products.

    Raises
    ------
    ContractError
        Its order is no chain, or its arithmetic is not defined for the operands' dtype.
    """
    found = resolved(contract, q, k)
    if found.order.kind != "chain":
        raise ContractError(
            "order of attention", limit="chain: leaves of 128 keys are part of attention itself", value=str(found),
            nearest=f"{found.arithmetic}/chain",
        )  # fmt: skip
    name = str(q.dtype).removeprefix("torch.")
    if name not in found.operands:
        peers = [other for other, arithmetic in ARITHMETICS.items() if name in arithmetic.operands]
        raise ContractError(
            f"attention under {found}", limit=f"operands of {' or '.join(found.operands)}", value=name,
            nearest=f"{peers[0]}/chain",
        )  # fmt: skip
    return found


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal_offset: int | None = None,
    start: Tensor | None = None,
    stop: Tensor | None = None,
    scale: float | None = None,
    contract: str = "",
    out_dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, m, l) of checked operands, outside the gradient's graph; `mask` is expanded to [b, hq, tq, tk]."""
    arithmetic = chosen(contract, q, k).arithmetic
    options: dict[str, Any] = {"causal_offset": causal_offset, "arithmetic": arithmetic}
    c = factor(scale, q.shape[3])
    with torch.no_grad():
        if q.device.type == "cuda":
            cuda: Any = import_module("isogemm.backends.cuda.attention")
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
            tk = k.shape[2]
            start, stop = (None if x is None else x.clamp(0, tk).to(torch.int32) for x in (start, stop))
            given = {"mask": mask, "start": start, "stop": stop, "out_dtype": out_dtype or q.dtype}
            y, m, total = cuda.forward(q, k, v, c=c, **given, **options)
            return y, m, total
        views = (array(name, x.detach()) for name, x in (("q", q), ("k", k), ("v", v)))
        seen = mask if mask is None or mask.dtype is not torch.bool else mask.numpy()
        found = cpu.forward(
            *views, c=c, mask=seen if seen is None or isinstance(seen, np.ndarray) else array("mask", seen.detach()),
            start=_bounds("start", start, k.shape[2]), stop=_bounds("stop", stop, k.shape[2]),
            out_dtype=as_dtype(out_dtype), **options,
        )  # fmt: skip
    y, m, total = (to_tensor(x) for x in found)
    return y, m, total


def _bounds(name: str, x: Tensor | None, keys: int) -> Any:
    if x is None:
        return None
    bounds = x.numpy()
    for bad in bounds[(bounds < 0) | (bounds > keys)]:
        raise OptionError(name, limit=f"0 to {keys}", value=int(bad), nearest=min(max(int(bad), 0), keys))
    return bounds


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt? causal_offset, Tensor? start, Tensor? stop, float? scale, "
    "str contract, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt? causal_offset, Tensor? start, Tensor? stop, "
    "float? scale, str contract, Tensor y, Tensor m, Tensor l, bool[] needs) -> (Tensor, Tensor, Tensor)"
)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal_offset: Any, start: Any, stop: Any, scale: Any, contract: str,
    out_dtype: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    chosen(contract, q, k)  # an unknown contract is an error while tracing
    y = q.new_empty(*q.shape[:3], v.shape[3], dtype=out_dtype or q.dtype)
    m, total = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return y, m, total


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal_offset: Any, start: Any, stop: Any, scale: Any,
    contract: str, y: Tensor, m: Tensor, total: Tensor, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = attention_gradients.Call(
        q, k, v, mask, causal_offset, start, stop, scale, str(chosen(contract, q, k)), y, m, total
    )
    with torch.no_grad():
        return attention_gradients.gradients(dy, call, needs)


def _fake_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = zip((q, k, v), rest[-1], strict=True)
    return tuple(x.new_empty(x.shape if need else (0,)) for x, need in shapes)


attention_op: Any = torch.library.custom_op("isogemm::attention", forward, mutates_args=(), schema=_SCHEMA)
attention_op.register_fake(_fake)
attention_backward_op: Any = torch.library.custom_op(
    "isogemm::attention_backward", _backward, mutates_args=(), schema=_BACKWARD_SCHEMA
)
attention_backward_op.register_fake(_fake_backward)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, ctx.offset, start, stop, ctx.scale, contract, _ = inputs
    ctx.contract = str(chosen(contract, q, k))
    ctx.save_for_backward(q, k, v, mask, start, stop, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 10
    q, k, v, mask, start, stop, *outputs = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = attention_backward_op(
        dy, q, k, v, mask, ctx.offset, start, stop, ctx.scale, ctx.contract, *outputs, needs
    )  # fmt: skip
    return *[g if need else None for g, need in zip(found, needs, strict=True)], *[None] * 7


def _vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
    return refused("attention", "one call: its first dimension is the batch's")


torch.library.register_autograd(attention_op, _differentiate, setup_context=_remember)
torch.library.register_vmap(attention_op, _vmap)

"""Attention as torch operators: isogemm::attention and isogemm::attention_backward, with fake kernels.

The direct call and the operator have the same body, `forward`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ...base.dtypes import as_dtype
from ...contract.attention import factor
from ...contract.spec import ARITHMETICS, Contract
from ...errors import ContractError
from ...operands.memory import empty
from ...operands.tensors import memory, to_tensor
from ...operands.views import array
from ..device import column
from ..gemm.products import resolved
from ..operator import Operator, Tensor, define, define_forward, define_gradient, needs_gradient, watched
from ..routing.elementwise import subnormals_kept
from . import capped
from .gradients import Forward, bound, gradients


def chosen(contract: str, q: Tensor, k: Tensor) -> Contract:
    """The contract of a call: the one asked for, or that of products.

    Raises ContractError: its order is no chain, or its arithmetic is not defined for the operands' dtype.
    """
    key = (contract, q.dtype, q.get_device())
    known = _chosen.get(key)
    if known is not None:
        return known
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
    _chosen[key] = found
    return found


_chosen: dict[tuple[str, Any, int], Contract] = {}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal_offset: int | None = None,
    start: Tensor | None = None,
    stop: Tensor | None = None,
    ranged: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    contract: str = "",
    out_dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, m, l) of checked operands, outside the gradient's graph; `mask` is expanded to [b, hq, tq, tk].

    `ranged`: every query has the range of keys that the mask shows it; then without offset, `start` and `stop`.
    """
    known = chosen(contract, q, k)
    if softcap is not None:
        call = Forward(q, k, v, mask, causal_offset, start, stop, ranged, scale, softcap, str(known))
        with torch.no_grad(), subnormals_kept(q):
            y, m, total = capped.forward(call)
            return y.to(out_dtype or q.dtype), m, total
    options = {
        "c": factor(scale, q.shape[3]),
        "causal_offset": causal_offset,
        "arithmetic": known.arithmetic,
        "ranged": ranged,
    }
    run = _on_cuda if q.is_cuda else _on_cpu
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        y, m, total = run(q, k, v, mask, start, stop, out_dtype, options)
    return y, m, total


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Any, start: Any, stop: Any, out_dtype: Any, options: Any) -> Any:
    if 0 in (*q.shape[:3], k.shape[2], v.shape[3]):  # nothing to launch
        m = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        return q.new_zeros(*q.shape[:3], v.shape[3], dtype=out_dtype), m, torch.zeros_like(m)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    start, stop = (_places(x, k.shape[2]) for x in (start, stop))
    options["c"] = float(options["c"])
    return column("attention", q.device.type).forward(
        q, k, v, mask=mask, start=start, stop=stop, out_dtype=out_dtype or q.dtype, **options
    )


def _places(x: Tensor | None, keys: int) -> Tensor | None:
    """int32, side by side; the kernels take what is out of range for the nearer end."""
    if x is None or x.dtype is torch.int32:
        return x if x is None else x.contiguous()
    return x.clamp(0, keys).to(torch.int32).contiguous()


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Any, start: Any, stop: Any, out_dtype: Any, options: Any) -> Any:
    xq, xk, xv = (array(name, x.detach()) for name, x in (("q", q), ("k", k), ("v", v)))
    if mask is not None:
        mask = memory("mask", mask) if mask.dtype is torch.bool else array("mask", mask.detach())
    bounds = {"start": bound("start", start, k.shape[2]), "stop": bound("stop", stop, k.shape[2])}
    y, out = empty((*q.shape[:3], v.shape[3]), as_dtype(out_dtype) or xq.dtype)
    _, m, total = column("attention", "cpu").forward(xq, xk, xv, mask=mask, out=out, **bounds, **options)
    return y, to_tensor(m), to_tensor(total)


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt? causal_offset, Tensor? start, Tensor? stop, bool ranged, "
    "float? scale, float? softcap, str contract"
)


def _pair(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward`, its m and l as one tensor [2, b, hq, tq]: an operator's results may not share memory."""
    y, m, total = forward(*arguments)
    one = m.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
    if one and m.numel() and (m.storage_offset(), total.storage_offset()) == (0, m.numel()):
        return y, m.as_strided((2, *m.shape), (m.numel(), *m.stride()))
    return y, torch.stack((m, total))


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, contract, out_dtype = rest
    return empty_pair(q, k, v, contract, out_dtype or q.dtype)


def empty_pair(q: Tensor, k: Tensor, v: Tensor, contract: Any, dtype: Any) -> tuple[Tensor, Tensor]:
    """What `_pair` gives, with nothing in it."""
    chosen(contract, q, k)  # an unknown contract is an error while tracing
    y = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
    return y, q.new_empty(2, *q.shape[:3], dtype=torch.float32)


def _backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *options, contract, y, stats, needs = rest
    m, total = stats.unbind(0)
    call = Forward(q, k, v, *options, str(chosen(contract, q, k)), y, m, total)  # type: ignore[call-arg]
    with torch.no_grad(), subnormals_kept(q):
        return gradients(dy, call, needs)


def fake_gradients(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = zip((q, k, v), rest[-1], strict=True)
    return tuple([x.new_empty(x.shape if need else (0,)) for x, need in shapes])


def remember(ctx: Any, operands: tuple[Any, ...], options: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep operands from q on, options of `forward` from the mask to the contract, and results, for a gradient of y."""
    mask, offset, start, stop, *rest, contract = options
    ctx.options = offset, *rest, str(chosen(contract, *operands[:2]))
    ctx.save_for_backward(*operands, mask, start, stop, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def remembered(ctx: Any) -> tuple[list[Tensor], tuple[Any, ...], tuple[Tensor, Tensor]]:
    """(operands, options, results)."""
    *operands, mask, start, stop, y, stats = ctx.saved_tensors
    offset, *rest = ctx.options
    return operands, (mask, offset, start, stop, *rest), (y, stats)


def needed(ctx: Any, gradients: tuple[Tensor, Tensor, Tensor]) -> list[Tensor | None]:
    """Those of q, k and v, where they are needed: operators have an empty tensor in the place of others."""
    return [g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    remember(ctx, inputs[:3], inputs[3:11], output)


def _back(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 12
    operands, options, results = remembered(ctx)
    found = differentiate(dy, *operands, *options, *results, list(ctx.needs_input_grad[:3]))
    return *needed(ctx, found), *[None] * 9


def _folded(x: Any, dim: int | None, size: int, at: int = 0) -> Any:
    """A tensor whose dimension `at` is the batch's, with the dimension of vmap in front of that, as one."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    x, sizes = x.movedim(0, at), x.shape
    # What is broadcast stays so: a mask has its own lines once.
    x = x[tuple(slice(1) if not step and i > at + 1 else slice(None) for i, step in enumerate(x.stride()))]
    x = x.flatten(at, at + 1)
    return x.expand(*x.shape[: at + 1], *sizes[at + 2 :])


def _vmap(info: Any, in_dims: Any, *operands: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """A dimension more is a longer batch: entries do not meet."""
    size = info.batch_size
    y, stats = _attention.with_gradient(*[_folded(x, dim, size) for x, dim in zip(operands, in_dims, strict=True)])
    return (y.unflatten(0, (size, -1)), stats.unflatten(1, (size, -1))), (0, 1)


def _vmap_backward(info: Any, in_dims: Any, *operands: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    size, stats = info.batch_size, len(operands) - 2
    flat = [_folded(x, d, size, int(i == stats)) for i, (x, d) in enumerate(zip(operands, in_dims, strict=True))]
    found, needs = differentiate.with_gradient(*flat), operands[-1]
    some = [x.unflatten(0, (size, -1)) if need else x for x, need in zip(found, needs, strict=True)]
    return tuple(some), tuple(0 if need else None for need in needs)


attention_op = define(
    "attention", f"({_CALL}, ScalarType? out_dtype) -> (Tensor, Tensor)", _pair, _fake,
    setup=_setup, backward=_back, vmap=_vmap,
)  # fmt: skip
attention_forward_op = define_forward(
    "attention", f"({_CALL}, ScalarType? out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": lambda *arguments: forward(*arguments)[0]},
    lambda *arguments: _fake(*arguments)[0], vmap=lambda *arguments: (_vmap(*arguments)[0][0], 0),
)  # fmt: skip
_attention = Operator(
    "Attention", slice(3), _pair, attention_op, lambda *arguments: (attention_forward_op(*arguments), None),
    _setup, _back, _vmap,
)  # fmt: skip
# (dq, dk, dv) for dy, the arguments of `forward` up to the contract, y, m and l as one tensor, and needs.
differentiate = define_gradient(
    "attention_backward",
    f"(Tensor dy, {_CALL}, Tensor y, Tensor stats, bool[] needs) -> (Tensor, Tensor, Tensor)",
    slice(4), _backward, fake_gradients, of="attention", vmap=_vmap_backward,
)  # fmt: skip


def attend(*arguments: Any) -> Tensor:
    """y of `forward`'s arguments by the shortest way that the call allows."""
    q, k, v = arguments[:3]
    if watched(q, k, v) == "direct" and not needs_gradient(q, k, v):
        return forward(*arguments)[0]
    return _attention(*arguments)[0]

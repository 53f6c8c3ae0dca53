"""What a mixture of experts does with rows, with gradients: sent to experts, multiplied there, and added up again.

Rows are in the order of their experts, and of the tokens within one. Everything that adds has a pinned order: a product
is that of its row alone with its expert; a token's sum over its experts, forward and backward, is a chain in the order
of its choices, in float32; the gradient of an expert's weight is a chain over its rows in ascending order, from +0 or
from a float32 buffer, so that micro-batches continue it wherever they cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import ops, reductions
from ...gemm.products import accumulate
from ...gemm.ragged import grouped_mm, spans
from ...ops import Tensor, resolved, with_order

__all__ = ["Sorting", "combined", "multiplied", "sent", "sorting"]


@dataclass(frozen=True, slots=True)
class Sorting:
    """Where the choices of `tokens` tokens, `choices` each, go.

    Attributes
    ----------
    order : tensor [tokens * choices]
        The choice that stands in each row.
    inverse : tensor [tokens * choices]
        The row of each choice.
    experts : tensor [tokens * choices]
        The expert of each row; one that there is not stands behind all others.
    ends : int32 tensor [experts]
        Where each expert's rows end.
    """

    tokens: int
    choices: int
    order: Tensor
    inverse: Tensor
    experts: Tensor
    ends: Tensor


def sorting(index: Tensor, experts: int) -> Sorting:
    """The order of rows for the choices [tokens, choices]."""
    tokens, choices = index.shape
    found, order = torch.sort(index.reshape(-1), stable=True)
    numbers = torch.arange(experts, device=index.device, dtype=found.dtype)
    ends = torch.searchsorted(found, numbers, right=True, out_int32=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=index.device)
    return Sorting(tokens, choices, order, inverse, found, ends)


def sent(x: Tensor, by: Sorting) -> Tensor:
    """The rows of tokens [tokens, n], each as often as it has experts, in the order of the experts."""
    if not torch.is_grad_enabled():
        return x.index_select(0, by.order // by.choices)
    return _Sent.apply(x, by.order, by.inverse, by.choices)


def multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None, by: Sorting, *, contract: str, transposed: bool, buffers: Any
) -> Tensor:
    """``x[i] @ weight[e].T + bias[e]`` for the expert e of each row, or without the transposition; rounded, then added.

    `buffers` are those of weight and bias, which then take their gradients.
    """
    records = torch.is_grad_enabled()
    if records:
        product = _Multiplied.apply(x, weight, by.ends, contract, transposed, buffers[0])
    else:
        product = _product(x, weight if transposed else weight.mT, by.ends, contract)
    if bias is None:
        return product
    experts = by.experts.clamp(max=len(bias) - 1)
    if records:
        return _Biased.apply(product, bias, experts, by.ends, buffers[1])
    return product + bias.index_select(0, experts)


def combined(y: Tensor, weights: Tensor, by: Sorting) -> Tensor:
    """The sum over a token's experts of ``y * weight``, each product rounded, in the dtype that torch promotes to."""
    if not torch.is_grad_enabled():
        return _chain(y.index_select(0, by.inverse).view(*weights.shape, y.shape[1]) * weights.unsqueeze(-1))
    return _Combined.apply(y, weights, by.order, by.inverse)


def _chain(slots: Tensor) -> Tensor:
    """The sum over the choices of [tokens, choices, n], as a chain in float32 from +0."""
    total = slots[:, 0].float() + 0.0
    for j in range(1, slots.shape[1]):
        total = total + slots[:, j].float()
    return total.to(slots.dtype)


class _Sent(ops.Reverse):
    """Rows copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return x.index_select(0, order // choices)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        return _chain(dy.index_select(0, inverse).view(-1, ctx.choices, dy.shape[1])), None, None, None


class _Multiplied(ops.Reverse):
    """The experts' products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, contract: str, transposed: bool, buffer: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.transposed, ctx.buffer, ctx.contract = transposed, buffer, contract
        return _product(x, weight if transposed else weight.mT, ends, contract)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, ends = ctx.saved_tensors
        contract = str(with_order(resolved(ctx.contract, x, weight)))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grouped_mm(contract, dy, weight.mT if ctx.transposed else weight, ends)
        if ctx.needs_input_grad[1]:
            a, b = (x, dy) if ctx.transposed else (dy, x)
            if ctx.buffer is None:
                dw = grouped_mm(contract, a.mT, b, ends)
            else:
                _continued(a, b, ends, ctx.buffer, contract)
        return dx, dw, None, None, None, None


class _Biased(ops.Reverse):
    """A row of bias added to the rows of its expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, experts: Tensor, ends: Tensor, buffer: Tensor | None) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.buffer, ctx.dtype = buffer, bias.dtype
        return x + bias.index_select(0, experts)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (ends,) = ctx.saved_tensors
        db = None
        if ctx.needs_input_grad[1]:
            rows, ones = dy.float(), dy.new_ones(len(dy), 1, dtype=torch.float32)
            if ctx.buffer is None:
                db = grouped_mm("fma/chain", ones.mT, rows, ends).squeeze(1).to(ctx.dtype)
            else:
                _continued(ones, rows, ends, ctx.buffer.unsqueeze(1), "fma/chain")
        return dy, db, None, None, None


def _continued(a: Tensor, b: Tensor, ends: Tensor, buffer: Tensor, contract: str) -> None:
    """``a.T @ b`` of each expert's rows, added to its part of a float32 buffer row by row."""
    for g, (i, j) in enumerate(spans(ends, len(a))):
        if i < j:
            accumulate(a[i:j].mT, b[i:j], buffer[g], contract)


class _Combined(ops.Reverse):
    """Rows weighted and added up."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        slots = y.index_select(0, inverse).view(*weights.shape, y.shape[1])
        ctx.save_for_backward(slots, weights, order)
        return _chain(slots * weights.unsqueeze(-1))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        slots, weights, order = ctx.saved_tensors
        dy = dy.unsqueeze(1)
        dx = (dy * weights.unsqueeze(-1)).to(slots.dtype).flatten(0, 1).index_select(0, order)
        return dx, reductions.sum(dy * slots, out_dtype=torch.float32).to(weights.dtype), None, None


def _product(a: Tensor, b: Tensor, offs: Tensor, contract: str) -> Tensor:
    """As an operator where something has to see it."""
    if not torch.compiler.is_compiling() and ops.is_plain(a, b):
        return _grouped(a, b, offs, contract)
    return torch.ops.isogemm.grouped_mm_forward(a, b, offs, contract)


def _grouped(a: Tensor, b: Tensor, offs: Tensor, contract: str) -> Tensor:
    with torch.no_grad():
        return grouped_mm(contract or None, a, b, offs)


def _fake_grouped(a: Tensor, b: Tensor, offs: Tensor, contract: str) -> Tensor:
    ops.refuse_meta(a, b, offs)
    return a.new_empty(a.shape[0], b.shape[2])


ops.define_forward(
    "grouped_mm",
    "(Tensor a, Tensor b, Tensor offs, str contract) -> Tensor",
    {"CompositeExplicitAutograd": _grouped},
    _fake_grouped,
)

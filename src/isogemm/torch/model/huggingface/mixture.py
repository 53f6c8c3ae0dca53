"""What a mixture of experts does with rows, with gradients: sent to experts, multiplied there, and added up again.

Rows are in the order of their experts, and of the tokens within one. Everything that adds has a pinned order: a product
is that of its row alone with its expert; a token's sum over its experts, forward and backward, is a chain in the order
of the experts, in float32, however a router sorts its choices; the gradient of an expert's weight is a chain over its
rows in ascending order, from +0 or from a float32 buffer, so that micro-batches continue it wherever they cut.

Tensor cores add sixteen rows at once, counted from an expert's first. For gradients in buffers, an expert's rows of
every leaf of tokens therefore begin with a sixteen of their own, behind rows of zeros: micro-batches of whole leaves
continue the chain where they cut it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import reductions
from ...gemm.grouped_linear import call_grouped_linear, call_outer, continued
from ...gradient_buffers import asked_for, written_between
from ...operator import Tensor, define_call, is_compiling, refuse_vmap


@dataclass(frozen=True, slots=True)
class Sorting:
    """Where the choices of `tokens` tokens, `choices` each, go."""

    tokens: int
    choices: int
    order: Tensor  # [rows]: the choice that stands in each row; tokens * choices in a row of zeros
    inverse: Tensor  # [tokens * choices]: the row of each choice
    experts: Tensor  # [rows]: the expert of each row; one that there is not stands behind all others
    counts: Tensor  # [experts]: how many rows each expert has


def in_order(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The choices [tokens, choices] of each token and their weights, in the order of the experts."""
    index, order = torch.sort(index, dim=1, stable=True)
    return index, weights.gather(1, order)


def sorting(index: Tensor, experts: int, block: int = 1, leaf: int = 0) -> Sorting:
    """The order of rows for the choices [tokens, choices].

    With a `leaf`, an expert's rows of each leaf of so many tokens are filled up with rows of zeros to a multiple of
    `block`. How many rows there are does not depend on the choices.
    """
    tokens, choices = index.shape
    flat, leaves = index.reshape(-1), -(-tokens // leaf) if leaf else 1
    if leaves > 1:
        at = torch.arange(len(flat), device=index.device) // (choices * leaf)
        flat = flat * leaves + at.to(flat.dtype)
    found, order = torch.sort(flat, stable=True)
    numbers = torch.arange(experts * leaves, device=index.device, dtype=found.dtype)
    counts = torch.searchsorted(found, numbers, right=True) - torch.searchsorted(found, numbers)
    row = torch.arange(len(order), device=index.device)
    if leaves > 1:
        filled = (counts + block - 1) // block * block
        before = torch.nn.functional.pad((filled - counts).cumsum(0), (1, 0))
        row = row + before[found.clamp(max=len(numbers))]
        spread = order.new_full((len(order) + (block - 1) * min(len(numbers), len(order)),), len(order))
        spread[row], counts = order, filled.view(experts, leaves).sum(1)
        places = torch.arange(len(spread), device=index.device)
        found = torch.searchsorted(counts.cumsum(0), places, right=True)
    inverse = torch.empty_like(order)
    inverse[order] = row
    return Sorting(tokens, choices, spread if leaves > 1 else order, inverse, found, counts)


def sent(x: Tensor, by: Sorting) -> Tensor:
    """The rows of tokens [tokens, n], each as often as it has experts, in the order of the experts."""
    if not torch.is_grad_enabled():
        return x.index_select(0, by.order // by.choices)
    found: Tensor = _call_sent(x, by.order, by.inverse, by.choices)
    return found


def multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None, by: Sorting, *, contract: str, transposed: bool, buffers: Any
) -> Tensor:
    """``x[i] @ weight[e].T + bias[e]`` for the expert e of each row, or without the transposition; rounded, then added.

    `buffers` are those of weight and bias, which then take their gradients.
    """
    if transposed:
        weight, buffers = weight.mT, (None if buffers[0] is None else buffers[0].mT, buffers[1])
    product: Tensor = call_grouped_linear(x, weight, None, by.counts, contract, "chain", None, buffers[0], None)
    if bias is not None:
        experts = by.experts.clamp(max=len(bias) - 1)
        if not torch.is_grad_enabled():
            return product + bias.index_select(0, experts)
        product = _call_biased(product, bias, experts, by.counts, buffers[1])
    return product


def combined(y: Tensor, weights: Tensor, by: Sorting) -> Tensor:
    """The sum over a token's experts of ``y * weight``, each product rounded, in the dtype that torch promotes to.

    An operator to compilers, which would not round the products between.
    """
    if not torch.is_grad_enabled() and not is_compiling():
        return _weighted(y, weights, by.order, by.inverse)
    found: Tensor = _call_combined(y, weights, by.order, by.inverse)
    return found


def _chain(slots: Tensor) -> Tensor:
    """The sum over the choices of [tokens, choices, n], as a chain in float32 from +0."""
    total = slots[:, 0].float() + 0.0
    for j in range(1, slots.shape[1]):
        total = total + slots[:, j].float()
    return total.to(slots.dtype)


# Rows copied.


def _copied(x: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
    return _rows(x, order // choices, len(inverse))


def _rows(x: Tensor, order: Tensor, choices: int) -> Tensor:
    """Rows of x, and zeros where `order`, longer than there are choices, names the one behind."""
    return torch.nn.functional.pad(x, (0, 0, 0, int(len(order) > choices))).index_select(0, order)


def _setup_sent(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.choices = inputs[3]


def _back_sent(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (inverse,) = ctx.saved_tensors
    return _chain(dy.index_select(0, inverse).view(-1, ctx.choices, dy.shape[1])), None, None, None


# A row of bias added to the rows of its expert.


def _biased(x: Tensor, bias: Tensor, experts: Tensor, counts: Tensor, buffer: Tensor | None) -> Tensor:
    return x + bias.index_select(0, experts)


def _setup_biased(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, counts, ctx.buffer = inputs
    written_between(ctx.buffer)
    ctx.save_for_backward(counts)
    ctx.dtype = bias.dtype


def _back_biased(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (counts,) = ctx.saved_tensors
    db = None
    if ctx.needs_input_grad[1]:
        rows, ones = dy.float(), dy.new_ones(len(dy), 1, dtype=torch.float32)
        buffer = asked_for(ctx, 1, ctx.buffer)
        if buffer is None:
            db = call_outer(ones, rows, counts, "fma/chain", "chain", ctx.dtype).squeeze(1)
        else:
            continued(ones, rows, counts, buffer.unsqueeze(1), "fma/chain")
    return dy, db, None, None, None


# Rows weighted and added up.


def _weighted(y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return _chain(y.index_select(0, inverse).view(*weights.shape, y.shape[1]) * weights.unsqueeze(-1))


def _setup_combined(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back_combined(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    y, weights, order, inverse = ctx.saved_tensors
    slots, dy = y.index_select(0, inverse).view(*weights.shape, y.shape[1]), dy.unsqueeze(1)
    dx = _rows((dy * weights.unsqueeze(-1)).to(slots.dtype).flatten(0, 1), order, len(inverse))
    return dx, reductions.sum(dy * slots, out_dtype=torch.float32).to(weights.dtype), None, None


_NO_VMAP = refuse_vmap("experts", "one call with the rows of all items")
_call_sent = define_call(
    "experts_sent", "(Tensor x, Tensor order, Tensor inverse, int choices) -> Tensor", slice(3), _copied,
    lambda x, order, inverse, choices: x.new_empty(order.shape[0], x.shape[1]),
    setup=_setup_sent, backward=_back_sent, vmap=_NO_VMAP,
)  # fmt: skip
_call_biased = define_call(
    "experts_biased", "(Tensor x, Tensor bias, Tensor experts, Tensor counts, Tensor? buffer) -> Tensor", slice(4),
    _biased, lambda x, bias, *_: x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, bias.dtype)),
    setup=_setup_biased, backward=_back_biased, vmap=_NO_VMAP,
)  # fmt: skip
_call_combined = define_call(
    "experts_combined", "(Tensor y, Tensor weights, Tensor order, Tensor inverse) -> Tensor", slice(4), _weighted,
    lambda y, weights, order, inverse: y.new_empty(
        weights.shape[0], y.shape[1], dtype=torch.promote_types(y.dtype, weights.dtype)
    ),
    setup=_setup_combined, backward=_back_combined, vmap=_NO_VMAP,
)  # fmt: skip

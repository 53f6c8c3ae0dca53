"""Products of one x with several weights, which are one product where the weights still are the rows of one tensor.

Whether they are is looked at in every call, in compiled code too: a parameter may get other memory at any time
(``p.data = ...``, ``load_state_dict(assign=True)``), which no compiler's guards see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..operator import Tensor, define_forward, refuse_vmap
from .products import linear, wider


def are_rows_of(whole: Tensor | None, parts: Sequence[Tensor | None]) -> bool:
    """Whether tensors are all the rows of `whole`, in their order and in its memory; no tensors where that is None."""
    if whole is None:
        return all(p is None for p in parts)
    place, dtype, steps = whole.data_ptr(), whole.dtype, whole.stride()
    end = place + whole.nbytes
    for p in parts:
        if p is None or p.data_ptr() != place or p.dtype is not dtype:
            return False
        if p.stride() != steps or not p.is_contiguous():
            return False
        place += p.nbytes
    return bool(place == end)


def _merged(
    x: Tensor, whole: Tensor, bias: Tensor | None, weights: list[Tensor], biases: list[Tensor], contract: str
) -> Tensor:
    if are_rows_of(whole, weights) and are_rows_of(bias, biases):
        return linear(x, whole, bias, contract, None)
    each = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat([linear(x, w, b, contract, None) for w, b in each], -1)


def _fake(
    x: Tensor, whole: Tensor, bias: Tensor | None, weights: list[Tensor], biases: list[Tensor], contract: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(len(w) for w in weights), dtype=wider(x, weights[0]))


def _vmap(info: Any, in_dims: Any, x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    if any(dim is not None for dim in torch.utils._pytree.tree_leaves(in_dims[1:])):
        refuse_vmap("weights that are one product", "convert with fuse=False")()
    return merged_op(x.movedim(in_dims[0], 0), *rest), 0


merged_op = define_forward(
    "merged_linear",
    "(Tensor x, Tensor whole, Tensor? bias, Tensor[] weights, Tensor[] biases, str contract) -> Tensor",
    {"CompositeExplicitAutograd": _merged}, _fake, vmap=_vmap,
)  # fmt: skip

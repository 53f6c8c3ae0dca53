"""The upper levels of a fixed tree, in float32, and the one rounding behind them: what every way of a sum computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...operands.tensors import rounded
from ..operator import Tensor
from ..routing.elementwise import subnormals_kept


def fixed_sum(parts: Sequence[Tensor]) -> Tensor:
    """float32 tensors added in a tree: neighbours meet, level by level. Their number is a power of two."""
    with subnormals_kept(parts[0]):
        while len(parts) > 1:  # order-critical: as the contract's tree, whose upper levels these are
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def finished(total: Tensor, bias: Tensor | None, dtype: Any) -> Tensor:
    """The contract's epilogue: ``total + bias`` in float32, rounded once to `dtype`, every NaN the canonical one."""
    if bias is not None:
        with subnormals_kept(total):
            total = total + bias.detach().float()
    return rounded(total, dtype)

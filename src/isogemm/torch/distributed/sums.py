"""Sums over ranks in the upper levels of a fixed tree, in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..operator import Tensor
from . import mapped
from .ranks import Ranks
from .tree import finished, fixed_sum

FEW_ROWS = 16  # up to here every rank takes all partial sums: one transfer in place of two
OVERLAP_ROWS = 512  # of each rank: with fewer, one product of all rows is faster than one for each rank


def sum_over_ranks(
    partial: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks, what: str, *, scatter: bool = False
) -> Tensor:
    """The ranks' float32 partial sums [rows, n], added in their tree, plus the bias, rounded once.

    Parameters
    ----------
    partial : float32 tensor [rows, n]
    bias : tensor [n], optional
        Added once, in float32, behind the tree.
    dtype : torch.dtype
        Of the result.
    what : str
        The module, for errors.
    scatter : bool
        Every rank gets its share of the rows, whose number the ranks divide, in place of all of them.

    Raises
    ------
    RankError
        A rank died, or did not answer in time.
    ShapeError
        With `scatter`, rows that the ranks do not divide.
    """
    if scatter:
        ranks.share(f"rows of {what}", len(partial))
    if ranks.size == 1:
        return finished(partial, bias, dtype)
    if mapped.serves(ranks, partial.device, partial.shape, dtype, bias, what):
        return mapped.total(partial, bias, dtype, ranks, scatter)
    return _collective(partial, bias, dtype, ranks, what, scatter)


def product_over_ranks(
    multiply: Callable[[Tensor], Tensor], x: Tensor, n: int, bias: Tensor | None, dtype: Any,
    ranks: Ranks, what: str, *, scatter: bool,
) -> Tensor:  # fmt: skip
    """`sum_over_ranks` of a product whose float32 partial sums are still to be made.

    `multiply` makes those of some rows of x. Where rows are many and memory is shared, each rank's rows are a product
    of their own, and travel beside the next.
    """
    if scatter:
        ranks.share(f"rows of {what}", len(x))
    many = ranks.size > 1 and len(x) >= OVERLAP_ROWS * ranks.size
    if many and mapped.serves(ranks, x.device, (len(x), n), dtype, bias, what):
        parts = x.split(-(-len(x) // ranks.size))
        out = mapped.result(x, len(x), n, dtype, ranks, scatter)
        mapped.copied(lambda to: multiply(parts[to]), len(x), bias, out, ranks, scatter)
        return out
    return sum_over_ranks(multiply(x), bias, dtype, ranks, what, scatter=scatter)


def _collective(partial: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks, what: str, scatter: bool) -> Tensor:
    """reduce-scatter by all_to_all, then all_gather of rounded rows: gloo on CPUs, NCCL on GPUs."""
    rows, n = partial.shape
    if rows <= FEW_ROWS and not scatter:
        return finished(fixed_sum(ranks.gather(partial, what)), bias, dtype)
    share = -(-rows // ranks.size)
    padded = torch.nn.functional.pad(partial, (0, 0, 0, share * ranks.size - rows))
    own = fixed_sum(list(ranks.exchange(padded.view(ranks.size, share, n), what)))
    y = finished(own, bias, dtype)
    return y if scatter else torch.cat(ranks.gather(y, what))[:rows]

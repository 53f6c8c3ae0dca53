"""Sums over ranks in the upper levels of a fixed tree, in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..operator import Tensor
from ..routing.elementwise import subnormals_kept
from .ranks import TRANSPORTS, Ranks

FEW_ROWS = 16  # up to here every rank takes all partial sums: one transfer in place of two


def fixed_sum(parts: Sequence[Tensor]) -> Tensor:
    """float32 tensors added in a tree: neighbours meet, level by level. Their number is a power of two."""
    with nullcontext() if parts[0].is_cuda else subnormals_kept():
        while len(parts) > 1:  # order-critical: as the contract's tree, whose upper levels these are
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def rounded(total: Tensor, bias: Tensor | None, dtype: Any) -> Tensor:
    """The contract's epilogue: ``total + bias`` in float32, rounded once to `dtype`, every NaN the canonical one."""
    if bias is not None:
        with nullcontext() if total.is_cuda else subnormals_kept():
            total = total + bias.detach().float()
    y = total.to(dtype, copy=True)
    words, nan = (torch.int32, 0x7FFFFFFF) if dtype is torch.float32 else (torch.int16, 0x7FFF)
    y.view(words).masked_fill_(y.isnan(), nan)
    return y


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
        return rounded(partial, bias, dtype)
    return _FUNCTIONS[ranks.transport](partial, bias, dtype, ranks, what, scatter)


def _collective(partial: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks, what: str, scatter: bool) -> Tensor:
    """reduce-scatter by all_to_all, then all_gather of rounded rows: gloo on CPUs, NCCL on GPUs."""
    rows, n = partial.shape
    if rows <= FEW_ROWS and not scatter:
        return rounded(fixed_sum(ranks.gather(partial, what)), bias, dtype)
    share = -(-rows // ranks.size)
    padded = torch.nn.functional.pad(partial, (0, 0, 0, share * ranks.size - rows))
    own = fixed_sum(list(ranks.exchange(padded.view(ranks.size, share, n), what)))
    y = rounded(own, bias, dtype)
    return y if scatter else torch.cat(ranks.gather(y, what))[:rows]


def _symmetric(partial: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks, what: str, scatter: bool) -> Tensor:
    """One shot through symmetric memory: every rank reads the others' sums over NVLink. It has not been run yet."""
    from torch.distributed import _symmetric_memory as symmetric

    name = ranks.group.group_name
    shared = symmetric.empty(partial.shape, dtype=partial.dtype, device=partial.device)
    handle = symmetric.rendezvous(shared, name)
    shared.copy_(partial)
    handle.barrier()
    rows = ranks.share(f"rows of {what}", len(partial)) if scatter else slice(None)
    parts = [handle.get_buffer(rank, partial.shape, partial.dtype)[rows] for rank in range(ranks.size)]
    y = rounded(fixed_sum(parts), bias, dtype)
    handle.barrier()  # nobody writes again before all have read
    return y


Transport = Callable[[Tensor, "Tensor | None", Any, Ranks, str, bool], Tensor]
_FUNCTIONS: dict[str, Transport] = dict(zip(TRANSPORTS, (_collective, _symmetric), strict=True))

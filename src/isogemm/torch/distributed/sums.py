"""Sums over ranks in the upper levels of a fixed tree, in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..device import column
from ..operator import Tensor
from ..routing.elementwise import subnormals_kept
from .ranks import Ranks

FEW_ROWS = 16  # up to here every rank takes all partial sums: one transfer in place of two
OVERLAP_ROWS = 512  # of each rank: with fewer, one product of all rows is faster than one for each rank


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
    if ranks.maps(partial.device, partial.shape, what):
        return _mapped(partial, bias, dtype, ranks, scatter)
    return _collective(partial, bias, dtype, ranks, what, scatter)


def product_over_ranks(
    multiply: Callable[[Tensor], Tensor], x: Tensor, n: int, bias: Tensor | None, dtype: Any,
    ranks: Ranks, what: str, *, scatter: bool = False,
) -> Tensor:  # fmt: skip
    """`sum_over_ranks` of a product whose float32 partial sums are still to be made.

    Where rows are many and memory is shared, each rank's rows are a product of their own, and travel beside the next.

    Parameters
    ----------
    multiply : callable
        Partial sums [rows, n] of some rows of x.
    x : tensor [rows, k]
    n, bias, dtype, ranks, what, scatter
        As in `sum_over_ranks`.
    """
    if scatter:
        ranks.share(f"rows of {what}", len(x))
    if ranks.size > 1 and len(x) >= OVERLAP_ROWS * ranks.size and ranks.maps(x.device, (len(x), n), what):
        parts = x.split(-(-len(x) // ranks.size))
        return _copied(lambda to: multiply(parts[to]), len(x), n, bias, dtype, ranks, scatter)
    return sum_over_ranks(multiply(x), bias, dtype, ranks, what, scatter=scatter)


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


def _mapped(partial: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks, scatter: bool) -> Tensor:
    """Through mapped memory: in one step where the ranks take all partial sums, else in two."""
    rows, n = partial.shape
    kernels, share, partial = column("ranks", "cuda"), -(-rows // ranks.size), partial.contiguous()
    one_shot = not scatter and (ranks.size - 1) * partial.nbytes <= kernels.ONE_SHOT_BYTES
    if not one_shot and share * n * 4 * ranks.size > kernels.TWO_SHOT_BYTES:
        parts = partial.split(share)
        return _copied(lambda to: parts[to] if to < len(parts) else partial[:0], rows, n, bias, dtype, ranks, scatter)
    out = partial.new_empty(share if scatter else rows, n, dtype=dtype)
    if out.numel() and one_shot:
        ranks.shared().box.one_shot(partial, out, _flat(bias))
    elif out.numel():
        box = ranks.shared(0, rows * n * 4).box
        box.two_shot(partial, out, _flat(bias), rows, there=False, scatter=scatter)
    return out


def _copied(
    part: Callable[[int], Tensor], rows: int, n: int, bias: Tensor | None, dtype: Any, ranks: Ranks, scatter: bool
) -> Tensor:
    """Partial sums travel by the copy engine to the rank that adds them: ``part(to)``, one's own last.

    Where they are products still to be made, the next one is under way meanwhile.
    """
    share = -(-rows // ranks.size)
    shared, main = ranks.shared(share * n * 4, rows * n * 4), torch.cuda.current_stream()
    sent = []  # whose memory is not another tensor's before the copies are over
    for step in range(1, ranks.size):
        to = (ranks.rank + step) % ranks.size
        sent.append(part(to))
        shared.copies.wait_stream(main)
        with torch.cuda.stream(shared.copies):
            shared.inbox(to, sent[-1].shape).copy_(sent[-1])
    own = part(ranks.rank)
    main.wait_stream(shared.copies)
    out = own.new_empty(share if scatter else rows, n, dtype=dtype)
    shared.box.two_shot(own, out, _flat(bias), rows, there=True, scatter=scatter)
    return out


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().contiguous()

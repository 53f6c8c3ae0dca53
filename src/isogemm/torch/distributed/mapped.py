"""Sums over ranks through memory that their GPUs map of one another, where every bit of a trial was right.

All ranks try a kernel together, at the first sum that would take it, on numbers that each of them can make; it serves
where no rank found a bit that is not the tree's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import DeviceError
from ...operands.tensors import words
from ...planner.records import notice
from ..device import column
from ..operator import Tensor
from . import symmetric
from .ranks import Ranks
from .tree import finished, fixed_sum

# Of a trial: one word, words that no block has all of, and more than all threads take at once.
SHAPES = ((1, 8), (37, 264), (608, 1024))
TURNS = 3  # of two boxes
_wrong: dict[tuple[Any, ...], int] = {}  # elements of a trial that differed, on all ranks


def serves(ranks: Ranks, on: Any, shape: Sequence[int], dtype: Any, bias: Tensor | None, what: str) -> bool:
    """Whether a sum goes this way.

    Raises DeviceError or ShapeError: `Ranks.transport` asks for it, and it cannot be; or a graph is captured, and the
    kernels were not tried before.
    """
    if not ranks.maps(on, shape, what):
        return False
    key = ranks.group, dtype, None if bias is None else bias.dtype
    if key not in _wrong:
        symmetric.check_eager("the first sum of its kind")
        found: list[Any] = [None] * ranks.size
        dist.all_gather_object(found, _tried(ranks, on, *key[1:]), group=ranks.group)
        _wrong[key] = sum(found)
        if _wrong[key]:
            notice(f"kernels for sums over ranks in {dtype} are not used: {_wrong[key]} elements of a trial differ")
    if _wrong[key] and ranks.transport == "symmetric":
        raise DeviceError(
            f"transport of {what}", limit="kernels whose bits were seen to be right",
            value=f"{_wrong[key]} elements of a trial differ", nearest="collective",
        )  # fmt: skip
    return not _wrong[key]


def _tried(ranks: Ranks, on: Any, dtype: Any, bias_dtype: Any) -> int:
    """Elements that differ from the definition on this rank: every way, several times in the same memory."""
    differing = 0
    for rows, n in SHAPES:
        for turn in range(TURNS):
            generator = torch.Generator().manual_seed(turn)
            parts = [_numbers(rows, n, generator).to(on) for _ in range(ranks.size)]
            bias = None if bias_dtype is None else torch.randn(n, generator=generator).to(on, bias_dtype)
            want = finished(fixed_sum(parts), bias, dtype)
            for found, scatter in _every_way(parts[ranks.rank], bias, dtype, ranks):
                own = want[ranks.share("rows of a trial", rows)] if scatter else want
                differing += int((words(found) != words(own)).sum())
    return differing


def _numbers(rows: int, n: int, generator: Any) -> Tensor:
    """Partial sums; among the first, what has bits of its own: the NaN that stands for nothing, an infinity, zeros."""
    made = torch.randn(rows, n, generator=generator) * 3
    special = torch.tensor([float("inf"), 3e38, -0.0, 1e-40])
    made[0, :4] = special[torch.randperm(4, generator=generator)]
    made.view(torch.int32)[0, 4] = -1
    return made


def _every_way(own: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks) -> Iterator[tuple[Tensor, bool]]:
    """Results of each way, poisoned before, and whether they are this rank's share."""
    rows, n = own.shape
    parts = own.split(-(-rows // ranks.size))
    for scatter in (False, True) if rows % ranks.size == 0 else (False,):
        ways: list[Callable[[Tensor], None]] = [
            lambda out, scatter=scatter: _two_shot(own, bias, out, ranks, scatter),  # type: ignore[misc]
            lambda out, scatter=scatter: copied(lambda to: _of(parts, to), rows, bias, out, ranks, scatter),  # type: ignore[misc]
        ]
        if not scatter:
            ways.append(lambda out: _one_shot(own, bias, out, ranks))
        for way in ways:
            out = result(own, rows, n, dtype, ranks, scatter)
            words(out).fill_(-2)  # a NaN that is no result
            way(out)
            yield out, scatter


def result(like: Tensor, rows: int, n: int, dtype: Any, ranks: Ranks, scatter: bool) -> Tensor:
    """Memory for all rows, or this rank's share of them."""
    made: Tensor = like.new_empty(-(-rows // ranks.size) if scatter else rows, n, dtype=dtype)
    return made


def total(partial: Tensor, bias: Tensor | None, dtype: Any, ranks: Ranks, scatter: bool) -> Tensor:
    """The sum of partial sums that are there: in one step where the ranks take all of them, else in two."""
    rows, n = partial.shape
    kernels, share, partial = column("ranks", "cuda"), -(-rows // ranks.size), partial.contiguous()
    out = result(partial, rows, n, dtype, ranks, scatter)
    if not out.numel():
        return out
    if not scatter and (ranks.size - 1) * partial.nbytes <= kernels.ONE_SHOT_BYTES:
        _one_shot(partial, bias, out, ranks)
    elif share * n * 4 * ranks.size <= kernels.TWO_SHOT_BYTES:
        _two_shot(partial, bias, out, ranks, scatter)
    else:
        parts = partial.split(share)
        copied(lambda to: _of(parts, to), rows, bias, out, ranks, scatter)
    return out


def _of(parts: Sequence[Tensor], to: int) -> Tensor:
    """The share of one rank; the last may have none."""
    return parts[to] if to < len(parts) else parts[0][:0]


def _one_shot(partial: Tensor, bias: Tensor | None, out: Tensor, ranks: Ranks) -> None:
    ranks.shared().box.one_shot(partial, out, _flat(bias))


def _two_shot(partial: Tensor, bias: Tensor | None, out: Tensor, ranks: Ranks, scatter: bool) -> None:
    box = ranks.shared(0, partial.nbytes).box
    box.two_shot(partial, out, _flat(bias), len(partial), there=False, scatter=scatter)


def copied(
    part: Callable[[int], Tensor], rows: int, bias: Tensor | None, out: Tensor, ranks: Ranks, scatter: bool
) -> None:
    """Partial sums travel by the copy engine to the rank that adds them: ``part(to)``, one's own last.

    Where they are products still to be made, the next one is under way meanwhile.
    """
    n, share = out.shape[1], -(-rows // ranks.size)
    shared = ranks.shared(share * n * 4, rows * n * 4)
    sent = []  # whose memory is not another tensor's before the copies are over
    for step in range(1, ranks.size):
        to = (ranks.rank + step) % ranks.size
        sent.append(part(to))
        if len(sent[-1]):
            shared.send(to, sent[-1])
    own = part(ranks.rank)
    shared.wait()
    shared.box.two_shot(own, out, _flat(bias), rows, there=True, scatter=scatter)


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().contiguous()

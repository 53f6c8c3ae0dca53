"""Memory that GPUs of one machine map of one another, by torch's symmetric memory, and the kernels that use it."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import DeviceError
from ...planner.records import notice
from ..device import column
from ..operator import Tensor

_LEAST = 8 << 20  # bytes of the first allocation's parts


class Shared(NamedTuple):
    """One allocation of every rank, and the kernels on it.

    `gathers` is whether rows of all ranks come by its kernel: where all ranks saw the right bits, when it was made.
    """

    memory: Tensor
    handle: Any
    box: Any
    copies: Any  # a stream
    gathers: bool = False

    def send(self, to: int, partial: Tensor) -> None:
        """Copy float32 partial sums to where rank `to` adds them, beside what the current stream does next."""
        there = self.handle.get_buffer(to, tuple(partial.shape), torch.float32, self.box.copied(self.box.rank) // 4)
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            there.copy_(partial)

    def wait(self) -> None:
        """Let the current stream wait for all that was sent."""
        torch.cuda.current_stream().wait_stream(self.copies)


_made: dict[tuple[Any, int], Shared] = {}
_kept: list[Shared] = []  # outgrown ones: a captured graph may still use them


@cache
def reaches(group: Any) -> bool:
    """Whether every rank of a group has a GPU of its own, of one machine, that maps the memory of all the others.

    Raises DeviceError: the group is asked for the first time while a graph is captured.
    """
    if dist.get_backend(group) != "nccl":
        return False
    check_eager("the first sum of a group")
    own = torch.cuda.current_device()
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, (socket.gethostname(), own), group=group)
    apart = len(set(places)) == len(places) and len({host for host, _ in places}) == 1
    found: list[Any] = [None] * len(places)
    mapped = apart and all(gpu == own or torch.cuda.can_device_access_peer(own, gpu) for _, gpu in places)
    dist.all_gather_object(found, mapped, group=group)
    return all(found)


def captures() -> bool:
    """Whether torch's current stream is captured into a graph."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_eager(what: str) -> None:
    """Raise while a graph is captured: what the ranks do together once has to come before."""
    if captures():
        raise DeviceError(
            f"{what} over ranks", limit="memory that is shared and kernels that are tried before a graph is captured",
            value="a capture", nearest="the same call once outside of it",
        )  # fmt: skip


def shared(group: Any, timeout: float, share: int = 0, results: int = 0) -> Shared:
    """The group's memory, with room for so many bytes of partial sums from each rank, and of results.

    All ranks make it together, where what they have is too small. Raises DeviceError: it is too small while a graph is
    captured.
    """
    device = torch.cuda.current_device()
    known = _made.get((group, device))
    if known is not None:
        if known.box.share >= share and known.box.results >= results:
            return known if known.box.timeout == timeout else known._replace(box=replace(known.box, timeout=timeout))
        share, results = max(share, known.box.share), max(results, known.box.results)
    check_eager("a larger sum")
    from torch.distributed import _symmetric_memory as symmetric

    kernels, world = column("ranks", "cuda").Mailbox, dist.get_world_size(group)
    share, results = (max(_LEAST, 1 << (size - 1).bit_length()) for size in (share, results))
    memory = symmetric.empty(
        kernels.nbytes(world, share, results), dtype=torch.uint8, device=torch.device("cuda", device)
    )
    handle = symmetric.rendezvous(memory, group.group_name)
    box = kernels(tuple(handle.buffer_ptrs), dist.get_rank(group), device, share, results, timeout)
    box.prepare(memory)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device])  # nobody sends before all are prepared
    torch.cuda.synchronize()
    if known is not None:
        _kept.append(known)
    made = Shared(memory, handle, box, torch.cuda.Stream(device))
    found: list[Any] = [None] * world
    dist.all_gather_object(found, wrongly_gathered(box, memory.device), group=group)
    if sum(found):
        notice(f"the kernel that gathers rows of all ranks is not used: {sum(found)} words of a trial differ")
    made = _made[group, device] = made._replace(gathers=not sum(found))
    return made


def wrongly_gathered(box: Any, on: Any) -> int:
    """Words of 8 bytes that differ from the other ranks', of a trial: some, and more than all threads take at once."""
    differing = 0
    for turn, words in enumerate((1, 333, 100_000)):
        generator = torch.Generator().manual_seed(turn)
        want = torch.randint(-(2**62), 2**62, (box.world, words), generator=generator).to(on)
        found = torch.full_like(want, -2)
        box.gather(want[box.rank].clone(), found)
        differing += int((found != want).sum())
    return differing


def gather_bytes() -> int:
    """The most that one rank sends another in one `gather` of the kernels."""
    return int(column("ranks", "cuda").GATHER_BYTES)

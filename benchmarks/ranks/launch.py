"""Processes of one group, and times that all of them agree on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from isogemm.lab import Timing, WallClock

__all__ = ["World", "interleaved", "launch"]

Run = Callable[[int], Any]
PATIENCE = 120.0  # seconds for a collective, while the others compile


@dataclass(frozen=True)
class World:
    """One process among those that were launched; what is compared here goes through the host's memory.

    Attributes
    ----------
    rank, size : int
    device : str
        ``cuda``, one GPU for each rank, or ``cpu``.
    host : ProcessGroup
        All ranks, through the host's memory.
    """

    rank: int
    size: int
    device: str
    host: Any

    def together(self, own: Any) -> list[Any]:
        """What every rank says, in their order. None goes on before all have spoken."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.host)
        return found

    def agree(self, own: Any) -> bool:
        """Whether it is so on all ranks."""
        return all(self.together(bool(own)))


def launch(size: int, device: str, body: Callable[..., Any], *words: Any) -> Any:
    """What ``body(world, *words)`` returns in the first of so many processes; an error of one ends all."""
    import torch.multiprocessing as processes

    found = processes.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        words = (size, device, f"file://{folder}/store", body, words, found)
        processes.spawn(_started, words, nprocs=size)
    return found.get()


def _started(rank: int, size: int, device: str, where: str, body: Callable[..., Any], words: Any, found: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    carrier, limit = ("nccl" if device == "cuda" else "gloo"), timedelta(seconds=PATIENCE)
    dist.init_process_group(carrier, init_method=where, rank=rank, world_size=size, timeout=limit)
    world = World(rank, size, device, dist.new_group(backend="gloo", timeout=limit))
    answer = body(world, *words)
    if rank == 0:
        found.put(answer)
    world.agree(True)
    if device == "cuda":
        # Communicators that graphs call, a compiler's processes and a profiler end late, or wait for one another.
        torch.cuda.synchronize()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    dist.destroy_process_group()


def interleaved(world: World, runs: Mapping[str, Run], *, rounds: int, block_seconds: float) -> dict[str, Timing]:
    """Times of candidates in rounds that rotate, each the slowest rank's: all make the same calls at the same time."""
    calls = {}
    for name, run in runs.items():
        _block(world, run, 2)
        seconds = min(max(world.together(_block(world, run, 2) / 2)) for _ in range(3))
        calls[name] = max(1, round(block_seconds / seconds))
    names, samples = list(runs), {name: [] for name in runs}
    for i in range(rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        for name in order[::-1] if (i // len(names)) % 2 else order:
            samples[name].append(_block(world, runs[name], calls[name]) / calls[name])
    ranks = world.together(samples)
    slowest = {name: [max(each) for each in zip(*(found[name] for found in ranks), strict=True)] for name in names}
    return {name: Timing.of(name, found, calls[name]) for name, found in slowest.items()}


def _block(world: World, run: Run, calls: int) -> float:
    """Seconds of so many calls on this rank's device, behind one that is not counted, in which ranks meet."""
    world.agree(True)
    if world.device == "cpu":
        run(0)
        return WallClock().elapsed(run, 0, calls)
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(0)
    start.record()
    for i in range(calls):
        run(i)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3

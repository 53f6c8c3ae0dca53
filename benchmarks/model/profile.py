"""Which kernels a step is made of, and where its host time goes."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["host", "kernels"]

MOST = 12  # lines of a list
SHORT = 40  # launches that are listed one by one, in their order


def kernels(run: Callable[[int], Any], synchronize: Callable[[], None]) -> list[tuple[str, int, float]]:
    """(name, launches, microseconds) of the device's kernels in one call, after the ``sum`` of all.

    The longest first, launches of one name together; where there are few launches, one by one in their order.
    """
    import torch
    from torch.profiler import profile, supported_activities

    run(0)
    synchronize()
    with profile(activities=supported_activities()) as record:
        run(0)
        synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    total = ("sum", len(events), sum(e.time_range.elapsed_us() for e in events))
    if len(events) <= SHORT:
        events.sort(key=lambda e: e.time_range.start)
        return [total, *((e.name, 1, e.time_range.elapsed_us()) for e in events)]
    found: Mapping[str, list[float]] = defaultdict(list)
    for e in events:
        found[e.name].append(e.time_range.elapsed_us())
    lines = sorted(((name, len(times), sum(times)) for name, times in found.items()), key=lambda line: -line[2])
    return [total, *lines[:MOST]]


def host(run: Callable[[int], Any], synchronize: Callable[[], None]) -> list[str]:
    """The functions in which one call spends the host's time, by cProfile, which itself takes about as much again."""
    run(0)
    synchronize()
    profiler = cProfile.Profile()
    profiler.enable()
    run(0)
    profiler.disable()
    synchronize()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(MOST)
    return [line for line in out.getvalue().splitlines() if line.strip() and "Ordered" not in line]

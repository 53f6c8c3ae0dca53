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


def kernels(run: Callable[[int], Any], synchronize: Callable[[], None]) -> list[tuple[str, int, float]]:
    """(name, launches, microseconds) of the device's kernels in one call, the longest first; all of them in ``sum``."""
    import torch
    from torch.profiler import profile, supported_activities

    run(0)
    synchronize()
    with profile(activities=supported_activities()) as record:
        run(0)
        synchronize()
    found: Mapping[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += 1
            found[event.name][1] += event.time_range.elapsed_us()
    lines = sorted(((name, int(n), us) for name, (n, us) in found.items()), key=lambda line: -line[2])
    total = ("sum", sum(n for _, n, _ in lines), sum(us for _, _, us in lines))
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

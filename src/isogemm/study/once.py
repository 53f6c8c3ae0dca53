"""A call of each way of a case, for a profiler that runs a program: ``python -m isogemm.study.once STUDY KEY SEED``.

Each call is in an NVTX range of the way's name, between `cudaProfilerStart` and `cudaProfilerStop`. Of a loop its first
products alone are called: they are alike, and a profiler replays each some tens of times.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from .declare import StudyCase
from .site import Site, open_site, untuned

STEPS = 2  # of a loop


def command_of(study: str, key: str, seed: int) -> list[str]:
    """The program, for `isogemm.lab.counters.read_counters`."""
    return [sys.executable, "-m", __name__, study, key, str(seed)]


def run_once(case: StudyCase, site: Site, seed: int, cuda: Any) -> list[str]:
    """Call every way twice, and once more where the profiler looks; `cuda` is torch's module of that name."""
    made = case.make(site, seed)
    with made.under(), untuned():
        for name, whole in made.ways.items():
            way = replace(whole, steps=whole.steps[:STEPS])
            way(0)
            way(0)
            cuda.synchronize()
            cuda.profiler.start()
            cuda.nvtx.range_push(name)
            way(0)
            cuda.synchronize()
            cuda.nvtx.range_pop()
            cuda.profiler.stop()
    return list(made.ways)


def main(words: list[str]) -> None:
    """Find the case among the study's, quick ones too."""
    import torch

    from .catalog import study

    name, key, seed = words
    site = open_site("cuda", ceilings=False)
    known = {case.key: case for quick in (True, False) for case in study(name).cases(site, quick)}
    run_once(known[key], site, int(seed), torch.cuda)


if __name__ == "__main__":
    main(sys.argv[1:])

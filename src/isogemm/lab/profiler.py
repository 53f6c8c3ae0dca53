"""What torch's profiler tells: the kernels that a call launches, and what a profiler does to a call's time."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .clock import Run, SyncClock


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel as the driver ran it."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    # registers, shared: of a thread; bytes of a block
    registers: int
    shared: int
    seconds: float  # on the device
    # share of a multiprocessor's warps that the launch can keep resident, as the profiler estimates it
    occupancy: float


def short_name(kernel: str) -> str:
    """A kernel's name without the types in it; of a template over a product by name, that product's."""
    product = re.search(r"<(\w*gemm\w*)>\(", kernel)
    if product:
        return product[1]
    bare, types = kernel, 1
    while types:
        bare, types = re.subn(r"<[^<>]*>|\([^()]*\)", "", bare)
    words = bare.split()
    return words[-1].removeprefix("::") if words else kernel


@cache
def _quiet() -> None:
    """An empty session of torch's profiler, whose library reads once in a process what it is to log.

    By itself torch 2.13's writes two lines to stderr for every session, hundreds in a study, and nobody reads them.
    """
    from torch.profiler import ProfilerActivity, profile

    level = "KINETO_LOG_LEVEL"
    if level in os.environ:
        return
    os.environ[level] = "6"  # above those lines' own
    try:
        with profile(activities=[ProfilerActivity.CPU]):
            pass
    finally:
        del os.environ[level]


def launches(call: Callable[[], Any]) -> list[KernelLaunch]:
    """The kernels that one call runs on the current CUDA device, in their order; none where no profiler may run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    _quiet()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return [_launch(event) for event in sorted(kernels, key=lambda event: float(event["ts"]))]


def _launch(event: dict[str, Any]) -> KernelLaunch:
    facts = event["args"]
    return KernelLaunch(
        event["name"],
        tuple(facts.get("grid", ())),
        tuple(facts.get("block", ())),
        int(facts.get("registers per thread", 0)),
        int(facts.get("shared memory", 0)),
        float(event["dur"]) * 1e-6,
        float(facts.get("est. achieved occupancy %", 0)) / 100,
    )


class ProfiledClock(SyncClock):
    """Host time under a profiler that takes kernels one by one, as one that replays them for its counters does.

    Every library call of a run (its ``steps``, or the run itself) has a session of torch's profiler of its own, and
    ends before the next begins. A real replaying profiler runs each kernel some tens of times besides; what they have
    in common is a price for each launch that is thousands of times that of a launch.
    """

    def __init__(self, synchronize: Callable[[], object], *, cuda: bool) -> None:
        from torch.profiler import ProfilerActivity

        super().__init__(synchronize)
        _quiet()
        self._activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """See `isogemm.lab.Clock`."""
        from torch.profiler import profile

        self._synchronize()
        begin = time.perf_counter()
        for i in range(first, first + calls):
            for step in getattr(run, "steps", (run,)):
                with profile(activities=self._activities):
                    step(i)
                    self._synchronize()
        return time.perf_counter() - begin


def operators(call: Callable[[], Any]) -> list[str]:
    """Operators of torch's that one call computes with on the CPU, in their order, and copies; no views."""
    from torch.profiler import ProfilerActivity, profile

    _quiet()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    found = [event for event in profiler.events() if event.name.partition("::")[2] not in _BOOKKEEPING]
    computing = {id(event) for event in found if event.name != "aten::copy_"}
    return [event.name for event in found if not any(id(child) in computing for child in event.cpu_children)]


_VIEWS = (
    "as_strided detach expand numpy_T permute reshape _reshape_alias select slice squeeze t transpose unsqueeze view"
)
_MEMORY = "_to_copy to clone contiguous empty empty_like empty_strided alias resolve_conj resolve_neg _unsafe_view"
_BOOKKEEPING = frozenset(f"{_VIEWS} {_MEMORY}".split())

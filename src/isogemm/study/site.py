"""The machine that a study runs on: its memory, clocks and ceilings, and operands that lie there."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._version import __version__
from ..backends import accelerator, open_device
from ..base.dtypes import NUMPY
from ..base.tuning import BUDGET, get_tuning, set_tuning
from ..contract.spec import Contract
from ..errors import DeviceError
from ..lab import WALL, Ceilings, Clock, SubmitClock, SyncClock, last_level_cache, limit_threads, measure_ceilings
from ..lab.limits import held
from ..lab.rotation import CACHES_TO_FILL
from ..operands.device_array import DeviceId
from ..planner.tuning import Wanted, pose


@dataclass(frozen=True, slots=True)
class Site:
    """A machine, as studies see it."""

    device: str  # {"cpu", "cuda"}
    name: str  # of the processor or the GPU
    memory: int  # bytes that are free on the device
    cache: int  # bytes of its last cache before memory
    torch: bool  # whether torch can be used
    clocks: Mapping[str, Clock]  # by name; ``device`` is there on a GPU alone, ``profiled`` with torch alone
    # the roofline of each arithmetic: ``fp32``, ``tf32``, ``bf16``; what is missing has no roofline
    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    synchronize: Callable[[], object] = lambda: None  # waits until the device has finished
    driver: str = ""  # the GPU's

    @property
    def main_clock(self) -> str:
        """The clock that a row's verdicts are made by."""
        return "device" if "device" in self.clocks else "wall"

    def limits(self, roofline: str) -> dict[str, float]:
        """Measured bytes and operations a second, for figures that draw them; nothing where none were measured."""
        found = self.ceilings.get(roofline)
        if found is None:
            return {}
        return {"bytes_per_second": found.bytes_per_second, "flops_per_second": found.flops_per_second}

    @property
    def identity(self) -> dict[str, str]:
        """What rows of one folder have in common."""
        known = {"device": self.device, "name": self.name, "driver": self.driver, "version": __version__}
        return {fact: value for fact, value in known.items() if value}

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Normal values, the same for the same seed: an ndarray, or a tensor on a GPU."""
        if self.device == "cpu":
            drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
            return drawn.astype(NUMPY[dtype], copy=False)
        import torch

        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory for a result, filled with NaN."""
        if self.device == "cpu":
            return np.full(shape, np.nan, NUMPY[dtype])
        import torch

        return torch.full(shape, float("nan"), dtype=getattr(torch, dtype), device="cuda")

    def alike(self, x: Any, count: int) -> list[Any]:
        """An operand and copies of it, `count` in all."""
        return [x, *(x.copy() if self.device == "cpu" else x.clone() for _ in range(count - 1))]

    def settle(self, *products: Wanted, m: int, dtype: str, contract: str) -> None:
        """Have isogemm compile and time kernels for some products of m rows, which first calls on a GPU would do.

        Nothing where tuning is off, as it is in quick runs, and none so large that its budget does not hold two calls.
        """
        if self.device == "cpu" or not get_tuning():
            return
        asked = Contract.parse(contract)
        unit = asked.arithmetic.partition(":")[0]
        rate = self.limits({"fma": "fp32", "tensor_core": "bf16"}.get(unit, unit)).get("flops_per_second", math.inf)
        few = [x for x in products if 2 * m * x.n * x.k * x.batch <= rate * BUDGET / 2e3]
        posed = [pose(x, m=m, dtype=dtype, contract=asked) for x in few]
        chooser = open_device(DeviceId("cuda", 0)).chooser
        chooser.live.warm(posed, lambda done, total, text: None, budget=BUDGET)

    def forget(self) -> None:
        """Have clocks drop what they keep of calls, and with it the memory of operands."""
        for clock in self.clocks.values():
            forget: Callable[[], None] | None = getattr(clock, "forget", None)
            if forget:
                forget()

    def copies(self, nbytes: int) -> int:
        """How many sets of operands are past the cache when their turn comes again; 1 where one set fills it."""
        filled = CACHES_TO_FILL * self.cache
        return 1 if nbytes > filled else min(64, max(2, -(-filled // max(1, nbytes))))


def untuned() -> AbstractContextManager[None]:
    """No kernels are timed or compiled ahead: a first call takes the one that tables or a model put first."""
    return held("off", get_tuning, set_tuning)


def limited(threads: int) -> AbstractContextManager[None]:
    """Give every library that studies call so many threads, or with 0 each one's own count."""
    if not threads:
        return nullcontext()
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")  # what is loaded later would take all threads
    return limit_threads(threads)


def open_site(device: str = "cpu", *, ceilings: bool = True) -> Site:
    """Look at this machine and measure its ceilings. Raises DeviceError: no such device, or no GPU that can be used."""
    if device == "cpu":
        return _cpu(ceilings)
    if device != "cuda" or not accelerator().usable():
        known = "cpu or cuda" if device != "cuda" else "an NVIDIA GPU and torch for it"
        raise DeviceError("study", limit=known, value=repr(device), nearest="--device cpu")
    return _cuda(ceilings)


def _cpu(ceilings: bool) -> Site:
    import psutil

    from ..base.threads import get_num_threads
    from ..lab.stamp import cpu_model

    torch = importlib.util.find_spec("torch") is not None
    clocks: dict[str, Clock] = {"wall": WALL}
    if torch:
        from ..lab.profiler import ProfiledClock

        clocks["profiled"] = ProfiledClock(lambda: None, cuda=False)
    limits = {"fp32": measure_ceilings(get_num_threads())} if ceilings else {}
    free = psutil.virtual_memory().available
    return Site("cpu", cpu_model(), free, last_level_cache(), torch, clocks, limits)


def _cuda(ceilings: bool) -> Site:
    import torch

    from ..lab.gpu.bench import rooflines
    from ..lab.gpu.clock import GraphClock
    from ..lab.profiler import ProfiledClock

    wait = torch.cuda.synchronize
    clocks: dict[str, Clock] = {
        "device": GraphClock(),
        "wall": SyncClock(wait),
        "submit": SubmitClock(wait),
        "profiled": ProfiledClock(wait, cuda=True),
    }
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    limits = rooflines() if ceilings else {}
    free = torch.cuda.mem_get_info()[0]
    driver = open_device(DeviceId("cuda", 0)).chooser.admissions.stamp.get("driver", "")
    return Site("cuda", torch.cuda.get_device_name(), free, cache, True, clocks, limits, wait, driver)

"""Kernels on a GPU against each other: operands beyond the caches, device times, bits compared on the device."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from ...backends import open_device
from ...operands.device_array import DeviceId
from ...planner.records import notice
from ...planner.tables import DeviceLimits
from ...planner.trials import variant_of
from ...planner.tuning import Job, Offers
from ...problem.product import Addresses, Launch, Product
from ..ceilings import Ceilings
from ..rotation import CACHES_TO_FILL
from ..timing import Candidate, interleave
from .clock import GraphClock

ROUGH_SECONDS = 300e-6  # of calls in a rough time: enough to see the slow ones


class _Calls:
    """One kernel on rotating operands."""

    def __init__(self, launch: Launch, at: Sequence[Addresses], stream: Callable[[], int]) -> None:
        self.launch, self.at, self.period, self.stream = launch, at, len(at), stream

    def __call__(self, i: int) -> None:
        self.launch(self.at[i % self.period], self.stream())


class GpuBench:
    """One GPU; see `isogemm.planner.tuning.TuningBench`."""

    def __init__(self, device: int = 0) -> None:
        import torch

        here = open_device(DeviceId("cuda", device))
        self._torch, self.device, self._stream, self._here = torch, device, here.stream, here
        self._cache: int = here.facts.l2_bytes
        self._weights: tuple[Any, list[Any]] = (None, [])
        self._random = torch.Generator(device=torch.device("cuda", device)).manual_seed(1)

    def seconds(self, product: Product, launches: Mapping[str, Launch], *, rough: bool) -> dict[str, float]:
        """Device time of each call; weights are rotated past the second-level cache."""
        held, at = self._operands(product)
        clock, times = GraphClock(self.device), {}
        calls = {name: _Calls(launch, at, self._stream) for name, launch in launches.items()}
        if rough:
            for name, call in calls.items():
                try:
                    times[name] = _rough(clock, call)
                except Exception as error:
                    notice(f"{name} cannot be timed: {type(error).__name__}: {error}")
                clock.forget()
        else:
            found = interleave(
                [Candidate(name, call) for name, call in calls.items()],
                blocks=7, block_seconds=0.002, pause=0.0, clock=clock,
            )  # fmt: skip
            times = {name: timing.median for name, timing in found.items()}
        clock.forget()
        del held
        return times

    def differing(self, product: Product, one: Launch, other: Launch) -> int:
        """Output elements that differ, over operands of several kinds that show how sums are made."""
        found = self._here.chooser.live.bench.differing(product, one, [other])
        if found is None:
            raise MemoryError(f"no room to compare kernels on {product.m} x {product.n} x {product.k}")
        return int(found[0])

    def ceilings(self) -> DeviceLimits:
        """Bandwidth of a copy or of a sum, whichever is more, and torch's rate on a square product by arithmetic."""
        torch, where = self._torch, self._torch.device("cuda", self.device)
        source = torch.zeros(1 << 28, dtype=torch.float32, device=where)
        target, total = torch.empty_like(source), torch.empty((), device=where)
        clock, nbytes = GraphClock(self.device), 4 * source.numel()
        memory = max(
            2 * nbytes / _best(clock, lambda i: target.copy_(source)),
            nbytes / _best(clock, lambda i: torch.sum(source, 0, out=total)),
        )
        sizes = {"tensor_core": (torch.bfloat16, 8192), "fma": (torch.float32, 4096)}
        peaks = {name: round(_rate(clock, *of) / 1e12, 1) for name, of in sizes.items()}
        return DeviceLimits(round(memory / 1e9, 1), peaks)

    def _operands(self, product: Product) -> tuple[list[Any], list[Addresses]]:
        """Tensors to hold on to, and addresses of enough sets of them that none is still cached when its turn comes."""
        itemsize = 4 if product.dtype_b == "float32" else 2
        each = product.batch * product.n * product.k * itemsize
        copies = max(2, min(64, math.ceil(CACHES_TO_FILL * self._cache / max(1, each))))
        key = (product.batch, product.n, product.k, product.dtype_b)
        if self._weights[0] != key:
            self._weights = (None, [])
            self._weights = (key, [self._matrix(product, "b") for _ in range(copies)])
        weights = self._weights[1]
        sets = [(self._matrix(product, "a"), self._empty(product)) for _ in range(2)]
        pairs = [(w, *sets[i % 2]) for i, w in enumerate(weights)]
        return [weights, sets], [Addresses(a.data_ptr(), w.data_ptr(), out.data_ptr()) for w, a, out in pairs]

    def _matrix(self, product: Product, which: str) -> Any:
        """Normal values of one operand, packed, whatever its layout."""
        torch, where = self._torch, self._torch.device("cuda", self.device)
        rows = product.m if which == "a" else product.n
        dtype = getattr(torch, product.dtype_a if which == "a" else product.dtype_b)
        x = torch.randn(product.batch, rows, product.k, device=where, generator=self._random).to(dtype)
        strides = product.a if which == "a" else product.b
        along_k = strides.col == 1 if which == "a" else strides.row == 1
        return x if along_k else x.transpose(1, 2).contiguous()

    def _empty(self, product: Product) -> Any:
        dtype = getattr(self._torch, product.dtype_out)
        shape = (product.batch, product.m, product.n)
        return self._torch.full(shape, float("nan"), dtype=dtype, device=self._torch.device("cuda", self.device))


def rooflines() -> dict[str, Ceilings]:
    """Measured limits of the current GPU by arithmetic: a copy's bandwidth, and torch's rate on 8192 cubed."""
    import torch

    clock = GraphClock(torch.cuda.current_device())
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    memory = 2 * source.nbytes / _best(clock, lambda i: target.copy_(source))
    before, found = torch.backends.cuda.matmul.allow_tf32, {}
    try:
        for name, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            found[name] = Ceilings(1, memory, _rate(clock, dtype, 8192))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return found


def _rough(clock: GraphClock, call: _Calls) -> float:
    """The shorter of two replays of a few calls."""
    once = clock.elapsed(call, 0, 1)
    calls = max(1, min(2 * call.period, 16, round(ROUGH_SECONDS / max(once, 1e-6))))
    return min(clock.elapsed(call, 0, calls) for _ in range(2)) / calls


def _rate(clock: GraphClock, dtype: Any, size: int) -> float:
    """Operations a second of torch's product of two square matrices."""
    import torch

    where = torch.device("cuda", clock.device)
    x, y = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    z = torch.empty_like(x)
    seconds = _best(clock, lambda i: torch.mm(x, y, out=z))
    clock.forget()
    return 2 * size**3 / seconds


def _best(clock: GraphClock, run: Any) -> float:
    times = interleave([Candidate("ceiling", run)], blocks=5, block_seconds=0.01, pause=0.0, clock=clock)
    return min(times["ceiling"].samples)


def prepare_in_processes(device: int, jobs: Sequence[Job], *, seconds: float = 90.0) -> Offers:
    """Compile and try kernels side by side, and search libraries; verdicts and code reach this process through disk."""
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    offers: dict[tuple[str, Product], tuple[str, ...]] = {}
    try:
        with worker_processes(count) as pool:
            futures = {pool.submit(_prepare, device, job): job for job in jobs}
            for future in as_completed(futures, timeout=seconds):
                name, config, products = futures[future]
                why, offered = future.result()
                if why:
                    notice(why)
                if not config:
                    offers[name, products[0]] = offered
    except (TimeoutError, RuntimeError) as error:  # RuntimeError: a process died, with its pool
        notice(f"some kernels are compiled later: {type(error).__name__} {error}")
    return offers


@contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that compile side by side; at the end those that still do are ended, which a pool would wait for."""
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        workers = list(getattr(pool, "_processes", {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()


def _prepare(device: int, job: Job) -> tuple[str, tuple[str, ...]]:
    name, config, products = job
    logging.getLogger("isogemm").setLevel(logging.CRITICAL)  # the parent says it, once
    try:
        here = open_device(DeviceId("cuda", device)).chooser
        if not config:
            return "", tuple(here.families[name].configs(products[0]))
        family = here.families[name]
        for product in products:
            if family.supports(product, config):  # a table's ring may have room for few rows alone
                family.bind(product, config, device)
        for variant, product in {variant_of(p): p for p in products}.items():
            found = here.verdict(family, product, config)
            if found.state == "refused":
                return f"kernel {name} [{config}] is not used for {variant}: {found.detail}", ()
    except Exception as error:
        return f"kernel {name} [{config}] cannot be prepared: {type(error).__name__}: {error}", ()
    return "", ()

"""The device side of measuring: CUDA graphs, clocks, measured ceilings, and what the device is."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import typer

from isogemm.contract.spec import Contract
from isogemm.lab import Clock, Run, SubmitClock, SyncClock, WallClock, uncollected
from isogemm.planner.tuning import Wanted, pose
from isogemm.problem.product import Product

from .cases import Case
from .operands import few_rows

__all__ = ["CudaEngine", "HostEngine", "open_engine", "posed"]

Thunk = Callable[[], Any]
COPY_BYTES = 2 << 30
PEAK_SIZE = 8192
FIELDS = (
    *("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu"),
)


def posed(x: Case, m: int = 0) -> Product:
    """A drawn product as kernels see it; with `m` rows where that is given."""
    product = pose(Wanted("", x.n, x.k, x.layout), m=m or x.m, dtype=x.dtype, contract=Contract.parse(x.definition))
    return replace(product, dtype_bias=x.dtype) if x.bias else product


def compared(x: Case) -> Iterator[Product]:
    """A drawn product, and those that its bits are compared with."""
    yield posed(x)
    yield replace(posed(x), dtype_bias=None)
    yield from (posed(x, m) for m in few_rows(x.m))


class EventClock:
    """Device time between two events; the queue is held until all is in it, so that submission never shows."""

    HOLD_CYCLES = 60_000  # about 30 us at 2 GHz: longer than the host needs to enqueue an event and a graph

    def __init__(self) -> None:
        import torch

        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """See `isogemm.lab.Clock`."""
        import torch

        torch.cuda._sleep(self.HOLD_CYCLES)
        self._start.record()
        for i in range(first, first + calls):
            run(i)
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3

    def pause(self, seconds: float) -> None:
        """A device does not spin."""


class CudaEngine:
    """The current CUDA device, and what is timed on it.

    Attributes
    ----------
    clock, submit, wall : Clock
        Time on the device; on the host until calls are enqueued; on the host until the device is done.
    """

    device = "cuda"

    def __init__(self) -> None:
        import torch

        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self.clock: Clock = EventClock()
        self.submit: Clock = SubmitClock(torch.cuda.synchronize)
        self.wall: Clock = SyncClock(torch.cuda.synchronize)
        self._anchor = self._graph([lambda: torch.zeros(1, device="cuda")])  # a pool ends with its last graph

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize()

    def capture(self, calls: Sequence[Thunk]) -> Run:
        """What replays one CUDA graph of all calls, in a memory pool shared with the others: no result is kept.

        Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache around every capture.
        """
        graph = self._graph(calls)
        return lambda i: graph.replay()

    def _graph(self, calls: Sequence[Thunk]) -> Any:
        import torch

        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            calls[0]()  # libraries make workspaces for a stream at its first call
            with uncollected():  # a graph that is destroyed now would end this capture
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def forget_tables(self) -> None:
        """Let no row of a table say what serves a product.

        Verdicts on kernels of ours stay; those on a library's algorithms are rows' own.
        """
        here = _chooser()
        here.tables, here.shipped = [], ()

    def prepare(self, drawn: Sequence[Case]) -> None:
        """Compile, side by side, what first calls would choose for drawn products. Nothing is timed."""
        from isogemm.lab.gpu.bench import prepare_in_processes

        here = _chooser()
        jobs: dict[tuple[str, str], list[Product]] = {}
        for product in dict.fromkeys(itertools.chain.from_iterable(map(compared, drawn))):
            uses = (hint.use for hint in here.hints(product) if hint.use.family in here.families)
            use = next((u for u in uses if here.families[u.family].supports(product, u.config)), None)
            if use is not None and not here.families[use.family].library:
                jobs.setdefault((use.family, use.config), []).append(product)
        prepare_in_processes(0, [(*use, tuple(products)) for use, products in jobs.items()], seconds=240.0)

    def tune(self, drawn: Sequence[Case]) -> None:
        """Time what may serve drawn products, as their first calls would."""
        from isogemm.base.progress import progress_bar
        from isogemm.base.tuning import BUDGET

        with progress_bar() as tell:
            _chooser().live.warm(list(map(posed, drawn)), tell, budget=BUDGET)

    def ceilings(self) -> dict[str, float]:
        """Copy bandwidth (bytes read and written), and the best products of 8192 cubed by torch as peaks.

        ``tf32x3`` is a third of tf32: it takes three products.
        """
        import torch

        found = {"bytes_per_second": self._copy()}
        for name in ("bfloat16", "float16", "float32"):
            found[name] = self._peak(getattr(torch, name))
        before = torch.backends.cuda.matmul.allow_tf32
        try:
            torch.backends.cuda.matmul.allow_tf32 = True
            found["tf32x3"] = self._peak(torch.float32) / 3
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return found

    def _copy(self) -> float:
        import torch

        source = torch.ones(COPY_BYTES // 4, device="cuda")
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self._best(lambda: target.copy_(source))

    def _peak(self, dtype: Any) -> float:
        import torch

        a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda").to(dtype) for _ in range(2))
        return 2 * PEAK_SIZE**3 / self._best(lambda: torch.mm(a, b))

    def _best(self, call: Thunk) -> float:
        self.clock.elapsed(lambda i: call(), 0, 2)
        return min(self.clock.elapsed(lambda i: call(), 0, 2) / 2 for _ in range(5))

    def facts(self) -> dict[str, Any]:
        """Name, capability, driver, CUDA, the versions of the libraries, and clocks and power as they are now."""
        import torch

        found: dict[str, Any] = {
            "name": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
            "cuda": torch.version.cuda,
            "packages": _versions("torch", "triton", "nvmath-python", "cuda-bindings", "nvidia-cublas"),
        }
        words = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--id=0"]
        try:
            answer = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return found
        values = [value.strip() for value in answer.stdout.strip().split(",")]
        return found | (dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else {})


class HostEngine:
    """A CPU in a GPU's place: a graph is its calls. Shows that everything runs, and nothing else."""

    device = "cpu"

    def __init__(self) -> None:
        self.clock = self.submit = self.wall = WallClock()

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def capture(self, calls: Sequence[Any]) -> Any:
        """A function that makes the calls."""
        return lambda i: [call() for call in calls]

    def facts(self) -> dict[str, Any]:
        """A name."""
        return {"name": "cpu"}


def _chooser() -> Any:
    from isogemm.backends import open_device
    from isogemm.operands.device_array import DeviceId

    return open_device(DeviceId("cuda", 0)).chooser


def _versions(*names: str) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def open_engine() -> CudaEngine:
    """The CUDA device, or an exit that says what is missing."""
    try:
        import torch
    except ImportError as error:
        raise typer.BadParameter("this benchmark needs torch with CUDA: pip install 'isogemm[cuda]'") from error
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs an NVIDIA GPU; torch sees none")
    return CudaEngine()

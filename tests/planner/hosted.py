"""A device that is this process, for what chooses at run time: threads are tasks in a list, the clock is a rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tests.planner.fakes import H200, FakeFamily, FakeMachine, compute, linear

from isogemm.planner.admission import Admissions
from isogemm.planner.family import NotCompiledError
from isogemm.planner.live import Live
from isogemm.planner.products import Chooser
from isogemm.planner.records import Records
from isogemm.planner.relay import Relay
from isogemm.problem.product import Addresses, Product

P = linear(16, 48, 512)


class Kernels(FakeFamily):
    """A family whose kernels have to be compiled once, as a real one's."""

    def __init__(self, name: str, bench: Any, **more: Any) -> None:
        FakeFamily.__init__(self, name, **more)
        self.bench = bench

    def bind(self, product: Product, config: str, device: int) -> Callable[[Addresses, int], None]:
        code = self.name, config
        if code not in self.bench.compiled and not self.library:
            if self.bench.waits:
                raise NotCompiledError(config)
            self.bench.compiled.append(code)
        return super().bind(product, config, device)


@dataclass
class HostRound:
    times: list[float]
    bench: Any

    def done(self) -> bool:
        return bool(self.bench.finished)

    def valid(self) -> bool:
        return bool(self.bench.valid)

    def microseconds(self) -> Sequence[float]:
        return self.times

    def whole(self) -> float:
        return sum(self.times) * 1e-3


@dataclass
class HostBench:
    """A `LiveBench` whose other threads are a list of tasks, and whose clock is a rule."""

    clock: Callable[[str], float] = lambda config: 10.0
    finished: bool = True
    valid: bool = True
    waits: bool = False
    compiled: list[tuple[str, str]] = field(default_factory=list)
    tasks: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    rounds: list[tuple[str, ...]] = field(default_factory=list)
    compared: list[Product] = field(default_factory=list)
    in_a_row: int = 0  # of the last round

    @contextlib.contextmanager
    def compiled_alone(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def aside(self) -> Any:
        return contextlib.nullcontext()

    def busy(self) -> bool:
        return bool(self.tasks)

    def idle(self, seconds: float) -> bool:
        self.work()
        return True

    def submit(self, task: Callable[[], None], rank: int) -> None:
        self.tasks.append((rank, task))

    def work(self) -> None:
        """Other threads come to their ends."""
        while self.tasks:
            self.tasks.sort(key=lambda item: item[0])
            self.tasks.pop(0)[1]()

    def round(
        self, product: Product, launches: Sequence[Any], at: Addresses, stream: int, in_a_row: int, patience: int
    ) -> HostRound:
        names = []
        for launch in launches:
            for _ in range(in_a_row):
                launch(at, stream)
            names.append(launch.config)
        self.rounds.append(tuple(names))
        self.in_a_row = in_a_row
        return HostRound([self.clock(name) for name in names], self)

    def operands(self, product: Product) -> tuple[Any, Addresses]:
        a, b = operands(product)
        out = out_of(product)
        return (a, b, out), Addresses(a.ctypes.data, b.ctypes.data, out.ctypes.data)

    def synchronize(self) -> None:
        pass

    def differing(self, product: Product, ours: Any, others: Sequence[Any]) -> list[int]:
        self.compared.append(product)
        a, b = operands(product)
        want, at = out_of(product), None
        counts = []
        for launch in (ours, *others):
            out = out_of(product)
            at = Addresses(a.ctypes.data, b.ctypes.data, out.ctypes.data)
            launch(at, 0)
            if launch is ours:
                want = out
            else:
                counts.append(int((out.view(np.uint16) != want.view(np.uint16)).sum()))
        return counts


def operands(product: Product) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    shapes = (product.m, product.k), (product.n, product.k)
    return tuple(random.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16) for s in shapes)


def out_of(product: Product) -> np.ndarray:
    return np.full((product.m, product.n), np.nan, ml_dtypes.bfloat16)


class Here:
    """A chooser with its bench, and calls of products."""

    def __init__(
        self, folder: Path | None = None, clock: Callable[[str], float] = lambda c: 10.0, **kernels: Any
    ) -> None:
        self.bench = HostBench(clock)
        self.machine = FakeMachine(dict(H200))
        own = kernels.pop("own", ("best", "second", "third"))
        expects = {config: 10.0 + i for i, config in enumerate(own)}
        expects |= kernels.pop("expects", {})
        self.f = Kernels(
            "f", self.bench, offered=own, expects=lambda p, c: expects[c], faults=kernels.pop("faults", {})
        )
        self.library = Kernels(
            "library", self.bench, offered=kernels.pop("offered", ()), faults=kernels.pop("wrong", {})
        )
        found = Chooser(Admissions(self.machine, Records(folder)), {"f": self.f, "library": self.library})
        found.live = self.live = Live(found, self.bench)
        found._arithmetic = "tensor_core:sm90"
        self.chooser = found

    def call(self, relay: Relay, product: Product = P) -> str:
        """One call: the configuration whose result it is; what was timed behind it left the bits alone."""
        a, b = operands(product)
        out = out_of(product)
        families = self.chooser.families.values()
        first = {f.name: len(f.runs) for f in families}
        at = Addresses(a.ctypes.data, b.ctypes.data, out.ctypes.data)
        relay.now(at, 0)
        want = compute(product, at)[0]
        assert (out.view(np.uint16) == want.view(np.uint16)).all()
        return next(f.runs[first[f.name]][0] for f in families if len(f.runs) > first[f.name])

    def settle(self, relay: Relay, product: Product = P, calls: int = 12) -> str:
        """Calls until nothing is timed any more; what serves then."""
        self.bench.work()
        for _ in range(calls):
            self.call(relay, product)
        self.bench.work()
        return self.call(relay, product)

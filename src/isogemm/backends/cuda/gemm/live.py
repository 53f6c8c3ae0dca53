"""Choosing at run time, on a GPU: kernels timed by events behind a caller's own product, and work on a stream aside.

A round begins with a pause on the stream, during which all of it is enqueued, so that no time of the host shows; a
round whose pause was over too early does not count. Before each timed run a memset of twice the second-level cache
makes operands cold, and reading half of that writes back what the memset left there: kernels of 24 drawn products were
ordered as by graphs with rotated weights to 0.9 % of their time in the mean, after the memset alone to 2.2 % (H200,
three runs of each). Short kernels are run behind their like, without an event between: a launch that begins before the
one before it ends takes room from that, and what is fastest alone may be slower in a row. Each has weights of its own,
as a model's layers have: those of the launch before may still lie in the cache.

Nothing waits for the device: events are asked, at later calls, whether they have come to pass. All of it is done in the
relaxed capture mode, so that no thread that captures a graph is disturbed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

from ....base.background import busy, submit, wait
from ....base.dtypes import ITEMSIZE
from ....problem.product import Addresses, Launch, Product, Strides
from ..driver import facts
from ..driver.kernel import Bound
from ..driver.libcuda import NON_BLOCKING, context, driver, relaxed
from ..driver.nvrtc import function_of
from ..driver.waiting import compiled_alone
from .cublaslt import compare

COLD = 2  # times the second-level cache
# Nanoseconds of a round, for each kernel, and for each of its runs: enqueueing one run took some 40 us, others fewer.
PAUSE, EACH, RUN = 300_000, 80_000, 10_000
LINE, APART = 128, 1024  # bytes: places lie as the caller's do in the first, and a multiple of the second apart
SWITCH = 2e-5  # seconds that another thread may keep the GIL for, while a round is enqueued: each call gives it up
SHARE = 0.25  # of the memory that is free, for operands of a comparison


class _Switches:
    """While any thread is inside, each is asked for the GIL after `SWITCH`; behind the last one all is as before."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.setswitchinterval(self._before)


_SWITCHES = _Switches()


class CudaLive:
    """One GPU; see `isogemm.planner.relay.LiveBench`."""

    def __init__(self, device: int) -> None:
        self.device, self._spare = device, list[Any]()
        self.compiled_alone = compiled_alone

    def submit(self, task: Callable[[], None], rank: int) -> None:
        """Do it in a thread of low priority."""
        submit(task, rank)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A stream that nobody else has and that waits for no other.

        None of torch's: they are 32, handed out in turn, and what is done here would go into the graph of whoever
        captures on the same one.
        """
        import torch

        with torch.cuda.device(self.device), context(self.device), relaxed():
            self._kernels  # noqa: B018  # compiled here, not by a call
            try:
                stream = self._spare.pop()
            except IndexError:
                made = driver().handle("cuStreamCreate", NON_BLOCKING, doing="making a stream for trials")
                stream = torch.cuda.ExternalStream(made, device=self.device)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                self._spare.append(stream)

    def busy(self) -> bool:
        """Whether threads of ours compile, try or compare, for whatever product: rounds would wait for the GIL."""
        return busy()

    def idle(self, seconds: float) -> bool:
        """Wait for them."""
        return wait(seconds)

    def round(
        self, product: Product, launches: Sequence[Launch], at: Addresses, stream: int, in_a_row: int, patience: int
    ) -> CudaRound | None:
        """Enqueue runs of each; an output that is read as well is left alone, another ends with the bits it has."""
        import torch

        cache = facts.device(self.device).l2_bytes
        words, nbytes = cache // 4, _extents(product)[2] + LINE
        elsewhere = in_a_row > 1 and _larger(product)[1] <= cache and nbytes <= COLD * cache
        spare = elsewhere or product.c is not None
        pause, read = self._kernels
        with torch.cuda.device(self.device), relaxed():
            try:
                cold = torch.empty((COLD * words,), dtype=torch.int32, device="cuda")
                scratch = torch.empty(nbytes if spare else 0, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return None
            aside = at._replace(out=scratch.data_ptr() + at.out % LINE) if spare else at
            others = in_other_places(product, aside, in_a_row - 1, cold.data_ptr(), cache) if elsewhere else []
            runs = [at if product.c is None else aside, *islice(cycle([*others, aside]), in_a_row - 1)]
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in launches]
            waiting = patience * (PAUSE + (EACH + RUN * in_a_row) * len(launches))
            gate = torch.cuda.Event()
            with _SWITCHES:
                pause(stream, waiting)
                gate.record()
                for launch, (begin, end) in zip(launches, pairs, strict=True):
                    cold.zero_()
                    read(stream, cold.data_ptr(), words)
                    begin.record()
                    for place in runs:
                        launch(place, stream)
                    end.record()
                return CudaRound(pairs, in_a_row, 1e-6 * waiting, not gate.query())

    @functools.cached_property
    def _kernels(self) -> tuple[Bound, Bound]:
        """``pause(stream, ns)`` and ``read(stream, address, words)``."""
        pause, read = (function_of("gemm/cold.cu", name, self.device) for name in ("pause", "read"))
        blocks = facts.device(self.device).multiprocessors
        return pause.bind(["i64"], grid=(1,), block=(1,)), read.bind(["ptr", "i64"], grid=(4 * blocks,), block=(256,))

    def operands(self, product: Product) -> tuple[Any, Addresses]:
        """Normal values."""
        return compare.operands(product, "normal", self._generator())

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize(self.device)

    def differing(self, product: Product, ours: Launch, others: Sequence[Launch]) -> list[int] | None:
        """What `compare.differing` counts, where its operands fit into a part of the memory that is free."""
        import torch

        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if compare.nbytes(product) > SHARE * free:
            return None
        try:
            return compare.differing(product, ours, others, self._generator(), facts.current_stream(self.device))
        except torch.OutOfMemoryError:
            return None

    def _generator(self) -> Any:
        import torch

        return torch.Generator(device=torch.device("cuda", self.device))


class CudaRound:
    """Pairs of events, one for each kernel."""

    def __init__(self, pairs: list[list[Any]], in_a_row: int, waiting: float, valid: bool) -> None:
        self.pairs, self._in_a_row, self._waiting, self._valid = pairs, in_a_row, waiting, valid

    def valid(self) -> bool:
        """Whether the pause was still on when the last launch had been enqueued."""
        return self._valid

    def done(self) -> bool:
        """Whether the last event has come to pass."""
        with relaxed():
            return bool(self.pairs[-1][1].query())

    def microseconds(self) -> list[float]:
        """Microseconds of one launch, by the events around those of each kernel."""
        with relaxed():
            return [1e3 / self._in_a_row * float(begin.elapsed_time(end)) for begin, end in self.pairs]

    def whole(self) -> float:
        """Milliseconds of the pause, and from the first event to the last where the host was ahead of them."""
        if not self._valid:
            return self._waiting
        with relaxed():
            return self._waiting + float(self.pairs[0][0].elapsed_time(self.pairs[-1][1]))


def in_other_places(product: Product, at: Addresses, count: int, room: int, cache: int) -> list[Addresses]:
    """Up to `count` addresses with the larger operand elsewhere, in the memory of twice the cache's bytes at `room`.

    What is not in the cache, its second half, comes first.
    """
    larger, size = _larger(product)
    each = -(-(size + LINE) // APART) * APART
    begins = (half + i * each for half in (room + cache, room) for i in range(cache // each))
    offset = getattr(at, larger) % LINE
    return [at._replace(**{larger: begin + offset}) for begin in islice(begins, count)]


def _larger(product: Product) -> tuple[str, int]:
    """Which of A and B has more bytes, and how many."""
    a, b, _ = _extents(product)
    return ("a", a) if a > b else ("b", b)


def _extents(p: Product) -> tuple[int, int, int]:
    """Bytes from the first element of A, of B and of the output to behind their last."""

    def of(x: Strides, rows: int, columns: int, dtype: str) -> int:
        last = (rows - 1) * x.row + (columns - 1) * x.col + (p.batch - 1) * x.batch
        return (last + 1) * ITEMSIZE[dtype]

    return of(p.a, p.m, p.k, p.dtype_a), of(p.b, p.k, p.n, p.dtype_b), of(p.out, p.m, p.n, p.dtype_out)

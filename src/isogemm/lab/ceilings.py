"""Measured ceilings of a roofline: how fast memory can be read, and how fast fp32 can be multiplied and added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError
from .clock import WALL, Clock
from .probes import ACCUMULATORS, add_kernel, multiply_add_kernel
from .rotation import last_level_cache
from .timing import Candidate, Timing, interleave

# Handing a slice to a thread costs up to 0.1 ms; reading this much takes 4 ms and more.
READ_BYTES = 256 << 20
PEAK_ROUNDS = 1 << 18


@dataclass(frozen=True, slots=True)
class Work:
    """What a call has to do at least: floating-point operations, and bytes from and to memory."""

    flops: int
    nbytes: int

    @classmethod
    def gemm(cls, m: int, n: int, k: int, *, itemsize: int, out_itemsize: int | None = None, batch: int = 1) -> Work:
        """2 m n k operations; every operand read once and the result written once."""
        out = itemsize if out_itemsize is None else out_itemsize
        return cls(2 * m * n * k * batch, ((m + n) * k * itemsize + m * n * out) * batch)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of some threads of this machine.

    Attributes
    ----------
    threads : int
    bytes_per_second : float
        Streaming read.
    flops_per_second : float
        fp32 multiply and add.
    """

    threads: int
    bytes_per_second: float
    flops_per_second: float

    def bound(self, work: Work) -> float:
        """Seconds below which `work` cannot be done: the larger of flops / peak and bytes / bandwidth."""
        return max(work.flops / self.flops_per_second, work.nbytes / self.bytes_per_second)

    def fraction(self, work: Work, seconds: float) -> float:
        """Share of the roofline reached by doing `work` in `seconds`. Above 1 where caches serve the operands."""
        return self.bound(work) / seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in GB/s and GFLOP/s."""
        return {
            "threads": self.threads,
            "read_gb_per_second": self.bytes_per_second / 1e9,
            "fp32_gflop_per_second": self.flops_per_second / 1e9,
        }


class _Team:
    """Runs one function on every thread's share at once: all but the first on helpers."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise OptionError("threads", limit="at least 1", value=threads, nearest=1)
        self.threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def __call__(self, work: Callable[[int], int]) -> int:
        others = [self._helpers.submit(work, t) for t in range(1, self.threads)] if self._helpers else []
        return work(0) + sum(o.result() for o in others)


class StreamingRead:
    """Reads a buffer much larger than the caches, once a call, on some threads.

    A shared host's bandwidth moves within minutes (33 to 60 GB/s was seen on one machine), so a fraction of it
    only means something when both are timed together: give `candidate` to `interleave` beside the kernels.

    Parameters
    ----------
    threads : int
    nbytes : int, optional
        Size of the buffer; by default 256 MiB or four last-level caches, whichever is more.

    Raises
    ------
    OptionError
        Less than one thread, or less than 8 bytes a thread.
    """

    def __init__(self, threads: int, nbytes: int | None = None) -> None:
        size = max(READ_BYTES, 4 * last_level_cache()) if nbytes is None else nbytes
        self._team = _Team(threads)
        if size < 8 * threads:
            raise OptionError("nbytes", limit="8 bytes a thread", value=size, nearest=8 * threads)
        self._shares = np.array_split(np.ones(size // 8, np.int64), threads)
        self.threads, self.nbytes = threads, size // 8 * 8

    def run(self, i: int) -> int:
        """Read everything once; returns the sum, which depends on every byte."""
        add = add_kernel()
        return self._team(lambda t: int(add(self._shares[t])))

    @property
    def candidate(self) -> Candidate:
        """For `interleave`; ``timing.scaled(nbytes / read.nbytes)`` is then the time of reading `nbytes`."""
        return Candidate("read", self.run)


def streaming_read(threads: int = 1, *, blocks: int = 5, clock: Clock = WALL) -> float:
    """Bytes per second at which `threads` threads read memory: the best of some blocks, for it is a ceiling."""
    read = StreamingRead(threads)
    return read.nbytes / _best(read.candidate, blocks, clock)


def fp32_peak(threads: int = 1, *, blocks: int = 5, clock: Clock = WALL) -> float:
    """fp32 operations per second of multiply-adds in registers, two operations each: the best of some blocks."""
    team, (kernel, width) = _Team(threads), multiply_add_kernel()
    flops = 2 * width * ACCUMULATORS * PEAK_ROUNDS * threads
    # The result is finite and never used; returning it keeps the loop alive.
    candidate = Candidate("fp32 peak", lambda i: team(lambda t: int(kernel(PEAK_ROUNDS))))
    return flops / _best(candidate, blocks, clock)


def measure_ceilings(threads: int = 1, *, clock: Clock = WALL) -> Ceilings:
    """Both ceilings, in about a second."""
    return Ceilings(threads, streaming_read(threads, clock=clock), fp32_peak(threads, clock=clock))


def _best(candidate: Candidate, blocks: int, clock: Clock) -> float:
    timings: Mapping[str, Timing] = interleave([candidate], blocks=blocks, clock=clock)
    return min(timings[candidate.name].samples)

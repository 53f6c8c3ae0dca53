"""Interleaved timing: every candidate in blocks of calls, round after round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..base import arguments
from ..errors import LimitError, OptionError
from .clock import WALL, Clock, Run

Progress = Callable[[int, int, str], None]

MAX_CALLS = 1 << 26
# Calls this many blocks long are not warmed up again: waking threads and refilling a cache take about a
# millisecond, which is nothing beside them.
LONG_CALL_BLOCKS = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to time.

    Attributes
    ----------
    name : str
        Unique among the candidates of one comparison.
    run : callable
        ``run(i)`` makes one call; `i` counts up over all calls of this candidate, to rotate operands with.
    seconds : float
        Of a call, where that is known: where it takes much of a block, it is not called again to be calibrated.
    most : int
        Calls in a block at most, for a clock that does not see all that a call costs; 0 for no limit.
    """

    name: str
    run: Run
    seconds: float = 0.0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one candidate; a sample is the mean over one block of calls.

    Attributes
    ----------
    name : str
    median, p5, p95 : float
        Of the samples, in seconds per call.
    samples : tuple of float
        One a round, in the order of rounds: sample r of two candidates timed together are neighbours in time.
    calls : int
        Calls in a block.
    """

    name: str
    median: float
    p5: float
    p95: float
    samples: tuple[float, ...]
    calls: int

    @classmethod
    def of(cls, name: str, samples: Sequence[float], calls: int) -> Timing:
        """Summarize samples in seconds per call.

        Raises
        ------
        OptionError
            No samples, or one that is not a positive finite number.
        """
        values = tuple(float(s) for s in samples)
        if not values or not all(math.isfinite(s) and s > 0 for s in values):
            raise OptionError(
                f"samples of {name!r}", limit="one or more positive finite times", value=values, nearest="time it again"
            )
        p5, median, p95 = (float(q) for q in np.percentile(values, [5, 50, 95]))
        return cls(name, median, p5, p95, values, calls)

    def scaled(self, factor: float, name: str | None = None) -> Timing:
        """The same samples times `factor`: a ceiling measured on other amounts of work, brought to this work."""
        return Timing.of(name or self.name, [s * factor for s in self.samples], self.calls)


@dataclass(slots=True)
class _Runner:
    """A candidate with its block length and the index of its next call."""

    candidate: Candidate
    clock: Clock
    calls: int = 1
    warm: int = 1
    next: int = 0

    def take(self, calls: int) -> float:
        first, self.next = self.next, self.next + calls
        return self.clock.elapsed(self.candidate.run, first, calls)

    def calibrate(self, block_seconds: float) -> None:
        """Choose how many calls make a block. The very first call may compile and is not counted."""
        calls, most = 1, self.candidate.most or MAX_CALLS
        if (seconds := self.candidate.seconds) >= block_seconds / 4:
            self._settle(seconds, block_seconds, most)
            return
        self.take(1)
        while (seconds := self.attempt(calls, block_seconds)) < block_seconds / 4 and calls < most:
            calls = min(2 * calls, most)
        if calls == MAX_CALLS and seconds < block_seconds / 4:
            limit, nearest = f"measurable within {MAX_CALLS} calls", "a candidate that works longer"
            raise LimitError(f"time of {self.candidate.name!r}", limit=limit, value=f"{seconds} s", nearest=nearest)
        self._settle(max(seconds, 1e-12) / calls, block_seconds, most)

    def _settle(self, per_call: float, block_seconds: float, most: int) -> None:
        self.calls = max(1, min(most, round(block_seconds / per_call)))
        long = per_call >= LONG_CALL_BLOCKS * block_seconds
        self.warm = 0 if long or most == 1 else min(most, math.ceil(block_seconds / 4 / per_call))

    def attempt(self, calls: int, block_seconds: float) -> float:
        """Seconds that `calls` take. Where they seem to fill a block they are repeated and the least counts: one
        interruption (16 ms was seen on a call of 6 microseconds) would leave every block with a single call."""
        seconds = self.take(calls)
        if seconds < block_seconds / 4:
            return seconds
        repeats = 1 if seconds >= LONG_CALL_BLOCKS * block_seconds else 2
        return min(seconds, *(self.take(calls) for _ in range(repeats)))

    def block(self) -> float:
        """Seconds per call over one block. Its first calls are thrown away: they find the threads asleep and
        the caches full of the previous candidate's operands."""
        if self.warm:
            self.take(self.warm)
        return self.take(self.calls) / self.calls


def interleave(
    candidates: Sequence[Candidate],
    *,
    blocks: int = 9,
    block_seconds: float = 0.02,
    pause: float = 0.08,
    progress: Progress | None = None,
    clock: Clock = WALL,
) -> dict[str, Timing]:
    """Time candidates against each other in interleaved blocks.

    Each round times one block of every candidate, in an order that rotates and turns round between rounds, so
    that a slow spell of the machine falls on all of them and none always follows the same neighbour. Before
    each block there is a pause, until no thread of the process works: OpenBLAS, OpenMP runtimes and thread pools
    spin after a call, for a tenth of a second some of them, and interleaving libraries call by call gave errors
    of up to 4x.

    Parameters
    ----------
    candidates : sequence of Candidate
        With different names.
    blocks : int
        Rounds, and so samples of each candidate. Fewer than five cannot decide a verdict.
    block_seconds : float
        Length of a block; a call longer than that is a block by itself.
    pause : float
        Seconds of rest before each block, at least; 0 for none (`Clock.pause`).
    progress : callable, optional
        Called as ``progress(done, total, name)`` when a block (or a calibration) is done.
    clock : Clock
        Where time comes from.

    Returns
    -------
    dict of str to Timing
        In the order of `candidates`.

    Raises
    ------
    OptionError
        No candidates, two of one name, or an option out of range.
    LimitError
        A candidate too short for the clock.
    """
    _check(candidates, blocks, block_seconds, pause)
    report = progress or (lambda done, total, name: None)
    total, done = (blocks + 1) * len(candidates), 0
    runners = [_Runner(c, clock) for c in candidates]
    for runner in runners:
        clock.pause(pause)
        runner.calibrate(block_seconds)
        report(done := done + 1, total, runner.candidate.name)
    samples: dict[str, list[float]] = {c.name: [] for c in candidates}
    for order in _orders(len(runners), blocks):
        for runner in (runners[i] for i in order):
            clock.pause(pause)
            samples[runner.candidate.name].append(runner.block())
            report(done := done + 1, total, runner.candidate.name)
    return {r.candidate.name: Timing.of(r.candidate.name, samples[r.candidate.name], r.calls) for r in runners}


def _orders(count: int, rounds: int) -> Iterator[list[int]]:
    """Rotations of 0..count-1, every second cycle of them backwards."""
    for r in range(rounds):
        order = [(i + r) % count for i in range(count)]
        yield order[::-1] if (r // count) % 2 else order


def _check(candidates: Sequence[Candidate], blocks: int, block_seconds: float, pause: float) -> None:
    names = [c.name for c in candidates]
    if not names or len(set(names)) < len(names):
        raise OptionError("candidates", limit="one or more, with different names", value=names, nearest="rename them")
    if arguments.whole("blocks", blocks) < 1:
        raise OptionError("blocks", limit="at least 1", value=blocks, nearest=1)
    if not 0 < arguments.number("block_seconds", block_seconds) < math.inf:
        raise OptionError("block_seconds", limit="a positive number", value=block_seconds, nearest=0.02)
    if not 0 <= arguments.number("pause", pause) < math.inf:
        raise OptionError("pause", limit="zero or a positive number", value=pause, nearest=0.04)

"""From a case to a row: operands, correctness, interleaved timings, verdicts against the bars."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import isogemm
from isogemm.lab import (
    Candidate,
    Ceilings,
    Clock,
    CpuClock,
    Progress,
    QuietClock,
    StreamingRead,
    Timing,
    Verdict,
    WallClock,
    fastest,
    interleave,
    limit_threads,
    measure_ceilings,
    row,
    verdict,
)

from ..common import Bar, Row, least_speed, repeated, summarize, told, words_of
from .cases import DRAWN, GROUPS, Case
from .operands import PEERS, Setup, build, compare
from .processes import ReportedClock, process_candidates

__all__ = ["CLOCKS", "Machine", "Settings", "against", "judge", "measure"]

CLOCKS = {"wall": WallClock, "cpu": CpuClock, "quiet": QuietClock}


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure, and with whom."""

    peers: tuple[str, ...]
    threads: tuple[int, ...]
    blocks: int = 9
    block_seconds: float = 0.02
    pause: float = 0.08
    seed: int = 0
    quick: bool = False
    clock: str = "wall"
    count: int = DRAWN

    @classmethod
    def quickly(cls, peers: tuple[str, ...], threads: tuple[int, ...], seed: int) -> Settings:
        """To see that all runs: five short blocks are the least that can decide anything."""
        return cls(peers, threads, blocks=5, block_seconds=0.002, pause=0.005, seed=seed, quick=True)

    def command(self, case: Case, threads: int) -> str:
        """The line that measures one row again."""
        words = ["--suite", case.suite, "--only", " ".join(case.words[1:])]
        words += told(
            threads=threads,
            peers=",".join(self.peers) if self.peers != PEERS else "",
            clock=self.clock if self.clock != "wall" else "",
            count=self.count if self.count != DRAWN else 0,
        )
        return repeated("cpu", words, seed=self.seed, quick=self.quick)


@dataclass(slots=True)
class Machine:
    """Ceilings, measured once a thread count."""

    _ceilings: dict[int, Ceilings] = field(default_factory=dict)
    _reads: dict[int, StreamingRead] = field(default_factory=dict)

    def ceilings(self, threads: int) -> Ceilings:
        """Read bandwidth and fp32 peak of so many threads."""
        if threads not in self._ceilings:
            self._ceilings[threads] = measure_ceilings(threads)
        return self._ceilings[threads]

    def read(self, threads: int) -> StreamingRead:
        """A streaming read to time beside a case."""
        if threads not in self._reads:
            self._reads[threads] = StreamingRead(threads)
        return self._reads[threads]

    def to_dict(self) -> list[dict[str, Any]]:
        """All that was measured."""
        return [c.to_dict() for c in self._ceilings.values()]


def measure(case: Case, settings: Settings, machine: Machine, report: Progress) -> Iterator[dict[str, Any]]:
    """Rows of a case, one for each thread count. An error of ours becomes a row that says so."""
    if case.form == "process":
        spent, broken = _processes(case, settings, report)
        yield _row(case, 0, settings, spent, None, None, "", broken)
        return
    try:
        setup = build(case, settings.peers, settings.seed)
    except Exception as error:
        failure = words_of(error)
        yield from (_row(case, t, settings, {}, None, None, "", failure) for t in settings.threads)
        return
    for threads in settings.threads:
        with limit_threads(threads):
            correctness, broken = _checked(setup, settings.seed)
            candidates = setup.peers if broken else (setup.ours, *setup.peers)
            clock = CLOCKS[settings.clock]()
            timings = _timed(case, candidates, threads, settings, machine, report, clock) if candidates else {}
            ceilings = machine.ceilings(threads)
            found = _row(case, threads, settings, timings, correctness, ceilings, setup.operands, broken)
            if isinstance(clock, QuietClock) and clock.held_up:
                found["held_up"] = sum(clock.held_up) / len(clock.held_up)
            yield found
    del setup
    gc.collect()  # a case holds up to a gigabyte; the next one needs it


def _processes(case: Case, settings: Settings, report: Progress) -> tuple[dict[str, Timing], str | None]:
    """Timings, and the last words of a process that failed."""
    clock, candidates = ReportedClock(), process_candidates(case.label)
    try:
        if not case.label.startswith("compiling"):
            return interleave(
                candidates, blocks=settings.blocks, block_seconds=1e-3, clock=clock, progress=report
            ), None
        # Compiling takes many seconds and is one sample: it is not calibrated.
        return {c.name: Timing.of(c.name, [clock.elapsed(c.run, 0, 1)], 1) for c in candidates}, None
    except RuntimeError as error:
        return {}, words_of(error)


def _checked(setup: Setup, seed: int) -> tuple[dict[str, Any] | None, str | None]:
    """Correctness of one call of ours, and what it raised."""
    try:
        if setup.result is None:
            setup.ours.run(0)
            return None, None
        return compare(*setup.result(), np.random.default_rng(seed + 1)), None
    except Exception as error:
        return None, words_of(error)


def _timed(
    case: Case,
    candidates: Sequence[Candidate],
    threads: int,
    settings: Settings,
    machine: Machine,
    report: Progress,
    clock: Clock,
) -> dict[str, Timing]:
    read = machine.read(threads) if case.streams else None
    timings = interleave(
        [*candidates, read.candidate] if read else candidates,
        blocks=settings.blocks,
        block_seconds=settings.block_seconds,
        pause=settings.pause,
        progress=report,
        clock=clock,
    )
    if read and case.work:
        timings["read"] = timings["read"].scaled(case.work.nbytes / read.nbytes)
    return timings


def judge(bar: Bar, timings: Mapping[str, Timing]) -> str:
    """Whether a bar is ``MET``, ``NOT MET``, ``AMBIGUOUS``, or ``NOT MEASURED``."""
    ours = timings.get("isogemm")
    if ours is None:
        return "NOT MEASURED"
    if bar.against == "seconds":
        return "MET" if ours.p95 <= bar.value else "NOT MET" if ours.p5 > bar.value else "AMBIGUOUS"
    # "fastest of the two" is not known while one of the two is missing.
    wanted = PEERS if bar.against == "fastest" else (bar.against,)
    if any(name not in timings for name in wanted):
        return "NOT MEASURED"
    return verdict(ours, fastest(timings, *wanted)).against(bar.value)


def against(row: Row, peer: str) -> float | None:
    """Speed relative to a peer by the samples of a row; ``fastest`` is the faster of those that ran."""
    return least_speed(row, "isogemm", PEERS if peer == "fastest" else (peer,))


def of_threads(rows: Sequence[Row], threads: int) -> list[dict[str, Any]]:
    """`GROUPS` of the rows with so many threads."""
    return summarize([row for row in rows if row["threads"] == threads], GROUPS, against)


def _row(
    case: Case,
    threads: int,
    settings: Settings,
    timings: Mapping[str, Timing],
    correctness: Mapping[str, Any] | None,
    ceilings: Ceilings | None,
    operands: str,
    error: str | None,
) -> dict[str, Any]:
    ours = timings.get("isogemm")
    verdicts: list[Verdict] = [verdict(ours, t) for t in timings.values() if t is not ours] if ours else []
    bars = [bar for bar in case.bars if not bar.threads or threads in bar.threads]
    plan = _plan(case, threads)
    return row(
        case.name,
        command=settings.command(case, threads),
        timings=timings,
        verdicts=verdicts,
        kernel=plan["strategy"] if plan else None,
        plan=plan,
        correctness=correctness,
        work=case.work,
        ceilings=ceilings,
        seed=settings.seed,
        threads=threads,
        operands=operands,
        bars=[{"bar": str(bar), "result": judge(bar, timings)} for bar in bars],
        error=error,
        **case.facts,
    )


def _plan(case: Case, threads: int) -> dict[str, Any] | None:
    """The planner's plan for this product: for one item where there are several, since threads then share items."""
    if not case.m or case.form == "reference":
        return None
    return isogemm.plan(
        case.m,
        case.n,
        case.k,
        dtype=case.dtype,
        trans_a=case.layout[0],
        trans_b=case.layout[1],
        packed=case.form == "packed",
        threads=threads if case.batch == 1 else 1,
    ).to_dict()

"""How long the demo's work takes with each provider, by the measuring core of `isogemm.lab`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from .. import lab
from ..base.threads import get_num_threads
from .forward import Multiplier, embed
from .minilm import Dense, MiniLM
from .trials import alone

Array = NDArray[Any]

# A pass takes tens of milliseconds, so every block is a call or a few. Five is the fewest that can decide a verdict.
BLOCKS = 5
BLOCK_SECONDS = 0.05
# Of those that were compared: a pass is one of some forty, and takes a tenth of a second.
SENTENCES = 8
# A candidate whose slow blocks take this many times its fastest one was disturbed, by other work or by its own threads.
STEADY = 3.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A named piece of the demo's work, run by a provider."""

    name: str
    run: Callable[[Multiplier], object]


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of one workload, by provider and threads, and the verdict on isogemm against its fastest peer."""

    workload: str
    timings: dict[str, lab.Timing]
    verdict: lab.Verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; seconds per run of the workload."""
        seconds = {
            name: {"median": timing.median, "p5": timing.p5, "p95": timing.p95} for name, timing in self.timings.items()
        }
        verdict: dict[str, Any] = {"ratio": self.verdict.ratio, "low": self.verdict.low, "high": self.verdict.high}
        verdict |= {"peer": self.verdict.peer}
        return {"workload": self.workload, "seconds": seconds, "verdict": verdict | {"word": str(self.verdict.word)}}


def workloads(model: MiniLM, batch: Sequence[Array], inputs: Sequence[tuple[Dense, Array]]) -> tuple[Workload, ...]:
    """Some sentences alone and in one batch, and the model's linears without anything else at M = 1 and at all rows.

    The linears' weights together are larger than most last-level caches, so at M = 1 they stream from memory as in
    decoding.
    """
    tokens, some = len(inputs[0][1]), batch[:SENTENCES]

    def linears(m: int) -> Callable[[Multiplier], object]:
        return lambda provider: [provider.linear(x[:m], linear) for linear, x in inputs]

    return (
        Workload(f"{len(some)} sentences, one by one", lambda provider: alone(model, some, provider)),
        Workload(f"{len(some)} sentences in one batch", lambda provider: embed(model, some, provider)),
        Workload(f"{len(inputs)} linears, M = 1", linears(1)),
        Workload(f"{len(inputs)} linears, M = {tokens}", linears(tokens)),
    )


def measure(workload: Workload, ours: Multiplier, peer: Multiplier) -> Timings:
    """Time `workload` in interleaved blocks: `ours`, and `peer` with one BLAS thread and with all of them.

    The peer that counts is the faster one: on a busy machine a BLAS that waits for all of its threads can be slower
    than with one.
    """
    pools = _blas_pools()
    before = [pool.get_num_threads() for pool in pools]

    def candidate(provider: Multiplier, name: str, threads: int = 0) -> lab.Candidate:
        def run(_: int) -> object:
            for pool in pools if threads else ():
                pool.set_num_threads(threads)
            return workload.run(provider)

        return lab.Candidate(name, run)

    names = {f"{peer.name}, {_threads(count)}": count for count in sorted({1, *before})} if pools else {peer.name: 0}
    peers = [candidate(peer, name, count) for name, count in names.items()]
    try:
        timings = lab.interleave([*peers, candidate(ours, ours.name)], blocks=BLOCKS, block_seconds=BLOCK_SECONDS)
    finally:
        for pool, count in zip(pools, before, strict=True):
            pool.set_num_threads(count)
    return judge(workload.name, timings, ours.name, lab.fastest(timings, *names).name)


def judge(workload: str, timings: dict[str, lab.Timing], ours: str, peer: str) -> Timings:
    """The row of these timings. One that varied by more than `STEADY` decides nothing, whatever its interval says."""
    verdict = lab.verdict(timings[ours], timings[peer])
    if any(timing.p95 > STEADY * min(timing.samples) for timing in (timings[ours], timings[peer])):
        verdict = replace(verdict, word="AMBIGUOUS")
    return Timings(workload, timings, verdict)


def conditions() -> str:
    """Under what the times were taken: threads, and the load average where the system has one."""
    count = get_num_threads()
    text = f"isogemm with {_threads(count)}; numpy with 1 and with all, the faster one counts"
    return text + (f"; load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "")


def _blas_pools() -> list[Any]:
    """Handles on the thread counts of the loaded BLAS libraries; none where the BLAS has no such setting."""
    import threadpoolctl

    return list(threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"

"""How long the demo's work takes with each provider, by the measuring core of `isogemm.lab`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .. import lab
from .forward import Provider, embed
from .minilm import Linear, MiniLM
from .trials import alone

__all__ = ["Row", "Workload", "measure", "workloads"]

Array = NDArray[Any]

# A pass takes tens of milliseconds, so every block is a call or a few. Five is the fewest that can decide a verdict.
BLOCKS = 5
BLOCK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """A named piece of the demo's work, run by a provider."""

    name: str
    run: Callable[[Provider], object]


@dataclass(frozen=True, slots=True)
class Row:
    """Timings of one workload, by provider, and the verdict on isogemm against its peer."""

    workload: str
    timings: dict[str, lab.Timing]
    verdict: lab.Verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; seconds per run of the workload."""
        seconds = {
            name: {"median": timing.median, "p5": timing.p5, "p95": timing.p95} for name, timing in self.timings.items()
        }
        verdict = {"ratio": self.verdict.ratio, "low": self.verdict.low, "high": self.verdict.high}
        return {"workload": self.workload, "seconds": seconds, "verdict": verdict | {"word": str(self.verdict.word)}}


def workloads(model: MiniLM, batch: Sequence[Array], inputs: Sequence[tuple[Linear, Array]]) -> tuple[Workload, ...]:
    """The sentences alone and in one batch, and the model's linears without anything else at M = 1 and at all rows.

    The linears' weights together are larger than most last-level caches, so at M = 1 they stream from memory as in
    decoding.
    """
    tokens = len(inputs[0][1])

    def linears(m: int) -> Callable[[Provider], object]:
        return lambda provider: [provider.linear(x[:m], linear) for linear, x in inputs]

    return (
        Workload(f"{len(batch)} sentences, one by one", lambda provider: alone(model, batch, provider)),
        Workload(f"{len(batch)} sentences in one batch", lambda provider: embed(model, batch, provider)),
        Workload(f"{len(inputs)} linears, M = 1", linears(1)),
        Workload(f"{len(inputs)} linears, M = {tokens}", linears(tokens)),
    )


def measure(workload: Workload, ours: Provider, peer: Provider) -> Row:
    """Time `workload` with both providers in interleaved blocks."""

    def candidate(provider: Provider) -> lab.Candidate:
        return lab.Candidate(provider.name, lambda i: workload.run(provider))

    timings = lab.interleave([candidate(peer), candidate(ours)], blocks=BLOCKS, block_seconds=BLOCK_SECONDS)
    return Row(workload.name, timings, lab.verdict(timings[ours.name], timings[peer.name]))

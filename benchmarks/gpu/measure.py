"""From a GPU case to a row: correctness, interleaved replays, verdicts against the bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from isogemm.lab import Candidate, Ceilings, Clock, Progress, Timing, fastest, interleave, row, verdict

from ..common import Bar, graph_calls, least_speed, repeated, words_of
from .cases import Case
from .engine import CudaEngine
from .kernels import kernel_of
from .operands import Peers, Setup, Shelf, build
from .peers import fastest_torch

__all__ = ["OURS", "Settings", "against", "judge", "measure"]

OURS = "isogemm"
SPACED = ", spaced"
MOST_CALLS = 400


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Samples of each candidate.
    replay_seconds : float
        About how long one replay of a graph is, and the least length of a block.
    seed : int
    options : tuple of str
        What the command was given beside, for the line that repeats a row.
    """

    rounds: int = 7
    replay_seconds: float = 1.5e-3
    seed: int = 0
    options: tuple[str, ...] = ()
    quick: bool = False

    def command(self, case: Case) -> str:
        """The line that measures one row again."""
        words = ["--suite", case.suite, "--only", " ".join(case.words[1:]), *self.options]
        return repeated("gpu", words, seed=self.seed, quick=self.quick)


def measure(
    case: Case,
    settings: Settings,
    engine: CudaEngine,
    shelf: Shelf,
    ceilings: Mapping[str, float],
    peers: Peers = MappingProxyType({}),
    report: Progress | None = None,
) -> dict[str, Any]:
    """The row of a case. An error of ours becomes a row that says so; a peer that cannot is named in ``absent``."""
    try:
        setup = build(case, shelf, peers)
        absent = _drop_unable(setup)
        if OURS in absent:
            return _row(case, settings, {}, None, ceilings, setup, absent, absent.pop(OURS))
        kernel = kernel_of(setup.calls[OURS])
        correctness = setup.check()
        engine.synchronize()
        timings = _timed(case, setup, settings, engine, ceilings, report)
        return _row(case, settings, timings, correctness, ceilings, setup, absent, None, kernel)
    except Exception as error:
        return _row(case, settings, {}, None, ceilings, None, {}, words_of(error))


def _drop_unable(setup: Setup) -> dict[str, str]:
    """Call every candidate once, which compiles; those that raise are dropped, with their words."""
    absent = {}
    for name, call in list(setup.calls.items()):
        try:
            with setup.settings(name):
                call(0)
        except Exception as error:
            absent[name] = words_of(error)
            del setup.calls[name]
    return absent


def _timed(
    case: Case,
    setup: Setup,
    settings: Settings,
    engine: CudaEngine,
    ceilings: Mapping[str, float],
    report: Progress | None,
) -> dict[str, Timing]:
    if case.form in ("host", "wall"):
        clock: Clock = engine.submit if case.form == "host" else engine.wall
        candidates = [Candidate(name, call) for name, call in setup.calls.items()]
        return interleave(candidates, blocks=settings.rounds, block_seconds=2e-3, pause=0, clock=clock, progress=report)
    count = calls_in_a_graph(case, setup.copies, settings.replay_seconds, ceilings)
    graphs = {}
    for name, call in setup.calls.items():
        with setup.settings(name):
            graphs[name] = engine.capture([lambda i=i, call=call: call(i) for i in range(count)])
        if setup.spacer and name in (OURS, "torch.mm"):
            graphs[name + SPACED] = engine.capture(_spaced(call, setup.spacer, count))
    timings = interleave(
        [Candidate(name, run) for name, run in graphs.items()],
        blocks=settings.rounds,
        block_seconds=settings.replay_seconds / 2,
        pause=0,
        clock=engine.clock,
        progress=report,
    )
    return {name: timing.scaled(1 / count) for name, timing in timings.items()}


def _spaced(call: Callable[[int], Any], spacer: Callable[[], Any], count: int) -> list[Callable[[], Any]]:
    """The calls with an unrelated kernel after each, so that none can begin while its like still runs."""

    def both(i: int) -> None:
        call(i)
        spacer()

    return [lambda i=i: both(i) for i in range(count)]


def calls_in_a_graph(case: Case, copies: int, seconds: float, ceilings: Mapping[str, float]) -> int:
    """Of a case, by its roofline; see `graph_calls`."""
    return graph_calls(copies, seconds, limits(case, ceilings).bound(case.work), MOST_CALLS)


def limits(case: Case, ceilings: Mapping[str, float]) -> Ceilings:
    """The measured roofline of a case's arithmetic."""
    return Ceilings(1, ceilings["bytes_per_second"], ceilings[case.arithmetic])


def against(row: Mapping[str, Any], peer: str, ours: str = OURS) -> float | None:
    """Speed relative to a peer by the samples of a row; ``torch`` is the fastest of torch's ways."""
    names = fastest_torch(row["timings"]) if peer == "torch" else [peer]
    return least_speed(row, ours, names)


def judge(bar: Bar, timings: Mapping[str, Timing]) -> str:
    """Whether a bar is ``MET``, ``NOT MET``, ``AMBIGUOUS``, or ``NOT MEASURED``."""
    names = fastest_torch(timings) if bar.against == "torch" else [bar.against]
    present = [name for name in names if name in timings]
    if OURS not in timings or not present:
        return "NOT MEASURED"
    return verdict(timings[OURS], fastest(timings, *present)).against(bar.value)


def _error_bar(case: Case, correctness: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The bar on the error relative to torch's."""
    if not case.error_ratio:
        return []
    errors = (correctness or {}).get("errors", {})
    if OURS not in errors or "torch.mm" not in errors:
        word = "NOT MEASURED"
    else:
        word = "MET" if errors[OURS] <= case.error_ratio * errors["torch.mm"] else "NOT MET"
    return [{"bar": f"error ≤ {case.error_ratio:g} torch", "result": word}]


def _row(
    case: Case,
    settings: Settings,
    timings: Mapping[str, Timing],
    correctness: Mapping[str, Any] | None,
    ceilings: Mapping[str, float],
    setup: Setup | None,
    absent: Mapping[str, str],
    error: str | None,
    kernel: str | None = None,
) -> dict[str, Any]:
    ours = timings.get(OURS)
    peers = [t for t in timings.values() if not t.name.startswith(OURS) and not t.name.endswith(SPACED)]
    verdicts = [verdict(ours, t) for t in peers] if ours else []
    spaced = timings.get(OURS + SPACED)
    if spaced:
        verdicts.append(verdict(spaced, timings["torch.mm" + SPACED]))
    roofline = case.form not in ("host", "wall", "replay")
    return row(
        case.name,
        command=settings.command(case),
        timings=timings,
        verdicts=verdicts,
        kernel=kernel,
        correctness=correctness,
        work=case.work,
        ceilings=limits(case, ceilings) if roofline else None,
        seed=settings.seed,
        operands=f"rotated over {setup.copies} copies" if setup else "",
        bars=[{"bar": str(bar), "result": judge(bar, timings)} for bar in case.bars] + _error_bar(case, correctness),
        absent=dict(absent),
        error=error,
        **case.facts,
    )

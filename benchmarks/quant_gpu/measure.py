"""From a quantized GPU case to a row: correctness, interleaved replays, verdicts against the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from isogemm.lab import Candidate, Ceilings, Timing, Verdict, interleave, row, verdict

from ..common import graph_calls, least_speed, repeated, summarize, told, words_of
from ..gpu.engine import CudaEngine
from ..gpu.measure import judge
from .cases import FP32, GROUPS, OURS, PLAIN, PLAIN_FP32, Q8, RANDOM, Case
from .kernels import kernel_of
from .operands import LLAMA, TORCH, Call, Setup, Shelf, build
from .peers import GEMLITE

__all__ = ["Settings", "checks", "groups", "measure", "wrong"]

ARITHMETIC = "bfloat16"
MOST_CALLS = 400
BITS = ("differing", "batch_differing", "plain_differing")


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Samples of each candidate.
    replay_seconds : float
        About how long one replay of a graph is, and twice the least length of a block.
    seed : int
    options : tuple of str
        What the command was given beside, for the line that repeats a row.
    """

    rounds: int = 7
    replay_seconds: float = 1.5e-3
    seed: int = 0
    options: tuple[str, ...] = ()

    def command(self, case: Case) -> str:
        """The line that measures one row again."""
        case_words = told(formats=case.format, m=case.m, shapes=f"{case.n}x{case.k}")
        if case.suite == RANDOM:
            case_words = told(suite=RANDOM, only=case.name)
        return repeated("quant_gpu", [*case_words, *self.options], seed=self.seed)


def measure(
    case: Case, settings: Settings, engine: CudaEngine, shelf: Shelf, ceilings: Mapping[str, float]
) -> dict[str, Any]:
    """The row of a case. An error of ours becomes a row that says so; who cannot is named in ``absent``."""
    correctness: dict[str, Any] | None = None
    error, timings, setup, kernels = None, dict[str, Timing](), None, dict[str, str]()
    try:
        setup = build(case, shelf)
        try:
            kernels = _kernels(setup) if shelf.device != "cpu" else {}
            correctness, error = _checked(setup)
            engine.synchronize()
            timings = _timed(case, setup, settings, engine, ceilings)
        finally:
            engine.synchronize()
            setup.free()
    except Exception as raised:
        error = words_of(raised)
    error = (setup.absent.get(OURS) if setup else None) or error
    return _row(case, settings, timings, correctness, ceilings, setup, error, kernels)


def _checked(setup: Setup) -> tuple[dict[str, Any] | None, str | None]:
    """Correctness, or what its check raised: times are measured all the same."""
    try:
        return setup.check(), None
    except Exception as error:
        return None, f"check: {words_of(error)}"


def _kernels(setup: Setup) -> dict[str, str]:
    """What each path of ours launches."""
    return {name: kernel_of(setup.calls[name].run) for name in (OURS, Q8, FP32) if name in setup.calls}


def _timed(
    case: Case, setup: Setup, settings: Settings, engine: CudaEngine, ceilings: Mapping[str, float]
) -> dict[str, Timing]:
    """Everybody's calls as graphs, replayed in turns."""
    graphs, counts = [], {}
    for name, call in setup.calls.items():
        count = counts[name] = _calls(case, name, call, settings.replay_seconds, ceilings)
        try:
            for i in range(call.copies):
                call.run(i)  # what is looked up at a copy's first call is not looked up while a graph is captured
            run = engine.capture([partial(call.run, i) for i in range(count)])
        except Exception as error:
            setup.absent[name] = f"graph: {words_of(error)}"
            continue
        graphs.append(Candidate(name, run))
    timings = interleave(
        graphs, blocks=settings.rounds, block_seconds=settings.replay_seconds / 2, pause=0, clock=engine.clock
    )
    return {name: timing.scaled(1 / counts[name]) for name, timing in timings.items()}


def _calls(case: Case, name: str, call: Call, seconds: float, ceilings: Mapping[str, float]) -> int:
    """Whole passes over a candidate's copies that take about `seconds`."""
    plain = {PLAIN: case.plain_work, TORCH: case.plain_work, PLAIN_FP32: case.plain_fp32_work}
    return graph_calls(call.copies, seconds, _limits(ceilings).bound(plain.get(name, case.work)), MOST_CALLS)


def _limits(ceilings: Mapping[str, float]) -> Ceilings:
    return Ceilings(1, ceilings["bytes_per_second"], ceilings[ARITHMETIC])


def groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of drawn products, of each path."""
    found = []
    for path, ours in (("same", OURS), ("q8", Q8)):
        each = summarize(rows, GROUPS, lambda row, peer, ours=ours: least_speed(row, ours, [peer]))
        found += [{**group, "group": f"{path}, {group['group']}"} for group in each]
    return found


def checks(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """What was compared, of each path of ours."""
    found = row["correctness"] or {}
    return found, found.get("q8", {}), found.get("fp32", {})


def wrong(row: Mapping[str, Any]) -> int:
    """Bits of ours that differ, anywhere."""
    return sum(int(part.get(key, 0)) for part in checks(row) for key in BITS)


def _verdicts(timings: Mapping[str, Timing]) -> list[Verdict]:
    """Of each path: the one with 16-bit activations against everybody, the others against those they are for."""
    pairs = [(OURS, name) for name in (PLAIN, TORCH, GEMLITE, LLAMA)] + [(Q8, name) for name in (PLAIN, LLAMA)]
    pairs += [(FP32, name) for name in (PLAIN, PLAIN_FP32)]
    return [verdict(timings[a], timings[b]) for a, b in pairs if a in timings and b in timings]


def _judged(case: Case, timings: Mapping[str, Timing]) -> list[dict[str, str]]:
    """Paths of 16 and 8 bits against each bar: the bars name no arithmetic, and the two have different bits.

    None is for float32 activations.
    """
    paths = [(path, timings[name]) for path, name in (("same", OURS), ("q8", Q8)) if name in timings]
    return [
        {"bar": f"{path} {bar}", "result": judge(bar, {**timings, OURS: ours})}
        for bar in case.bars
        for path, ours in paths
    ]


def _row(
    case: Case,
    settings: Settings,
    timings: Mapping[str, Timing],
    correctness: Mapping[str, Any] | None,
    ceilings: Mapping[str, float],
    setup: Setup | None,
    error: str | None,
    kernels: Mapping[str, str],
) -> dict[str, Any]:
    copies = {name: call.copies for name, call in setup.calls.items()} if setup else {}
    return row(
        case.name,
        command=settings.command(case),
        timings=timings,
        verdicts=_verdicts(timings),
        kernel=kernels.get(OURS),
        kernels=kernels,
        correctness=correctness,
        work=case.work,
        ceilings=_limits(ceilings),
        seed=settings.seed,
        operands=f"weights rotated over copies: {copies}",
        bars=_judged(case, timings),
        absent={name: words for name, words in setup.absent.items() if name != OURS} if setup else {},
        error=error,
        **case.facts,
    )

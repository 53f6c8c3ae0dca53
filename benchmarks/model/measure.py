"""From a case of a whole model or of a training step to a row: bits, interleaved times, verdicts against the bars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isogemm.lab import Candidate, Timing, interleave, row, verdict
from isogemm.study.bits import differing

from ..common import repeated, words_of
from . import parts as model_parts
from . import train as model_train
from .build import Scoped, Shelf, Step
from .cases import MAIN_GRAD, TORCH, TREE, WHOLE, Case

__all__ = ["OURS", "Settings", "measure", "wrong"]

OURS = (WHOLE, TREE, MAIN_GRAD)  # the variants whose bits must not change
MICRO_BATCHES = 2
SKIPPED = "not compiled"


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Samples of each candidate.
    block_seconds : float
        About how long a sample is, or one step where that is longer.
    seed : int
    compile_until : float
        Seconds after the start from which on nothing more is compiled: a compiler cannot be interrupted.
    started : float
        When the run began, by `time.monotonic`.
    """

    rounds: int = 9
    block_seconds: float = 0.03
    seed: int = 0
    quick: bool = False
    compile_until: float = 90.0
    started: float = field(default_factory=time.monotonic)

    def command(self, case: Case) -> str:
        """The line that measures one row again."""
        words = ["--suite", case.suite, "--only", " ".join(case.words[1:])]
        return repeated("model", words, seed=self.seed, quick=self.quick)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


@dataclass(slots=True)
class Made:
    """A case made ready: what is timed, what could not be, what was found about bits, how long the first calls took."""

    steps: dict[str, Step]
    absent: dict[str, str]
    bits: dict[str, dict[str, int]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)


def measure(case: Case, settings: Settings, engine: Any, shelf: Shelf) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a case, and what its candidates were timed as. A candidate that fails is named in ``absent``."""
    runs: dict[str, Any] = {}
    try:
        made = _made(case, settings, engine, shelf)
        for name in list(made.steps):
            _first(made, name, engine)
        runs = _runs(case, made, engine)
        if TORCH not in runs:
            why = made.absent.get(TORCH, "plain torch was not measured")
            return _row(case, settings, {}, made, None if why.startswith(SKIPPED) else why), {}
        timings = _timed(runs, settings, engine, case)
        return _row(case, settings, timings, made, None), runs
    except Exception as error:
        return _row(case, settings, {}, Made({}, {}), words_of(error)), runs


def wrong(measured: Mapping[str, Any]) -> int:
    """Differing elements of variants that promise that there are none."""
    return sum(found["differing"] for name, found in (measured["correctness"] or {}).items() if name in OURS)


def _made(case: Case, settings: Settings, engine: Any, shelf: Shelf) -> Made:
    if case.suite == "train":
        return _train(case, shelf)
    if case.suite == "parts":
        return Made(*model_parts.build(case, shelf.sizes, shelf.device, shelf.seed))
    return _model(case, settings, engine, shelf)


def _model(case: Case, settings: Settings, engine: Any, shelf: Shelf) -> Made:
    made = Made(shelf.steps(case), dict(shelf.absent))
    if case.mode.startswith("compile"):
        for name in list(made.steps):
            if settings.elapsed() > settings.compile_until:
                made.absent[name] = f"{SKIPPED}: {settings.elapsed():.0f} s into the run"
                del made.steps[name]
            else:
                _first(made, name, engine)
    elif case.mode == "eager":
        made.bits = _other_batches(case, shelf, made.absent)
    return made


def _train(case: Case, shelf: Shelf) -> Made:
    layers, absent = model_train.build(case, shelf.sizes, shelf.device, shelf.seed)
    made = Made(model_train.steps(layers), absent)
    if case.mode == "eager":
        for name, one in layers.items():
            try:
                made.bits[name] = model_train.micro_batches(one, MICRO_BATCHES)
            except Exception as error:
                made.absent[name] = words_of(error)
                made.steps.pop(name, None)
    return made


def _other_batches(case: Case, shelf: Shelf, absent: dict[str, str]) -> dict[str, dict[str, int]]:
    """Differing bits of the logits of the first rows, between this batch and one with other rows beside them."""
    others = shelf.steps(case, 2 if case.phase == "prefill" else 7 if case.batch == 64 else 64)
    found = {}
    for name, step in shelf.steps(case).items():
        try:
            with step.scope():
                here, there = step(0), others[name](0)
        except Exception as error:
            absent[f"{name}, bits in another batch"] = words_of(error)
            continue
        count = min(len(here), len(there))
        found[name] = {"differing": differing(here[:count], there[:count]), "checked": here[:count].numel()}
    return found


def _first(made: Made, name: str, engine: Any) -> None:
    """One call of a candidate, which may compile; it is dropped where it raises."""
    if name in made.first:
        return
    begin, step = time.perf_counter(), made.steps[name]
    try:
        with step.scope():
            step(0)
        engine.synchronize()
        made.first[name] = time.perf_counter() - begin
    except Exception as error:
        made.absent[name] = words_of(error)
        del made.steps[name]


def _runs(case: Case, made: Made, engine: Any) -> dict[str, Any]:
    """What is timed of each candidate: its step, or a graph of it."""
    if not case.mode.endswith("graph"):
        return dict(made.steps)
    runs = {}
    for name, step in made.steps.items():
        try:
            with step.scope():
                runs[name] = engine.capture([lambda step=step: step(0)])
        except Exception as error:
            made.absent[name] = words_of(error)
    return runs


def _timed(runs: Mapping[str, Any], settings: Settings, engine: Any, case: Case) -> dict[str, Timing]:
    clock = engine.clock if case.mode.endswith("graph") else engine.wall
    candidates = [Candidate(name, run) for name, run in runs.items()]
    return interleave(
        candidates, blocks=settings.rounds, block_seconds=settings.block_seconds, pause=0, clock=Scoped(clock)
    )


def _row(
    case: Case, settings: Settings, timings: Mapping[str, Timing], made: Made, error: str | None
) -> dict[str, Any]:
    pairs = {(name, TORCH): None for name in timings if name != TORCH}
    pairs |= {(bar.variant, bar.peer): None for bar in case.bars}
    judged = {
        (ours, peer): verdict(timings[ours], timings[peer]) for ours, peer in pairs if {ours, peer} <= timings.keys()
    }
    verdicts = list(judged.values())
    bars = []
    for bar in case.bars:
        found = judged.get((bar.variant, bar.peer))
        bars.append({"bar": str(bar), "result": found.against(bar.value) if found else "NOT MEASURED"})
    return row(
        case.name,
        command=settings.command(case),
        timings=timings,
        verdicts=verdicts,
        correctness=made.bits or None,
        seed=settings.seed,
        tokens_per_second={name: case.count / t.median for name, t in timings.items()},
        bars=bars,
        absent=dict(made.absent),
        first_call_seconds=made.first,
        error=error,
        **case.facts,
    )

"""A plan that was measured: each operation by one thread or by several, whichever took less on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..base.arguments import extent, of_type
from .model import DecoderConfig
from .plan import choices_of
from .program import Program, Run, relowered

GAIN = 0.95  # of the time: what is not that much shorter is taken for chance
ROUNDS = 5


def random_weights(model: DecoderConfig, draw: np.random.Generator) -> dict[str, Any]:
    """Small ones for matrices, ones for norms, zeros for biases; by their names in a program."""
    return {
        name: 0.02 * draw.standard_normal(shape, np.float32)
        if len(shape) > 1
        else np.full(shape, float(not name.endswith(".bias")), np.float32)
        for name, _, shape in model.weights()
    }


def tuned(program: Program, rounds: int = ROUNDS) -> Program:
    """The same program, of which operations go to one thread where threads cost more than they give.

    Both plans run `rounds` times in turn on random weights and tokens, and the least time of each operation counts. Any
    choice has the same bits.
    """
    of_type("program", program, Program, "a Program", "lower(model, ...)")
    rounds = extent("rounds", rounds)
    chosen = choices_of(program.plan)
    alone = {op["name"]: {**chosen.dispatch[op["name"]], "threads": 1} for op in program.plan["ops"]}
    programs = program, relowered(program.plan, replace(chosen, dispatch=alone))
    runs = [each.start(random_weights(each.model, np.random.default_rng(0))) for each in programs]
    least: list[dict[str, float]] = [{}, {}]
    for _ in range(rounds + 1):  # the first compiles
        for run, times in zip(runs, least, strict=True):
            run.executor.times = []
            _once(run)
            for name, _, begin, end in run.executor.times:
                times[name] = min(times.get(name, np.inf), end - begin)
    serial = {name: each for name, each in alone.items() if least[1][name] < GAIN * least[0][name]}
    return relowered(program.plan, replace(chosen, dispatch={**chosen.dispatch, **serial}))


def _once(run: Run) -> None:
    about, draw = run.program.plan["isogemm"], np.random.default_rng(1)
    ids, targets = draw.integers(0, run.program.model.vocab_size, (2, about["batch"], about["tokens"]))
    if run.program.phase == "train":
        run.step(ids, targets)
    elif run.program.phase == "prefill":
        run.logits(ids)
    else:
        run.decode(ids[:, 0], np.full(len(ids), about["tokens"] - 1))

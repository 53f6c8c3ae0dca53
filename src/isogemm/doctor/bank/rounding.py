"""Mistakes about types: operands, accumulators and results with too few digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ..case import GemmCall, Variant
from ..simulate import round_to

STEPS = (1, 0, 4, 8, 16, 32)
NARROW = ("float16", "bfloat16")


def _operands(name: str, case: GemmCall) -> Iterator[Variant]:
    with np.errstate(all="ignore"):
        for x in (case.a, case.b):
            some = x.flat[: 2**14].astype(np.float64)
            if (round_to(some, name) != some).any():
                yield Variant(f"operands rounded to {name}", replace(case, rounded=name))
                return


tf32, fp16, bf16 = (partial(_operands, name) for name in ("tf32", "float16", "bfloat16"))


def accumulator(case: GemmCall) -> Iterator[Variant]:
    """A sum of few digits."""
    for name in NARROW:
        for step in STEPS:
            at = f", {step} products at a time" if step > 1 else "" if step else ", products too"
            yield Variant(f"the sum kept in {name}{at}", replace(case, sums=(name, step)))


def twice(case: GemmCall) -> Iterator[Variant]:
    """Results rounded to another type on the way."""
    for name in NARROW:
        if name != case.out.name:
            yield Variant(f"results rounded to {name} first", replace(case, between=name))

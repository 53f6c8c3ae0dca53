"""Mistakes about alpha, beta and the memory of C."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from ..case import GemmCall, Variant

LEAST = 5e-324  # as a factor of what is finite it is 0
TYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def misread(x: float) -> dict[str, float]:
    """What a scalar's bytes are in another type, by the way they were read.

    A type that is wider reads on: zeros, or the same scalar again.
    """
    found: dict[str, float] = {}
    with np.errstate(all="ignore"):
        for (name, kind), (other, read) in itertools.permutations(TYPES.items(), 2):
            held, size, words = np.array([x], kind).tobytes(), np.dtype(read).itemsize, f"{name} read as {other}"
            if size <= len(held):
                parts = np.frombuffer(held, read)
                found |= {f"{words}, part {i} of {len(parts)}": float(part) for i, part in enumerate(parts)}
            else:
                for behind, said in ((bytes(size), "zeros"), (held * size, "itself")):
                    found[f"{words}, {said} behind it"] = float(np.frombuffer((held + behind)[:size], read)[0])
    return {words: value for words, value in found.items() if np.isfinite(value) and value != x}


def _with(case: GemmCall, name: str, value: float) -> GemmCall:
    return replace(case, alpha=value) if name == "alpha" else replace(case, beta=value)


def _scalar(name: str, case: GemmCall) -> Iterator[Variant]:
    seen = set()
    for words, value in misread(getattr(case, name)).items():
        if value not in seen:
            seen.add(value)
            yield Variant(f"{name} {getattr(case, name):g} as {words}: {value:.6g}", _with(case, name, value))


alpha_type = partial(_scalar, "alpha")


def beta_type(case: GemmCall) -> Iterator[Variant]:
    """Beta read in another type."""
    if case.beta != 0 and case.before is not None:
        yield from _scalar("beta", case)


def beta_garbage(case: GemmCall) -> Iterator[Variant]:
    """What lay in C is added although beta is 0."""
    if case.beta == 0 and case.before is not None:
        yield Variant("beta is 0 and what was in C was added once", replace(case, beta=1.0))
        if not np.isfinite(case.before.astype(np.float64)).all():
            yield Variant("0 * C was added: what was no number there is none now", replace(case, beta=LEAST))


def alias(case: GemmCall) -> Iterator[Variant]:
    """C was the memory of an operand."""
    m, n, k = case.sizes
    if case.items > 1 or case.beta != 0 or case.bias is not None:
        return
    if n <= k and n > 1:
        yield Variant("C lies over A, and each row was written while it was read", replace(case, alias="a"))
    if m <= k and m > 1:
        yield Variant(
            "C lies over B, whose rows were written before later rows of C read them", replace(case, alias="b")
        )

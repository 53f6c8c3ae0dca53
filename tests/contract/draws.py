"""Operands for contract tests, drawn bit by bit so that every class of number occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class Arithmetic:
    """What the oracle and the package call the same thing."""

    name: str
    fmt: str
    dtype: Any
    word: Any
    exponent_bits: int
    fraction_bits: int
    block: int
    aligned_bits: int

    def __str__(self) -> str:
        return f"{self.name}-{self.fmt}"


ARITHMETICS = (
    Arithmetic("fma", "float32", np.float32, np.uint32, 8, 23, 1, 0),
    Arithmetic("tensor_core:sm90", "bfloat16", ml_dtypes.bfloat16, np.uint16, 8, 7, 16, 25),
    Arithmetic("tensor_core:sm90", "float16", np.float16, np.uint16, 5, 10, 16, 25),
    Arithmetic("tensor_core:sm80", "bfloat16", ml_dtypes.bfloat16, np.uint16, 8, 7, 8, 24),
    Arithmetic("tensor_core:sm80", "float16", np.float16, np.uint16, 5, 10, 8, 24),
    Arithmetic("tf32:sm90", "tf32", np.float32, np.uint32, 8, 23, 8, 25),
)

CLASSES = ("near", "wide", "any", "small", "product underflows", "large", "special", "zeros")


def draw(rng: Any, shape: tuple[int, ...], kind: str, arithmetic: Arithmetic) -> Any:
    """Random bits of one class of numbers."""
    e, f = arithmetic.exponent_bits, arithmetic.fraction_bits
    bias, top = (1 << (e - 1)) - 1, (1 << e) - 1
    low, high = {
        "near": (bias - 6, bias + 2),
        "wide": (bias - 14, bias + 14),
        "any": (0, top),
        "small": (0, 4),
        "product underflows": (max(0, bias - 80), max(3, bias - 66)),
        "large": (top - 8, top - 1),
        "special": (bias - 3, bias + 3),
        "zeros": (bias, bias),
    }[kind]
    bits = (rng.integers(low, high + 1, shape, dtype=np.uint64) << f) | rng.integers(0, 1 << f, shape, dtype=np.uint64)
    share = {"special": 0.2, "zeros": 0.7}.get(kind, 0.05)
    values = [0, 1, top << f, (top << f) | 1, (top << f) - 1] if kind == "special" else [0]
    bits = np.where(rng.random(shape) < share, rng.choice(np.array(values, np.uint64), shape), bits)
    return (bits | (rng.integers(0, 2, shape, dtype=np.uint64) << (e + f))).astype(arithmetic.word)


FLOAT32 = ARITHMETICS[0]


@st.composite
def products(draw_one: Any, most: int = 40) -> tuple[Arithmetic, Any, Any, Any]:
    """An arithmetic, operands and a start, all as bits: m, n up to 3, K up to `most`."""
    arithmetic = draw_one(st.sampled_from(ARITHMETICS))
    m, n, k = draw_one(st.integers(1, 3)), draw_one(st.integers(1, 3)), draw_one(st.integers(0, most))
    left, right, start = (draw_one(st.sampled_from(CLASSES)) for _ in range(3))
    rng = np.random.default_rng(draw_one(st.integers(0, 2**32 - 1)))
    a, b = draw(rng, (m, k), left, arithmetic), draw(rng, (k, n), right, arithmetic)
    return arithmetic, a, b, draw(rng, (m, n), start, FLOAT32)

"""Products that nobody chose: drawn from a seed, for figures that no table can have been made for."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

__all__ = ["Drawn", "draw"]

LEAST, MOST, ROWS = 512, 32768, 8192


class Drawn(NamedTuple):
    """out[m, n] = op(A) op(B) (+ bias): sizes, type, and the layout as in BLAS."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str
    bias: bool

    @property
    def aligned(self) -> bool:
        """Whether N and K are multiples of 8: what a tensor map of 2-byte elements can read."""
        return self.n % 8 == 0 and self.k % 8 == 0


def draw(seed: int, count: int) -> list[Drawn]:
    """`count` products; more of them begin with the same ones.

    N and K are log-uniform in 512..32768, four fifths of the products with multiples of 64, the rest with any; M is
    log-uniform in 1..8192. bfloat16 60 %, float16 20 %, float32 20 %; NT mostly; a bias on one in five.
    """
    source = random.Random(seed)
    found = []
    for _ in range(count):
        whole = source.random() < 0.8
        n, k = (_log_uniform(source, LEAST, MOST) for _ in range(2))
        if whole:
            n, k = (max(LEAST, round(x / 64) * 64) for x in (n, k))
        m = _log_uniform(source, 1, ROWS)
        dtype = source.choices(("bfloat16", "float16", "float32"), (0.6, 0.2, 0.2))[0]
        layout = source.choices(("NT", "NN", "TN"), (0.8, 0.12, 0.08))[0]
        found.append(Drawn(m, n, k, dtype, layout, source.random() < 0.2))
    return found


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))

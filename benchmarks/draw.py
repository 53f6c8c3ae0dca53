"""Products that nobody chose: drawn from a seed, for figures that no table and no threshold can have been made for."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Drawn", "DrawnQuantized", "of_cpus", "of_gpus", "of_quantized"]


class Drawn(NamedTuple):
    """out[m, n] = op(A) op(B) (+ bias): sizes, type, the layout as in BLAS, and where B lies before a call."""

    m: int
    n: int
    k: int
    dtype: str = "float32"
    layout: str = "NT"
    bias: bool = False
    cold: bool = True


class DrawnQuantized(NamedTuple):
    """A product of m rows with a quantized weight [n, k]."""

    format: str
    m: int
    n: int
    k: int


def of_gpus(seed: int, count: int) -> list[Drawn]:
    """`count` products; more of them begin with the same ones.

    N and K are log-uniform in 512..32768, four fifths of the products with multiples of 64, the rest with any; M is
    log-uniform in 1..8192. bfloat16 60 %, float16 20 %, float32 20 %; NT mostly; a bias on one in five.
    """
    source = random.Random(seed)
    found = []
    for _ in range(count):
        whole = source.random() < 0.8
        n, k = (_log_uniform(source, 512, 32768) for _ in range(2))
        if whole:
            n, k = (max(512, round(x / 64) * 64) for x in (n, k))
        m = _log_uniform(source, 1, 8192)
        dtype = source.choices(("bfloat16", "float16", "float32"), (0.6, 0.2, 0.2))[0]
        layout = source.choices(("NT", "NN", "TN"), (0.8, 0.12, 0.08))[0]
        found.append(Drawn(m, n, k, dtype, layout, source.random() < 0.2))
    return found


def of_cpus(seed: int, count: int) -> list[Drawn]:
    """`count` linear layers of float32: N and K log-uniform in 128..4096, M in 1..2048 and a third of them 1.

    Every other one is hot: its weights lie in the caches, as far as they fit.
    """
    source = random.Random(seed)
    found = []
    for i in range(count):
        n, k = (_log_uniform(source, 128, 4096) for _ in range(2))
        m = 1 if source.random() < 1 / 3 else _log_uniform(source, 1, 2048)
        found.append(Drawn(m, n, k, cold=i % 2 == 0))
    return found


def of_quantized(seed: int, count: int, formats: Sequence[str]) -> list[DrawnQuantized]:
    """`count` products: N and K log-uniform in 512..16384, multiples of 256, M log-uniform in 1..512."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        n, k = (max(512, round(_log_uniform(source, 512, 16384) / 256) * 256) for _ in range(2))
        found.append(DrawnQuantized(source.choice(formats), _log_uniform(source, 1, 512), n, k))
    return found


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))

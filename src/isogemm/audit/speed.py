"""The speed of the audited providers against each other, from interleaved blocks of `isogemm.lab`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..lab import Candidate, fastest, interleave, last_level_cache, rotate, verdict
from .bench import LinearOperands
from .data import Array, arrange
from .providers import Provider
from .results import Speed

_MOST_CACHE = 64 << 20  # rotation past a larger cache would take more memory than an audit should
_FILLS = 3  # a weight this many caches large needs no copies


def measure(
    providers: Mapping[str, Provider],
    operands: LinearOperands,
    m: int,
    *,
    blocks: int,
    step: Callable[[], None] = lambda: None,
) -> list[Speed]:
    """Time the linear at batch size `m` for every provider, weights rotated past the cache.

    Providers that raise are left out; an empty list when none is left.
    """
    weights = _weights(operands)
    x = arrange(operands.draw(m), "C")
    candidates = [
        Candidate(name, _runner(provider, x, weights))
        for name, provider in providers.items()
        if _runs(provider, x, weights[0])
    ]
    if not candidates:
        return []
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        timings = interleave(candidates, blocks=blocks, block_seconds=0.01, pause=0.03, progress=lambda *_: step())
    best = fastest(timings)
    linear = operands.linear
    speeds = []
    for name, timing in timings.items():
        word = "FASTEST" if timing is best else verdict(timing, best).word
        speeds.append(
            Speed(
                *(name, linear.name, m, linear.n, linear.k),
                *(timing.median, timing.p5, timing.p95),
                against_fastest=timing.median / best.median,
                verdict=word,
            )
        )
    return speeds


def _weights(operands: LinearOperands) -> Sequence[Array]:
    cache = min(last_level_cache(), _MOST_CACHE)
    if operands.w.nbytes >= _FILLS * cache:
        return [operands.w]
    return rotate(lambda: arrange(operands.w, "C"), max(operands.w.nbytes, cache // 64), cache_bytes=cache)


def _runner(provider: Provider, x: Array, weights: Sequence[Array]) -> Callable[[int], object]:
    return lambda i: provider.linear(x, weights[i % len(weights)])


def _runs(provider: Provider, x: Array, w: Array) -> bool:
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            provider.linear(x, w)
    except (Exception, SystemExit):
        return False
    return True

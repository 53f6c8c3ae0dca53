"""The relations of batch invariance on the GPU: each counts the bits that change though nothing of theirs did.

A relation takes ``call(x, w)``, which has to be ``x @ w.T``, activations x [m, k] and weights w [n, k].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.backends.cuda.device import differing, torch

from isogemm.audit.relations import FULL_SWEEP

Call = Callable[[Any, Any], Any]
CHUNKS = ((100, 156), (128, 128), (64,) * 4, (1,) * 24, (28, 1, 1, 1, 1), (193, 1, 16, 17), (1000, 24, 1))


def population(call: Call, x: Any, w: Any, sweep: tuple[int, ...] = FULL_SWEEP) -> int:
    """Every M of the sweep against the largest, and rows alone, as matrices and as vectors."""
    whole = call(x, w)
    count = sum(differing(call(x[:m], w), whole[:m]) for m in sweep if m <= len(x))
    for row in sorted({0, 1, 2, 7, len(x) // 2, len(x) - 1}):
        count += differing(call(x[row : row + 1], w), whole[row : row + 1])
        count += differing(call(x[row], w), whole[row])
    return count


def position(call: Call, x: Any, w: Any) -> int:
    """The batch with its rows moved round."""
    count = 0
    for m in (2, 4, 9, 16, 17, 33, 128, 200, 1000):
        part = x[:m]
        want = call(part, w)
        for shift in {1, m // 2, m - 1}:
            count += differing(call(part.roll(shift, 0), w).roll(-shift, 0), want)
    return count


def neighbours(call: Call, x: Any, w: Any) -> int:
    """Three rows of a batch whose other rows hold something else."""
    count = 0
    for m in (2, 7, 16, 64, 200):
        kept = sorted({0, m // 2, m - 1})[: m - 1]
        others = [i for i in range(m) if i not in kept]
        want = call(x[:m], w)[kept]
        for contents in (0.0, -0.0, 1e4, 1e-40, np.nan, np.inf):
            part = x[:m].clone()
            part[others] = contents
            count += differing(call(part, w)[kept], want)
    return count


def padding(call: Call, x: Any, w: Any) -> int:
    """Rows followed by rows of zeros, and columns of weights beside columns of zeros."""
    count = 0
    for m, padded in ((1, 8), (5, 8), (17, 32), (100, 128), (250, 256), (1000, 1024)):
        part = torch.zeros((padded, x.shape[1]), dtype=x.dtype, device=x.device)
        part[:m] = x[:m]
        want = call(x[:m], w)
        count += differing(call(part, w)[:m], want)
        taller = torch.zeros((len(w) + 28, w.shape[1]), dtype=w.dtype, device=w.device)
        taller[: len(w)] = w
        count += differing(call(x[:m], taller)[:, : len(w)], want)
    return count


def schedule(call: Call, x: Any, w: Any) -> int:
    """A prefill at once, in chunks, and token by token."""
    count = 0
    for lengths in CHUNKS:
        total = sum(lengths)
        parts = [call(part, w) for part in x[:total].split(list(lengths))]
        count += differing(torch.cat(parts), call(x[:total], w))
    return count


def rerun(call: Call, x: Any, w: Any) -> int:
    """The same call again and again, between other work."""
    count = 0
    for m in (1, 5, 64, 256, 1000):
        want = call(x[:m], w)
        noise = torch.randn(512, 512, device=x.device)
        for _ in range(5):
            noise = noise @ noise / 23
            count += differing(call(x[:m], w), want)
    return count


def columns(call: Call, x: Any, w: Any) -> int:
    """One wide product against products of its column blocks."""
    count = 0
    for m in (1, 4, 17, 128):
        whole = call(x[:m], w)
        for cut in sorted({1, len(w) // 3, len(w) // 2, len(w) - 1}):
            parts = [call(x[:m], part) for part in w.split([cut, len(w) - cut]) if len(part)]
            count += differing(torch.cat(parts, 1), whole)
    return count


def layouts(call: Call, x: Any, w: Any) -> int:
    """The same values in other memory layouts, unaligned and strided ones among them."""
    from tests.backends.cuda.device import LAYOUTS, laid

    count = 0
    for m in (1, 5, 64, 130):
        want = call(x[:m], w)
        for layout in LAYOUTS:
            count += differing(call(laid(x[:m], layout), w), want)
            count += differing(call(x[:m], laid(w, layout)), want)
        count += differing(call(laid(x[:m], "offset"), laid(w, "padded columns")), want)
    return count


RELATIONS = {f.__name__: f for f in (population, position, neighbours, padding, schedule, rerun, columns, layouts)}

"""Providers for the audit's tests: one that holds, and ones that break exactly one promise each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import isogemm
from isogemm.audit import CallableProvider

Array = NDArray[Any]

N, K = 24, 40
_THREADS = isogemm.get_num_threads()
_calls = 0


def honest(x: Array, w: Array) -> Array:
    """Row by row, each sum along contiguous memory: a row's bits see nothing but the row."""
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    return np.stack([(row * w).sum(axis=1, dtype=np.float32) for row in x]).astype(x.dtype)


def nudged(y: Array) -> Array:
    """One ULP away."""
    return np.nextafter(y, np.float32(np.inf), dtype=y.dtype)


def by_m(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return nudged(y) if len(x) == 1 else y


def by_position(x: Array, w: Array) -> Array:
    y = honest(x, w)
    y[1::2] = nudged(y[1::2])
    return y


def by_neighbours(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return y if np.isfinite(x).all() else nudged(y)


def by_padding(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return y if x[-3:].any() else nudged(y)


def by_schedule(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return nudged(y) if len(x) == 156 else y


def by_rerun(x: Array, w: Array) -> Array:
    global _calls
    _calls += 1
    y = honest(x, w)
    return nudged(y) if _calls % 3 == 0 else y


def by_threads(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return y if isogemm.get_num_threads() == _THREADS else nudged(y)


def by_form(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return y if len(w) == N else nudged(y)


def by_layout(x: Array, w: Array) -> Array:
    y = honest(x, w)
    return y if x.flags.c_contiguous and w.flags.c_contiguous else nudged(y)


class ByPacking(CallableProvider):
    """Prepares weights that give other bits."""

    def __init__(self) -> None:
        super().__init__("by_packing", honest)
        self.packed = lambda x, w: nudged(honest(x, w))


def by_direction(x: Array, w: Array) -> Array:
    """Gradients of x in a micro-batch of one."""
    y = honest(x, w)
    return nudged(y) if len(w) == K and len(x) == 1 else y


class ByAccumulation(CallableProvider):
    """Sums gradients row by row, and rounds each micro-batch's sum by itself."""

    def __init__(self, name: str, *, rounds: bool) -> None:
        super().__init__(name, honest)

        def accumulate(total: Array | None, dy: Array, x: Array) -> Array:
            start = np.zeros((dy.shape[1], x.shape[1]), np.float32) if total is None or rounds else total
            for i in range(len(x)):
                start = start + np.outer(dy[i], x[i])
            return start if total is None or not rounds else total + start

        self.accumulate = accumulate


class Elsewhere(CallableProvider):
    """A device with streams and graphs, of which one gives other bits, and whose profiler tells kernels."""

    def __init__(self, name: str, wrong: str) -> None:
        super().__init__(name, honest)
        self.streamed = self.captured = honest
        setattr(self, wrong, lambda x, w: self._tell(nudged(honest(x, w)), "split"))
        self.watched = self._watched
        self._seen: list[str] | None = None

    def linear(self, x: Array, w: Array) -> Array:
        return self._tell(honest(x, w), "plain")

    def _tell(self, y: Array, kernel: str) -> Array:
        if self._seen is not None:
            self._seen.append(f"M={len(y)}: {kernel}")
        return y

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[str]]:
        self._seen = []
        yield self._seen
        self._seen = None


def one_output(x: Array, w: Array) -> Array:
    """A single output of a single batch size is off, by five ULPs."""
    y = honest(x, w)
    if len(x) == 16:
        for _ in range(5):
            y[11, 7] = nudged(y[11, 7])
    return y


def raises(x: Array, w: Array) -> Array:
    raise RuntimeError("no kernel for this shape\nand more")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_without_words(x: Array, w: Array) -> Array:
    raise Wordless


def raises_at_64(x: Array, w: Array) -> Array:
    if len(x) == 64:
        raise ValueError("64 is too many")
    return honest(x, w)


def leaves(x: Array, w: Array) -> Array:
    sys.exit(3)


def lists(x: Array, w: Array) -> Any:
    return honest(x, w).tolist()


def transposed(x: Array, w: Array) -> Array:
    return honest(x, w).T


def wide(x: Array, w: Array) -> Array:
    return honest(x, w).astype(np.float64)


def zeros(x: Array, w: Array) -> Array:
    return np.zeros((len(x), len(w)), x.dtype)


def not_finite(x: Array, w: Array) -> Array:
    return np.full((len(x), len(w)), np.nan, x.dtype)


def writes_x(x: Array, w: Array) -> Array:
    y = honest(x, w)
    x[0, 0] += 1
    return y


def writes_w(x: Array, w: Array) -> Array:
    y = honest(x, w)
    w[3, 5] = np.nan
    return y


def swaps_w(x: Array, w: Array) -> Array:
    y = honest(x, w)
    w[[0, 1]] = w[[1, 0]]
    return y


def reuses_its_buffer(x: Array, w: Array, _buffers: dict[Any, Array] = {}) -> Array:  # noqa: B006 (that is the point)
    y = _buffers.setdefault((len(x), len(w)), np.empty((len(x), len(w)), x.dtype))
    y[...] = by_rerun(x, w)
    return y

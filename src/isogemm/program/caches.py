"""Values that lie in caches behind a sequence's position, and are no finite numbers, put aside while it is decoded.

Attention goes over whole caches: what a sequence does not see it multiplies by 0, which of an infinity or a NaN is NaN.
Such values stay where a sequence goes back, or its place is another one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray


class UnseenValues:
    """Such values of caches [sequences, heads, keys, width]; they are looked for where a sequence goes back."""

    def __init__(self, caches: Sequence[NDArray[Any]], sequences: int, keys: int) -> None:
        self._caches, self._keys = caches, keys
        self._newest = np.full(sequences, keys)  # position of each sequence
        self._found = np.zeros((sequences, keys), np.bool_)

    def refilled(self) -> None:
        """Caches hold something else: all is looked at again."""
        self._newest[:] = self._keys

    @contextmanager
    def aside(self, positions: NDArray[np.int64]) -> Iterator[None]:
        """Within it such values behind `positions` are zeros; after it they are as they were."""
        for i in np.flatnonzero(positions < self._newest):
            behind = slice(positions[i] + 1, None)
            self._found[i, behind] = False
            for cache in self._caches:
                self._found[i, behind] |= ~np.isfinite(cache[i, :, behind]).all(axis=(0, 2))
        self._newest[:] = positions
        sequence, key = np.nonzero(self._found & (np.arange(self._keys) > positions[:, None]))
        if not sequence.size:
            yield
            return
        kept = [cache[sequence, :, key] for cache in self._caches]
        try:
            for cache in self._caches:
                cache[sequence, :, key] = 0
            yield
        finally:
            for cache, values in zip(self._caches, kept, strict=True):
                cache[sequence, :, key] = values

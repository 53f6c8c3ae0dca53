"""Cosines and sines of rotations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DTypeError, ShapeError
from ..operands.tensors import on_host

BLOCK = 4096  # positions that are computed at once, always as many: a row's bits cannot depend on the table's length


def frequencies(n: int, theta: float) -> NDArray[np.float32]:
    """``theta**(-2 * j / n)`` in float32, as transformers has them; two C libraries may differ in the last bit."""
    exponents = np.arange(0, n, 2, dtype=np.float32) / np.float32(n)
    found: NDArray[np.float32] = np.float32(1) / np.float32(theta) ** exponents
    return found


def given_frequencies(given: Any, n: int) -> NDArray[Any]:
    """A model's own `inv_freq` for heads of n elements. Raises DTypeError or ShapeError: it is none."""
    found = on_host(given)
    if found.dtype.kind not in "fV":
        raise DTypeError("dtype of inv_freq", limit="floats", value=found.dtype.name, nearest="float32")
    if found.shape != (n // 2,):
        limit = f"[{n // 2}], half of the elements of a head"
        raise ShapeError("shape of inv_freq", limit=limit, value=list(found.shape), nearest=[n // 2])
    return found


def rope_tables(tokens: int, inv_freq: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position * inv_freq, in float64 and rounded once: rows for positions from 0."""
    w = np.asarray(inv_freq).astype(np.float64)
    parts = []
    for first in range(0, tokens, BLOCK):
        angles = np.arange(first, first + BLOCK, dtype=np.float64)[:, None] * w
        parts.append((np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)))
    cos, sin = (np.concatenate(some)[:tokens] for some in zip(*parts, strict=True))
    return cos, sin

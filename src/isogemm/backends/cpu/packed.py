"""Weights prepared once."""

from __future__ import annotations

from typing import Any


class PackedWeight:
    """A weight [n, k] laid out for the kernels of this CPU."""

    n: int
    k: int
    dtype: Any


def pack(w: Any) -> PackedWeight:
    """Prepare a weight."""
    raise NotImplementedError

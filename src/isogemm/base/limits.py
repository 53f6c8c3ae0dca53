"""How large an array may be: what can be addressed, and what a device's memory holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from ..errors import LimitError, ShapeError

_ADDRESSABLE = 2**63 - 1


def check_size(shape: Sequence[int], itemsize: int, memory: Callable[[], int]) -> None:
    """Raise `LimitError` when an array of that shape can be neither addressed nor held in `memory()` bytes."""
    nbytes = math.prod(shape) * itemsize
    if nbytes < 2**28:
        return
    limit = min(_ADDRESSABLE, memory())
    if nbytes > limit:
        rows = limit // (math.prod(shape[:-2]) * shape[-1] * itemsize)
        items = limit // (math.prod(shape[1:]) * itemsize)
        some = f"at most {items} at a time" if items else "shorter rows"
        raise LimitError(
            "bytes of the result",
            limit=f"{limit} bytes of memory",
            value=f"{nbytes} for shape {list(shape)}",
            nearest=f"at most {rows} rows at a time" if rows else some,
        )


def check_extents(m: int, n: int, k: int, itemsize: int, items: int = 1) -> None:
    """Raise `ShapeError` when a matrix of a product, or so many of them, could not be addressed."""

    def size(m: int, n: int, k: int) -> int:
        return max(m * k, k * n, m * n) * itemsize

    limit, near = "matrices of at most 2**63 - 1 bytes", [m, n, k]
    if size(m, n, k) <= _ADDRESSABLE < size(m, n, k) * items:
        raise ShapeError("batch", limit=f"{limit} in all", value=items, nearest=_ADDRESSABLE // size(m, n, k))
    while size(*near) * items > _ADDRESSABLE and max(near) > 1:
        near[near.index(max(near))] //= 2
    if near != [m, n, k]:
        raise ShapeError("m, n, k", limit=limit, value=(m, n, k), nearest=tuple(near))


def at_most(name: str, size: int, most: int) -> int:
    """`size`, if it is no more; else a `ShapeError`."""
    if size > most:
        raise ShapeError(name, limit=f"at most {most}", value=size, nearest=most)
    return size


@lru_cache(maxsize=1)
def physical_memory() -> int:
    """Bytes of this machine's memory."""
    import psutil

    return int(psutil.virtual_memory().total)

"""Rotation: enough copies of an operand that none is still in a cache when its turn comes again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import LimitError, OptionError

T = TypeVar("T")

# Caches do not replace strictly in order: with just one cache's worth of copies part of each would survive.
CACHES_TO_FILL = 3
DEFAULT_CACHE = 32 << 20
MAX_COPIES = 1 << 20


def rotate(make: Callable[[], T], nbytes: int, *, cache_bytes: int | None = None) -> list[T]:
    """Call `make` often enough that the copies together are three times the last-level cache.

    Parameters
    ----------
    make : callable
        Makes one copy.
    nbytes : int
        Bytes of a copy that a call reads.
    cache_bytes : int, optional
        Last-level cache; asked of the system when absent.

    Returns
    -------
    list
        At least two copies; index it with ``i % len(copies)``.

    Raises
    ------
    OptionError
        `nbytes` or `cache_bytes` is not positive.
    LimitError
        More copies than can sensibly be made: operands this small belong in the cache.
    """
    cache = last_level_cache() if cache_bytes is None else cache_bytes
    for name, value in (("nbytes", nbytes), ("cache_bytes", cache)):
        if value < 1:
            raise OptionError(name, limit="at least 1", value=value, nearest=1)
    copies = max(2, -(-CACHES_TO_FILL * cache // nbytes))
    if copies > MAX_COPIES:
        least = -(-CACHES_TO_FILL * cache // MAX_COPIES)
        raise LimitError("copies to rotate", limit=MAX_COPIES, value=copies, nearest=f"nbytes of at least {least}")
    return [make() for _ in range(copies)]


def last_level_cache() -> int:
    """Bytes of the largest cache of the first CPU; 32 MiB where the system does not say."""
    return max(cache_sizes().values(), default=DEFAULT_CACHE)


def cache_sizes() -> dict[str, int]:
    """Bytes of the data caches of the first CPU, by level (``L1d``, ``L2``, ``L3``); empty where unknown."""
    sizes = _linux_caches(Path("/sys/devices/system/cpu/cpu0/cache"))
    return sizes or _darwin_caches()


def _linux_caches(folder: Path) -> dict[str, int]:
    sizes = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
        digits = size.rstrip("KMG")
        if kind != "Instruction" and digits.isdigit():
            sizes[f"L{level}" + ("d" if kind == "Data" else "")] = int(digits) * unit
    return sizes


def _darwin_caches() -> dict[str, int]:
    if not hasattr(os, "uname") or os.uname().sysname != "Darwin":
        return {}
    import subprocess

    sizes = {}
    for level, key in (("L1d", "l1dcachesize"), ("L2", "perflevel0.l2cachesize"), ("L3", "l3cachesize")):
        answer = subprocess.run(["sysctl", "-n", f"hw.{key}"], capture_output=True, text=True, check=False)
        if answer.stdout.strip().isdigit() and int(answer.stdout):
            sizes[level] = int(answer.stdout)
    return sizes

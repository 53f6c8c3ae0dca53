"""How many threads the CPU backend uses."""

from __future__ import annotations

import os

from .errors import OptionError

__all__ = ["get_num_threads", "set_num_threads"]

_count = 0


def _available() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _from_environment() -> int:
    text = os.environ.get("ISOGEMM_NUM_THREADS", "").strip()
    if not text:
        return _available()
    if not text.isdigit() or int(text) < 1:
        raise OptionError(
            "ISOGEMM_NUM_THREADS", limit="a whole number of at least 1", value=repr(text), nearest=_available()
        )
    return int(text)


def get_num_threads() -> int:
    """Threads that a call may use: `set_num_threads`, else ``ISOGEMM_NUM_THREADS``, else the CPUs of this process."""
    global _count
    if not _count:
        _count = _from_environment()
    return _count


def set_num_threads(count: int) -> None:
    """Set how many threads a call may use, for the process. Never changes a bit of any result.

    Raises
    ------
    OptionError
        `count` is not a whole number of at least 1.
    """
    global _count
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError("thread count", limit="a whole number of at least 1", value=repr(count), nearest=_available())
    _count = count

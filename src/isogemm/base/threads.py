"""How many threads the CPU backend uses."""

from __future__ import annotations

import os
from typing import Any

from ..errors import OptionError
from .arguments import counted

_FEW = 8  # threads that may share one CPU
chosen = 0
"""Threads that a call may use, as `get_num_threads` says; 0 before anyone has asked."""
_joined = False


def available() -> int:
    """CPUs of this process."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _from_environment() -> int:
    text = os.environ.get("ISOGEMM_NUM_THREADS", "").strip()
    if not text:
        return available()
    count = int(text) if text.isdigit() and text.isascii() and len(text) < 1000 else 0
    if count < 1:
        raise OptionError(
            "ISOGEMM_NUM_THREADS", limit="a whole number of at least 1", value=repr(text), nearest=available()
        )
    return _useful("ISOGEMM_NUM_THREADS", count)


def _most() -> int:
    """More threads than this are a mistake."""
    return max(1023, 4 * available())


def threads_of(what: str, count: Any) -> int:
    """A number of threads, a whole number of Python's or of another library's; else an OptionError."""
    found = counted(count)
    if found is None or found < 1:
        raise OptionError(what, limit="a whole number of at least 1", value=repr(count), nearest=1)
    if found > _most():
        raise OptionError(what, limit=f"at most {_most()} threads", value=found, nearest=_most())
    return found


def _useful(what: str, count: Any) -> int:
    """As many threads as asked for, but no more than CPUs, or 8 where there are fewer: others would wait for those."""
    return min(threads_of(what, count), max(_FEW, available()))


def get_num_threads() -> int:
    """Threads that a call may use: `set_num_threads`, else ``ISOGEMM_NUM_THREADS``, else the CPUs of this process.

    Of what was asked for, no more than the process has CPUs, or 8 where it has fewer.
    """
    global chosen
    if not chosen:
        chosen = _from_environment()
    return chosen


def set_num_threads(count: int) -> None:
    """Set how many threads a call may use, for the process. Never changes a bit of any result.

    Larger numbers than that of the process's CPUs, or than 8 where it has fewer, count as that one: more threads would
    wait for one another's CPU. `get_num_threads` says what counts.

    Raises
    ------
    OptionError
        `count` is not a whole number from 1 to 1023, or to 4 for each CPU of the process where that is more.
    """
    global chosen
    chosen = _useful("thread count", count)


def join_threadpoolctl() -> None:
    """Let ``threadpoolctl.threadpool_limits`` and ``threadpool_info`` see isogemm's threads; once per process.

    threadpoolctl finds pools by the shared libraries that are loaded. The pool here lives in compiled Python, so it
    stands behind the compiler's own library, which is loaded wherever a kernel is.
    """
    global _joined
    if _joined:
        return
    _joined = True
    import threadpoolctl

    class Controller(threadpoolctl.LibController):  # type: ignore[misc]
        user_api = "isogemm"
        internal_api = "isogemm"
        filename_prefixes = ("libllvmlite", "llvmlite")

        def get_num_threads(self) -> int:
            return get_num_threads()

        def set_num_threads(self, num_threads: Any) -> None:
            set_num_threads(int(num_threads))

        def get_version(self) -> str:
            from .._version import __version__

            return __version__

        def set_additional_attributes(self) -> None:
            pass

    threadpoolctl.register(Controller)

"""Whether this thread may wait for a compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ....base.background import ending

_this_thread = threading.local()


@contextmanager
def compiled_alone() -> Iterator[None]:
    """Inside, in this thread, what is in no cache raises `NotCompiledError` instead of being compiled."""
    before, _this_thread.waits = getattr(_this_thread, "waits", True), False
    try:
        yield
    finally:
        _this_thread.waits = before


def waits() -> bool:
    """Not inside of `compiled_alone`, nor in the background while the process ends, which would wait for it."""
    return getattr(_this_thread, "waits", True) and not ending()

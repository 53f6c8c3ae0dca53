"""Settings of the process for a while: one thread count for every library, and any other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let isogemm, the loaded BLAS and OpenMP runtimes, and torch where it is loaded, use `count` threads.

    Everything is put back on leaving, also after an exception; nested uses restore the outer count. It acts on
    the process, like the settings it changes: use it from one thread.

    Raises
    ------
    OptionError
        `count` is not a whole number of at least 1; nothing was changed.
    """
    from threadpoolctl import threadpool_limits

    from ..base.threads import get_num_threads, set_num_threads

    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        stack.enter_context(held(count, get_num_threads, set_num_threads))
        torch_before = torch.get_num_threads() if torch else 0  # asked before the OpenMP that it counts by is limited
        stack.enter_context(threadpool_limits(limits=count))
        if torch:
            stack.callback(torch.set_num_threads, torch_before)
            torch.set_num_threads(count)
        yield


@contextmanager
def held(value: Any, get: Callable[[], Any], set: Callable[[Any], object]) -> Iterator[None]:
    """A setting at that value inside of the block, and as it was behind it."""
    before = get()
    set(value)
    try:
        yield
    finally:
        set(before)

"""One thread count for every library of the process, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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

    before = get_num_threads()
    set_num_threads(count)
    torch = sys.modules.get("torch")
    try:
        torch_before = torch.get_num_threads() if torch else 0
        with threadpool_limits(limits=count):
            if torch:
                torch.set_num_threads(count)
            try:
                yield
            finally:
                if torch:
                    torch.set_num_threads(torch_before)
    finally:
        set_num_threads(before)

"""How far work has come that takes its time: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[int, int | None, str], None]
"""``tell(done, total, text)``; a total of None is not known yet."""

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


def quiet() -> bool:
    """Whether ISOGEMM_QUIET is set."""
    return os.environ.get("ISOGEMM_QUIET", "0") not in ("", "0")


def say(text: str) -> None:
    """One line to standard error, where a user waits and should know why; none where ISOGEMM_QUIET is set."""
    if not quiet():
        print(f"isogemm: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(*, console: Console | None = None, shown: bool = True) -> Iterator[Tell]:
    """A bar that is gone at the end, on standard error or on a console; yields what moves it.

    Where standard error is no terminal, as in a log, a line says how far it is, once in `EVERY` seconds.
    """
    if not shown:
        yield lambda done, total, text: None
        return
    from rich.console import Console

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)  # a path or a module's name may look like some
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda done, total, text: bars.update(task, completed=done, total=total, description=text)


def _lines() -> Tell:
    started = said = time.monotonic()

    def tell(done: int, total: int | None, text: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= EVERY:
            said = now
            of = f"{done} of {total}" if total else f"{done}"
            print(f"isogemm: {of} after {now - started:.0f} s: {text}", file=sys.stderr, flush=True)

    return tell

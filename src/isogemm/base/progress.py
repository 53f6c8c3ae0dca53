"""A bar on a terminal, for work that takes its time: the one that commands, demos and conversions show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Tell", "progress_bar"]

Tell = Callable[[int, int | None, str], None]
"""``tell(done, total, text)``; a total of None is not known yet."""


@contextmanager
def progress_bar(total: int | None = None, *, console: Console | None = None, shown: bool = True) -> Iterator[Tell]:
    """A bar that is gone at the end, on standard error or on a console; yields what moves it."""
    if not shown:
        yield lambda done, total, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)  # a path or a module's name may look like some
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=total)
        yield lambda done, total, text: bars.update(task, completed=done, total=total, description=text)

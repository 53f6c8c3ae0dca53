"""Options of the command line: lists with commas, types, files to write, those that are not read; and tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from ..base.disk import check_room, writing
from ..errors import OptionError

Several = list[str] | None
DIGITS = 20  # of a number: fewer than 64 bits have
LONG_LINE = 400  # characters of a line, where no terminal says how many it has


def words(values: Several, default: str = "") -> list[str]:
    """The words of all that was given, or of the default."""
    return [part.strip() for value in (values or [default]) for part in value.split(",") if part.strip()]


def numbers(option: str, given: str | Several, *, nearest: str, count: int = 0) -> list[int]:
    """Whole numbers, so many where it is said; none where nothing is given.

    Raises OptionError: what is given is something else.
    """
    values = [given] if isinstance(given, str) else given or []
    texts = [part.strip() for value in values for part in value.split(",")]
    if not all(text.isascii() and text.isdecimal() and len(text) < DIGITS for text in texts) or (
        count and len(texts) != count
    ):
        limit = f"{count or ''} whole numbers with commas".strip()
        raise OptionError(option, limit=limit, value=",".join(texts), nearest=nearest)
    return [int(text) for text in texts]


def element(option: str, text: str, *others: str, nearest: str = "float32") -> str:
    """The name of an element type that is given by it or for short. Raises OptionError: it is none of products'."""
    from ..base.arguments import nearest as spelt
    from ..base.dtypes import ITEMSIZE, SHORT_NAMES

    name, known = SHORT_NAMES.get(text, text), (*ITEMSIZE, *others)
    if name not in known:
        raise OptionError(option, limit=", ".join(known), value=text, nearest=spelt(text, known, nearest))
    return name


def was_given(here: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line."""
    return getattr(here.get_parameter_source(name), "name", "") == "COMMANDLINE"


def refuse_given(here: typer.Context, unread: Collection[str], **said: Any) -> None:
    """Raise an OptionError, with what else is `said`, of parameters on the command line that would not be read.

    Nobody is to think that they were heard.
    """
    names = [
        (x.secondary_opts if here.params[x.name] is False else x.opts)[0]
        for x in here.command.params
        if x.name in unread and was_given(here, x.name)
    ]
    if names:
        raise OptionError(", ".join(names), **said)


def refuse_beside(here: typer.Context, beside: str, *unread: str) -> None:
    """`refuse_given` of parameters that `beside` makes unread."""
    refuse_given(here, unread, limit=f"without {beside.split()[0]}", value=beside, nearest="one of both")


def check_out(path: str | Path, name: str = "report.json") -> None:
    """Refuse before the work what could not be written after it; `name` is advised in the place of a folder."""
    with writing(path, name):
        check_room(path)


def print_table(table: Any) -> None:
    """Print a table of rich's, of which nothing is cut where there is no terminal's width."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, LONG_LINE)
    console.print(table)

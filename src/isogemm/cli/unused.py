"""Options that a command would not read beside others are refused: nobody is to think that they were heard."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import typer

from ..errors import OptionError


def refuse_unused(beside: str, given: Mapping[str, object]) -> None:
    """Raise an OptionError of what was `given`, by the names of options, where `beside` is what makes it unread."""
    names = [name for name, value in given.items() if value]
    if names:
        raise OptionError(", ".join(names), limit=f"without {beside.split()[0]}", value=beside, nearest="one of both")


def refuse_given(here: typer.Context, unread: Collection[str], **said: Any) -> None:
    """Raise an OptionError, with what else is `said`, of options that are on the command line: of these parameters."""
    given = (x for x in here.command.params if x.name in unread)
    names = [
        (x.secondary_opts if here.params[x.name or ""] is False else x.opts)[0]
        for x in given
        if getattr(here.get_parameter_source(x.name or ""), "name", "") == "COMMANDLINE"
    ]
    if names:
        raise OptionError(", ".join(names), **said)

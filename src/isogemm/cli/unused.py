"""Options that a command would not read beside others are refused: nobody is to think that they were heard."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import OptionError


def refuse_unused(beside: str, given: Mapping[str, object]) -> None:
    """Raise an OptionError of what was `given`, by the names of options, where `beside` is what makes it unread."""
    names = [name for name, value in given.items() if value]
    if names:
        raise OptionError(", ".join(names), limit=f"without {beside.split()[0]}", value=beside, nearest="one of both")

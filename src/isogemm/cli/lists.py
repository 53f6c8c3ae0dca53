"""Lists on the command line: words and numbers with commas, in options that may be repeated."""

from __future__ import annotations

from ..errors import OptionError

Several = list[str] | None
DIGITS = 20  # of a number: fewer than 64 bits have


def words(values: Several, default: str = "") -> list[str]:
    """Of all that was given, or of the default."""
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

"""A mistake with its parameter."""

from __future__ import annotations

from typing import NamedTuple

from ..case import GemmCall


class Variant(NamedTuple):
    """One way to make a mistake.

    Attributes
    ----------
    parameter : str
        What was used where, in words.
    case : GemmCall
        The call that was really made.
    """

    parameter: str
    case: GemmCall

"""A mistake with its parameter."""

from __future__ import annotations

from typing import NamedTuple

from ..case import GemmCall


class Variant(NamedTuple):
    """One way to make a mistake."""

    parameter: str  # what was used where, in words
    case: GemmCall  # the call that was really made

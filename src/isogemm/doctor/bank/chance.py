"""What no call describes, because it is left to chance: it is read from the result, not simulated."""

from __future__ import annotations

from collections.abc import Iterator

from ..case import GemmCall
from .variant import Variant


def unforeseen(case: GemmCall) -> Iterator[Variant]:
    """No call: `isogemm.doctor.tiles` and `isogemm.doctor.orders` look at what was seen."""
    yield from ()

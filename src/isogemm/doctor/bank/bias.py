"""Mistakes about the bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..case import GemmCall, Variant


def axis(case: GemmCall) -> Iterator[Variant]:
    """A number for each row."""
    if case.bias is not None:
        yield Variant("one number of the bias for each row of C", replace(case, bias_axis=1 - case.bias_axis))


def times(case: GemmCall) -> Iterator[Variant]:
    """Not once."""
    for count, words in ((2, "twice"), (0, "not at all"), (4, "four times"), (3, "three times"), (8, "eight times")):
        if case.bias is not None:
            yield Variant(f"the bias added {words}", replace(case, bias_times=count))

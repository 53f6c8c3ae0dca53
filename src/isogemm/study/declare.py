"""What a study declares: its question, its cases with the ways to compute each, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..lab import Work
from .site import Site

Row = Mapping[str, Any]
Step = Callable[[int], Any]
ROOFLINES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to compute a case: a candidate, which clocks call; some of them look at its `steps` and its `period`."""

    # what one call enqueues, a library call each: a loop has as many as it has products. ``step(i)`` works on the i-th
    # copy of the operands.
    steps: Sequence[Step]
    work: Work  # operations, and bytes that have to be moved
    library: str = "isogemm"  # whose code it is: ``isogemm``, ``torch``, ``numpy``, ``cublas``
    kernel: str = ""  # what computes it, where no profiler tells
    copies: int = 1  # of the operands, that `i` rotates through

    @property
    def period(self) -> int:
        """Calls after which the same operands come again."""
        return self.copies

    def __call__(self, i: int) -> Any:
        """One call; returns the last step's result."""
        result = None
        for step in self.steps:
            result = step(i)
        return result


@dataclass(frozen=True, slots=True)
class Ways:
    """A case made ready."""

    ways: dict[str, Way]  # the first is the one that the others are compared with
    # ``check()`` gives for each way, JSON-ready, what was compared and how many bit patterns differed; run before
    # anything is timed
    check: Callable[[], Mapping[str, Mapping[str, Any]]]
    facts: Mapping[str, Any] = field(default_factory=dict)  # what was found while making it, for the row
    # settings of libraries that all ways are called under
    under: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True)
class StudyCase:
    """One row of a study."""

    key: str  # readable and unique within the study: ``N=1024 k=16 fp32``; what ``--case`` takes
    facts: Mapping[str, Any]  # the key's parts and what else figures read, JSON-ready; they are part of the row
    nbytes: int  # memory that it needs on the device, all copies and results
    make: Callable[[Site, int], Ways]  # ``make(site, seed)`` allocates operands and gives the ways
    # which of ``device``, ``wall``, ``submit``, ``profiled`` it is timed by, where the device has them
    clocks: Sequence[str] = ("device",)
    inspect: bool = False  # also record grid, block, registers and occupancy of each kernel

    @property
    def roofline(self) -> str:
        """The name of the ceilings that it is held against."""
        return str(self.facts.get("roofline") or ROOFLINES[str(self.facts.get("dtype", "float32"))])


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture and what it says."""

    title: str  # the finding, computed from the rows
    chart: Any  # None for a finding in words alone
    sentence: str  # how to read it, or why it is so
    table: Sequence[Mapping[str, Any]] = ()  # rows of a table in place of a chart, all with the same keys


@dataclass(frozen=True, slots=True)
class Study:
    """A question, and how it is answered."""

    name: str
    question: str
    # ``cases(site, quick)``: all that would be measured given endless memory; the engine leaves out what does not fit
    cases: Callable[[Site, bool], Sequence[StudyCase]]
    figures: Callable[[Sequence[Row]], Sequence[Figure]]  # of one machine's rows that have times; loads altair

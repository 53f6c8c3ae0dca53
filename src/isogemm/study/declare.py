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


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a case: a candidate.

    Attributes
    ----------
    steps : sequence of callable
        What one call enqueues, a library call each: a loop has as many as it has products. ``step(i)`` works on the
        i-th copy of the operands.
    work : Work
        Operations, and bytes that have to be moved.
    library : str
        Whose code it is: ``isogemm``, ``torch``, ``numpy``, ``cublas``.
    kernel : str
        What computes it, where no profiler tells.
    copies : int
        Of the operands, that `i` rotates through.
    """

    steps: Sequence[Step]
    work: Work
    library: str = "isogemm"
    kernel: str = ""
    copies: int = 1

    def run(self, i: int) -> Any:
        """One call; returns the last step's result."""
        result = None
        for step in self.steps:
            result = step(i)
        return result


@dataclass(frozen=True, slots=True)
class Ways:
    """A case made ready.

    Attributes
    ----------
    ways : dict of str to Way
        The first is the one that the others are compared with.
    check : callable
        ``check()`` gives for each way, JSON-ready, what was compared and how many bit patterns differed; run before
        anything is timed.
    facts : mapping
        What was found while making it, for the row.
    under : callable
        Settings of libraries that all ways are called under.
    """

    ways: dict[str, Way]
    check: Callable[[], Mapping[str, Mapping[str, Any]]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    under: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True)
class StudyCase:
    """One row of a study.

    Attributes
    ----------
    key : str
        Readable and unique within the study: ``N=1024 k=16 fp32``; what ``--case`` takes.
    facts : mapping
        The key's parts and what else figures read, JSON-ready; they are part of the row.
    nbytes : int
        Memory that it needs on the device, all copies and results.
    make : callable
        ``make(site, seed)`` allocates operands and gives the ways.
    clocks : sequence of str
        Which of ``device``, ``wall``, ``submit``, ``profiled`` it is timed by, where the device has them.
    inspect : bool
        Also record grid, block, registers and occupancy of each kernel.
    """

    key: str
    facts: Mapping[str, Any]
    nbytes: int
    make: Callable[[Site, int], Ways]
    clocks: Sequence[str] = ("device",)
    inspect: bool = False

    @property
    def roofline(self) -> str:
        """The name of the ceilings that it is held against."""
        return str(self.facts.get("roofline") or ROOFLINES[str(self.facts.get("dtype", "float32"))])


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture and what it says.

    Attributes
    ----------
    title : str
        The finding, computed from the rows.
    chart : altair chart, or None
        None for a finding in words alone.
    sentence : str
        How to read it, or why it is so.
    table : sequence of mapping
        Rows of a table in place of a chart, all with the same keys.
    """

    title: str
    chart: Any
    sentence: str
    table: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A question, and how it is answered.

    Attributes
    ----------
    name, question : str
    cases : callable
        ``cases(site, quick)``: all that would be measured given endless memory; the engine leaves out what
        does not fit.
    figures : callable
        ``figures(rows)`` of one machine; loads altair.
    devices : sequence of str
    """

    name: str
    question: str
    cases: Callable[[Site, bool], Sequence[StudyCase]]
    figures: Callable[[Sequence[Row]], Sequence[Figure]]
    devices: Sequence[str] = ("cpu", "cuda")

"""Families of one kernel without configurations, in whose place the host does the work where its bits were wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....planner.bench import Bench
from ....planner.choose import Option, first
from ..driver import machine
from .trial import HOME


@dataclass
class Single:
    """Such a family; a case is a text that says what is compiled."""

    name: str
    tried: Callable[[Bench, str], str]  # (bench, case): see `isogemm.planner.family.Family`
    home: str = HOME

    def configs(self, case: str) -> list[str]:
        """One, without a name."""
        return [""]

    def supports(self, case: str, config: str) -> bool:
        """Always: callers ask for what there is."""
        return True

    def code(self, case: str, config: str) -> str:
        """The case."""
        return case

    def trial(self, bench: Bench, case: str, config: str) -> str:
        """See `isogemm.planner.family.Family`."""
        return self.tried(bench, case)

    def bind(self, case: str, config: str, device: int) -> Any:
        """Nothing is bound before it is called."""
        return None


def serves(family: Single, case: str, device: int) -> bool:
    """Whether its bits were right.

    Raises
    ------
    DeviceError
        While a graph is captured: it was not tried before.
    """
    options: list[Option[str, Any]] = [Option(family, "")]
    return first(options, case, machine.admissions(device), what=f"{family.name} of {case}") is not None

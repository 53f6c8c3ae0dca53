"""A family: kernels that share a source, and what the planner has to know of them, whatever they compute.

Products, products with quantized weights, operations along rows and attention bring the same six things. A *case* is a
call but for its addresses, a *configuration* one way to serve it, and *code* the text of all that selects what is
compiled. Verdicts are about code: they hold for every case and configuration that have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from .bench import Bench

__all__ = ["Families", "Family", "NotCompiledError"]

C = TypeVar("C", contravariant=True)
L = TypeVar("L", covariant=True)
F = TypeVar("F", bound="Family[Any, Any]")


class NotCompiledError(Exception):
    """A kernel would have to be compiled, where whoever binds it does not want to wait for that."""


class Family(Protocol[C, L]):
    """Kernels for cases of a kind `C`; bound to one, a kernel is an `L`."""

    name: str  # in tables, records and messages; no two families of a device share one
    # its folder in the package, or its file: what a verdict's fingerprint is made from, with all that is imported and
    # included there; see `isogemm.planner.fingerprint`
    home: str

    def configs(self, case: C) -> Sequence[Any]:
        """Configurations worth trying, the likeliest first; empty where the family cannot serve the case."""
        ...

    def supports(self, case: C, config: Any) -> bool:
        """Whether a configuration is legal for a case."""
        ...

    def code(self, case: C, config: Any) -> str:
        """What selects compiled code: equal texts, equal code."""
        ...

    def trial(self, bench: Bench, case: C, config: Any) -> str:
        """Run that code on operands that reach its edges: empty where every bit was right, else why it is refused."""
        ...

    def bind(self, case: C, config: Any, device: int) -> L:
        """Compile (from a cache where possible) and fix everything but the addresses."""
        ...


class Families(Generic[F]):
    """The families of a column, a row each, loaded when they are first asked for; those that cannot load say why.

    Parameters
    ----------
    package : str
        That the rows are relative to.
    rows : mapping of str to str
        Name to ``module:attribute``: a family, or its class.
    """

    def __init__(self, package: str, rows: Mapping[str, str]) -> None:
        self.package, self.rows = package, dict(rows)

    @property
    def found(self) -> Mapping[str, F]:
        """Every family that loads here, by name, in the order of the rows."""
        return self._loaded[0]

    @property
    def absent(self) -> Mapping[str, str]:
        """Why the others do not."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[dict[str, F], dict[str, str]]:
        found: dict[str, F] = {}
        missing: dict[str, str] = {}
        for name, row in self.rows.items():
            try:
                module, _, attribute = row.partition(":")
                family = getattr(import_module(f".{module}", self.package), attribute)
                made = family() if isinstance(family, type) else family
                if made.name != name:
                    raise AttributeError(f"its name is {made.name!r}, its row's {name!r}")
                found[name] = made
            except (ImportError, AttributeError, OSError) as error:
                missing[name] = f"{type(error).__name__}: {error}"
        return found, missing

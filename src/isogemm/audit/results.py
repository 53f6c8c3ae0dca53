"""What an audit found, as values: of each relation, of each provider, of all of them. `report` writes them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..contract.compare import bits
from .cases import NOT_A_NUMBER, ULP_BINS, FirstDifference, Outcome, Status
from .data import Array

SCHEMA = "isogemm.audit.v1"
_KEPT_DRIFTS = 3


@dataclass
class RelationResult:
    """One relation over all shapes, for one provider.

    Attributes
    ----------
    relation : str
    held, changed, failed, not_applicable : int
        Cases that kept their bits, that did not, that the provider failed, that do not apply to it.
    outputs, changed_outputs : int
        Outputs compared, and those whose bits changed.
    max_ulp : int
    histogram : list of int
        Changed outputs in each of `ULP_BINS`.
    reason, inapplicable : str
        Why the first case failed, or why none applies; why the first case that does not apply does not.
    drifts : list of Drift
        The first few.
    meaning : str
        What is compared.
    excused : int
        Changed cases whose bits nobody promised; `unpromised` says why.
    """

    relation: str
    held: int = 0
    changed: int = 0
    failed: int = 0
    not_applicable: int = 0
    outputs: int = 0
    changed_outputs: int = 0
    max_ulp: int = 0
    reason: str = ""
    inapplicable: str = ""
    histogram: list[int] = field(default_factory=lambda: [0] * len(ULP_BINS))
    drifts: list[FirstDifference] = field(default_factory=list)
    meaning: str = ""
    excused: int = 0
    unpromised: str = ""

    @property
    def cases(self) -> int:
        """Cases that apply."""
        return self.held + self.changed + self.failed

    @property
    def status(self) -> Status:
        """``held`` when at least one case applies and every one kept its bits."""
        return "changed" if self.changed else self.demanded

    @property
    def demanded(self) -> Status:
        """`status`, as if cases that nobody promised and that changed had not been run."""
        if self.changed > self.excused:
            return "changed"
        return "failed" if self.failed else "held" if self.held else "n/a"

    def add(self, outcome: Outcome, unpromised: str = "") -> None:
        """Count one more case; `unpromised` is why its bits may change, empty where they must not."""
        if outcome.status == "changed" and unpromised:
            self.excused, self.unpromised = self.excused + 1, unpromised
        self.held += outcome.status == "held"
        self.changed += outcome.status == "changed"
        self.failed += outcome.status == "failed"
        self.not_applicable += outcome.status == "n/a"
        self.outputs += outcome.outputs
        self.changed_outputs += outcome.changed
        self.max_ulp = max(self.max_ulp, outcome.max_ulp)
        self.histogram = [a + b for a, b in zip(self.histogram, outcome.histogram, strict=True)]
        if outcome.status == "n/a":
            self.inapplicable = self.inapplicable or outcome.reason
        first_failure = outcome.status == "failed" and self.failed == 1
        if first_failure or (outcome.status == "n/a" and not self.reason):
            self.reason = outcome.reason
        if outcome.drift is not None and len(self.drifts) < _KEPT_DRIFTS:
            self.drifts.append(outcome.drift)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; ``max_ulp`` is null where a NaN stood against a number."""
        names = ("relation", "meaning", "status", "cases", "held", "changed", "failed", "not_applicable")
        return (
            {name: getattr(self, name) for name in (*names, "outputs", "changed_outputs")}
            | {
                "max_ulp": None if self.max_ulp == NOT_A_NUMBER else self.max_ulp,
                "reason": self.reason,
                "drifts": [drift.to_dict() for drift in self.drifts],
            }
            | ({"not_promised": {"changed": self.excused, "why": self.unpromised}} if self.excused else {})
        )


class Agreement:
    """Which batch sizes agree with which: outputs of the common rows, and how many of them have equal bits."""

    def __init__(self, sweep: Sequence[int]) -> None:
        self.sweep = tuple(sweep)
        self.equal: Array = np.zeros((len(sweep), len(sweep)), np.int64)
        self.total: Array = np.zeros_like(self.equal)

    def add(self, products: Mapping[int, Array]) -> None:
        """Count the outputs of one linear, given by batch size."""
        for i, m in enumerate(self.sweep):
            for j, other in enumerate(self.sweep[: i + 1]):
                if m in products and other in products:
                    left, right = products[m][:other], products[other]
                    equal = int(np.count_nonzero(bits(left) == bits(right)))
                    self.equal[i, j] += equal
                    self.total[i, j] += left.size
        self.equal = np.maximum(self.equal, self.equal.T)
        self.total = np.maximum(self.total, self.total.T)

    def cells(self) -> list[dict[str, Any]]:
        """One entry for each ordered pair of sizes that were compared."""
        return [
            {"m": m, "other": other, "equal": int(self.equal[i, j]), "outputs": int(self.total[i, j])}
            for i, m in enumerate(self.sweep)
            for j, other in enumerate(self.sweep)
            if self.total[i, j]
        ]


@dataclass(frozen=True)
class Speed:
    """Time of one product by one provider, interleaved with the others'.

    Attributes
    ----------
    provider, shape : str
    m, n, k : int
    median, p5, p95 : float
        Seconds per call.
    against_fastest : float
        Its median over that of the fastest provider: 1 is the fastest.
    verdict : str
        Against the fastest: ``FASTEST``, ``EQUAL``, ``SLOWER`` or ``AMBIGUOUS``.
    """

    provider: str
    shape: str
    m: int
    n: int
    k: int
    median: float
    p5: float
    p95: float
    against_fastest: float
    verdict: str


@dataclass
class ProviderResult:
    """Everything found about one provider.

    Attributes
    ----------
    name : str
    reason : str
        Why it did not run, or was given up on a shape; empty when neither happened.
    relations : dict of str to RelationResult
    agreement : Agreement
    relative_error : float
        Largest error of a sample against float64, as a share of its norm: what a gross error shows in, no bound.
    """

    name: str
    relations: dict[str, RelationResult]
    agreement: Agreement
    reason: str = ""
    ran: bool = False
    relative_error: float = 0.0

    @classmethod
    def empty(cls, name: str, meanings: Mapping[str, str], sweep: Iterable[int]) -> ProviderResult:
        """Before the first case of relations with these meanings."""
        relations = {relation: RelationResult(relation, meaning=text) for relation, text in meanings.items()}
        return cls(name, relations, Agreement(tuple(sweep)))

    @property
    def status(self) -> Literal["held", "changed", "failed", "absent"]:
        """``held`` when it ran everywhere, something was compared, and nothing failed, or changed that is promised.

        Where nothing but what is not promised was asked for, that counts. Where nothing applies, it is ``absent``.
        """
        found = {r.demanded for r in self.relations.values()}
        if found <= {"n/a"}:
            found = {r.status for r in self.relations.values()}
        if "changed" in found:
            return "changed"
        if (not self.ran) if self.reason else found <= {"n/a"}:
            return "absent"
        return "held" if found & {"held"} and "failed" not in found and not self.reason else "failed"

    @property
    def cases(self) -> int:
        """Cases that apply."""
        return sum(r.cases for r in self.relations.values())

    @property
    def compared(self) -> int:
        """Outputs that were compared."""
        return sum(r.outputs for r in self.relations.values())

    @property
    def histogram(self) -> list[int]:
        """Changed outputs in each of `ULP_BINS`, over all relations."""
        return [sum(counts) for counts in zip(*(r.histogram for r in self.relations.values()), strict=True)]

    @property
    def first_drifts(self) -> list[FirstDifference]:
        """The first one of each relation that has any."""
        return [r.drifts[0] for r in self.relations.values() if r.drifts]

    @property
    def changed(self) -> int:
        """Cases in which at least one bit changed."""
        return sum(r.changed for r in self.relations.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "relations": [r.to_dict() for r in self.relations.values()],
            "agreement": {"sweep": list(self.agreement.sweep), "cells": self.agreement.cells()},
            "histogram": [{"ulps": b, "outputs": c} for b, c in zip(ULP_BINS, self.histogram, strict=True)],
            "relative_error": self.relative_error,
        }


@dataclass(repr=False)
class Results:
    """What an audit found.

    Attributes
    ----------
    providers : dict of str to ProviderResult
    required : tuple of str
        Providers that have to hold.
    wanted : tuple of str
        Providers that have to have run, whatever came of it.
    shapes : list of dict
        name, n, k, source and columns compared of each linear.
    speeds : list of Speed
    options : dict
        dtype, seed, sweep and the rest.
    notes : list of str
        What was left out, and why.
    environment : dict
        The lab's stamp of the machine.
    schema, title : str
        Of the JSON, and of the page.
    described : str
        What was measured, where it is no product.
    quantized : dict
        Of a model whose weights were to be quantized: `formats`, how many Linear modules have which; `floats`, why
        others stay as they were, by name; `weights` and `float_weights`, the elements of both. Else empty.
    """

    providers: dict[str, ProviderResult]
    required: tuple[str, ...]
    options: dict[str, Any]
    shapes: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    schema: str = SCHEMA
    title: str = "Does the matmul keep its bits?"
    described: str = ""
    quantized: dict[str, Any] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {result.status}" for name, result in self.providers.items())
        return f"{type(self).__name__}({names}; {'ok' if self.ok else 'not ok'})"

    def held(self, provider: str) -> bool:
        """Whether every applicable case of every audited relation kept its bits, with at least one compared.

        Raises
        ------
        KeyError
            No such provider was audited.
        """
        return self.providers[provider].status == "held"

    @property
    def ok(self) -> bool:
        """Whether all required providers held, and all wanted ones ran: what was not checked is not right."""
        return not self.broken and not self.missing

    @property
    def broken(self) -> list[str]:
        """The required providers that ran and did not hold."""
        return [name for name in self.required if not self.held(name) and self.providers[name].status != "absent"]

    @property
    def missing(self) -> list[str]:
        """The required and wanted providers of which nothing was seen."""
        names = dict.fromkeys([*self.required, *self.wanted])
        return [name for name in names if name not in self.broken and not self.providers[name].compared]

    @property
    def exit_status(self) -> int:
        """That of `isogemm audit`: 0 when `ok`, 1 when a required provider did not hold, 3 when one did not run."""
        return 1 if self.broken else 3 if self.missing else 0

    def drifts(self, provider: str) -> list[FirstDifference]:
        """The drift reports that were kept, the first few of each relation."""
        return [d for r in self.providers[provider].relations.values() for d in r.drifts]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values; a product's has the schema ``isogemm.audit.v1``."""
        return {
            "schema": self.schema,
            "ok": self.ok,
            "required": list(self.required),
            "options": self.options,
            "shapes": self.shapes,
            "providers": [p.to_dict() for p in self.providers.values()],
            "speeds": [vars(s) for s in self.speeds],
            "notes": self.notes,
            "environment": self.environment,
        } | ({"quantized": self.quantized} if self.quantized else {})

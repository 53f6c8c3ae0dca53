"""Bits of results on the device: against the definition on a sample, and against each other everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogemm.contract import reference
from isogemm.operands.tensors import on_host

from ..common import compare_bits

__all__ = ["Sample", "relative_error"]

Array = NDArray[Any]
SAMPLED_COLUMNS = 48


def relative_error(got: Any, a: Any, b: Any, c: Any = None) -> float:
    """||got - (c + a @ b)|| / ||c + a @ b|| in Frobenius' norm, against float64."""
    exact = a.double() @ b.double()
    if c is not None:
        exact += c.double()
    return float((got.double() - exact).norm() / exact.norm())


@dataclass(slots=True)
class Sample:
    """Rows and columns of one product whose outputs the definition gives, evaluated once for all calls on it.

    An element depends on its row of `a` and its column of `b` alone, so the sample holds for every batch that the
    rows are part of.

    Attributes
    ----------
    a, b : tensor [m, k] and [k, n]
    definition : str
        The contract.
    rows, columns : sequence of int
        Ascending.
    c : tensor [m, n] of float32, optional
        What the walk over K starts from.
    """

    a: Any
    b: Any
    definition: str
    rows: Sequence[int]
    columns: Sequence[int]
    c: Any = None
    _expected: Array | None = field(default=None, init=False)

    @classmethod
    def of(cls, a: Any, b: Any, definition: str, rows: Sequence[int], c: Any = None) -> Sample:
        """With both ends of the columns and an even spread between: tails are where kernels go wrong."""
        columns = np.unique(np.linspace(0, b.shape[1] - 1, SAMPLED_COLUMNS).astype(int))
        return cls(a, b, definition, sorted({r for r in rows if 0 <= r < a.shape[0]}), columns.tolist(), c)

    def expected(self) -> Array:
        """float32 accumulators [rows, columns]."""
        if self._expected is None:
            a, b = on_host(self.a[list(self.rows)]), on_host(self.b[:, list(self.columns)])
            c = None if self.c is None else on_host(self.c[list(self.rows)][:, list(self.columns)])
            self._expected = reference.evaluate(a, b, self.definition, c)
        return self._expected

    def check(self, got: Any) -> dict[str, Any]:
        """`got` [m' <= m, n], the product of the first m' rows, by `compare_bits` with the definition."""
        count = sum(1 for r in self.rows if r < got.shape[0])
        found = on_host(got[list(self.rows[:count])][:, list(self.columns)])
        want = reference.epilogue(self.expected()[:count], out_dtype=found.dtype)
        return compare_bits(self.definition, found, want)

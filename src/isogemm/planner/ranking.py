"""Kernels in the order in which tables recommend them for a product. What is legal and admitted is judged elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..problem.numeric import numeric_key
from ..problem.product import Product
from .tables import Row, Table, Use, nearest_rows

__all__ = ["Candidate", "recommended"]


class Candidate(NamedTuple):
    """A kernel that may be right for a product.

    Attributes
    ----------
    use : Use
    reason : str
        Why it is considered.
    table : Table or None
        Where it stands.
    row : Row or None
        Its row: of exactly this product, or of one nearby.
    expected_us : float or None
        Microseconds, where exactly this N and K were timed and it was the fastest.
    """

    use: Use
    reason: str
    table: Table | None = None
    row: Row | None = None
    expected_us: float | None = None


def recommended(tables: Sequence[Table], product: Product) -> Iterator[Candidate]:
    """From the product's own row, table by table; then from the nearest rows, by the same buckets of M."""
    key = numeric_key(product)
    seen: set[Use] = set()

    def of(table: Table, row: Row, reason: str, *, exact: bool) -> Iterator[Candidate]:
        for i, use in enumerate(row.bucket(product.m).uses):
            if use not in seen:
                seen.add(use)
                timed = row.microseconds(product.m) if exact and i == 0 else None
                yield Candidate(use, reason, table, row, timed)

    for table in tables:
        row = table.row(key)
        if row is not None:
            yield from of(table, row, f"table {table.name}", exact=True)
    for table in tables:
        for row in nearest_rows(table, key):
            near = f"n {row.key.n}, k {row.key.k}" + (f", batch {row.key.batch}" if row.key.batch > 1 else "")
            yield from of(table, row, f"default: as for {near} in {table.name}", exact=False)

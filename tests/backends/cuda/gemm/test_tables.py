"""Every kernel that a shipped table names, on the product and the rows that it is named for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.backends.cuda import forced
from tests.backends.cuda.device import DTYPES, Mode, check_sample, differing, draw, torch

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.planner.tables import Table, TunedRow, shipped_tables

pytestmark = pytest.mark.gpu

PARTS = 8
MOST_ROWS = 8192  # of A; a weight gradient's bucket may be larger
MOST_BYTES = 6 << 30


def tables() -> list[Table]:
    """Those of this device."""
    name = torch.cuda.get_device_name()
    return [table for table in shipped_tables() if table.stamp.get("device") == name]


def test_an_h200_has_a_table() -> None:
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("tables are shipped for the H200")
    assert any(table.rows for table in tables())


@dataclass(frozen=True)
class Posed:
    """A row's product at one M."""

    row: TunedRow
    m: int

    @property
    def mode(self) -> Mode:
        dtype = self.row.key.types.split("*")[0]
        return Mode(dtype, dtype, self.row.key.contract, self.row.key.contract)

    def operands(self) -> tuple[Any, Any]:
        """A and B as the row's layout has them."""
        key, (left, right) = self.row.key, self.row.key.layout.split(">")[0]
        a = self.stack(self.m, key.k, left, seed=self.m)
        return a, self.stack(key.k, key.n, right, seed=key.n)

    def stack(self, rows: int, columns: int, letter: str, seed: int) -> Any:
        lead = (self.row.key.batch,) if self.row.key.batch > 1 else ()
        shape = (*lead, columns, rows) if letter == "T" else (*lead, rows, columns)
        x = draw(shape, self.mode.dtype, seed)
        return x.transpose(-1, -2) if letter == "T" else x

    @property
    def nbytes(self) -> int:
        key = self.row.key
        return 4 * key.batch * (self.m * key.k + key.n * key.k + 2 * self.m * key.n)


def posed() -> Iterator[Posed]:
    """Every row at the last M of each bucket, as far as memory and time allow."""
    for table in tables():
        for row in table.rows:
            if "S" in row.key.layout or row.key.layout.endswith(">T"):
                continue
            for m in dict.fromkeys(min(bucket.m, MOST_ROWS) for bucket in row.buckets):
                case = Posed(row, m)
                if case.nbytes <= MOST_BYTES:
                    yield case


def outputs(case: Posed) -> tuple[Any, Any, Any, Any]:
    """A, B, an output of NaNs and, for accumulation, a start."""
    a, b = case.operands()
    dtype = case.row.key.types.split(">")[1]
    out = torch.full((*a.shape[:-1], b.shape[-1]), float("nan"), dtype=DTYPES[dtype], device="cuda")
    start = draw(out.shape, "float32", 9) if case.row.key.epilogue == "accumulate" else None
    return a, b, out, start


def check_all(case: Posed) -> list[str]:
    """Run every kernel of the bucket; samples of the first have the definition's bits, the others have its bits."""
    a, b, out, start = outputs(case)
    product, at = forced.pose(a, b, out, case.mode, start)
    first, wrong = None, []
    admitted = set(forced.candidates(product))
    for use in case.row.bucket(case.m).uses:
        if not forced.family(use.family).supports(product, use.config):
            continue
        if FAMILIES.found[use.family].library and tuple(use) not in admitted:
            continue
        out.fill_(float("nan"))
        forced.run(*use, product, at)
        if first is None:
            first = out.clone()
            items = (0, a.shape[0] - 1) if a.ndim == 3 else (None,)
            for i in items:
                got, x, y, c = (t if i is None or t is None else t[i] for t in (first, a, b, start))
                check_sample(got, x, y, case.mode, rows=6, columns=24, c=c)
        elif differing(out, first):
            wrong.append(f"{case.row.key} m={case.m}: {use.family} [{use.config}]")
    return wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_of_every_bucket(part: int) -> None:
    wrong = []
    for case in list(posed())[part::PARTS]:
        try:
            wrong += check_all(case)
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append(f"{case.row.key} m={case.m}: {error}")
        torch.cuda.empty_cache()
    assert not wrong, "\n".join(wrong)


def test_rows_are_those_of_packed_products() -> None:
    """What this file poses is what the keys mean: a key made from a posed product is the row's own."""
    from isogemm.problem.numeric import numeric_key

    for case in list(posed())[:: max(1, math.isqrt(len(list(posed()))))]:
        a, b, out, start = outputs(case)
        product, _ = forced.pose(a, b, out, case.mode, start)
        if case.row.key.epilogue != "epilogue":
            assert numeric_key(product) == case.row.key

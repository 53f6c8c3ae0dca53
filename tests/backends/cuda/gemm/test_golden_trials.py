"""What a trial has to work with: for every kind of product, golden products that the kernels offered for it take."""

from __future__ import annotations

import pytest

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.contract.spec import Contract
from isogemm.planner import trials
from isogemm.planner.tuning import Wanted, pose

LONGEST = 333  # of K: below, orders can have the same bits by chance


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("trans", ["NT", "NN", "TN"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (50257, 4096), (4096, 4095), (1001, 999)])
@pytest.mark.parametrize("m", [4, 200])
def test_every_kernel_that_is_offered_can_be_tried(n: int, k: int, m: int, trans: str, dtype: str) -> None:
    """An odd N says nothing of how operands lie: kernels that want them aligned are tried with aligned ones."""
    contract = Contract() if dtype == "float32" else Contract("tensor_core:sm90")
    product = pose(Wanted("", n, k, trans), m=m, dtype=dtype, contract=contract)
    golden = [
        trials._pose(product, case, rows, columns, 1).product
        for case in trials._cases(product)
        for rows, columns in trials._sizes(case, product)
        if case.k >= LONGEST
    ]
    for family in FAMILIES.found.values():
        if not family.library:
            for config in family.configs(product):
                assert any(family.supports(p, config) for p in golden), f"{family.name} [{config}]"

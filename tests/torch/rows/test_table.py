"""The table of operations along rows: from a row come an operator, its fake kernel, its gradient and its routes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from isogemm.contract.rows import OPERATIONS  # noqa: E402
from isogemm.torch.routing.rows import REDUCTIONS  # noqa: E402
from isogemm.torch.rows import ops, table  # noqa: E402


@pytest.mark.parametrize("kind", table.ROWS)
def test_a_row_has_an_operator_of_the_contracts_operands(kind):
    arguments = [a.name for a in ops.OPERATORS[kind]._schema.arguments]
    if kind == "embedding":
        assert arguments == ["weight", "ids"]
    else:
        operands = [operand.name for operand in OPERATIONS[kind].operands]
        assert arguments[: len(operands)] == operands
        assert arguments[-1] == "out_dtype"


def test_what_rows_name_is_routed():
    routed = {name for _, name in REDUCTIONS.values()}
    assert {name for row in table.ROWS.values() for name in row.aten} < routed


def test_every_operation_of_the_contract_is_torchs_or_a_part_of_one():
    left = set(OPERATIONS) - set(table.ROWS) - set(ops.FUSED)
    assert all(name.endswith("_back") or name == "norm_rope" for name in left)

"""The table of operations along rows: from a row come an operator, its fake kernel, its gradient and its routes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from isogemm.contract.reference import canonical  # noqa: E402
from isogemm.contract.rows import OPERATIONS, Operation, RowOperand  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402
from isogemm.torch.routing.rows import REDUCTIONS  # noqa: E402
from isogemm.torch.rows import ops, table  # noqa: E402
from isogemm.torch.rows.direct import direct  # noqa: E402
from isogemm.torch.rows.signature import signature  # noqa: E402


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
    assert all(name.endswith("_back") or name in ("norm_rope", "cross_entropy") for name in left)


@pytest.mark.parametrize("kind", sorted(set(table.ROWS) & set(OPERATIONS)))
@pytest.mark.parametrize("n", [2, 130, 1026])
def test_every_operation_has_the_bits_of_its_formula_on_the_host(kind, n):
    """No trial looks at kernels of a CPU: this does, for what is in the table and what will be."""
    random, operation = np.random.default_rng(n), OPERATIONS[kind]
    shapes = {"rows": (3, n), "row": (n,), "angles": (3, n // 2)}
    drawn = [random.standard_normal(shapes[x.extent]).astype(np.float32) * 3 for x in operation.operands]
    drawn[0][1, :2] = np.inf, -0.0
    drawn[0][2, 1] = np.nan
    for option in (False, True) if "interleaved" in operation.options else (1e-5,):
        own = {"eps": option} if "eps" in operation.options else {"interleaved": option}
        options = [option] if "eps" in operation.options or "interleaved" in operation.options else []
        options += [True] if operation.results[0].width else []
        got = direct(kind, tuple(map(torch.from_numpy, drawn)), (*options, None)).numpy()
        for i in range(3):
            rows = [x if x.ndim == 1 else x[i] for x in drawn]
            want = canonical(np.atleast_1d(operation.results_of(*rows, **own)[0]).astype(np.float32))
            assert (canonical(got[i]).view(np.uint32) == want.view(np.uint32)).all(), (kind, i)


ENDS = [
    0.0, -0.0, 1e-30, 17.3, 79.9, 80.1, 86.9, 87.0, 87.1, 87.34, 88.0, 88.37, 88.38, 88.72, 88.7229, 88.73, 90.0, 100.0,
    103.27, 103.28, 103.97, 103.98, 104.0, 104.1, 1e4, 3e38, np.inf,
]  # fmt: skip


LEASTS = [80.0, 86.9, 87.0, 87.1, 88.0, 103.28, 103.98, 104.0, 104.1, np.inf, np.nan]


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        *((kind, end) for kind in ("softmax", "log_softmax") for end in LEASTS),
        *((kind, end) for kind in ("exp", "sigmoid", "silu", "silu_mul") for end in (np.inf, np.nan)),
    ],
)
def test_exponentials_at_their_ends_have_the_bits_of_the_formula(kind, end):
    """Up to each alone, of either sign: what is subnormal, infinite or none is computed in another way."""
    ends = np.array([x for x in ENDS if x < end or end < 80], np.float32)
    row = np.concatenate([-ends, ends[ends < 80], np.float32([-end, end]), np.linspace(-3, 3, 150, dtype=np.float32)])
    rows = np.stack([-np.abs(row[-200:]), row[-200:]])
    operation = OPERATIONS[kind]
    given = [rows, np.full_like(rows, 2)][: len(operation.operands)]
    got = direct(kind, tuple(map(torch.from_numpy, given)), (None,)).numpy()
    for i in range(2):
        want = canonical(np.asarray(operation.results_of(*(x[i] for x in given))[0], np.float32))
        assert (canonical(got[i]).view(np.uint32) == want.view(np.uint32)).all()


def test_what_the_host_cannot_take_is_refused_when_it_is_defined(monkeypatch):
    four = tuple(RowOperand(name) for name in ("x", "y", "z", "t"))
    monkeypatch.setitem(OPERATIONS, "four", Operation(lambda x, y, z, t: x, four, "each"))
    with pytest.raises(OptionError, match="operands of four: limit: at most 3; got: 4"):
        signature("four")
    monkeypatch.setitem(OPERATIONS, "power", Operation(lambda x: x, kernels="each", options=("power",)))
    with pytest.raises(OptionError, match="option of power: limit: "):
        signature("power")
    with pytest.raises(OptionError, match="operation along rows: limit: "):
        signature("nope")

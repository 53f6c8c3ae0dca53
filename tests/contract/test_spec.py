"""Contracts as values: text form, equality, cuts of K, and errors that name the limit."""

from __future__ import annotations

import doctest
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isogemm.contract.reference
import isogemm.contract.spec
from isogemm.contract import ARITHMETICS, Contract, Order, as_contract
from isogemm.errors import ContractError

ORDERS = st.one_of(
    st.just("chain"),
    st.integers(1, 10**6).map(lambda i: f"leaf{256 * i}"),
    st.sampled_from([2, 4, 8, 16]).map(lambda i: f"tree{i}"),
)


@given(st.sampled_from(sorted(ARITHMETICS)), ORDERS)
def test_text_form_round_trips(arithmetic: str, order: str) -> None:
    text = f"{arithmetic}/{order}"
    contract = Contract.parse(text)
    assert str(contract) == text
    assert Contract.parse(str(contract)) == contract
    assert hash(Contract.parse(text)) == hash(contract)
    assert as_contract(contract) is contract
    assert eval(repr(contract), {"Contract": Contract.parse}) == contract


def test_defaults_and_properties() -> None:
    assert Contract.parse("fma") == Contract() == as_contract("fma/chain")
    hopper = Contract.parse("tensor_core:sm90/leaf4096")
    assert (hopper.block, hopper.fraction_bits, hopper.operands) == (16, 25, ("bfloat16", "float16"))
    assert hopper.order == Order("leaf", 4096)
    assert Contract.parse("tensor_core:sm80").block == 8
    assert Contract.parse("tensor_core:sm80").fraction_bits == 24
    assert Contract.parse("tf32:sm90").block == 8
    assert len({Contract.parse("fma/chain"), Contract.parse("fma/leaf16"), Contract.parse("fma/tree2")}) == 3


@pytest.mark.parametrize(
    ("text", "limit", "nearest"),
    [
        ("fmaa/chain", "fma", "fma"),
        ("tensor_core:sm91/chain", "tensor_core:sm90", "tensor_core:sm90"),
        ("FMA/chain", "fma", "fma"),
        ("Tensor_Core:SM90/chain", "tensor_core:sm90", "tensor_core:sm90"),
        ("chian", "fma", "'fma/chain'"),
        ("chain", "fma", "'fma/chain'"),
        ("leafs", "fma", "'fma/leaf4096'"),
        ("tree", "fma", "'fma/tree8'"),
        ("lanes", "fma", "'fma/lanes32'"),
        ("int", "int32", "int32"),
        ("ieee", "fma", "fma/chain"),
        ("default", "fma", "'fma/chain'"),
        ("", "fma", "'fma/chain'"),
        ("fma/", "chain", "chain"),
        ("fma/chains", "chain", "chain"),
        ("fma/chian", "chain", "chain"),
        ("fma/laef512", "leafL", "leaf4096"),
        ("fma/Tree8", "treeN", "tree8"),
        ("fma/lane32", "lanes32", "lanes32"),
        ("fma/leaf", "leafL", "leaf4096"),
        ("fma/leaf0", "leafL", "leaf4096"),
        ("fma/leaf-16", "leafL", "leaf4096"),
        ("fma/leaf016", "leafL", "leaf4096"),
        ("fma/tree", "treeN", "tree8"),
        ("fma/lanes", "lanes32", "lanes32"),
        ("fma/lanes16", "32", "lanes32"),
        ("int32/lanes32", "block is 1", "chain"),
        ("fma/tree3", "2, 4, 8, 16", "tree2"),
        ("fma/tree32", "2, 4, 8, 16", "tree16"),
        ("tensor_core:sm90/leaf100", "16", "leaf96"),
        ("tensor_core:sm90/leaf7", "16", "leaf16"),
        ("tf32:sm90/leaf12", "8", "leaf"),
        ("tf32x3:sm90/leaf40", "32", "leaf32"),
        ("tf32x3/chain", "tf32x3:sm90", "tf32x3:sm90"),
        ("fma/chain/chain", "chain", "chain"),
    ],
)
def test_malformed_contracts_name_limit_value_and_nearest(text: str, limit: str, nearest: str) -> None:
    with pytest.raises(ContractError) as caught:
        Contract.parse(text)
    assert limit in str(caught.value.limit)
    assert str(caught.value.nearest).startswith(nearest)
    if "arithmetic" in caught.value.what:  # whole: what is offered is a contract
        assert str(caught.value.nearest).removesuffix("/chain") == nearest.removesuffix("/chain")
        Contract.parse(str(caught.value.nearest).strip("'"))
    assert "nearest legal choice" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "size", "nearest"),
    [
        ("foo", 3, "chain"), ("leafs", 64, "leaf4096"), (None, 0, "chain"), ("leaf", 16.0, "leaf4096"),
        ("tree", 8.0, "tree8"), ("leaf", "16", "leaf4096"), ("leaf", True, "leaf4096"), ("lanes", 32.0, "lanes32"),
        ("chain", 7, "chain"), ("leaf", 0, "leaf4096"),
    ],
)  # fmt: skip
def test_an_order_that_is_none_makes_no_contract(kind: object, size: object, nearest: str) -> None:
    with pytest.raises(ContractError, match="order of a contract") as caught:
        Contract("fma", Order(kind, size))
    assert nearest in str(caught.value.nearest)


@pytest.mark.parametrize("value", [None, 3, b"fma/chain", Order()])
def test_a_contract_is_a_contract_or_text(value: object) -> None:
    with pytest.raises(ContractError, match="text form"):
        as_contract(value)


def test_cuts_of_k() -> None:
    assert Order().leaves(100, 16) == ((0, 100),)
    assert Order("leaf", 48).leaves(100, 16) == ((0, 48), (48, 96), (96, 100))
    assert Order("leaf", 48).leaves(0, 16) == ()
    assert Order("tree", 4).leaves(100, 16) == ((0, 32), (32, 64), (64, 96), (96, 100))
    assert Order("tree", 8).leaves(20, 16) == ((0, 16), (16, 20), *[(20, 20)] * 6)
    assert Order("tree", 2).leaves(0, 16) == ((0, 0), (0, 0))
    assert Order("lanes", 32).leaves(34, 1)[:3] == ((0, 2), (2, 4), (4, 5))
    assert Order("lanes", 32).lane_by_lane(34)[:6] == [0, 32, 1, 33, 2, 3]


@given(st.integers(0, 5000), st.sampled_from([1, 8, 16]), st.integers(1, 40), st.sampled_from([2, 4, 8, 16]))
def test_cuts_cover_k_once_at_multiples_of_the_block(k: int, block: int, blocks: int, count: int) -> None:
    for order in (Order("leaf", blocks * block), Order("tree", count)):
        leaves = order.leaves(k, block)
        edges = [0, *(stop for _, stop in leaves)]
        assert [start for start, _ in leaves] == edges[:-1]
        assert edges[-1] == k
        assert edges == sorted(edges)
        assert all(edge % block == 0 or edge == k for edge in edges)
    assert len(Order("tree", count).leaves(k, block)) == count


@pytest.mark.parametrize("module", [isogemm.contract.spec, isogemm.contract.reference], ids=lambda m: m.__name__)
def test_examples_in_docstrings(module: object) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_importing_contracts_loads_neither_numba_nor_torch() -> None:
    code = "import sys, isogemm.contract; print([m for m in ('numba', 'torch') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_device_s_own_arithmetic_has_no_definition() -> None:
    x = np.ones((2, 16), np.float16)
    with pytest.raises(ContractError, match="executable definition"):
        isogemm.contract.reference.evaluate(x, x.T, "tensor_core:native/chain")

"""Relations that follow from the definition: orders, padding, continuation, and independence of everything else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.draws import ARITHMETICS, Arithmetic, draw, products

from isogemm.contract import Contract
from isogemm.contract.compare import bits, differing, first_mismatch
from isogemm.contract.reference import canonical, evaluate
from isogemm.errors import ContractError, DTypeError, ShapeError

BY_NAME = pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)


def operands(arithmetic: Arithmetic, m: int, k: int, n: int, kind: str = "near", seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    a, b = draw(rng, (m, k), kind, arithmetic), draw(rng, (k, n), kind, arithmetic)
    return a.view(arithmetic.dtype), b.view(arithmetic.dtype)


def assert_same(x: Any, y: Any) -> None:
    assert first_mismatch(x, y) is None


@BY_NAME
def test_one_leaf_is_the_chain(arithmetic: Arithmetic) -> None:
    for kind in ("near", "special", "product underflows"):
        a, b = operands(arithmetic, 7, 100, 9, kind)
        chain = evaluate(a, b, f"{arithmetic.name}/chain")
        for length in (112, 4096):
            assert_same(evaluate(a, b, f"{arithmetic.name}/leaf{length}"), np.float32(0) + chain)  # -0 becomes +0


@pytest.mark.parametrize("k", [0, 1, 31, 32, 33, 100])
@pytest.mark.parametrize("kind", ["near", "special", "product underflows"])
def test_lanes_meet_by_xor(kind: str, k: int) -> None:
    arithmetic = next(a for a in ARITHMETICS if a.name == "fma")
    a, b = operands(arithmetic, 7, k, 9, kind, seed=k)
    with np.errstate(all="ignore"):
        lanes = np.stack([evaluate(a[:, lane::32], b[lane::32], "fma/chain") for lane in range(32)])
        for mask in (16, 8, 4, 2, 1):
            lanes = lanes + lanes[np.arange(32) ^ mask]
    assert (canonical(lanes[0]).view(np.uint32) == canonical(lanes).view(np.uint32)).all()
    assert_same(evaluate(a, b, "fma/lanes32"), canonical(lanes[0]))
    if kind == "near" and k == 100:
        assert differing(evaluate(a, b, "fma/lanes32"), evaluate(a, b, "fma/chain")) > 0


def test_lanes_have_no_running_total() -> None:
    a, b = operands(next(a for a in ARITHMETICS if a.name == "fma"), 2, 40, 3)
    with pytest.raises(ContractError, match="running total"):
        evaluate(a, b, "fma/lanes32", np.zeros((2, 3), np.float32))


@BY_NAME
def test_leaves_add_up_in_ascending_order(arithmetic: Arithmetic) -> None:
    a, b = operands(arithmetic, 7, 100, 9)
    start = evaluate(*operands(arithmetic, 7, 5, 9, seed=1), f"{arithmetic.name}/chain")
    for c in (None, start):
        total = np.zeros((7, 9), np.float32) if c is None else c.copy()
        for i in range(0, 100, 32):
            total = total + evaluate(a[:, i : i + 32], b[i : i + 32], f"{arithmetic.name}/chain")
        assert_same(evaluate(a, b, f"{arithmetic.name}/leaf32", c), total)


@BY_NAME
def test_shape_of_a_tree(arithmetic: Arithmetic) -> None:
    a, b = operands(arithmetic, 7, 128, 9)
    q = [evaluate(a[:, i : i + 16], b[i : i + 16], f"{arithmetic.name}/chain") for i in range(0, 128, 16)]
    pairs = [q[0] + q[1], q[2] + q[3], q[4] + q[5], q[6] + q[7]]
    tree = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert_same(evaluate(a, b, f"{arithmetic.name}/tree8"), tree)
    assert differing(tree, evaluate(a, b, f"{arithmetic.name}/leaf16")) > 0


@BY_NAME
def test_orders_are_different_contracts(arithmetic: Arithmetic) -> None:
    a, b = operands(arithmetic, 7, 300, 9)
    results = [evaluate(a, b, f"{arithmetic.name}/{order}") for order in ("chain", "leaf64", "tree2", "tree4")]
    for i, x in enumerate(results):
        for y in results[i + 1 :]:
            assert differing(x, y) > 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_arithmetics_are_different_contracts(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((8, 256)).astype(dtype), rng.standard_normal((256, 8)).astype(dtype)
    sm90, sm80, fma = (evaluate(a, b, f"{name}/chain") for name in ("tensor_core:sm90", "tensor_core:sm80", "fma"))
    assert differing(sm90, sm80) > 16
    assert differing(sm90, fma) > 16
    assert differing(sm80, fma) > 16


@settings(max_examples=60)
@given(products(most=60), st.integers(0, 40))
def test_zero_padding_of_k_changes_nothing(case: Any, extra: int) -> None:
    arithmetic, a, b, c = case
    k = a.shape[1]
    start = c.view(np.float32) if k else None  # an empty walk returns its start, -0 included
    wide = np.pad(a, ((0, 0), (0, extra))), np.pad(b, ((0, extra), (0, 0)))
    results = [
        evaluate(x.view(arithmetic.dtype), y.view(arithmetic.dtype), f"{arithmetic.name}/chain", start)
        for x, y in ((a, b), wide)
    ]
    if arithmetic.name == "fma":  # fma(+0, +0, -0) is +0: the one difference that padding can make
        results = [np.where(r == 0, np.float32(0), r) for r in results]
    assert_same(*results)


@settings(max_examples=60)
@given(products(most=60), st.data())
def test_a_product_cut_along_k_continues_from_its_accumulator(case: Any, data: Any) -> None:
    arithmetic, a, b, c = case
    order = data.draw(st.sampled_from(["chain", f"leaf{2 * arithmetic.block}"]))
    step = Contract.parse(f"{arithmetic.name}/{order}").order.size or arithmetic.block
    cut = step * data.draw(st.integers(0, a.shape[1] // step))
    x, y, start = a.view(arithmetic.dtype), b.view(arithmetic.dtype), c.view(np.float32)
    first = evaluate(x[:, :cut], y[:cut], f"{arithmetic.name}/{order}", start)
    second = evaluate(x[:, cut:], y[cut:], f"{arithmetic.name}/{order}", first)
    assert_same(second, evaluate(x, y, f"{arithmetic.name}/{order}", start))


def test_a_cut_inside_a_block_is_another_product() -> None:
    arithmetic = ARITHMETICS[1]
    a, b = operands(arithmetic, 16, 64, 16)
    first = evaluate(a[:, :24], b[:24], "tensor_core:sm90/chain")
    cut = evaluate(a[:, 24:], b[24:], "tensor_core:sm90/chain", first)
    assert differing(cut, evaluate(a, b, "tensor_core:sm90/chain")) > 0


@pytest.mark.parametrize("arithmetic", ARITHMETICS[1:], ids=str)
def test_order_inside_a_block_does_not_matter_and_across_blocks_it_does(arithmetic: Arithmetic) -> None:
    block = arithmetic.block
    a, b = operands(arithmetic, 9, 6 * block, 11, "wide")
    rng = np.random.default_rng(1)
    inside = np.concatenate([i * block + rng.permutation(block) for i in range(6)])
    across = np.concatenate([np.arange(block) + i * block for i in (3, 1, 5, 0, 4, 2)])
    whole = evaluate(a, b, f"{arithmetic.name}/chain")
    assert_same(evaluate(a[:, inside], b[inside], f"{arithmetic.name}/chain"), whole)
    assert differing(evaluate(a[:, across], b[across], f"{arithmetic.name}/chain"), whole) > 0


@BY_NAME
def test_an_element_depends_on_its_row_and_column_alone(arithmetic: Arithmetic) -> None:
    a, b = operands(arithmetic, 33, 50, 300, "special")
    whole = evaluate(a, b, f"{arithmetic.name}/chain")
    assert_same(evaluate(a[5:6], b, f"{arithmetic.name}/chain"), whole[5:6])
    assert_same(evaluate(a, b[:, 200:201], f"{arithmetic.name}/chain"), whole[:, 200:201])
    assert_same(evaluate(a[::-3], b[:, 127:131], f"{arithmetic.name}/chain"), whole[::-3, 127:131])
    fortran = np.asfortranarray(a), np.asfortranarray(b)
    assert_same(evaluate(*fortran, f"{arithmetic.name}/chain"), whole)
    a.flags.writeable = b.flags.writeable = False
    assert_same(evaluate(a, b, f"{arithmetic.name}/chain"), whole)


@BY_NAME
def test_threads_change_nothing(arithmetic: Arithmetic) -> None:
    a, b = operands(arithmetic, 40, 200, 333)
    one = evaluate(a, b, f"{arithmetic.name}/chain", threads=1)
    for threads in (2, 3, 7):
        assert_same(evaluate(a, b, f"{arithmetic.name}/chain", threads=threads), one)


@BY_NAME
@pytest.mark.parametrize("order", ["chain", "leaf16", "tree4"])
def test_empty_products(arithmetic: Arithmetic, order: str) -> None:
    for m, k, n in ((0, 5, 3), (3, 5, 0), (3, 0, 2), (0, 0, 0)):
        got = evaluate(
            np.zeros((m, k), arithmetic.dtype), np.zeros((k, n), arithmetic.dtype), f"{arithmetic.name}/{order}"
        )
        assert got.shape == (m, n)
        assert got.dtype == np.float32
        assert not bits(got).any()


def test_an_empty_walk_returns_its_start() -> None:
    start = np.array([[1.5, -0.0, np.inf]], np.float32)
    got = evaluate(np.zeros((1, 0), np.float32), np.zeros((0, 3), np.float32), "fma/chain", start)
    assert_same(got, start)
    assert got is not start


def test_starts_are_read_and_not_written() -> None:
    a, b = operands(ARITHMETICS[0], 3, 5, 4)
    start = np.ones((3, 4), np.float32)
    evaluate(a, b, "fma/chain", start)
    evaluate(a, b, "fma/leaf2", start)
    assert (start == 1).all()


@pytest.mark.parametrize(
    ("a", "b", "contract", "error", "nearest"),
    [
        (np.float32, np.float32, "tensor_core:sm90/chain", DTypeError, "contract fma/chain"),
        (np.float16, np.float16, "tf32:sm90/leaf64", DTypeError, "contract fma/leaf64"),
        (np.float32, np.float16, "fma/chain", DTypeError, "both float32"),
        (np.float64, np.float64, "fma/chain", DTypeError, "both float32"),
        (np.int32, np.int32, "tensor_core:sm80/chain", DTypeError, "both bfloat16"),
        (np.float32, np.float32, "tensor_core:sm70/chain", ContractError, "tensor_core:sm"),
    ],
)
def test_what_a_contract_is_not_defined_for(a: Any, b: Any, contract: str, error: Any, nearest: str) -> None:
    with pytest.raises(error) as caught:
        evaluate(np.ones((2, 3), a), np.ones((3, 2), b), contract)
    assert str(caught.value.nearest).startswith(nearest)


def test_shapes_and_starts_that_do_not_fit() -> None:
    x = np.ones((2, 3), np.float32)
    for a, b in ((x, x), (x[0], x.T), (x, x.T[None])):
        with pytest.raises(ShapeError, match=r"\[m, k\]"):
            evaluate(a, b, "fma/chain")
    with pytest.raises(ShapeError, match=r"\[m, n\]"):
        evaluate(x, x.T, "fma/chain", np.ones((1, 2), np.float32))
    with pytest.raises(DTypeError, match="float32"):
        evaluate(x, x.T, "fma/chain", np.ones((2, 2)))
    with pytest.raises(ContractError) as caught:
        evaluate(x, x.T, "fma/tree4", np.ones((2, 2), np.float32))
    assert caught.value.nearest == "fma/chain"

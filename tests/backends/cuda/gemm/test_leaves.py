"""Leaves side by side, and trees in one walk: what is walked, where sums wait, how they meet. Bits: tests on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.cuda.compiled import Kernels, kernels
from tests.backends.cuda.gemm.test_kernels_compile import begun, full, pose

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.backends.cuda.gemm.hopper.config import HopperConfig, geometry, levels_of, quads_of
from isogemm.backends.cuda.gemm.leaves.family import MOST, walks
from isogemm.problem.product import Product, Strides

__all__ = ["kernels"]  # the fixture

LEAVES = FAMILIES.found["leaves"]
KINDS = {"bfloat16": ("tensor_core:sm90", 16), "float32": ("fma", 1)}
orders = st.one_of(
    st.sampled_from(["tree2", "tree4", "tree8", "tree16"]), st.integers(1, 60).map(lambda n: f"leaf{16 * n}")
)


def covered(strides: Strides, k: int, *, rows: bool) -> np.ndarray:
    """Where each of K lies in a matrix whose other index is 0."""
    return np.arange(k) * (strides.row if rows else strides.col)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3000), orders, st.sampled_from(["NT", "NN", "TN"]),
       st.sampled_from(sorted(KINDS)))  # fmt: skip
def test_chains_are_the_leaves_of_the_contract(m: int, n: int, k: int, order: str, layout: str, dtype: str) -> None:
    arithmetic, block = KINDS[dtype]
    p = pose(layout, dtype, f"{arithmetic}/{order}", m=m, n=n, k=k)
    found = walks(p)
    leaves = [(begin, end) for begin, end in p.contract.order.leaves(k, block) if end > begin]
    if found is None:
        length = leaves[0][1]
        assert len(leaves) < 2 or len(leaves) > MOST or (block == 1 and length % 4)
        return
    assert found.number == len(leaves)
    chains = [(found.even, item, 0) for item in range(found.even.batch)]
    chains += [(found.rest, 0, found.even.batch)] if found.rest else []
    for (begin, end), (chain, item, before) in zip(leaves, chains, strict=True):
        assert chain.contract.order.kind == "chain"
        assert chain.k == end - begin
        for x, of, rows in ((chain.a, p.a, False), (chain.b, p.b, True)):
            first = (item * x.batch) if not before else before * (found.even.a if not rows else found.even.b).batch
            there = covered(of, k, rows=rows)[begin:end]
            assert np.array_equal(first + covered(x, chain.k, rows=rows), there)
        assert chain.plain
        assert (chain.dtype_out, chain.out.col, chain.out.row % 4) == ("float32", 1, 0)
        assert chain.out.row >= n


@pytest.mark.parametrize(
    "product",
    [
        pose(contract="tensor_core:sm90/chain"),
        pose(contract="tensor_core:sm90/leaf4096"),  # one leaf
        pose(contract="tensor_core:sm90/tree8", batch=2),
        pose(contract="tensor_core:sm90/leaf16", k=16 * MOST + 1),
        pose(dtype="float32", contract="tf32:sm90/tree8"),
        pose(dtype="float32", contract="fma/tree8", k=1001),  # leaves of 126: no multiple of 16 bytes
    ],
)
def test_what_is_left_to_others(product) -> None:
    assert walks(product) is None
    assert not LEAVES.configs(product)
    assert not LEAVES.supports(product, "128x128x64 s4")


MEETING = [
    (full(pose(contract="tensor_core:sm90/tree8", m=64, n=1000, k=5000)), ["hopper", "hopper", "meet"], 7),
    (full(pose("NN", contract="tensor_core:sm90/tree4", m=5, n=72)), ["hopper", "meet"], 3),
    (begun(pose(contract="tensor_core:sm90/leaf256", out="float32")), ["hopper", "meet"], 8),
    (full(pose(dtype="float32", contract="fma/tree8", k=4096, m=4, n=64)), ["sgemm", "meet"], 7),
]


def test_sums_meet_one_rounding_at_a_time(kernels: Kernels) -> None:
    built = [kernels.build("leaves", LEAVES.configs(product)[0], product) for product, _, _ in MEETING]
    for (product, names, sums), made in zip(MEETING, built, strict=True):
        assert [kernel.name for kernel in made] == names
        added, fused = made[-1].machine_counts("FADD", "FFMA")
        # Of four values each; beta * C and the bias are two more, and every way to store has its own.
        scaled, biased = product.c is not None and not product.accumulate, product.dtype_bias is not None
        assert added >= 4 * (sums + scaled + biased), product
        assert fused == 0, product
        assert all(kernel.spilled == 0 for kernel in made), product


WALKED = [
    ("tree2", "128x192x64 s5"),
    ("tree4", "128x128x64 s7"),
    ("tree8", "128x128x64 s7"),
    ("tree8", "128x128x64 s5"),
    ("tree8", "w64x16x256 s5"),
    ("tree16", "64x128x64 s4 pp"),
]


def tree(order: str, k: int = 4096) -> Product:
    return pose(contract=f"tensor_core:sm90/{order}", m=256, k=k)


@pytest.mark.parametrize(
    ("order", "k", "config"),
    [
        ("tree8", 1024, "w64x16x256 s5"),  # a leaf ends within a stage
        ("tree8", 4096 + 16, "128x128x64 s5"),  # leaves of two lengths
        ("tree8", 4096, "128x192x64 s5"),  # three sums that registers do not hold
    ],
)
def test_trees_that_no_walk_takes_at_once(order: str, k: int, config: str) -> None:
    assert not FAMILIES.found["hopper"].supports(tree(order, k), config)


def test_a_tree_in_one_walk(kernels: Kernels) -> None:
    made = [kernels.build("hopper", config, tree(order)) for order, config in WALKED]
    for (order, config), (kernel,) in zip(WALKED, made, strict=True):
        product, parsed, where = tree(order), HopperConfig.parse(config), f"{order} {config}"
        quads, levels, near = quads_of(product), levels_of(product), geometry(product, parsed).inside(product)
        added, fused, read, written, waits = kernel.machine_counts("FADD", "FFMA", "LDG", "STG", "WARPGROUP")
        assert kernel.spilled == fused == 0, where
        # Three times two meet in a quad, once at each level above; a pair is a total that both leaves are added to.
        assert added == parsed.accumulators * (3 + levels if quads else 1), where
        assert (read, written >= read) == ((levels - near) * parsed.accumulators // 4, True), where
        # No instruction waits for the one before: those that do have a fence and a wait each.
        assert waits <= kernel.machine_counts("HGMMA")[0], where


def test_a_tree_of_few_tiles_is_walked_leaf_by_leaf_at_once(monkeypatch) -> None:
    """By the model: what a chain makes wait is an eighth as long, and the meeting costs less than that saves."""
    from tests.backends.cuda.compiled import H200

    from isogemm.backends.cuda.driver import facts

    monkeypatch.setattr(facts, "device", lambda ordinal: H200)
    chain, tree = (pose(contract=f"tensor_core:sm90/{order}", m=56, n=512, k=25472) for order in ("chain", "tree8"))
    hopper = FAMILIES.found["hopper"]
    alone = min(hopper.microseconds(chain, c, 0) for c in hopper.configs(chain))
    together = min(LEAVES.microseconds(tree, c, 0) for c in LEAVES.configs(tree))
    assert together < 0.6 * alone

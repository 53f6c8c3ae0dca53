"""Operands out of step: what is copied for Hopper's kernels, and where the copies lie. Bits: see the tests on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isogemm.backends.cuda.gemm.hopper.config import serves
from isogemm.backends.cuda.gemm.padded import family
from isogemm.backends.cuda.gemm.padded.family import FEW, Padded, padded
from isogemm.contract.spec import Contract
from isogemm.problem.product import Product, Strides

PADDED = Padded()


def pose(m: int, n: int, k: int, layout: str = "NT", batch: int = 1, dtype: str = "bfloat16", gap: int = 0) -> Product:
    """A product whose lines are `gap` elements longer than they are wide."""

    def laid(letter: str, rows: int, columns: int) -> Strides:
        step = (columns if letter == "N" else rows) + gap
        item = step * (rows if letter == "N" else columns) * (batch > 1)
        return Strides(step, 1, item) if letter == "N" else Strides(1, step, item)

    return Product(
        m, n, k, dtype, dtype, dtype, Contract.parse("tensor_core:sm90/chain"),
        laid(layout[0], m, k), laid(layout[1], k, n), Strides(n, 1, m * n * (batch > 1)), batch=batch,
    )  # fmt: skip


sizes = st.integers(2, 300)


@given(
    st.integers(1, 300), sizes, sizes, st.sampled_from(["NN", "NT", "TN", "TT"]), st.integers(1, 3), st.integers(0, 9)
)
def test_every_layout_is_readable_afterwards(m: int, n: int, k: int, layout: str, batch: int, gap: int) -> None:
    p = pose(m, n, k, layout, batch, gap=gap)
    found = padded(p)
    assert (found is None) == serves(p)
    if found is None:
        return
    assert serves(found.product)
    for before, after, copy, rows, columns in (
        (p.a, found.product.a, found.a, m, k),
        (p.b, found.product.b, found.b, k, n),
    ):
        if copy is None:
            assert after == before
            continue
        assert copy.number * copy.inner == rows * columns
        few = (m if copy is found.a else n) < FEW
        assert (after.col == 1) == (copy is found.a if few else before.col == 1)
        last = (rows - 1) * after.row + (columns - 1) * after.col + (copy.items - 1) * after.batch
        assert 2 * last < copy.nbytes
        assert 8 * copy.words - copy.inner < 8
    assert replace(found.product, a=p.a, b=p.b) == p


@pytest.mark.parametrize(
    ("product", "copied"),
    [
        (pose(64, 128, 256), ""),
        (pose(64, 128, 257), "ab"),
        (pose(64, 129, 256), ""),
        (pose(64, 129, 256, "NN"), "b"),
        (pose(65, 128, 256, "TN"), "a"),
        (pose(1, 128, 257), "b"),
        (pose(64, 128, 256, gap=3), "ab"),
    ],
)
def test_what_can_be_read_as_it_lies_is_not_copied(product: Product, copied: str) -> None:
    found = padded(product)
    assert copied == ("" if found is None else "a" * (found.a is not None) + "b" * (found.b is not None))
    assert bool(PADDED.configs(product)) == bool(copied)


@pytest.mark.parametrize(
    "product",
    [
        pose(64, 128, 257, dtype="float32"),
        replace(pose(64, 128, 257), align=2),
        replace(pose(64, 128, 257), contract=Contract.parse("tensor_core:sm90/tree4")),
        replace(pose(64, 128, 257), dtype_b="float16"),
    ],
)
def test_what_hopper_s_kernels_cannot_do_is_left_to_others(product: Product) -> None:
    assert padded(product) is None
    assert not PADDED.configs(product)
    assert not PADDED.supports(product, "128x128x64 s4")


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_equal_zeros_keep_their_signs(monkeypatch, zeros) -> None:
    bound: list[float] = []
    monkeypatch.setattr(family, "bind_copies", lambda sides, device: None)
    monkeypatch.setattr(family.HOPPER, "bind", lambda product, config, device: bound.append(product.alpha))
    for alpha in zeros:
        PADDED.bind(replace(pose(8, 77, 123), alpha=alpha), "", 0)
    assert [str(alpha) for alpha in bound] == [str(alpha) for alpha in zeros]

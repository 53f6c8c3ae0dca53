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
from isogemm.planner.trials import golden_products
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
    across = m < FEW and p.a.col != 1
    assert (found is None) == (serves(p) and not across)
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
        assert (after.col == 1) == (before.col == 1 or (copy is found.a and m < FEW))
        last = (rows - 1) * after.row + (columns - 1) * after.col + (copy.items - 1) * after.batch
        assert 2 * last < copy.nbytes
        piece = 8 if copy.inner <= 56 else 64  # a line of the cache, where a copy's is no shorter
        assert 8 * copy.words == -(-copy.inner // piece) * piece
    assert replace(found.product, a=p.a, b=p.b) == p


@pytest.mark.parametrize(
    ("product", "copied"),
    [
        (pose(64, 128, 256), ""),
        (pose(64, 128, 257), "ab"),
        (pose(64, 129, 256), ""),
        (pose(64, 129, 256, "NN"), "b"),
        (pose(65, 128, 256, "TN"), "a"),
        (pose(72, 128, 256, "TN"), ""),
        (pose(56, 128, 256, "TN"), "a"),
        (pose(56, 56, 256, "TN"), "a"),
        (pose(56, 56, 256, "NT"), ""),
        (pose(1, 128, 256, "TN"), ""),
        (pose(1, 128, 256, "TN", gap=7), "ab"),
        (pose(128, 1, 256, "NN"), ""),
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_that_turn_an_operand_have_its_bits(dtype: str) -> None:
    """Few rows across K, in step and out of it; what lies between lines and around the result is NaN."""
    import torch
    from tests.backends.cuda import forced
    from tests.backends.cuda.device import Mode

    mode, kind = Mode(dtype, dtype, None, "tensor_core:sm90/chain"), getattr(torch, dtype)

    def across(values: torch.Tensor, gap: int) -> torch.Tensor:
        """The same numbers, lines along the first dimension."""
        flat = torch.full((values.shape[1], values.shape[0] + gap), float("nan"), dtype=kind, device="cuda")
        return flat[:, : values.shape[0]].t().copy_(values)

    wrong = []
    for m, n, k in (
        (2, 136, 333),
        (16, 264, 2568),
        (37, 72, 1000),
        (63, 1000, 129),
        (48, 40, 512),
        (33, 56, 8 * 256 + 3),
    ):
        a, b = torch.randn(m, k, device="cuda").to(kind), torch.randn(k, n, device="cuda").to(kind)
        k8, n8 = -(-k // 8) * 8, -(-n // 8) * 8
        a8, b8 = torch.zeros(m, k8, dtype=kind, device="cuda"), torch.zeros(n8, k8, dtype=kind, device="cuda").t()
        a8[:, :k], b8[:k, :n] = a, b
        want = torch.zeros(m, n8, dtype=kind, device="cuda")
        forced.run("hopper", "64x64x64 s4", *forced.pose(a8, b8, want, mode))
        for gap in (0, 1, 8):
            around = torch.full((m * n + 64,), float("nan"), dtype=kind, device="cuda")
            out = around[16 : 16 + m * n].view(m, n)
            x, w = across(a, gap), across(b.t(), gap).t()
            product, at = forced.pose(x, w, out, mode)
            found = padded(product)
            assert found is not None
            assert found.product.a.col == 1
            for config in PADDED.configs(product)[:6]:
                around.fill_(float("nan"))
                forced.run("padded", config, product, at)
                stray = int((~around.isnan()).sum()) - out.numel()
                if stray or not torch.equal(out.view(torch.int16), want[:, :n].contiguous().view(torch.int16)):
                    wrong.append(f"{m} x {n} x {k}, gap {gap} [{config}]")
    assert not wrong, wrong


@pytest.mark.parametrize("k", [4096, 2201])
def test_a_trial_has_products_of_every_way_of_copying(k: int) -> None:
    """With K beyond a ring of stages: what a verdict is about is a layout, and rows decide how it is copied."""
    product = pose(700, 640, k, "TN")
    every = [(g, padded(g)) for g in golden_products(product)]
    long = [(g.m, f.product.a.col == 1) for g, f in every if f is not None and g.k > 2000]
    assert any(turned for m, turned in long)
    assert k % 8 == 0 or any(not turned for m, turned in long)
    assert all(turned == (m < FEW) for m, turned in long)

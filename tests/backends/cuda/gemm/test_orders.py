"""Chains, leaves and trees on the GPU, and what follows from their definitions."""

from __future__ import annotations

import pytest
from tests.backends.cuda.device import (
    ALL_MODES,
    BF16,
    FP16,
    Mode,
    all_modes,
    check_sample,
    draw,
    expected,
    modes,
    same,
    torch,
)

import isogemm

pytestmark = pytest.mark.gpu

ORDERS = ("chain", "leaf32", "leaf128", "leaf4096", "tree2", "tree8", "tree16")


@all_modes
@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str, mode: Mode) -> None:
    asked = mode.ordered(order)
    for m, n, k in ((1, 64, 256), (130, 33, 333), (64, 128, 4500), (70, 96, 2048)):
        x, w = draw((m, k), mode.dtype, m, special=True), draw((n, k), mode.dtype, n)
        got = isogemm.linear(x, w, out_dtype=torch.float32, **asked.options)
        same(got, expected(x, w.T, asked.definition, out_dtype="float32"), f"{asked.definition} {m} x {n} x {k}")


@modes
@pytest.mark.parametrize("order", ["leaf4096", "tree8"])
def test_orders_do_not_depend_on_the_batch(order: str, mode: Mode) -> None:
    asked = mode.ordered(order)
    x, w = draw((1024, 14336), mode.dtype, 1), draw((512, 14336), mode.dtype, 2)
    whole = isogemm.linear(x, w, out_dtype=torch.float32, **asked.options)
    check_sample(whole, x, w.T, asked)
    for m in (1, 2, 7, 16, 33, 64, 100, 256, 1000):
        same(isogemm.linear(x[:m], w, out_dtype=torch.float32, **asked.options), whole[:m], f"{asked.definition} {m}")


@modes
@pytest.mark.parametrize(("order", "cut"), [("chain", 32), ("leaf64", 64), ("leaf512", 512)])
def test_a_walk_goes_on_where_another_ended(order: str, cut: int, mode: Mode) -> None:
    """Products cut along K at multiples of the block (of the leaf), accumulated in order, are the uncut one."""
    asked, k = mode.ordered(order), 8 * 512
    a, b = draw((100, k), mode.dtype, 1), draw((k, 72), mode.dtype, 2)
    whole = isogemm.matmul(a, b, out_dtype=torch.float32, **asked.options)
    for size in (cut, 3 * cut):
        if k // size > 200:
            continue
        total = torch.zeros((100, 72), device="cuda")
        for start in range(0, k, size):
            isogemm.matmul(
                a[:, start : start + size], b[start : start + size], out=total, accumulate=True, **asked.options
            )
        same(total, whole, f"{asked.definition} in pieces of {size}")


@pytest.mark.parametrize("mode", [BF16, FP16], ids=str)
def test_a_weight_gradient_over_micro_batches(mode: Mode) -> None:
    """dW = dY^T X over tokens: micro-batches at leaf multiples, and padding tokens, change no bit."""
    asked = mode.ordered("leaf1024")
    dy, x = draw((4096, 160), mode.dtype, 1), draw((4096, 136), mode.dtype, 2)
    whole = isogemm.matmul(dy.T, x, out_dtype=torch.float32, **asked.options)
    check_sample(whole, dy.T, x, asked)
    for size in (1024, 2048):
        total = torch.zeros((160, 136), device="cuda")
        for start in range(0, 4096, size):
            part = slice(start, start + size)
            isogemm.matmul(dy[part].T, x[part], out=total, accumulate=True, **asked.options)
        same(total, whole, f"micro-batches of {size}")
    padded = torch.zeros((4096 + 128, 160), dtype=dy.dtype, device="cuda"), draw((4096 + 128, 136), mode.dtype, 3)
    padded[0][:4096], padded[1][:4096] = dy, x
    same(isogemm.matmul(padded[0].T, padded[1], out_dtype=torch.float32, **asked.options), whole, "padding tokens")


def test_errors_of_leaves_are_flat_in_k() -> None:
    """A chain on tensor cores drifts with K; leaves of 4096 do not."""
    errors: dict[str, list[float]] = {}
    for order in ("chain", "leaf4096"):
        asked = BF16.ordered(order)
        for k in (4096, 65536):
            x, w = draw((64, k), BF16.dtype, 1), draw((64, k), BF16.dtype, 2)
            exact = x.double() @ w.double().T
            got = isogemm.linear(x, w, out_dtype=torch.float32, **asked.options).double()
            errors.setdefault(order, []).append(float((got - exact).norm() / exact.norm()))
    assert errors["leaf4096"][1] < 1.5 * errors["leaf4096"][0]
    assert errors["chain"][1] > 5 * errors["chain"][0]
    assert errors["leaf4096"][1] < 1e-5


def test_tree_and_accumulate_are_refused_together() -> None:
    a, b = draw((4, 64), BF16.dtype, 1), draw((64, 4), BF16.dtype, 2)
    with pytest.raises(isogemm.errors.ContractError):
        isogemm.matmul(a, b, out=torch.zeros((4, 4), device="cuda"), accumulate=True, contract="tensor_core:sm90/tree4")


def test_orders_differ() -> None:
    """Otherwise the tests above could not tell them apart."""
    for mode in ALL_MODES:
        x, w = draw((32, 4096), mode.dtype, 1), draw((32, 4096), mode.dtype, 2)
        found = [
            isogemm.linear(x, w, out_dtype=torch.float32, **mode.ordered(order).options)
            for order in ("chain", "leaf64", "tree2", "tree8")
        ]
        for i, y in enumerate(found):
            assert all((y != z).any() for z in found[:i]), mode

"""grouped_linear on a GPU: lengths that nobody waits for, the bits of `linear`, graphs replayed with other lengths."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda.poison import poisoned  # noqa: E402
from tests.torch.gemm.test_grouped_linear import alone  # noqa: E402
from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.gemm.grouped_linear import call_grouped_linear  # noqa: E402

__all__ = ["poisoned"]  # the fixture

# torch says so once in a process, after it has set the mode.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]
COUNTS = ([5, 0, 130, 1, 17, 300], [0, 0, 0, 1, 0, 0], [64] * 6, [0, 5000, 33, 0, 16, 15], [1] * 6)


def operands(counts, n, k, dtype, behind=9):
    rows = sum(counts) + behind
    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = ((rows, k), (len(counts), n, k), (len(counts), n), (rows, n))
    x, w, bias, dy = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes)
    x[sum(counts) :], dy[sum(counts) :] = torch.nan, torch.nan
    return x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), dy


@pytest.mark.parametrize("order", ["leaf4096", "chain", "leaf64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_group_has_the_bits_of_linear(counts, dtype, order):
    x, w, bias, dy = operands(counts, 264, 328, dtype)
    lengths, m = torch.tensor(counts, device="cuda"), sum(counts)
    for watching in (nullcontext, no_waiting):  # kernels are tried before the first call
        with watching():
            y = iso.grouped_linear(x, w, lengths, bias, grad_order=order)
            got = (y, *torch.autograd.grad(y, (x, w, bias), dy))
    want = alone(x, w, bias, dy, counts, grad_order=order)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same(a[:m] if i < 2 else a, b)
    assert not y[m:].any()
    assert not got[1][m:].any()
    with torch.no_grad():
        assert same(iso.grouped_linear(x, w, lengths.int(), bias), y)
        assert same(iso.grouped_linear(x, w, counts, bias), y)


@contextmanager
def no_waiting():
    """An error for whatever waits for the device."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("order", ["chain", "leaf16"])
def test_buffers_continue_behind_whole_blocks(order):
    counts, (n, k) = [48, 0, 160, 16], (264, 328)
    x, w, _, dy = operands(counts, n, k, torch.bfloat16, behind=0)
    x, starts, totals = x.detach(), np.cumsum([0, *counts[:-1]]), []
    for cuts in ([0, 1], [0, 0.5, 1]):
        total = torch.zeros(4, n, k, device="cuda")
        for low, high in pairwise(cuts):
            pairs = zip(starts, counts, strict=True)
            ends = [(i + 16 * int(c // 16 * low), i + 16 * int(c // 16 * high)) for i, c in pairs]
            rows = torch.cat([torch.arange(i, j, device="cuda") for i, j in ends])
            lengths = torch.tensor([j - i for i, j in ends], device="cuda")
            y = call_grouped_linear(x[rows].requires_grad_(), w, None, lengths, "", order, None, total, None)
            y.backward(dy[rows])
        totals.append(total)
    assert same(*totals)
    for g, part in enumerate(torch.arange(sum(counts), device="cuda").split(counts)):
        want = iso.mm(dy[part].mT, x[part], contract=f"tensor_core:sm90/{order}", out_dtype=torch.float32)
        assert same(totals[0][g], want)


def test_a_graph_is_replayed_with_other_lengths():
    x, w, bias, _ = operands([10, 20, 30], 264, 328, torch.bfloat16, behind=40)
    x = torch.randn_like(x)
    counts = torch.tensor([10, 20, 30], device="cuda")
    with torch.no_grad():
        iso.grouped_linear(x, w, counts, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = iso.grouped_linear(x, w, counts, bias)
        for lengths in ([10, 20, 30], [0, 100, 0], [1, 0, 2], [0, 0, 0], [100, 0, 0]):
            counts.copy_(torch.tensor(lengths))
            y.fill_(torch.nan)
            graph.replay()
            parts = x[: sum(lengths)].split(lengths)
            want = [iso.linear(rows, w[g], bias[g]) for g, rows in enumerate(parts) if len(rows)]
            assert same(y[: sum(lengths)], torch.cat([y[:0], *want]))
            assert not y[sum(lengths) :].any()


def test_lengths_that_cannot_be_touch_nothing():
    x, w, _, _ = operands([8, 8], 64, 64, torch.bfloat16, behind=0)
    with torch.no_grad():
        y = iso.grouped_linear(x, w, torch.tensor([-3, 2**40], device="cuda"))
        assert same(y, iso.linear(x, w[1]))


def test_torch_s_grouped_mm_is_served_without_waiting():
    x, w, _, dy = operands([7, 0, 40], 64, 96, torch.bfloat16, behind=3)
    ends = torch.tensor([7, 7, 47], dtype=torch.int32, device="cuda")
    for watching in (nullcontext, no_waiting):
        with torch.no_grad(), iso.invariant(), watching():
            y, dw = torch._grouped_mm(x, w.mT, offs=ends), torch._grouped_mm(dy.mT, x, offs=ends)
    lengths = torch.tensor([7, 0, 40], device="cuda")
    assert same(y, iso.grouped_linear(x, w, lengths).detach())
    assert same(dw[2], iso.mm(dy[7:47].mT, x.detach()[7:47]))

"""Gradients of operations along rows on CUDA: the bits of the CPU's, micro-batches included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.backends.cuda.poison import poisoned
from tests.backends.cuda.rows.test_run import bits, same

__all__ = ["poisoned"]  # the fixture

torch = pytest.importorskip("torch")
reductions = pytest.importorskip("isogemm.torch.reductions")

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# name: function, how many operands are rows, how many are one row.
CASES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "rms_norm": (reductions.rms_norm, 1, 1),
    "rms_norm alone": (reductions.rms_norm, 1, 0),
    "rms_norm wide": (lambda x, w: reductions.rms_norm(x, w, 1e-3, out_dtype=F32), 1, 1),
    "layer_norm": (reductions.layer_norm, 1, 2),
    "layer_norm alone": (reductions.layer_norm, 1, 0),
    "add_rms_norm": (lambda x, y, w: torch.cat(reductions.add_rms_norm(x, y, w), -1), 2, 1),
    "softmax": (reductions.softmax, 1, 0),
    "log_softmax": (reductions.log_softmax, 1, 0),
    "cross_entropy": (lambda x: reductions.cross_entropy(x, targets(x)), 1, 0),
    "sum": (reductions.sum, 1, 0),
    "mean": (reductions.mean, 1, 0),
    "silu_mul": (reductions.silu_mul, 2, 0),
    "silu": (reductions.silu, 1, 0),
    "sigmoid": (reductions.sigmoid, 1, 0),
    "exp": (reductions.exp, 1, 0),
}


def targets(x: Any) -> Any:
    """A class for each row, but for every fifth."""
    i = torch.arange(len(x), device=x.device)
    return torch.where(i % 5 == 4, -100, i * 7 % x.shape[1])


def drawn(*shape: int, seed: int, dtype: Any = F32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(function: Callable[..., Any], tensors: list[Any], dy: Any) -> list[Any]:
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    return list(torch.autograd.grad(out, tensors, dy(out)))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, dtype):
    function, full, single = CASES[name]
    for count, n in (
        (1, 1),
        (5, 7),
        (3, 128),
        (300, 50),
        (40, 1000),
        (700, 129),
        (9, 4096),
        (2, 8200),
        (3, 20000),
        (1, 240001),
    ):
        x = [drawn(count, n, seed=i, dtype=dtype) for i in range(full)]
        x += [drawn(n, seed=7 + i, dtype=dtype) for i in range(single)]

        def dy(out: Any) -> Any:
            return drawn(*out.shape, seed=99, dtype=out.dtype).to(out.device)

        want = gradients(function, x, dy)
        for got, expected in zip(gradients(function, [t.cuda() for t in x], dy), want, strict=True):
            same(got, expected)


def test_strided_operands():
    for name in ("rms_norm", "layer_norm", "softmax", "silu_mul"):
        function, full, single = CASES[name]
        x = [drawn(4, 6, 3, 64, seed=i).transpose(0, 2)[..., ::2] for i in range(full)]
        x += [drawn(64, seed=7 + i)[::2] for i in range(single)]
        there = [drawn(4, 6, 3, 64, seed=i).cuda().transpose(0, 2)[..., ::2] for i in range(full)]
        there += [drawn(64, seed=7 + i).cuda()[::2] for i in range(single)]
        for dy in (torch.ones_like, lambda out: torch.ones((), device=out.device).expand(out.shape)):
            want = gradients(function, x, dy)
            for got, expected in zip(gradients(function, there, dy), want, strict=True):
                same(got, expected)


@pytest.mark.parametrize("moved", [(0, 1), (1, 0), (1, 1)], ids=str)
def test_operands_between_aligned_places(moved):
    """Of the same shape and strides as those of a call before that were read four elements at once."""
    for offsets in ((0, 0), moved):
        x, dy = (
            drawn(300 * 64 + 1, seed=i, dtype=BF16).cuda()[at:][: 300 * 64].view(300, 64)
            for i, at in enumerate(offsets)
        )
        found = [gradients(reductions.rms_norm, [x, drawn(64, seed=7).cuda()], lambda _, dy=dy: dy)]
        found += [gradients(reductions.rms_norm, [x.cpu(), drawn(64, seed=7)], lambda _, dy=dy: dy.cpu())]
        for got, want in zip(*found, strict=True):
            same(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [50, 2048])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_micro_batches_have_the_bits_of_one_batch(name, n, dtype):
    function, _, single = CASES[name]
    x, dy = (drawn(1000, n, seed=i, dtype=dtype).cuda() for i in (0, 1))
    start = drawn(n, seed=5).cuda()

    def step(cuts: list[int]) -> list[Any]:
        parameters = [drawn(n, seed=7 + i, dtype=dtype).cuda().requires_grad_() for i in range(single)]
        for p in parameters:
            p.main_grad = start.clone()
        for part, back in zip(x.split(cuts), dy.split(cuts), strict=True):
            function(part, *parameters).backward(back)
        assert all(p.grad is None for p in parameters)
        return [p.main_grad for p in parameters]

    want = step([1000])
    for cuts in ([500, 500], [1, 999], [256, 256, 488], [100] * 10):
        for got, expected in zip(step(cuts), want, strict=True):
            assert not torch.equal(got, start)
            assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("order", ["leaf1", "leaf128", "leaf300", "leaf4096", "tree4", "tree16"])
def test_sums_over_rows_have_the_order_of_the_call(order):
    for shape, n in (((1000,), 50), ((5, 40, 6), 128), ((0,), 8), ((3,), 2100), ((3,), 0)):
        x, dy = (drawn(*shape, n, seed=i, dtype=BF16) for i in (0, 1))
        x, dy = (t.transpose(0, 1) if len(shape) > 1 else t for t in (x, dy))
        found = []
        for there in (False, True):
            parameters = [drawn(n, seed=7 + i).to("cuda" if there else "cpu").requires_grad_() for i in (0, 1)]
            operands = [t.cuda() if there else t for t in (x, dy)]
            y = reductions.layer_norm(operands[0], *parameters, grad_order=order)
            found.append([*torch.autograd.grad(y, parameters, operands[1], retain_graph=True)])
            if not order.startswith("tree"):
                for p in parameters:
                    p.main_grad = drawn(n, seed=5).to(p.device)
                y = reductions.layer_norm(operands[0], *parameters, grad_order=order)
                y.backward(operands[1])
                found[-1] += [p.main_grad for p in parameters]
        for got, want in zip(found[1], found[0], strict=True):
            same(got, want)


def test_a_buffer_of_minus_zeros_keeps_its_sign():
    weight = torch.ones(8, device="cuda", requires_grad=True)
    weight.main_grad = torch.full((8,), -0.0, device="cuda")
    x = torch.ones(0, 8, device="cuda")
    reductions.rms_norm(x, weight).backward(x)
    assert torch.signbit(weight.main_grad).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tables_add_rows_in_order(dtype):
    ids = torch.randint(0, 40, (3, 500), generator=torch.Generator().manual_seed(1))
    ids[0, :100] = 7
    weight, dy = drawn(50, 136, seed=2, dtype=dtype), drawn(3, 500, 136, seed=3, dtype=dtype)

    def grad(place: str, buffer: bool) -> Any:
        table = weight.to(place, copy=True).requires_grad_()
        if buffer:
            table.main_grad = drawn(50, 136, seed=4).to(place)
        reductions.embedding(ids.to(place), table).backward(dy.to(place))
        return table.main_grad if buffer else table.grad

    for buffer in (False, True):
        same(grad("cuda", buffer), grad("cpu", buffer))


def test_a_training_step_in_a_graph():
    x, w = drawn(64, 512, seed=1, dtype=BF16).cuda(), drawn(512, seed=2, dtype=BF16).cuda().requires_grad_()
    w.main_grad = torch.zeros(512, device="cuda")
    table = drawn(100, 512, seed=3, dtype=BF16).cuda().requires_grad_()
    table.main_grad = torch.zeros(100, 512, device="cuda")
    ids = torch.arange(64, device="cuda") % 5

    def step() -> None:
        h = reductions.embedding(ids, table)
        reductions.layer_norm(reductions.silu_mul(reductions.rms_norm(h, w), x), w).backward(x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    want = [w.main_grad.clone(), table.main_grad.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for buffer in (w.main_grad, table.main_grad):
        buffer.zero_()
    graph.replay()
    for got, expected in zip((w.main_grad, table.main_grad), want, strict=True):
        assert expected.any()
        assert torch.equal(bits(got), bits(expected))

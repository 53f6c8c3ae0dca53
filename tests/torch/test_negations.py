"""Tensors that torch negates lazily, whose memory holds the opposite of their numbers."""

from __future__ import annotations

import pytest
from tests.torch.tensors import randn, same

import isogemm
from isogemm.errors import LayoutError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch import reductions  # noqa: E402


def _parallel(x, w, bias):
    from isogemm.torch.distributed import ColumnParallel, Ranks

    layer = iso.Linear(16, 8)
    ColumnParallel.adopt(layer, Ranks(order="tree8"), "layer", set())
    return torch.func.functional_call(layer, {"weight": w, "bias": bias}, (x,))


QUANTIZED = isogemm.quantize(randn(8, 32).numpy(), "Q8_0")
X, W, BIAS, STACK = (6, 16), (8, 16), (8,), (2, 8, 16)
CALLS = {
    "mm": (lambda a, b: iso.mm(a, b.mT), X, W),
    "bmm": (lambda a, b: iso.bmm(a, b.mT), (2, 6, 16), STACK),
    "addmm": (lambda c, a, b: iso.addmm(c, a, b.mT, alpha=0.5, beta=2.0), BIAS, X, W),
    "baddbmm": (lambda c, a, b: iso.baddbmm(c, a, b.mT), (2, 6, 8), (2, 6, 16), STACK),
    "linear": (iso.linear, X, W, BIAS),
    "grouped": (lambda *x: iso.grouped(x[:2], [y.mT for y in x[2:]])[1], X, X, W, W),
    "grouped_linear": (lambda x, w, bias: iso.grouped_linear(x, w, [2, 4], bias), X, STACK, (2, 8)),
    "quantized": (lambda x, bias: iso.linear(x, QUANTIZED, bias), (6, 32), BIAS),
    "attention": (lambda q, k, v: iso.attention(q, k, v, causal=True), *[(1, 2, 4, 8)] * 3),
    "a layer that ranks share": (_parallel, X, W, BIAS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_that_torch_negates_lazily(name, dtype):
    function, *shapes = CALLS[name]
    given = [randn(*shape, dtype=dtype, seed=i, grad=True) for i, shape in enumerate(shapes)]
    y = function(*given)
    dy = randn(*y.shape, dtype=y.dtype, seed=9)
    want = torch.autograd.grad(y, given, -dy, retain_graph=True)
    got = torch.autograd.grad(y, given, torch._neg_view(dy))
    assert all(map(same, got, want))


def test_as_autograd_makes_them():
    """Of the imaginary part of a number whose conjugate was used."""
    a, b = randn(6, 16, grad=True), randn(16, 8, grad=True)
    y = iso.mm(a, b)
    (-y).sum().backward()
    want, a.grad, b.grad = (a.grad, b.grad), None, None
    seen = []
    y = iso.mm(a, b)
    y.register_hook(lambda dy: seen.append(dy.is_neg()))
    (torch.complex(torch.zeros(6, 8), y).conj() + 0).imag.sum().backward()
    assert seen == [True]
    assert all(map(same, (a.grad, b.grad), want))


def test_into_buffers():
    def sums(dy):
        x, w, bias = randn(6, 16, grad=True), randn(8, 16, grad=True), randn(8, grad=True)
        made = torch.zeros(8, 16), torch.zeros(8)
        iso.linear(x, w, bias, main_grad=made[0], bias_main_grad=made[1]).backward(dy)
        return made

    dy = randn(6, 8, seed=9)
    assert all(map(same, sums(torch._neg_view(dy)), sums(-dy)))


def test_of_an_operator_that_has_a_list_of_results():
    a, b, dy = randn(6, 16, grad=True), randn(16, 8, grad=True), randn(6, 8, seed=9)
    y = torch.ops.isogemm.grouped([a], [b], "", "leaf4096", None)[0]
    want = torch.autograd.grad(y, (a, b), -dy, retain_graph=True)
    assert all(map(same, torch.autograd.grad(y, (a, b), torch._neg_view(dy)), want))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda x, w: iso.linear(torch._neg_view(x), w)),
        ("w", lambda x, w: iso.linear(x, torch._neg_view(w))),
        ("bias", lambda x, w: iso.linear(x, w, torch._neg_view(w[:, 0]))),
        ("a", lambda x, w: isogemm.matmul(torch._neg_view(x), w.mT)),
        ("out", lambda x, w: isogemm.matmul(x, w.mT, out=torch._neg_view(torch.empty(6, 8)))),
        ("x", lambda x, w: reductions.softmax(torch._neg_view(x))),
        ("weight", lambda x, w: reductions.rms_norm(x, torch._neg_view(w[0]))),
    ],
)
def test_as_operands_they_are_refused_and_the_error_says_what_helps(name, call):
    """`contiguous` would give back the same view."""
    with pytest.raises(LayoutError, match=rf"^{name}: .*got: a lazy negation; .*: {name}\.resolve_neg\(\)"):
        call(randn(6, 16), randn(8, 16))


def test_compiled_code_has_them_in_memory():
    x, w = randn(6, 16), randn(8, 16)
    compiled = torch.compile(iso.linear, backend="aot_eager", fullgraph=True)
    assert same(compiled(torch._neg_view(x), w), iso.linear(-x, w))

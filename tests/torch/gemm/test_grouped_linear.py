"""grouped_linear: every group has the bits of `linear` alone, forward and backward, whatever the counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import DTypeError, OptionError, ShapeError  # noqa: E402
from isogemm.torch.gemm.grouped_linear import call_grouped_linear  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPERATORS = torch.ops.isogemm


def operands(counts, k=19, n=11, dtype=torch.float32, behind=0, seed=0):
    """x, w, bias and dy; what is behind the last group is NaN."""
    generator = torch.Generator().manual_seed(seed)
    m = sum(counts)
    shapes = ((m, k), (len(counts), n, k), (len(counts), n), (m, n))
    x, w, bias, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    x, dy = (torch.cat([t, torch.full((behind, t.shape[1]), torch.nan, dtype=dtype)]) for t in (x, dy))
    return x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), dy


def alone(x, w, bias, dy, counts, **options):
    """What `linear` makes of each group, and its gradients."""
    parts = []
    for g, rows in enumerate(torch.arange(sum(counts), device=x.device).split(counts)):
        inputs = [t.detach().requires_grad_() for t in (x[rows], w[g], bias[g])]
        y = iso.linear(*inputs, **options)
        parts.append((y.detach(), *torch.autograd.grad(y, inputs, dy[rows])))
    y, dx, dw, db = zip(*parts, strict=True)
    return torch.cat(y), torch.cat(dx), torch.stack(dw), torch.stack(db)


@settings(deadline=None, max_examples=25)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    behind=st.integers(0, 2),
    options=st.sampled_from([{}, {"contract": "fma/leaf16", "grad_order": "leaf4"}, {"grad_order": "chain"}]),
)
def test_a_group_has_the_bits_of_linear(counts, dtype, behind, options):
    x, w, bias, dy = operands(counts, dtype=dtype, behind=behind)
    m = sum(counts)
    y = iso.grouped_linear(x, w, torch.tensor(counts, dtype=torch.int32), bias, **options)
    got = (y, *torch.autograd.grad(y, (x, w, bias), dy))
    want = alone(x, w, bias, dy, counts, **options)
    assert all(same(a[:m] if i < 2 else a, b) for i, (a, b) in enumerate(zip(got, want, strict=True)))
    assert not y[m:].any()
    assert not got[1][m:].any()
    with torch.no_grad():
        assert same(iso.grouped_linear(x, w, counts, bias, **options), y)


def test_without_a_bias_and_of_another_dtype():
    counts = [3, 0, 4]
    x, w, _, dy = operands(counts, dtype=torch.bfloat16)
    y = iso.grouped_linear(x, w, counts, out_dtype="float32")
    assert y.dtype is torch.float32
    dx, dw = torch.autograd.grad(y, (x, w), dy.float())
    parts = [i.tolist() for i in torch.arange(7).split(counts)]
    for g, rows in enumerate(parts):
        a, b = x[rows].detach().requires_grad_(), w[g].detach().requires_grad_()
        want = iso.linear(a, b, out_dtype="float32")
        assert same(y[rows], want)
        assert all(map(same, (dx[rows], dw[g]), torch.autograd.grad(want, (a, b), dy[rows].float())))


def test_a_row_does_not_see_its_neighbours():
    counts = [4, 1, 6]
    x, w, bias, _ = operands(counts)
    whole = iso.grouped_linear(x, w, counts, bias)
    assert same(iso.grouped_linear(x[7:8], w, [0, 0, 1], bias), whole[7:8])
    assert same(iso.grouped_linear(x.flip(1).flip(1)[:, :], w.mT.contiguous().mT, counts, bias), whole)


@pytest.mark.parametrize("options", [{}, {"contract": "fma/leaf16", "grad_order": "leaf4"}], ids=["", "leaves"])
def test_second_derivatives(options):
    counts = [6, 0, 7]
    *inputs, _ = operands(counts, n=4)

    def twice(y, inputs):
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)

    got = twice(iso.grouped_linear(*inputs[:2], counts, inputs[2], **options), inputs)
    parts = []
    for g, rows in enumerate(torch.arange(sum(counts)).split(counts)):
        own = [t.detach().requires_grad_() for t in (inputs[0][rows], inputs[1][g], inputs[2][g])]
        parts.append(twice(iso.linear(*own, **options), own))
    x, w, bias = zip(*parts, strict=True)
    assert all(map(same, got, (torch.cat(x), torch.stack(w), torch.stack(bias))))


def with_buffers(counts):
    """A result whose gradients by the weight and the bias go into buffers, and those."""
    x, w, bias, _ = operands(counts)
    buffers = torch.zeros(w.shape), torch.zeros(bias.shape)
    return call_grouped_linear(x, w, bias, torch.tensor(counts), "", "leaf4096", None, *buffers), buffers


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_a_buffer_has_no_second_derivative():
    y, buffers = with_buffers([2, 0, 3])
    with pytest.raises(OptionError, match="main_grad with create_graph"):
        y.sum().backward(create_graph=True)
    assert not any(buffer.any() for buffer in buffers)


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0]], ids=str)
def test_torch_sees_that_buffers_were_written(counts):
    y, buffers = with_buffers(counts)
    later = [torch.ones(buffer.shape, requires_grad=True) * buffer for buffer in buffers]
    y.sum().backward()
    for each in later:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_opcheck(dtype):
    counts = torch.tensor([2, 0, 3])
    x, w, bias, dy = operands([2, 0, 3], dtype=dtype)
    torch.library.opcheck(OPERATORS.grouped_linear.default, (x, w, bias, counts))
    torch.library.opcheck(OPERATORS.grouped_outer.default, (dy.requires_grad_(), x, counts))
    out = torch.zeros(3, 11, 19)
    torch.library.opcheck(OPERATORS.grouped_walk_.default, (dy.detach(), x.detach(), counts, out, "fma/chain"))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled_with_any_counts():
    x, w, bias, dy = operands([2, 0, 3])

    def step(counts):
        return iso.grouped_linear(x, w, counts, bias)

    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for lengths in ([2, 0, 3], [1, 4, 0]):
        counts = torch.tensor(lengths)
        y, want = compiled(counts), step(counts)
        assert same(y, want)
        gradients = (torch.autograd.grad(each, (x, w, bias), dy) for each in (y, want))
        assert all(map(same, *gradients))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_what_is_refused():
    x, w, bias, _ = operands([2, 0, 3])
    for counts, nearest in (([2, 0, 4], r"\[2, 0, 3\]"), ([2, -1, 3], r"\[2, 0, 3\]")):
        with pytest.raises(ShapeError, match=nearest):
            iso.grouped_linear(x, w, counts)
    with pytest.raises(ShapeError, match="shape of counts"):
        iso.grouped_linear(x, w, [2, 3])
    with pytest.raises(DTypeError, match="int32 or int64"):
        iso.grouped_linear(x, w, torch.tensor([2.0, 0.0, 3.0]))
    with pytest.raises(DTypeError, match="integers, one for each group"):
        iso.grouped_linear(x, w, 5)
    with pytest.raises(ShapeError, match="columns of x"):
        iso.grouped_linear(x[:, 1:], w, [2, 0, 3])
    with pytest.raises(ShapeError, match="shape of bias"):
        iso.grouped_linear(x, w, [2, 0, 3], bias[:, 1:])
    with pytest.raises(OptionError, match="vmap over grouped_linear"):
        torch.vmap(lambda one: iso.grouped_linear(one, w, [2, 0, 3]))(x.detach().expand(2, 5, 19))

"""Attention with sinks: softmax's own formula, in any batch, chunk and padding, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.torch.tensors import same  # noqa: E402

from isogemm.errors import DTypeError, OptionError, ShapeError  # noqa: E402
from isogemm.torch import attention  # noqa: E402

HEADS, TOKENS = 4, 150  # more keys than a leaf has


def operands(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, HEADS, TOKENS, 16), (2, 2, TOKENS, 16), (2, 2, TOKENS, 24), (HEADS,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def formula(q, k, v, sinks):
    """In float64, written out."""
    scores = q @ k.repeat_interleave(2, 1).mT * 16**-0.5
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(2, HEADS, TOKENS, 1)), -1)
    return torch.softmax(scores, -1)[..., :-1] @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)], ids=str)
def test_values_and_gradients(dtype, error):
    ours = operands(dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    y, want = attention(*ours[:3], causal=True, sinks=ours[3]), formula(*exact)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), want, rtol=error, atol=error)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad(y, ours, dy.to(dtype)), torch.autograd.grad(want, exact, dy.to(dtype).double())
    for a, b in zip(*gradients, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=error, atol=error * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_does_not_see_the_call(dtype):
    q, k, v, sinks = (x.detach() for x in operands(dtype))
    whole = attention(q, k, v, causal=True, sinks=sinks)
    assert not same(whole, attention(q, k, v, causal=True))
    assert same(attention(q[1:], k[1:], v[1:], causal=True, sinks=sinks), whole[1:])
    for i in (0, 1, 127, 128, TOKENS - 1):
        token = attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], sinks=sinks)
        assert same(token, whole[:, :, i : i + 1])
    padded = [torch.nn.functional.pad(x, (0, 0, 33, 0), value=torch.nan) for x in (q, k, v)]
    behind = attention(*padded, causal=True, start=torch.tensor([33, 33]), sinks=sinks)
    assert same(behind[:, :, 33:], whole)
    assert not attention(q, k, v, stop=0, sinks=sinks).any()  # a query without a key


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled():
    *operands_, sinks = operands()

    def step():
        y = attention(*operands_, causal=True, sinks=sinks)
        return y, *torch.autograd.grad(y.square().sum(), (*operands_, sinks))

    def forward():
        return attention(*operands_, causal=True, sinks=sinks)

    torch._dynamo.reset()
    y = torch.compile(forward, fullgraph=True, backend="aot_eager")()
    got = y, *torch.autograd.grad(y.square().sum(), (*operands_, sinks))
    assert all(map(same, got, step()))
    torch._dynamo.reset()


def test_what_is_refused():
    q, k, v, sinks = operands()
    with pytest.raises(ShapeError, match=r"\[heads of q\]"):
        attention(q, k, v, sinks=sinks[:2])
    with pytest.raises(DTypeError, match="sinks"):
        attention(q, k, v, sinks=sinks.double())
    with pytest.raises(OptionError, match="vmap"):
        torch.vmap(lambda x: attention(x, k.detach(), v.detach(), sinks=sinks.detach()))(q.detach()[None])

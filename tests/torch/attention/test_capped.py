"""Attention with capped logits: the formula, in any batch, chunk and padding, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.torch.tensors import same  # noqa: E402

from isogemm.errors import OptionError  # noqa: E402
from isogemm.torch import attention  # noqa: E402

CAP, TOKENS = 2.0, 150  # so low that it matters; more keys than a leaf has
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
gradients = pytest.importorskip("isogemm.torch.attention.gradients")


def operands(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, TOKENS, 16), (2, 2, TOKENS, 16), (2, 2, TOKENS, 24))
    return [(2 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_() for shape in shapes]


def formula(q, k, v, mask):
    """In float64, written out."""
    scores = q @ k.repeat_interleave(2, 1).mT * 16**-0.5
    return torch.softmax(CAP * torch.tanh(scores / CAP) + mask, -1) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 4e-6), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("budget", [2**22, 2])  # all heads at once, and each alone
@DEVICES
def test_values_and_gradients(dtype, error, budget, device, monkeypatch):
    monkeypatch.setitem(gradients._BUDGET, device, budget)
    ours = operands(dtype, device)
    exact = [x.detach().double().requires_grad_() for x in ours]
    late = torch.ones(TOKENS, TOKENS).triu(1).bool()
    mask = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
    mask = mask.masked_fill(late, -torch.inf).to(device)
    y, want = attention(*ours, mask=mask, softcap=CAP), formula(*exact, mask.double())
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), want, rtol=error, atol=error)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(device)
    pairs = torch.autograd.grad(y, ours, dy.to(dtype)), torch.autograd.grad(want, exact, dy.to(dtype).double())
    for a, b in zip(*pairs, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=error, atol=error * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@DEVICES
def test_a_query_does_not_see_the_call(dtype, sinks, device):
    q, k, v = (x.detach() for x in operands(dtype, device))
    more = {"softcap": CAP, "sinks": torch.linspace(-1, 1, 4).to(device, dtype) if sinks else None}
    whole = attention(q, k, v, causal=True, **more)
    assert not same(whole, attention(q, k, v, causal=True, sinks=more["sinks"]))
    assert same(attention(q[1:], k[1:], v[1:], causal=True, **more), whole[1:])
    for i in (0, 1, 127, 128, TOKENS - 1):
        token = attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], **more)
        assert same(token, whole[:, :, i : i + 1])
    padded = [torch.nn.functional.pad(x, (0, 0, 33, 9), value=torch.nan) for x in (q, k, v)]
    bounds = {"start": torch.tensor([33, 33], device=device), "stop": torch.tensor([183, 183], device=device)}
    behind = attention(*padded, causal=True, **bounds, **more)
    assert same(behind[:, :, 33:-9], whole)
    table = torch.nn.functional.pad(torch.ones(TOKENS, TOKENS).tril().bool(), (33, 9, 33, 9)).to(device)
    assert same(attention(*padded, mask=table, **bounds, **more)[:, :, 33:-9], whole)
    one = attention(q, k, v, start=torch.tensor([0, 40], device=device), **more)
    assert same(one[1:], attention(q[1:], k[1:, :, 40:], v[1:, :, 40:], **more))
    assert not attention(q, k, v, stop=0, **more).any()  # a query without a key


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled():
    given = operands()

    def forward():
        return attention(*given, causal=True, softcap=CAP)

    def taken(y):
        return y, *torch.autograd.grad(y.square().sum(), given)

    torch._dynamo.reset()
    assert all(map(same, taken(torch.compile(forward, fullgraph=True, backend="aot_eager")()), taken(forward())))
    torch._dynamo.reset()


@DEVICES
def test_gradients_do_not_see_the_batch(device):
    given = operands(torch.bfloat16, device)
    alone = [x.detach()[1:].requires_grad_() for x in given]
    for x, y in zip(*(torch.autograd.grad(attention(*z, causal=True, softcap=CAP).sum(), z) for z in (given, alone)),
                    strict=True):  # fmt: skip
        assert same(x[1:], y)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_refused(cap):
    q, k, v = operands()
    with pytest.raises(OptionError, match="softcap"):
        attention(q, k, v, softcap=cap)

"""Attention with dropout: its generator's vectors, the formula, and choices that belong to tokens."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.small import causal, prompts, same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import DTypeError, OptionError, ShapeError  # noqa: E402
from isogemm.torch.attention import dropout  # noqa: E402

RATE, TOKENS = 0.3, 150  # more keys than a leaf has
SEEDS = torch.tensor([5, -(2**62) + 1])
MORE = {"dropout": RATE, "causal": True}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def operands(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, TOKENS, 16), (2, 2, TOKENS, 16), (2, 2, TOKENS, 24))
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def words(*numbers):
    return tuple(torch.tensor(n) for n in numbers)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(counter, key, want):
    """Those that Random123 publishes for threefry2x32 with 20 rounds."""
    assert tuple(int(x) for x in dropout.threefry(words(*key), words(*counter))) == want


def chosen():
    """Which probabilities stay, one by one from the definition."""
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, TOKENS, TOKENS)), indexing="ij")
    key = SEEDS[b] & 0xFFFFFFFF, (SEEDS[b] >> 32) & 0xFFFFFFFF
    even, odd = dropout.threefry(key, (i, (h << 24) + (j >> 1)))
    return torch.where(j % 2 == 0, even, odd) >= round(RATE * 2**32)


def formula(q, k, v):
    scores = q @ k.repeat_interleave(2, 1).mT * 16**-0.5
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    return (torch.softmax(scores, -1) * chosen() / (1 - RATE)) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 4e-6), (torch.bfloat16, 3e-2)], ids=str)
@DEVICES
def test_values_and_gradients(dtype, error, device):
    assert 0.69 < float(chosen().float().mean()) < 0.71
    ours = operands(dtype, device)
    exact = [x.detach().cpu().double().requires_grad_() for x in ours]
    y, want = iso.attention(*ours, **MORE, seeds=SEEDS.to(device)), formula(*exact)
    torch.testing.assert_close(y.cpu().double(), want, rtol=error, atol=error)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    pairs = torch.autograd.grad(y, ours, dy.to(device, dtype)), torch.autograd.grad(want, exact, dy.to(dtype).double())
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=error, atol=error * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@DEVICES
def test_choices_belong_to_tokens(dtype, device):
    (q, k, v), seeds = (x.detach() for x in operands(dtype, device)), SEEDS.to(device)
    whole = iso.attention(q, k, v, **MORE, seeds=seeds)
    assert same(iso.attention(q, k, v, **MORE, seeds=seeds), whole)
    assert not same(iso.attention(q, k, v, **MORE, seeds=seeds + 1), whole)
    assert same(iso.attention(q[1:], k[1:], v[1:], **MORE, seeds=seeds[1:]), whole[1:])
    for i in (0, 1, 127, 128, TOKENS - 1):
        token = iso.attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], dropout=RATE, seeds=seeds)
        assert same(token, whole[:, :, i : i + 1])
    for pad in (33, 8):
        padded = [torch.nn.functional.pad(x, (0, 0, pad, 0), value=torch.nan) for x in (q, k, v)]
        behind = iso.attention(*padded, **MORE, start=torch.tensor([pad, pad], device=device), seeds=seeds)
        assert same(behind[:, :, pad:], whole)


@DEVICES
def test_gradients_do_not_see_the_batch(device):
    given, seeds = operands(torch.bfloat16, device), SEEDS.to(device)
    alone = [x.detach()[1:].requires_grad_() for x in given]
    sums = [iso.attention(*x, **MORE, seeds=s).sum() for x, s in ((given, seeds), (alone, seeds[1:]))]
    for x, y in zip(*(torch.autograd.grad(s, z) for s, z in zip(sums, (given, alone), strict=True)), strict=True):
        assert same(x[1:], y)


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled():
    given = operands()

    def forward():
        return iso.attention(*given, **MORE, seeds=SEEDS)

    def taken(y):
        return y, *torch.autograd.grad(y.square().sum(), given)

    torch._dynamo.reset()
    assert all(map(same, taken(torch.compile(forward, fullgraph=True, backend="aot_eager")()), taken(forward())))
    torch._dynamo.reset()


def test_a_model_that_is_trained():
    """Gradients of micro-batches, each sequence with its own number; and layers have seeds of their own."""
    model, ids = causal("qwen3", torch.float32, attention_dropout=RATE).train(), prompts(4, 16)
    plain = copy.deepcopy(model).eval()
    iso.convert(model, strict=True, grad_order="leaf16")
    with pytest.raises(OptionError, match="sequence_seeds"):
        model(ids)
    seeds, found = torch.arange(4) + 17, []
    for sequences in (4, 1, 2):
        model.zero_grad()
        iso.use_main_grad(model)
        for part, own in zip(ids.split(sequences), seeds.split(sequences), strict=True):
            with iso.sequence_seeds(own):
                iso.reductions.sum(model(part).logits.square().flatten(1)).sum().backward()
        iso.collect_main_grad(model)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(same, found[0], found[1]))
    assert all(map(same, found[0], found[2]))
    with torch.no_grad(), iso.sequence_seeds(seeds):
        dropped = model(ids).logits
        assert not torch.allclose(dropped, plain(ids).logits, atol=1e-3)
        assert same(model.eval()(ids).logits, model(ids).logits)
        one, two = (dropout.seeds_of(layer, RATE) for layer in range(2))
    assert len({*one.tolist(), *two.tolist()}) == 8


def test_what_is_refused():
    q, k, v = operands()
    for changes, kind, words_ in (
        ({"dropout": 1.0}, OptionError, "dropout"),
        ({"dropout": -0.1}, OptionError, "dropout"),
        ({"seeds": None}, DTypeError, "seeds"),
        ({"seeds": SEEDS.int()}, DTypeError, "seeds"),
        ({"seeds": SEEDS[:1]}, ShapeError, "seeds"),
        ({"sinks": torch.zeros(4)}, OptionError, "sinks"),
    ):
        with pytest.raises(kind, match=words_):
            iso.attention(q, k, v, **({"seeds": SEEDS, **MORE} | changes))
    with pytest.raises(OptionError, match="vmap"):
        torch.vmap(lambda x: iso.attention(x, k.detach(), v.detach(), **MORE, seeds=SEEDS))(q.detach()[None])

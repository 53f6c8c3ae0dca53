"""Layers that stand for torch's, and which modules are taken for what."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from tests.torch.tensors import bits

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch import reductions  # noqa: E402
from isogemm.torch.model import recognition  # noqa: E402


class RMS(torch.nn.Module):
    """As in transformers: rounds before the weight."""

    def __init__(self, n, eps=1e-5, base=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n))
        self.variance_epsilon, self.base = eps, base

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.base + self.weight) * wide.to(x.dtype)


class NoEps(RMS):
    def forward(self, x):
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).sqrt()


class Gated(torch.nn.Module):
    def __init__(self, act=None, other=False):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down_proj, self.act_fn, self.other = torch.nn.Linear(24, 16), act or torch.nn.SiLU(), other

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(gate * self.act_fn(up) if self.other else self.act_fn(gate) * up)


LAYERS = {
    "rms": lambda: torch.nn.RMSNorm(40),
    "rms_eps": lambda: torch.nn.RMSNorm(40, eps=1e-3),
    "rms_bare": lambda: torch.nn.RMSNorm(40, elementwise_affine=False),
    "layer": lambda: torch.nn.LayerNorm(40),
    "layer_no_bias": lambda: torch.nn.LayerNorm(40, bias=False),
    "silu": lambda: torch.nn.SiLU(),
    "foreign": lambda: RMS(40),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_converted_layers_are_close_and_do_not_see_their_batch(make, dtype):
    theirs = make().to(dtype)
    ours = copy.deepcopy(theirs)
    state = torch.get_rng_state()
    report = iso.convert(ours)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.converted == ("",)
    assert not report.left
    assert isinstance(ours, type(theirs))
    assert type(ours).__name__ == type(theirs).__name__
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(33, 40, dtype=dtype) * torch.logspace(-4, 1, 33).to(dtype).unsqueeze(1)
    got, eps = ours(x), 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, theirs(x), rtol=eps, atol=eps / 8)
    for m in (1, 2, 7):
        assert torch.equal(bits(ours(x[m : 2 * m])), bits(got[m : 2 * m]))
    assert torch.equal(bits(pickle.loads(pickle.dumps(copy.deepcopy(ours)))(x)), bits(got))


def test_layers_call_reductions():
    x = torch.randn(5, 40).bfloat16()
    norm, layer, foreign = torch.nn.RMSNorm(40, eps=1e-3), torch.nn.LayerNorm(40), RMS(40, eps=1e-2)
    model = torch.nn.ModuleList([norm, layer, foreign]).bfloat16()
    assert iso.convert(model).parts["norm"] == ("0", "1", "2")
    assert torch.equal(bits(norm(x)), bits(reductions.rms_norm(x, norm.weight, 1e-3)))
    assert torch.equal(bits(layer(x)), bits(reductions.layer_norm(x, layer.weight, layer.bias, 1e-5)))
    assert torch.equal(bits(foreign(x)), bits(reductions.rms_norm(x, foreign.weight, 1e-2)))
    assert foreign.float()(x).dtype is torch.float32


def test_a_gated_block():
    theirs = Gated().bfloat16()
    ours, x, called = copy.deepcopy(theirs), torch.randn(9, 16).bfloat16(), []
    report = iso.convert(ours)
    assert report.parts["mlp"] == ("",)
    assert report.parts["linear"] == ("gate_proj", "up_proj", "down_proj")
    ours.up_proj.register_forward_hook(lambda *args: called.append(1))
    gate, up = (iso.linear(x, p.weight) for p in (ours.gate_proj, ours.up_proj))
    want = iso.linear(reductions.silu_mul(gate, up), ours.down_proj.weight, ours.down_proj.bias)
    assert torch.equal(bits(ours(x)), bits(want))
    assert called == [1]
    torch.testing.assert_close(ours(x), theirs(x), rtol=0.02, atol=0.02)


def _patched(layer):
    layer.forward = lambda x: x
    return layer


def _hooked():
    block = Gated()
    block.act_fn.register_forward_hook(lambda *args: None)
    return block


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: RMS(40, base=1.0), "does not compute"),
        (lambda: NoEps(40), "does not compute"),
        (lambda: _patched(RMS(40)), "replaced"),
        (lambda: _patched(torch.nn.LayerNorm(40)), "replaced"),
        (lambda: torch.nn.LayerNorm((4, 10)), "2 dimensions"),
        (lambda: type("Mine", (torch.nn.LayerNorm,), {})(40), "a subclass of LayerNorm, .*Mine"),
        (lambda: torch.nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (lambda: torch.nn.Embedding(4, 4, sparse=True), "sparse"),
        (lambda: Gated(other=True), "does not compute down_proj"),
        (_hooked, "hooks"),
        (lambda: torch.nn.SiLU(inplace=True), "in place"),
    ],
)
def test_what_is_something_else_is_left(make, why):
    model = torch.nn.Sequential(make())
    kind = type(model[0])
    report = iso.convert(model)
    assert type(model[0]) is kind
    assert re.search(why, report.left["0"])
    assert report.left["0"] in str(report)


def test_parts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    report = iso.convert(model, parts="norm")
    assert (type(model[0]), type(model[1])) == (torch.nn.Linear, iso.LayerNorm)
    assert report.left == {"0": "linear is not among the parts"}
    assert iso.convert(model, parts="all").converted == ("0",)
    with pytest.raises(OptionError, match=r"part of a model: .* nearest legal choice: linear"):
        iso.convert(torch.nn.Linear(4, 4), parts=("Linears",))
    with pytest.raises(OptionError, match="part of a model"):
        iso.convert(model, parts=("linears",))
    # A Linear that cannot be converted stops nothing where Linears are not asked for.
    torch.nn.utils.parametrizations.weight_norm(model[0])
    iso.convert(model, parts="norm")


@pytest.mark.parametrize(("name", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)])
def test_an_embedding_that_became_another_one_is_refused(name, value):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4))
    iso.convert(model)
    setattr(model[0], name, value)
    with pytest.raises(OptionError, match=name):
        model(torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3])
def test_an_embedding(dtype, padding):
    theirs = torch.nn.Embedding(11, 8, padding_idx=padding).to(dtype)
    ours = copy.deepcopy(theirs)
    assert iso.convert(ours).converted == ("",)
    ids, dy = torch.randint(0, 11, (6, 9)), torch.randn(6, 9, 8, dtype=dtype)
    for layer in (ours, theirs):
        layer(ids).backward(dy)
    assert torch.equal(bits(ours(ids)), bits(theirs(ids)))
    with torch.no_grad():
        assert torch.equal(bits(ours(ids)), bits(theirs(ids)))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0.05, atol=0.05)
    if padding is not None:
        assert not ours.weight.grad[padding].any()
    whole = ours.weight.grad
    iso.use_main_grad(ours)
    for i in range(6):
        ours(ids[i : i + 1]).backward(dy[i : i + 1])
    assert torch.equal(ours.weight.main_grad.to(dtype), whole)


def test_stand_ins_keep_the_module_alone():
    norm = RMS(40)
    norm.register_forward_hook(lambda *args: pytest.fail("a hook was called"))
    weight = norm.weight.detach().clone()
    found = recognition.known(norm, recognition.Looks())
    assert found.layer is not None
    assert torch.equal(norm.weight, weight)
    assert type(norm) is RMS

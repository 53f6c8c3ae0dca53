"""`convert(model, quantize=...)`: which modules get quantized weights, what they compute, and what is refused."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest
from tests.torch.tensors import bits

import isogemm
from isogemm.errors import FormatError, OptionError, ShapeError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.quant import convert as quantizing  # noqa: E402


class Model(torch.nn.Module):
    """Linear modules of several widths, one of them used twice and one tied to the embedding."""

    def __init__(self, width=256, hidden=96, vocabulary=40):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width, bias=False)
        self.again = self.up
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x + self.down(torch.relu(self.again(x))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


def kinds(model):
    return {name: type(child) for name, child in model.named_modules()}


EXTRAS = {
    "weight_orig": lambda layer: torch.nn.utils.spectral_norm(layer),
    "scale": lambda layer: layer.register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
    "mask": lambda layer: layer.register_buffer("mask", torch.ones(1)),
    "adapter": lambda layer: layer.add_module("adapter", torch.nn.Identity()),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_linear_that_holds_more_is_refused(model, name):
    """Another object takes its place, so what it holds besides would be lost: hooks read such things."""
    EXTRAS[name](model.up)
    before, state = kinds(model), {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(OptionError, match=rf"up: limit: weight and bias; got: .*{name}.*leave=\['up'\]"):
        iso.convert(model, quantize="Q4_0")
    assert kinds(model) == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    iso.convert(model, quantize="Q4_0", leave=["up", "again"])
    assert type(model.down) is iso.QuantizedLinear
    model(torch.arange(3))


def test_patterns_are_text(model):
    with pytest.raises(OptionError, match="quantize: limit: patterns of modules' names; got: 3; nearest"):
        iso.convert(model, quantize={3: "Q4_0"})


def test_linears_are_swapped_and_all_else_stays(model):
    called = []
    handle = model.up.register_forward_hook(lambda *args: called.append(1))
    up, bias, norm, weight = model.up, model.up.bias, model.norm, model.up.weight.detach().numpy().copy()
    report = iso.convert(model, quantize="Q4_0")
    assert report.quantized == {"up": "Q4_0", "down": "Q4_0"}
    assert list(report.floats) == ["head"]
    assert "its weight is embed's too" in report.floats["head"]
    assert report.parts["linear"] == ("up", "down", "head")
    assert report.converted == ("embed", "norm", "up", "down", "head")
    for text in ("converted 3 linear", "quantized 2 linear to Q4_0; 1 linear stay floats", "head: its weight"):
        assert text in str(report)
    assert type(model.up) is type(model.down) is iso.QuantizedLinear
    assert model.again is model.up is not up
    assert model.up.bias is bias
    assert model.norm is norm
    assert model.head.weight is model.embed.weight
    assert not model.up.training
    assert model.up.weight.name == "up.weight"
    assert [name for name, _ in model.named_modules()] == ["", "embed", "norm", "up", "down", "head"]
    x = torch.randn(5, 256)
    np.testing.assert_array_equal(model.up.weight.rows, isogemm.quantize(weight, "Q4_0").rows)
    want = isogemm.linear(x.numpy(), isogemm.quantize(weight, "Q4_0"), bias.detach().numpy())
    with torch.no_grad():
        assert torch.equal(bits(model.up(x)), bits(torch.from_numpy(want)))
        assert model(torch.arange(6)).shape == (6, 40)
    assert len(called) == 3
    handle.remove()
    model(torch.arange(6))
    assert len(called) == 3


def test_patterns_choose_formats(model):
    plain = copy.deepcopy(model)
    report = iso.convert(model, quantize={"head": "Q6_K", "d*n": None, "*": "Q4_K"})
    assert report.quantized == {"up": "Q4_K", "head": "Q6_K"}
    assert report.floats == {"down": "quantize has None for 'd*n'"}
    assert type(model.down) is iso.Linear
    assert torch.equal(model.embed.weight, plain.embed.weight)  # the head has a copy of its own
    np.testing.assert_array_equal(
        model.head.weight.rows, isogemm.quantize(plain.head.weight.detach().numpy(), "Q6_K").rows
    )
    report = iso.convert(plain, quantize={"up": "Q8_0"})
    assert report.quantized == {"up": "Q8_0"}
    assert set(report.floats.values()) == {"no pattern of quantize has it"}
    with pytest.raises(OptionError, match=r"quantize.*dwn.*nearest.*down"):
        iso.convert(plain, quantize={"dwn": "Q8_0", "*": "Q4_0"})


def test_rows_that_do_not_fit(model):
    before = kinds(model)
    with pytest.raises(ShapeError, match=r"multiple of its block, 256; got: down: .* 96; .*fallback='Q5_0'.*'down'"):
        iso.convert(model, quantize="Q4_K")
    assert kinds(model) == before
    kept = iso.convert(copy.deepcopy(model), quantize="Q4_K", fallback="keep")
    assert kept.quantized == {"up": "Q4_K"}
    assert kept.floats["down"] == "down: columns of a Q4_K matrix: 96 is not a multiple of its block, 256"
    other = iso.convert(copy.deepcopy(model), quantize="Q4_K", fallback="Q5_0")
    assert other.quantized == {"up": "Q4_K", "down": "Q5_0"}
    left = iso.convert(copy.deepcopy(model), quantize="Q4_K", leave=["down"])
    assert left.quantized == {"up": "Q4_K"}
    assert left.left == {"down": "in leave"}
    with pytest.raises(ShapeError, match="down"):
        iso.convert(model, quantize="Q4_K", fallback="Q6_K")
    assert kinds(model) == before


def test_what_is_refused_changes_nothing(model):
    before = kinds(model)
    for options, words in (
        ({"quantize": "Q9"}, "one of F32"),
        ({"quantize": "F16"}, "one of Q8_0"),
        ({"quantize": "Q8_K"}, "one of Q8_0"),
        ({"quantize": "Q4_0", "fallback": "BF16"}, "fallback"),
        ({"quantize": "Q4_0", "activations": "int8"}, "activations"),
        ({"quantize": "Q4_0", "activations": "q8", "contract": "fma/leaf8"}, "int32 with 'q8'"),
        ({"fallback": "keep"}, "with quantize"),
        ({"activations": "q8"}, "with quantize"),
    ):
        with pytest.raises(OptionError, match=words):
            iso.convert(model, **options)
    with pytest.raises(OptionError, match="QuantizedLinear"):
        iso.convert(torch.nn.Linear(32, 4), quantize="Q4_0")
    with pytest.raises(OptionError, match=r"0\.weight.*meta"):
        iso.convert(torch.nn.Sequential(torch.nn.Linear(32, 4, device="meta")), quantize="Q4_0")
    for wrong, words in ((float("nan"), "finite"), (float("inf"), "finite"), (3e38, "65504")):
        broken = copy.deepcopy(model)
        broken.down.weight.data[3, 5] = wrong
        with pytest.raises(FormatError, match=rf"down\.weight: w\[3, 5\].*{words}"):
            iso.convert(broken, quantize="Q8_0")
        assert kinds(broken) == before
    model.down.weight.data[3, 5] = 30000.0  # large, and a scale can still hold it
    assert iso.convert(model, quantize="Q8_0").quantized == {"up": "Q8_0", "down": "Q8_0"}


def test_weights_are_freed_one_by_one(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5)))
    dead, seen, encode = [weakref.ref(layer.weight) for layer in model], [], quantizing.encode

    def counted(*args, **options):
        seen.append(sum(ref() is None for ref in dead))
        return encode(*args, **options)

    monkeypatch.setattr(quantizing, "encode", counted)
    iso.convert(model, quantize="Q4_0")
    assert seen == [0, 1, 2, 3, 4]
    assert all(ref() is None for ref in dead)


def test_linears_of_one_weight_share_it_still():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model[2].weight = model[0].weight
    iso.convert(model, quantize="Q4_0")
    assert model[2].weight is model[0].weight is not model[1].weight
    assert model[2].bias is not model[0].bias


def test_a_converted_model_is_quantized_later(model):
    """Also one whose projections were merged: the copies are dropped."""

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (torch.nn.Linear(64, 96, bias=False) for _ in range(2))
            self.down_proj, self.act_fn = torch.nn.Linear(96, 64), torch.nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    block = Gated()
    iso.convert(block, fuse=True)
    assert block.merged_weight is not None
    other = copy.deepcopy(block)
    report = iso.convert(block, quantize="Q5_1", fuse=True)
    assert report.quantized == {"gate_proj": "Q5_1", "up_proj": "Q5_1", "down_proj": "Q5_1"}
    assert not {"merged_weight", "merged_bias"} & set(block._buffers)
    x = torch.randn(3, 64)
    gate, up = (isogemm.quantize(p.weight.detach(), "Q5_1") for p in (other.gate_proj, other.up_proj))
    with torch.no_grad():
        hidden = iso.reductions.silu_mul(isogemm.linear(x, gate), isogemm.linear(x, up))
        want = isogemm.linear(hidden, isogemm.quantize(other.down_proj.weight.detach(), "Q5_1"), other.down_proj.bias)
        assert torch.equal(bits(block(x)), bits(want))
    again = iso.convert(block, quantize="Q4_0")
    assert not again.quantized
    assert again.left["up_proj"] == "isogemm's already, as it is"


def test_activations_and_contract():
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    weight, x = isogemm.quantize(model[0].weight.detach(), "Q4_1"), torch.randn(3, 64)
    for options in ({"activations": "fp32"}, {"contract": "fma/leaf16"}, {"activations": "q8"}, {}):
        found = copy.deepcopy(model)
        iso.convert(found, quantize="Q4_1", **options)
        with torch.no_grad():
            assert torch.equal(bits(found(x)), bits(isogemm.linear(x, weight, model[0].bias, **options)))


def test_the_way_back(model):
    """As the documentation writes it: the floats that the blocks stand for, not those that were there before."""
    iso.convert(model, quantize="Q8_0")
    quantized = copy.deepcopy(model)
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, iso.QuantizedLinear):
                n, k = child.weight.shape
                layer = torch.nn.Linear(k, n, bias=child.bias is not None)
                layer.weight.data = torch.from_numpy(child.weight.dequantize())
                layer.bias = child.bias
                setattr(parent, name, layer)
    assert {type(m) for m in (model.up, model.down)} == {torch.nn.Linear}
    x = torch.randn(4, 256)
    with torch.no_grad():
        want = iso.linear(x, quantized.up.weight, quantized.up.bias, activations="fp32")
        assert torch.equal(bits(iso.linear(x, model.up.weight, model.up.bias)), bits(want))


def test_progress_is_shown_when_asked(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    iso.convert(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))), quantize="Q4_0", progress=True)
    assert "3/3" in capsys.readouterr().err
    iso.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), quantize="Q4_0")
    assert not capsys.readouterr().err


def test_a_shared_weight_has_each_layer_s_format():
    layers = [torch.nn.Linear(256, 8, bias=False) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    found = torch.nn.Sequential(*layers)
    iso.convert(found, quantize={"0": "Q4_K", "1": "Q4_K", "2": "Q8_0"})
    assert [layer.weight.format.name for layer in found] == ["Q4_K", "Q4_K", "Q8_0"]

"""Nothing silent: what `convert` leaves is refused or said once, a model is verified, and there is a way back."""

from __future__ import annotations

import copy
import warnings

import pytest

from isogemm.errors import DTypeError, OptionError, ShapeError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97, "bos_token_id": 1}
GEMMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, eos_token_id=2)).eval()


class Pictures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = torch.nn.Conv2d(1, 8, 2), torch.nn.Linear(8, 4)
        self.more = torch.nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.head(self.more(self.patches(x)).flatten(2).mT)


class Centred(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_strict_refuses_what_would_stay_and_changes_nothing():
    model = Pictures()
    with pytest.raises(OptionError, match=r"2 modules: 2 Conv2d \(Conv2d is not known here\).*'patches', 'more'"):
        iso.convert(model, strict=True)
    assert type(model.head) is torch.nn.Linear
    report = iso.convert(model, strict=True, leave=["patches", "more"])
    assert (report.converted, report.open) == (("head",), {})


def test_one_warning_lists_what_was_left_by_kind():
    with pytest.warns(iso.LeftToTorch, match=r"2 modules of Pictures to torch.*2 Conv2d") as seen:
        report = iso.convert(Pictures())
    assert len(seen) == 1
    assert report.open.keys() == {"patches", "more"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iso.convert(Pictures(), leave=["patches", "more"])
        iso.convert(Pictures().head, parts=("norm",))
        iso.convert(gpt2())


def test_verify_holds_and_names_the_first_module_that_does_not():
    model = gpt2()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    modes = model.train().training
    iso.convert(model, strict=True)
    found = iso.verify(model)
    assert found, found
    assert found.held == ("rerun", "batch", "position", "left-padding", "right-padding", "chunks", "tokens")
    assert model.training == modes
    assert not any(child._forward_hooks for child in model.modules())
    block = model.transformer.h[1].mlp
    block.c_proj.register_forward_hook(lambda module, x, y: y + x[0].shape[1] * 1e-3)  # it looks at the length
    found = iso.verify(model)
    assert not found
    assert set(found.broken) == {"left-padding", "right-padding", "chunks", "tokens"}
    assert all(where.startswith("transformer.h.1.mlp.c_proj") for where in found.broken.values()), found


@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_verify_of_short_prompts(tokens):
    model = gpt2()
    iso.convert(model, strict=True)
    assert iso.verify(model, torch.arange(2 * tokens).view(2, tokens) + 3)


def test_verify_of_a_module_by_rows():
    layer = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.GELU())
    iso.convert(layer, strict=True)
    assert iso.verify(layer, torch.randn(5, 40)).held == ("rerun", "batch", "position")
    over = torch.nn.Sequential(torch.nn.Linear(40, 8), Centred())
    assert iso.convert(over).open.keys() == {"1"}
    assert iso.verify(over, torch.randn(5, 40)).broken == {"batch": "1 (Centred)", "position": "1 (Centred)"}
    with pytest.raises(OptionError, match="inputs"):
        iso.verify(layer)


def kept(model):
    """What every module is and has, by name."""
    return [(type(x), vars(x).keys(), {*x._buffers}, {*x._non_persistent_buffers_set}) for x in model.modules()]


class Wordy(torch.nn.Linear):
    def forward(self, x):
        return {"text": str(super().forward(x))}


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([[1, 2, 3, 4, 5]] * 2, DTypeError, "inputs: limit: a tensor of rows; got: list"),
        (torch.tensor(3), OptionError, "rows of inputs: limit: at least 2; got: 0"),
        (torch.ones(2, 9), DTypeError, r"inputs: limit: token ids, int64 or int32; got: torch.float32"),
        (torch.ones(9, dtype=torch.int64), ShapeError, r"inputs: limit: \[rows, tokens\]"),
        (torch.ones(2, 0, dtype=torch.int64), ShapeError, r"at least 1 token; got: \[2, 0\]"),
        (torch.full((2, 9), 97), OptionError, "ids of inputs: limit: 0 to 96; got: 97; nearest legal choice: 96"),
        (torch.full((2, 9), -100), OptionError, "ids of inputs: limit: 0 to 96; got: -100; nearest legal choice: 0"),
    ],
)
def test_verify_refuses_prompts_that_it_cannot_cut(given, error, said):
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
    with pytest.raises(error, match=said):
        iso.verify(model, given)


def test_an_encoder_is_told_its_positions_behind_padding():
    """Else it counts them from the padding on, and has another result, in torch as here."""
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertModel(config).eval()
    iso.convert(model, strict=True)
    found = iso.verify(model)
    assert found, str(found)
    assert "left-padding" in found.held


def test_images_are_no_token_ids():
    """A model of transformers without a vocabulary is compared by rows, as any other module."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    )
    with iso.invariant():
        found = iso.verify(transformers.ViTModel(config).eval(), torch.randn(3, 3, 8, 8))
    assert found.held == ("rerun", "batch", "position"), str(found)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused_by_name():
    scripted = torch.nn.Sequential(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4))))
    with pytest.raises(OptionError, match=r"module: limit: modules of Python's, no TorchScript; got: .*, 0;"):
        iso.convert(scripted)


def test_verify_refuses_outputs_that_it_cannot_compare():
    with pytest.raises(OptionError, match="Wordy"):
        iso.verify(Wordy(8, 8), torch.randn(4, 8))


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_the_way_back(kind):
    model = gpt2() if kind == "gpt2" else transformers.GemmaForCausalLM(transformers.GemmaConfig(**GEMMA)).eval()
    plain = copy.deepcopy(model)
    ids = torch.randint(3, 97, (3, 9))
    names = set(model.state_dict())
    report = iso.convert(model, strict=True, fuse=True)
    iso.use_main_grad(model)
    model.config.pad_token_id = 5  # what is changed in between stays
    assert set(iso.restore(model)) >= set(report.converted) - set(report.parts["attention"])
    assert kept(model) == kept(plain)
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert (model.config.pad_token_id, set(model.state_dict())) == (5, names)
    assert not any(hasattr(p, "main_grad") for p in model.parameters())
    with torch.no_grad():
        assert same(model(ids).logits, plain(ids).logits)
    model.lm_head = torch.nn.Linear(32, 97)  # a converted model would refuse this
    model(ids)
    assert iso.convert(model, strict=True).converted


def test_quantized_weights_have_no_way_back():
    model = torch.nn.Sequential(torch.nn.Linear(32, 8))
    iso.convert(model, quantize="Q8_0")
    with pytest.raises(OptionError, match="quantized: 0"):
        iso.restore(model)

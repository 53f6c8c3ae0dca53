"""A converted model that other code changes afterwards: an error at its next call, until `convert` has seen it."""

from __future__ import annotations

import copy
import pickle

import pytest

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models import sweep  # noqa: E402
from tests.torch.model.tiny import build, tokens  # noqa: E402
from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.model.convert import PARTS  # noqa: E402

CHANGED = r"a converted model that was changed.*{}.*convert\(model\) again"


class Adapter(torch.nn.Module):
    """What adapters of low rank put in a projection's place."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Around(torch.nn.Module):
    """What checkpoints and compilers put around a block: no weights of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        return self.inner(*args, **options)


def adapted(model, name):
    parent, _, key = name.rpartition(".")
    parent = model.get_submodule(parent)
    torch.manual_seed(1)
    setattr(parent, key, Adapter(getattr(parent, key)))


def logits(model, **options):
    with torch.no_grad():
        return model(tokens(3, 9), **options).logits


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"])
def test_an_adapter_is_noticed_and_converted_again(fuse, name):
    model = build()
    iso.convert(model, fuse=fuse)
    adapted(model, name)
    for _ in range(2):
        with pytest.raises(OptionError, match=CHANGED.format(f"{name}.lora_A is a Linear")):
            logits(model)
    report = iso.convert(model, fuse=fuse)
    assert report.converted == (f"{name}.lora_A", f"{name}.lora_B")
    whole = logits(model)
    with torch.no_grad():
        assert same(model(tokens(3, 9)[1:2]).logits, whole[1:2])
    apart = build()  # the same weights, nothing merged
    adapted(apart, name)
    iso.convert(apart)
    assert same(logits(apart), whole)


def test_an_adapter_that_is_left_is_torchs():
    model = build()
    iso.convert(model, fuse=True)
    adapted(model, "model.layers.1.self_attn.q_proj")
    report = iso.convert(model, leave=["*.lora_?"])
    assert report.converted == ()
    logits(model)


def test_a_subclass_that_holds_a_merged_weight_is_called():
    class Own(iso.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build(num_hidden_layers=1)
    iso.convert(model, fuse=True)
    before = logits(model)
    model.model.layers[0].mlp.gate_proj.__class__ = Own
    after = logits(model)
    model.model.layers[0].mlp.merged_weight = None  # the products apart
    assert same(logits(model), after)
    assert not same(before, after)


def test_other_changes_are_noticed():
    for change, said in (
        (lambda m: m.resize_token_embeddings(101, mean_resizing=False), "lm_head is a Linear"),
        (lambda m: m.set_attn_implementation("sdpa"), "the attention function is 'sdpa'"),
        (lambda m: setattr(m.model, "norm", torch.nn.Identity()), "model.norm is a Identity"),
        (lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.GELU()), r"mlp\.act_fn is a GELU"),
        (lambda m: m.model.layers.append(build(num_hidden_layers=1).model.layers[0]), "and 7 more"),
        (lambda m: setattr(m.model, "extra", torch.nn.Linear(2, 2)), "model.extra is a Linear"),
    ):
        model = build(tie_word_embeddings=False)
        iso.convert(model)
        change(model)
        with pytest.raises(OptionError, match=CHANGED.format(said)):
            logits(model)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "FalconForCausalLM"])
def test_weights_of_attention_are_refused(name):
    """GPT-2 does not hand on what it is asked for; Falcon's own code has another way for it."""
    model = sweep.build(name)
    iso.convert(model)
    before = logits(model)
    with pytest.raises(OptionError, match=r"output_attentions.*without its part \"attention\""):
        logits(model, output_attentions=True)
    assert same(logits(model, output_attentions=False), before)
    model.config._output_attentions = True
    around = Around(model.base_model)
    iso.convert(around)
    for call in (model, around, copy.deepcopy(model)):
        with torch.no_grad(), pytest.raises(OptionError, match="output_attentions"):
            call(tokens(3, 9))
    iso.restore(model)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_weights_of_attention_in_code_of_its_own():
    for name, parts in (("LlamaForCausalLM", [x for x in PARTS if x != "attention"]), ("GPTJForCausalLM", PARTS)):
        model = sweep.build(name)
        model.set_attn_implementation("eager")
        iso.convert(model, parts=parts)
        with torch.no_grad():
            found = model(tokens(3, 9), output_attentions=True).attentions
        assert [list(x.shape) for x in found] == [[3, 4, 9, 9]] * 2


def test_a_gate_that_is_no_silu_any_more_is_refused():
    model = build()
    iso.convert(model)
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(OptionError, match=r"activation of model\.layers\.1\.mlp, which was converted.*GELU"):
        iso.convert(model)


def test_attention_comes_back_with_the_next_convert():
    model = build()
    iso.convert(model)
    want = logits(model)
    model.set_attn_implementation("eager")
    assert len(iso.convert(model).parts["attention"]) == 2
    assert same(logits(model), want)


def test_what_changes_nothing_is_let_through():
    model = build()
    iso.convert(model)
    want = logits(model)
    layers = model.model.layers
    layers[0] = Around(layers[0])
    layers[1].mlp.register_forward_hook(lambda *_: None)
    assert same(logits(model), want)
    model.double().float()
    assert same(logits(model), want)
    adapted(model, "model.layers.0.inner.mlp.up_proj")  # what was let through is looked into
    with pytest.raises(OptionError, match=CHANGED.format("up_proj")):
        logits(model)


def test_copies_and_pickles_are_looked_at_on_their_own():
    model = build()
    iso.convert(model)
    want = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(logits(other), want)
        adapted(other, "model.layers.0.self_attn.v_proj")
        with pytest.raises(OptionError, match=CHANGED.format("v_proj")):
            logits(other)
        assert other.state_dict().keys() != model.state_dict().keys()
    assert same(logits(model), want)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_notices(inside):
    torch._dynamo.reset()
    model = build(num_hidden_layers=1)
    iso.convert(model)
    call = (lambda ids: model(ids, use_cache=False)) if inside else model
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    options = {} if inside else {"use_cache": False}
    want = logits(model)
    assert same(logits(compiled, **options), want)
    adapted(model, "model.layers.0.mlp.down_proj")
    with pytest.raises(Exception, match=CHANGED.format("down_proj")):
        logits(compiled, **options)
    iso.convert(model)
    assert same(logits(compiled, **options), logits(model))


def test_a_second_convert_claims_nothing():
    model = build()
    first = iso.convert(model)
    again = iso.convert(model)
    assert first.converted
    assert again.converted == ()
    assert set(again.left) == set(first.converted)
    assert str(again).startswith("converted nothing; left")


def test_a_norm_with_a_buffer_for_a_weight_that_it_does_not_use():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.FalconMambaConfig(
        vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=1, intermediate_size=64, time_step_rank=4
    )
    theirs = transformers.FalconMambaForCausalLM(config).eval()
    ours = copy.deepcopy(theirs)
    iso.convert(ours)
    assert any(type(m).__name__ == "FalconMambaWeightlessRMSNorm" for m in ours.modules())
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)

"""Checkpoints with quantized weights: what `save_pretrained` writes, `from_pretrained` reads, bit for bit."""

from __future__ import annotations

import json
import pickle

import pytest
from tests.process import python

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.small import causal, prompts, same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import FormatError  # noqa: E402

iso.register_quantizer()
FORMATS = {"lm_head": "Q6_K", "*.down_proj": "Q8_0", "*.layers.1.*": None, "*": "Q4_0"}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
READ = """
import pickle, sys, torch
with open(sys.argv[1] + "/pickle", "rb") as file:
    pickled = pickle.load(file)
ids = torch.load(sys.argv[1] + "/ids.pt")
found = [pickled(ids).logits.detach()]

import transformers
import isogemm.torch as iso
iso.register_quantizer()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
torch.save([*found, model(ids).logits.detach()], sys.argv[1] + "/logits.pt")
"""


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", torch.float32), ("llama", torch.bfloat16)], ids=str)
def test_what_is_saved_is_read(name, dtype, tmp_path):
    model, ids = causal(name, dtype, **SIZES, attention_bias=True), prompts(2, 9)
    iso.convert(model, quantize=FORMATS)
    model.save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert [type(child) for child in other.modules()] == [type(child) for child in model.modules()]
    with torch.no_grad():
        assert same(other(ids).logits, model(ids).logits)
    assert iso.verify(other)
    other.save_pretrained(tmp_path / "again")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    state = third.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


ATTENTION, MLP = {"*.self_attn": "Q8_0"}, {"*.mlp": "Q8_0"}
CALLS = {
    "activations": [{"quantize": ATTENTION, "activations": "fp32"}, {"quantize": MLP, "activations": "q8"}],
    "contracts": [{"quantize": MLP, "contract": "fma/leaf32"}, {"quantize": ATTENTION}],
    "floats": [{"contract": "fma/leaf32"}, {"quantize": ATTENTION}],
    "what was left": [{"quantize": ATTENTION, "leave": ["lm_head", "model.layers.0.mlp"]}],
    "what was left at first": [{"quantize": ATTENTION, "leave": ["lm_head"]}, {}],
    "parts": [{"quantize": ATTENTION, "parts": ["linear", "attention", "rope"]}],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_a_model_is_converted_again_as_it_was(calls, tmp_path):
    """Layers of other arithmetic, and those that stayed torch's; again where what was read is saved."""
    model, ids = causal("qwen3", torch.float32, **SIZES), prompts(2, 9)
    for call in calls:
        iso.convert(model, **call)
    said = [str(child) for child in model.modules() if not child._modules]
    with torch.no_grad():
        wanted = model(ids).logits
        for time in range(2):
            model.save_pretrained(tmp_path / str(time))
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(time), dtype="auto")
            assert [str(child) for child in model.modules() if not child._modules] == said
            assert same(model(ids).logits, wanted)


def test_another_process_reads_it(tmp_path):
    """A pickle of a converted model, which needs no import before it, and then what was saved."""
    pickled, model, ids = causal("qwen3", torch.float32), causal("qwen3", torch.float32, **SIZES), prompts(2, 9)
    iso.convert(pickled)
    iso.convert(model, quantize="Q8_0")
    (tmp_path / "pickle").write_bytes(pickle.dumps(pickled))
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    python("-c", READ, tmp_path)
    with torch.no_grad():
        assert all(map(same, torch.load(tmp_path / "logits.pt"), (pickled(ids).logits, model(ids).logits)))


def test_the_configuration_of_another_model_stays(tmp_path):
    config = causal("qwen3", torch.float32, **SIZES).config
    models = [transformers.AutoModelForCausalLM.from_config(config) for _ in range(2)]
    for parts in (("linear",), ("linear", "attention")):
        iso.convert(models[0], parts=parts, quantize="Q8_0")
        assert models[0].config.quantization_config["formats"]
        assert not hasattr(models[1].config, "quantization_config")


def test_another_format_than_the_configurations_is_refused(tmp_path):
    model = causal("qwen3", torch.float32, **SIZES)
    iso.convert(model, quantize={"*.q_proj": "Q4_1"})
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("Q4_1", "Q4_0"))
    assert json.loads(path.read_text())["quantization_config"]["quant_method"] == "isogemm"
    with pytest.raises((FormatError, RuntimeError), match=r"Q4_1|mismatch"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

"""A sample of transformers' causal language models, tiny and with large weights, before and after `convert`."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from . import sweep  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

# Of every kind of norm, block, attention and mask, and all in which something was dropped once.
SAMPLE = [
    "AXK2", "Apertus", "Bamba", "Git", "BigBirdPegasus", "BitNet", "Bloom", "Cohere2", "CpmAnt", "DeepseekV3",
    "DeepseekV32", "DeepseekV4", "Doge", "Exaone4", "Falcon", "FalconMamba", "FlexOlmo", "Gemma2", "Gemma3n",
    "Glm4", "GlmMoeDsa", "GptOss", "GraniteMoeHybrid", "HYV4", "Helium", "Jamba", "Llama", "Llama4", "MiniMaxM3VL",
    "Mistral", "Mixtral", "NanoChat", "Nemotron", "Olmo", "Olmo2", "Phi3", "Qwen2Moe", "Qwen3Next", "SmolLM3",
    "StableLm",
]  # fmt: skip


@pytest.fixture(scope="module")
def one_thread():
    """Threads of torch's that wait for each other in tiny operators are most of the time otherwise."""
    before, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("name", SAMPLE)
def test_convert_changes_roundings_alone(name):
    verdict = sweep.judge(f"{name}ForCausalLM", sweep.SCALES[:1])
    if verdict.outcome == "unbuilt":
        pytest.skip(verdict.why)
    assert verdict.outcome == "right", verdict.why
    assert verdict.converted > 5


def test_the_judge_sees_what_was_dropped_once():
    """A limit that is gone, and a factor in training alone; not other roundings."""
    model = sweep.enlarge(sweep.build("OlmoForCausalLM"), sweep.SCALES[0])
    assert sweep.compare(model, sweep.changed(model, 3), True)[0] == "right"
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config.clip_qkv = None
    assert sweep.compare(model, other, True)[0] == "wrong"
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.register_forward_hook(lambda module, x, y: y * 1.0001 if module.training else None)
    assert sweep.compare(model.eval(), other.eval(), True)[0] == "right"
    assert sweep.compare(model.train(), other.train(), True)[0] == "wrong"

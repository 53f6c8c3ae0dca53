"""Continuous batching: a request's tokens and logits are those of the request alone, whatever else is served."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.audit  # noqa: E402
import isogemm.torch as iso  # noqa: E402
from isogemm.audit.transformer import serving  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402

from .small import causal, prompts, same  # noqa: E402

LENGTHS = (5, 19, 33, 2, 11, 40)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def requests():
    return [row[:n].tolist() for row, n in zip(prompts(len(LENGTHS), max(LENGTHS)), LENGTHS, strict=True)]


def test_tokens_of_generate_batch_are_those_of_generate():
    model = causal("qwen3", torch.bfloat16)
    iso.convert(model, strict=True)
    found = {}
    for tokens, block in ((16, 16), (48, 32)):  # of a call, and of a page
        settings = transformers.ContinuousBatchingConfig(block_size=block, num_blocks=48, max_batch_tokens=tokens)
        greedy = transformers.GenerationConfig(**GREEDY, eos_token_id=-1)
        answers = model.generate_batch(requests(), generation_config=greedy, continuous_batching_config=settings)
        found[tokens] = [answer.generated_tokens for answer in answers.values()]
    assert found[16] == found[48]
    model.generation_config.eos_token_id = None
    for ids, got in zip(requests(), found[16], strict=True):
        inputs = torch.tensor([ids])
        alone = model.generate(inputs, attention_mask=torch.ones_like(inputs), **GREEDY)
        assert alone[0, len(ids) :].tolist() == got


def test_the_relation_of_load():
    model = causal("qwen3", torch.float32)
    attention, ids = model.config._attn_implementation, prompts(2, 9)
    with torch.no_grad():
        before = model(ids).logits
    report = isogemm.audit.model(model, mode=["plain", "convert", "invariant"], relations=["load"], batches=(3,))
    found = {mode: report.providers[mode].relations["load"] for mode in ("plain", "convert", "invariant")}
    assert {mode: r.status for mode, r in found.items()} == {"plain": "changed", "convert": "held", "invariant": "n/a"}
    assert found["convert"].cases == 2
    assert found["convert"].outputs > 2 * 67 * 257  # the prompt's, and of what was generated
    assert "thread" in found["invariant"].reason
    assert model.config._attn_implementation == attention
    assert "_supports_logits_to_keep" not in vars(model)
    with torch.no_grad():
        assert same(model(ids).logits, before)


def test_a_transformers_that_takes_its_own_attention_alone_is_named(monkeypatch):
    monkeypatch.setattr(serving, "LAST", (4, 57))
    model = causal("qwen3", torch.float32)
    report = isogemm.audit.model(model, mode=["plain", "convert"], relations=["load"], batches=(3,))
    plain, found = (report.providers[mode].relations["load"] for mode in ("plain", "convert"))
    assert (plain.status, found.status) == ("changed", "n/a")
    assert found.reason.endswith(" takes no other attention there, 4.57 is the last to")


def test_load_is_not_unasked():
    assert isogemm.audit.transformer.relations.RELATIONS["load"].asked


def test_pages_are_for_continuous_batching():
    model = causal("qwen3", torch.float32)
    iso.convert(model)
    model.set_attn_implementation("paged|isogemm")
    with pytest.raises(OptionError, match="without its cache"):
        model(prompts(1, 4))
    model.set_attn_implementation("paged|sdpa")
    with pytest.raises(OptionError, match="the attention function is"):
        model(prompts(1, 4))


@pytest.fixture(scope="module")
def windowed():
    """A model whose layers see all keys or a window of 8."""
    config = transformers.Gemma3TextConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config).eval()


def test_load_counts_the_pages_of_layers_of_each_kind(windowed):
    report = isogemm.audit.model(windowed, mode=["convert"], relations=["load"], batches=(3,))
    assert report.providers["convert"].relations["load"].status == "held"

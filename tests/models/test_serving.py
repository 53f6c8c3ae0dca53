"""Continuous batching: a request's tokens and logits are those of the request alone, whatever else is served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.audit  # noqa: E402
import isogemm.torch as iso  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402
from isogemm.torch.model.huggingface.modules import attend  # noqa: E402
from isogemm.torch.model.huggingface.paged import attend_paged, let_through  # noqa: E402

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


def test_load_is_not_unasked():
    assert isogemm.audit.transformer.relations.RELATIONS["load"].asked


@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")
def test_pages_are_for_continuous_batching():
    model = causal("qwen3", torch.float32)
    iso.convert(model)
    model.set_attn_implementation("paged|isogemm")
    with pytest.raises(OptionError, match="without its cache"):
        model(prompts(1, 4))
    model.set_attn_implementation("paged|sdpa")
    with pytest.raises(OptionError, match="the attention function is"):
        model(prompts(1, 4))


class Pages:
    """What a cache of pages says and does for one layer, as versions of transformers have it."""

    def __init__(self, version: str, held: tuple[torch.Tensor, torch.Tensor], window: int) -> None:
        self.held = held
        if version == "5.17":
            self.sliding_windows = [window or 1]
        else:
            self.layer_to_allocator = {0: SimpleNamespace(sliding_window=window) if window else SimpleNamespace()}
        self.update = self.new if version == "5.19" else self.former

    def former(self, key_states, value_states, layer_idx, read_index, write_index):
        return tuple(x[0].transpose(0, 1) for x in self.new(key_states, value_states, layer_idx, {"cu_seq_lens_k": {}}))

    def new(self, key_states, value_states, layer_idx, kwargs):
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"].get("this")
        return tuple(torch.cat(pair, 2) for pair in zip(self.held, (key_states, value_states), strict=True))


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("version", ["5.17", "5.18", "5.19", "5.24"])
def test_pages_of_every_version_hold_the_same_keys(version, window):
    """A request of 21 tokens, of which its cache has those that the last 5 may see."""
    query, key, value = torch.randn(1, 4, 21, 16), torch.randn(1, 2, 21, 16), torch.randn(1, 2, 21, 16)
    places = torch.arange(21)
    shown = (places <= places[:, None]) & (places > places[:, None] - (window or 21))
    want = iso.attention(query, key, value, mask=shown)[:, :, 16:].transpose(1, 2)
    first = 16 - (window - 1 if window else 16)
    held = key[:, :, first:16], value[:, :, first:16]
    ends = torch.tensor([0, 21 - first])
    kind = "sliding_attention" if window else "full_attention"
    options = {"position_ids": torch.arange(16, 21)[None], "cu_seq_lens_q": torch.tensor([0, 5]), "read_index": [],
               "write_index": [], "cu_seq_lens_k": {"this" if version == "5.19" else kind: ends}}  # fmt: skip
    new = key[:, :, 16:], value[:, :, 16:]
    if version == "5.24":
        new = tuple(torch.cat(pair, 2) for pair in zip(held, new, strict=True))
        options |= {"cu_seq_lens_k": ends, "window": window}
    else:
        options["cache"] = Pages(version, held, window)
    module = SimpleNamespace(layer_idx=0)
    found, _ = (attend_paged if version < "5.19" else attend)(module, query[:, :, 16:], *new, None, **options)
    assert same(found, want)


def test_a_check_of_names_lets_ours_through_and_no_other(monkeypatch):
    class Manager:
        def switch_to_cb_friendly_attn(self, model, auto_switch_to_flash=True):
            raise ValueError(model.config._attn_implementation)

    monkeypatch.setattr(transformers.generation.continuous_batching, "ContinuousBatchingManager", Manager)
    let_through("isogemm")
    once = Manager.switch_to_cb_friendly_attn
    let_through("isogemm")
    assert Manager.switch_to_cb_friendly_attn is once
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="isogemm"))
    Manager().switch_to_cb_friendly_attn(model, False)
    model.config._attn_implementation = "another"
    with pytest.raises(ValueError, match="another"):
        Manager().switch_to_cb_friendly_attn(model)


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

"""The language model of the demo: against transformers' own, blind to its company, and its words when bits move."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from isogemm.contract import compare
from isogemm.demo import decode, smollm, story

HIDDEN, INNER, HEADS, GROUPS, VOCABULARY = 32, 48, 4, 2, 61
PROMPTS = ([3, 5, 7], [11, 2, 9, 4, 8], [1], [60, 59])


@pytest.fixture(scope="module")
def small() -> smollm.SmolLM:
    rng = np.random.default_rng(5)

    def linear(n: int, k: int) -> np.ndarray:
        return (rng.normal(size=(n, k)) / np.sqrt(k)).astype(ml_dtypes.bfloat16)

    def norm() -> np.ndarray:
        return rng.normal(1, 0.1, HIDDEN).astype(np.float32)

    def block() -> smollm.Block:
        narrow = HIDDEN // HEADS * GROUPS
        sizes = ((HIDDEN, HIDDEN), (narrow, HIDDEN), (narrow, HIDDEN), (HIDDEN, HIDDEN))
        attention = [linear(*size) for size in sizes]
        mlp = [linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER)]
        return smollm.Block(norm(), *attention, norm(), *mlp)

    words = (2 * linear(VOCABULARY, HIDDEN).astype(np.float32)).astype(ml_dtypes.bfloat16)
    return smollm.SmolLM(words, (block(), block()), norm(), HEADS, GROUPS, 10000.0, 1e-5, end=VOCABULARY)


def test_an_answer_does_not_see_its_company(small):
    decoder = decode.Decoder(small, decode.ISOGEMM)
    together = decoder.answers(PROMPTS, 5)
    for prompt, in_batch in zip(PROMPTS, together, strict=True):
        alone = decoder.answers([prompt], 5)[0]
        assert np.isfinite(alone.logits).all()
        assert alone.tokens == in_batch.tokens
        assert compare.differing(np.stack(alone.logits), np.stack(in_batch.logits)) == 0


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """A weight whose rotary halves are [first half, second half], as neighbours: what GGUF files hold."""
    return weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)


def test_the_decoder_is_transformers_llama(small):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        tie_word_embeddings=True, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        rms_norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.data = torch.tensor(small.words.astype(np.float32))
    model.model.norm.weight.data = torch.tensor(small.norm)
    for layer, block in zip(model.model.layers, small.blocks, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        linears = {attention.v_proj: block.value, attention.o_proj: block.output, mlp.gate_proj: block.gate}
        linears |= {mlp.up_proj: block.up, mlp.down_proj: block.down}
        for module, weight in linears.items():
            module.weight.data = torch.tensor(weight.astype(np.float32))
        for module, weight, heads in ((attention.q_proj, block.query, HEADS), (attention.k_proj, block.key, GROUPS)):
            halves = weight.astype(np.float32).reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
            assert np.array_equal(_interleaved(halves, heads), weight.astype(np.float32))
            module.weight.data = torch.tensor(halves)
        layer.input_layernorm.weight.data = torch.tensor(block.norm_attention)
        layer.post_attention_layernorm.weight.data = torch.tensor(block.norm_mlp)
    answer = decode.Decoder(small, decode.ISOGEMM).answers([PROMPTS[1]], 4)[0]
    ids = torch.tensor([[*PROMPTS[1], *answer.tokens[:3]]])
    with torch.no_grad():
        expected = model(ids).logits[0, len(PROMPTS[1]) - 1 :].numpy()
    # bfloat16 between operations: a few of its steps of 2**-8 in numbers of about 4.
    np.testing.assert_allclose(np.stack(answer.logits), expected, atol=0.15)


def _answer(*rows: list[float]) -> decode.Answer:
    logits = [np.array(row, np.float32) for row in rows]
    return decode.Answer([int(row.argmax()) for row in logits], logits)


class _Letters:
    def decode(self, tokens):
        return "".join("abcd"[token] for token in tokens)


def test_words_that_part_are_counted_and_shown():
    alone = _answer([0, 2, 1, 0], [3, 0, 2.75, 0], [0, 0, 0, 1])
    turned = _answer([0, 2, 0.5, 0], [2.5, 0, 2.75, 0], [0, 0, 0, 1])
    row = story.compare("p", "why?", _Letters(), alone, turned, end=3)
    assert (row.alone, row.together, row.shared, row.tokens) == ("ba", "bc", 1, 2)
    assert row.leads == (1.0, 0.25)
    assert row.moved == (0.5, 0.5)
    same = story.compare("q", "why?", _Letters(), alone, alone, end=3)
    assert not same.changed
    assert not any(same.moved)
    text = story.lines([row, same])
    assert text[:2] == ["why? p, alone:", "  b[a]"]
    assert "moved by 0.5 in the median, 0.5 at most; 1 of them (50%)" in text[4]
    assert text[5] == "q: over 2 tokens the lead of the chosen one over the next never moved by a bit."
    assert [line.split(" of the")[0] for line in story.counts([row, same])] == [
        "p: 1 of 1 answers",
        "q: 0 of 1 answers",
    ]


def test_one_answer_that_ends_earlier_has_parted():
    short, long = _answer([1, 0, 0, 0], [0, 0, 0, 1]), _answer([1, 0, 0, 0], [0, 1, 0, 0.5])
    row = story.compare("p", "why?", _Letters(), short, long, end=3)
    assert (row.alone, row.together, row.shared, row.tokens, row.changed) == ("a", "ab", 1, 2, True)

"""The encoder against an independent one in torch, and its invariance with isogemm's products."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.contract import compare
from isogemm.demo import forward, minilm, trials
from isogemm.demo.sentences import SENTENCES


def _torch_embedding(model, ids):
    """One sentence, float64, torch's own attention, layer norm and GELU."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def tensor(x):
        return torch.tensor(np.asarray(x, np.float64))

    def linear(x, p):
        return functional.linear(x, tensor(p.weight), tensor(p.bias))

    def norm(x, p):
        return functional.layer_norm(x, x.shape[-1:], tensor(p.gamma), tensor(p.beta), model.epsilon)

    def split(x):
        return x.reshape(len(ids), model.heads, -1).transpose(0, 1)

    x = tensor(model.words[ids]) + tensor(model.positions[: len(ids)]) + tensor(model.token_type)
    x = norm(x, model.norm)
    for layer in model.layers:
        q, k, v = (split(linear(x, p)) for p in (layer.query, layer.key, layer.value))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(len(ids), -1)
        x = norm(x + linear(mixed, layer.output), layer.norm_attention)
        x = norm(x + linear(functional.gelu(linear(x, layer.up)), layer.down), layer.norm_output)
    return functional.normalize(x.mean(0), dim=0).numpy()


def test_the_real_model_agrees_with_torch_and_finds_paraphrases(real_folder):
    model = minilm.load(real_folder)
    batch = minilm.tokenize(minilm.tokenizer(real_folder), SENTENCES)
    got = forward.embed(model, batch, forward.NUMPY)
    for i in (0, 5, 8, 23):
        np.testing.assert_allclose(got[i], _torch_embedding(model, batch[i]), rtol=0, atol=1e-6)
    similarity = got @ got.T - 2 * np.eye(len(got))
    assert (similarity.argmax(1) == np.arange(len(got)) ^ 1).all()


def test_the_real_tokenizer_neither_pads_nor_runs_on(real_folder):
    text_to_tokens = minilm.tokenizer(real_folder)
    hello, long = minilm.tokenize(text_to_tokens, ["Hello world.", "word " * 1000])
    assert hello.tolist() == [101, 7592, 2088, 1012, 102]
    assert len(long) == minilm.MAX_TOKENS


@pytest.mark.parametrize("provider", [forward.NUMPY, forward.ISOGEMM], ids=lambda p: p.name)
def test_the_small_encoder_agrees_with_torch(small, small_batch, provider):
    got = forward.embed(small, small_batch, provider)
    expected = np.stack([_torch_embedding(small, ids) for ids in small_batch])
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("trial", trials.trials(9), ids=lambda t: t.name)
def test_isogemm_keeps_every_bit(small, small_batch, trial):
    expected = trials.alone(small, small_batch, forward.ISOGEMM)
    assert np.isfinite(expected).all()
    got = trial.embed(small, small_batch, forward.ISOGEMM)
    mismatch = compare.first_mismatch(expected, got)
    assert mismatch is None, f"{trial.name}: {mismatch}"


@pytest.mark.parametrize("m", [1, 2, 3, 16])
def test_isogemm_linears_keep_every_bit(small, small_batch, m):
    inputs = trials.activations(small, small_batch, forward.ISOGEMM)
    assert trials.row_drift(forward.ISOGEMM, inputs, m).outputs_changed == 0


def test_row_by_row_gives_a_linear_one_row_at_a_time(small, small_batch):
    seen = []

    def linear(x, parameters):
        seen.append(len(x))
        return forward.NUMPY.linear(x, parameters)

    one = forward.row_by_row(forward.Multiplier("spy", linear, np.matmul))
    forward.embed(small, small_batch[:2], one)
    tokens = 2 * max(map(len, small_batch[:2]))
    assert seen == [1] * tokens * len(small.linears)

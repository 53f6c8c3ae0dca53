"""A GPT-2: every plan has the same bits, those of isogemm.torch around GELU's formula, near torch in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.program.small import BATCH, TOKENS, differing, program, tokens, trained, weights

import isogemm.torch
from isogemm.errors import OptionError, ShapeError
from isogemm.program import DecoderConfig, load, lower
from isogemm.program.model import decoder, is_turned
from isogemm.torch import reductions

transformers = pytest.importorskip("transformers")

CONFIG = transformers.GPT2Config(
    vocab_size=67, n_positions=40, n_embd=64, n_layer=2, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    bos_token_id=1, eos_token_id=1,
)  # fmt: skip
MODEL = decoder(CONFIG)
APART = replace(MODEL, fused_qkv=False)
SCALE, CUBE, SLOPE = (float(np.float32(x)) for x in (1.5957691216057308, 0.044715, 0.21406444881780073))


class Gelu(torch.autograd.Function):
    """The formulas of a program, a single operation of float32 at a time."""

    @staticmethod
    def forward(ctx, x):
        s = reductions.sigmoid((x + ((x * x) * x) * CUBE) * SCALE)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        return dy * (s + (x * (s * (1 - s))) * ((x * x) * SLOPE + SCALE))


class Act(torch.nn.Module):
    def forward(self, x):
        return Gelu.apply(x)


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.int32)


def peer_of(dtype=torch.float32):
    """transformers' model with the weights, and its parameters by their names in a program."""
    peer, given = transformers.GPT2LMHeadModel(CONFIG).to(dtype), weights(MODEL)
    known = dict(peer.named_parameters())
    parameters = {name: known[key] for name, key, _ in MODEL.weights()}
    for name, p in parameters.items():
        p.data = torch.from_numpy(turned(name, given[name]).copy()).to(dtype)
    peer.lm_head.weight = peer.transformer.wte.weight
    return peer, parameters


def turned(name, x):
    return x.T if is_turned({n: key for n, key, _ in MODEL.weights()}[name]) else x


def converted():
    peer, parameters = peer_of()
    for block in peer.transformer.h:
        block.mlp.act = Act()
    isogemm.torch.convert(peer, grad_order=f"leaf{TOKENS}", leave=[f"transformer.h.{i}.mlp.act" for i in range(2)])
    return peer, parameters


def places(ids):
    return torch.arange(ids.shape[1]).expand(ids.shape)


@pytest.mark.parametrize("model", [MODEL, APART], ids=["fused", "apart"])
def test_every_choice_has_the_same_bits(model):
    wanted = trained(program(model, threads=1), model=model)
    for options in ({"threads": 3, "mode": "fast", "recompute": True}, {"micro_batches": 4}):
        made = program(model, **options)
        made.check()
        assert differing(trained(made, model=model), wanted) == [], options


def test_a_training_step_is_that_of_isogemm_torch():
    """The loss and every gradient: products, norms, attention, embeddings and softmax are isogemm.torch's own."""
    peer, parameters = converted()
    ids, targets = (torch.from_numpy(x) for x in tokens(model=MODEL))
    log_p = reductions.log_softmax(peer(ids, position_ids=places(ids), use_cache=False).logits)
    (-log_p.gather(-1, targets[..., None]).sum() / (BATCH * TOKENS)).backward()
    run = program(CONFIG).start(weights(MODEL))
    run.step(ids.numpy(), targets.numpy())
    for name, p in parameters.items():
        found = run.array(f"dw.{name}")
        if name == "embed":
            found = found + run.array("dw.embed.by.x")
        assert np.array_equal(bits(p.grad.numpy()), bits(turned(name, found))), name


def test_prefill_and_decode_have_the_logits_of_isogemm_torch():
    peer, parameters = converted()
    ids = tokens(model=MODEL, batch=3)[0]
    with torch.no_grad():
        wanted = peer(torch.from_numpy(ids), use_cache=False).logits.numpy()
    # As a checkpoint has them: some are [k, n].
    given = {key: parameters[name].detach().numpy() for name, key, _ in MODEL.weights()}
    part = lower(CONFIG, batch=3, tokens=5, phase="prefill", threads=1).start(given)
    assert np.array_equal(bits(part.logits(ids[:, :5])), bits(wanted[:, :5]))
    run = lower(CONFIG, batch=3, tokens=40, phase="decode", threads=3).start(given)
    run.fill(part)
    for t in range(5, TOKENS):
        assert np.array_equal(bits(run.decode(ids[:, t], [t] * 3)), bits(wanted[:, t])), t


@pytest.mark.parametrize("model", [MODEL, APART], ids=["fused", "apart"])
def test_quantized_weights_have_biases(model, tmp_path):
    """Decoding has the logits of a prefill; what is saved is read again."""
    ids, given = tokens(model=model, batch=2)[0], weights(model)
    whole = lower(model, batch=2, tokens=TOKENS, phase="prefill", quantize="Q8_0").start(given).logits(ids)
    made = lower(model, batch=2, tokens=20, phase="decode", quantize="Q8_0", threads=3)
    run = load(made.save(tmp_path)).start(given)
    for t in range(TOKENS):
        assert np.array_equal(bits(run.decode(ids[:, t], [t] * 2)), bits(whole[:, t])), t
    plain = lower(model, batch=2, tokens=TOKENS, phase="prefill").start(given).logits(ids)
    assert 0 < np.abs(whole - plain).max() < 0.05 * np.abs(plain).max()


def test_a_step_is_near_float64():
    """Every gradient against plain torch, whose GELU is that by tanh."""
    peer, parameters = peer_of(torch.float64)
    ids, targets = (torch.from_numpy(x) for x in tokens(model=MODEL))
    logits = peer(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    run = program(MODEL).start(weights(MODEL))
    run.step(ids.numpy(), targets.numpy())
    for name, p in parameters.items():
        found, exact = run.array(f"dw.{name}"), p.grad.numpy()
        if name == "embed":
            found = found + run.array("dw.embed.by.x")
        bound = 16 * np.finfo(np.float32).eps * np.sqrt(BATCH * TOKENS) * np.abs(exact).max()
        assert np.abs(turned(name, found) - exact).max() <= bound, name


def test_what_it_has_not_is_refused():
    config = CONFIG.to_dict()
    with pytest.raises(OptionError, match=r"activation_function: limit: gelu_new"):
        decoder(config | {"activation_function": "relu"})
    with pytest.raises(OptionError, match=r"scale_attn_by_inverse_layer_idx: limit: False"):
        decoder(config | {"scale_attn_by_inverse_layer_idx": True})
    dropping = config | {"attn_pdrop": 0.1}
    with pytest.raises(OptionError, match=r"dropout of a model that is trained: limit: 0.0; got: 0.1"):
        lower(dropping, batch=1, tokens=4)
    lower(dropping, batch=1, tokens=4, phase="prefill")
    with pytest.raises(ShapeError, match=r"tokens: limit: at most 40, the learned positions"):
        lower(MODEL, batch=1, tokens=41, phase="decode")
    with pytest.raises(OptionError, match="fused_qkv"):
        DecoderConfig(67, 64, 96, 1, 4, 4, 16, fused_qkv=True)

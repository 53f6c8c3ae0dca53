"""A decoder of Qwen3's shape, tiny, with weights and tokens that are the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.program import AdamW, DecoderConfig, lower

MODEL = DecoderConfig(
    vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
BATCH, TOKENS = 8, 12


def weights(model=MODEL, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        for name, _, shape in model.weights()
    }


def tokens(seed=1, model=MODEL, batch=BATCH, length=TOKENS):
    rng = np.random.default_rng(seed)
    return rng.integers(0, model.vocab_size, (2, batch, length))


def program(model=MODEL, **options):
    return lower(model, **({"batch": BATCH, "tokens": TOKENS, "threads": 2, "leaf": TOKENS} | options))


def trained(made, steps=2, model=MODEL):
    """The bits of the losses, of the last gradients and of the weights and the optimizer's state after some steps."""
    run = made.start(weights(model))
    found = {"losses": np.array([run.step(*tokens(i, model), AdamW(lr=1e-2)) for i in range(steps)], np.float32)}
    names = [v.name for v in made.graph.values.values() if v.section in ("weights", "grad_weights", "optimizer")]
    return {name: x.copy().view(np.int32) for name, x in (found | {name: run.array(name) for name in names}).items()}


def differing(found, wanted):
    """Names of tensors with a differing bit."""
    return [name for name in wanted if not np.array_equal(found[name], wanted[name])]


def converted(model, architecture="Qwen3", **options):
    """transformers' model with the same weights by isogemm.torch, its parameters by name, and its configuration."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {name: x for name, x in model.to_dict().items() if name not in ("head_norms", "rope_theta")}
    import isogemm.torch

    config = getattr(transformers, f"{architecture}Config")(**sizes, max_position_embeddings=64)
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    known = {name: key for name, key, _ in model.weights()}
    state = {known[name]: torch.from_numpy(x.copy()) for name, x in weights(model).items()}
    peer.load_state_dict(state, strict=False)
    parameters = dict(peer.named_parameters())
    isogemm.torch.convert(peer, grad_order=f"leaf{TOKENS}", **options)
    return peer, parameters, config

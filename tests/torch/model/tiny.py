"""Small language models of transformers, before and after `convert`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.small import filled  # noqa: E402

import isogemm.torch as iso  # noqa: E402

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
FAMILIES = ("Qwen3", "Llama", "Qwen2", "Mistral")
DTYPES = [torch.float32, torch.bfloat16]


def build(family="Qwen3", dtype=torch.float32, **options):
    torch.manual_seed(0)  # what a test draws afterwards is the same every time, too
    config = getattr(transformers, f"{family}Config")(**{**TINY, "tie_word_embeddings": True, **options})
    return filled(config, dtype)


def converted(*args, **options):
    model = build(*args, **options)
    return model, iso.convert(model)


def tokens(*shape):
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1))

"""Small language models of real architectures, with random weights from their configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from tests.torch.tensors import same

SIZES = {
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def causal(name: str, dtype: torch.dtype, device: str = "cpu", **changes: Any) -> Any:
    """``qwen3`` or ``llama``; weights large enough that tokens differ and nothing saturates."""
    kinds = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}
    return filled(kinds[name](**{**SIZES, **changes}), dtype, device)


def filled(config, dtype, device="cpu", kind=transformers.AutoModelForCausalLM):
    """The model of a configuration, with the same random weights every time."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) * 0.1 if p.dim() > 1 else 1 + 0.1 * torch.randn(p.shape))
    return model.eval()


def check_tokens_of_generate(model):
    """transformers' own loop: tokens and logits of a left-padded batch are those of each prompt alone."""
    ids, options = prompts(3, 20), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids)
    mask[1, :7], mask[2, :13] = 0, 0
    whole = model.generate(ids, attention_mask=mask, **options)
    for i, first in enumerate((0, 7, 13)):
        alone = model.generate(ids[i : i + 1, first:], attention_mask=mask[i : i + 1, first:], **options)
        assert torch.equal(alone.sequences[0, 20 - first :], whole.sequences[i, 20:])
        for a, b in zip(alone.logits, whole.logits, strict=True):
            assert same(a[0], b[i])
    return whole


def prompts(sequences: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(seed).integers(1, 256, (sequences, tokens)))

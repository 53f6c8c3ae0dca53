"""Small language models of real architectures, with random weights from their configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from tests.torch.tensors import same  # noqa: F401

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


def prompts(sequences: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(seed).integers(1, 256, (sequences, tokens)))

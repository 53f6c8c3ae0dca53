"""Models of real widths with random weights, drawn where they will be."""

from __future__ import annotations

from typing import Any

from .ledger import Sizes

__all__ = ["SHAPES", "causal"]

QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rope_theta": 1000000, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 4096,
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 8192, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 512, "max_position_embeddings": 4096,
}  # fmt: skip
TINY = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-0.6b": ("Qwen3Config", QWEN3, {"num_hidden_layers": 2}),
    "qwen3-moe, 16 experts": ("Qwen3MoeConfig", MOE, {"num_hidden_layers": 2, "moe_intermediate_size": 48}),
    "gemma-3-1b, 6 layers": ("Gemma3TextConfig", GEMMA3, {"sliding_window": 16, "query_pre_attn_scalar": 16}),
}
"""Configurations by name: their class, their sizes, and what is other in tests."""


def causal(name: str, sizes: Sizes, **changes: Any) -> Any:
    """A causal language model in bfloat16, in evaluation mode."""
    import torch
    import transformers

    kind, settings, small = SHAPES[name]
    settings = settings | (TINY | small if sizes.tiny else {}) | changes
    with torch.random.fork_rng(), torch.device(sizes.device):
        torch.manual_seed(sizes.seed)
        config = getattr(transformers, kind)(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()

"""Decoder families of transformers, and what is expected of each."""

from __future__ import annotations

import numpy as np
import torch
from tests.models.sweep import build
from tests.torch.tensors import same

import isogemm.torch as iso
from isogemm.audit.bench import NotApplicable
from isogemm.audit.transformer.serving import served
from isogemm.errors import OptionError

# Every relation of `isogemm.torch.verify` holds after convert(strict=True), and inside invariant().
HELD = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Phi", "Phi3", "GPT2", "GPTBigCode", "GPTNeoX", "StableLm", "Olmo", "Olmo2",
    "Olmo3", "Gemma", "Gemma2", "Gemma3", "Granite", "GraniteMoe", "Starcoder2", "SmolLM3", "Glm4", "Ernie4_5",
    "Falcon", "Llama4", "Qwen2Moe", "Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "GPTJ", "GPTNeo",
)  # fmt: skip

# All but padding on the left, which its compressors take for tokens: refused after convert, and other results inside
# invariant().
HELD_BUT_LEFT = ("DeepseekV4",)

# What convert(strict=True) says of the others.
REFUSED = {
    "Bloom": "does not use transformers' attention functions",
    "Cohere": "CohereLayerNorm",
    "Mamba": "MambaMixer",
    "Nemotron": "NemotronLayerNorm1P",
    "OPT": "OPTLearnedPositionalEmbedding",
    "Qwen3Next": "Qwen3NextGatedDeltaNet",
}

# Families of these that transformers' continuous batching cannot run, whatever computes attention.
NOT_BATCHED = ("DeepseekV3", "Falcon", "GPTBigCode", "GPTJ", "GPTNeo", "Llama4", "StableLm")


def family(name: str, dtype: torch.dtype, device: str = "cpu"):
    """A tiny model whose tokens differ and whose numbers do not saturate."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn_like(p) * 0.1
                p.copy_(noise if p.dim() > 1 else p + noise)
    return model.to(device, dtype)


def judged(name: str, mode: str, dtype: torch.dtype, device: str = "cpu") -> str:
    """``held``, ``refused: why``, where bits changed, or ``held,`` and which relations the model then refused."""
    model = family(name, dtype, device)
    if mode == "convert":
        try:
            iso.convert(model, strict=True)
        except OptionError as error:
            return f"refused: {error.value}"
        found = iso.verify(model)
    else:
        with iso.invariant():
            found = iso.verify(model)
    if all(where.startswith("OptionError") for where in found.broken.values()):
        return ", ".join(["held", *(f"{relation} refused" for relation in found.broken)])
    return f"changed: {', '.join(found.broken)}"


def loaded(name: str, dtype: torch.dtype) -> str:
    """What continuous batching made of one prompt alone and among others: ``held``, ``changed``, or an error."""
    model = family(name, dtype).eval()
    iso.convert(model, strict=True)
    ids = np.random.default_rng(0).integers(1, model.config.get_text_config().vocab_size - 1, (5, 27))
    with torch.no_grad():
        try:
            alone, among = _logits(model, ids[:1]), _logits(model, ids)
        except (OptionError, NotApplicable) as error:
            return f"not batched: {getattr(error, 'value', error)}"
        once = model(torch.tensor(ids[:1]), use_cache=False).logits[0]
    return "held" if same(alone[:27], once) and same(alone, among) else "changed"


def _logits(model, ids):
    parts = served(model, ids)
    order = np.argsort(np.concatenate([positions for positions, _ in parts]))
    return torch.cat([rows for _, rows in parts])[torch.as_tensor(order)]

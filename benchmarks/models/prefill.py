"""Prompts through four layers of Qwen3-0.6B's widths in bfloat16, isogemm beside plain torch; bits in a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from isogemm.study.bits import differing

from .ledger import Case, Sizes, timed
from .shapes import causal

__all__ = ["cases"]


def cases(sizes: Sizes) -> Iterator[Case]:
    """One for each length of a prompt."""
    import isogemm.torch

    plain = causal("qwen3-0.6b", sizes, num_hidden_layers=1 if sizes.tiny else 4, vocab_size=4096)
    ours = copy.deepcopy(plain)
    isogemm.torch.convert(ours, strict=True)
    for tokens in (5,) if sizes.tiny else (16, 128, 512):
        yield f"{tokens} tokens", lambda tokens=tokens: _facts(sizes, {"isogemm": ours, "torch": plain}, tokens)


def _facts(sizes: Sizes, models: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    import torch

    generator = torch.Generator(sizes.device).manual_seed(sizes.seed)
    ids = torch.randint(4096, (2, tokens), generator=generator, device=sizes.device)
    with torch.no_grad():
        calls = {name: lambda x=x: x(ids[:1], use_cache=False).logits for name, x in models.items()}
        both = models["isogemm"](ids, use_cache=False).logits[:1]
        bad = differing(calls["isogemm"](), both)
        return {"differing": bad, "checked": both.numel()} | timed(sizes, calls, "torch")

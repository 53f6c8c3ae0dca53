"""Gradients of attention beside torch's flash attention: the backward pass alone, and bits of an entry alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from isogemm.study.bits import differing

from .ledger import Case, Sizes, timed

__all__ = ["cases"]

SHAPES = (
    (4, 16, 8, 1024, 128), (8, 32, 8, 2048, 128), (1, 16, 8, 4096, 128), (2, 32, 32, 2048, 128),
    (32, 16, 8, 512, 128), (16, 12, 12, 512, 64), (4, 16, 16, 1024, 64), (1, 32, 8, 8192, 128),
)  # fmt: skip
"""batch, query heads, key heads, tokens, width; the last but one without a causal mask."""


def cases(sizes: Sizes) -> Iterator[Case]:
    """One for each shape."""
    for i, shape in enumerate([(2, 4, 2, 37, 16)] if sizes.tiny else SHAPES):
        causal = i != 6
        name = "batch={} heads={}/{} tokens={} width={}".format(*shape) + (" causal" if causal else "")
        yield name, lambda shape=shape, causal=causal: _facts(sizes, shape, causal)


def _facts(sizes: Sizes, shape: tuple[int, ...], causal: bool) -> Mapping[str, Any]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from isogemm.torch import attention

    b, hq, hkv, t, d = shape
    generator = torch.Generator(sizes.device).manual_seed(sizes.seed)
    options = {"generator": generator, "device": sizes.device}
    q, k, v = (torch.randn(b, h, t, d, **options).bfloat16().requires_grad_() for h in (hq, hkv, hkv))
    dy = torch.randn(b, hq, t, d, **options).bfloat16()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if sizes.device == "cuda" else nullcontext():
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hkv)
    outs = {"isogemm": attention(q, k, v, causal=causal), "torch": plain}
    calls = {
        name: lambda out=out: torch.autograd.grad(out, (q, k, v), dy, retain_graph=True) for name, out in outs.items()
    }
    last = [x.detach()[-1:].clone().requires_grad_() for x in (q, k, v)]
    alone = torch.autograd.grad(attention(*last, causal=causal), last, dy[-1:])
    bad = sum(differing(x[-1:], y) for x, y in zip(calls["isogemm"](), alone, strict=True))
    return {"differing": bad, "checked": sum(x.numel() for x in alone)} | timed(sizes, calls, "torch")

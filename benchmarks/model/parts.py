"""Operations of a forward pass one by one: isogemm's, with a pinned order, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..common import words_of
from .build import Step
from .cases import PART, TORCH, Case, Sizes

__all__ = ["build"]

Run = Callable[[], Any]


def build(case: Case, sizes: Sizes, device: str, seed: int) -> tuple[dict[str, Step], dict[str, str]]:
    """Both ways, each as `case.calls` calls over operands in turn, and what could not be made, with the reason."""
    import torch

    torch.manual_seed(seed)
    dtype = getattr(torch, sizes.dtype)
    made = [(_attention if case.phase == "attention" else _rows)(case, dtype, device) for _ in range(2)]
    steps, absent = {}, {}
    for name in (TORCH, PART):
        runs = [ways[name] for ways in made]
        try:
            runs[0]()
        except Exception as error:
            absent[name] = words_of(error)
            continue
        steps[name] = Step(lambda i, runs=runs: [runs[j % len(runs)]() for j in range(case.calls)])
    return steps, absent


def _rows(case: Case, dtype: Any, device: str) -> dict[str, Run]:
    import torch
    from torch.nn import functional

    from isogemm.torch import reductions

    n = case.context
    x, y = (torch.randn(case.tokens, n, device=device).to(dtype) for _ in range(2))
    w = torch.randn(n, device=device).to(dtype)
    ways: dict[str, tuple[Run, Run]] = {
        "rms_norm": (lambda: functional.rms_norm(x, (n,), w, 1e-6), lambda: reductions.rms_norm(x, w, 1e-6)),
        "layer_norm": (
            lambda: functional.layer_norm(x, (n,), w, w, 1e-5), lambda: reductions.layer_norm(x, w, w, 1e-5)
        ),
        "softmax": (lambda: torch.softmax(x, -1), lambda: reductions.softmax(x)),
        "silu_mul": (lambda: functional.silu(x) * y, lambda: reductions.silu_mul(x, y)),
    }  # fmt: skip
    return dict(zip((TORCH, PART), ways[case.phase], strict=True))


def _attention(case: Case, dtype: Any, device: str) -> dict[str, Run]:
    """16 heads of 128 over 8 of keys and values: one query of each row, or a causal prompt."""
    import torch
    from torch.nn import functional

    import isogemm.torch

    q = torch.randn(case.batch, 16, case.tokens, 128, device=device).to(dtype)
    k, v = (torch.randn(case.batch, 8, case.context, 128, device=device).to(dtype) for _ in range(2))
    causal = case.tokens > 1
    return {
        TORCH: lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        PART: lambda: isogemm.torch.attention(q, k, v, causal=causal),
    }

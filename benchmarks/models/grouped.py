"""grouped_linear beside torch._grouped_mm over drawn counts: forward and backward, bits of each group alone.

With ISOGEMM_TUNING=off in the environment: products of each group alone would be timed in the background, beside what
is timed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isogemm.study.bits import differing

from .ledger import Case, Sizes, timed

__all__ = ["cases", "drawn"]

LAYERS = ((4096, 1536), (2048, 768), (768, 2048), (2048, 1408), (4096, 14336), (2880, 2880))  # k and n of experts
TORCH, OURS, HOST = "torch._grouped_mm", "grouped_linear", "grouped_linear, counts on the host"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rows of experts, and one layer of them."""

    k: int
    n: int
    counts: tuple[int, ...]


def drawn(sizes: Sizes, cells: int = 20) -> list[Drawn]:
    """Experts from 8 to 64, tokens from 64 to 8192, and shares of them as routers give: some have none."""
    rng, found = np.random.default_rng(sizes.seed), []
    for i in range(2 if sizes.tiny else cells):
        k, n = (64, 32) if sizes.tiny else LAYERS[i % len(LAYERS)]
        groups = 4 if sizes.tiny else int(2 ** rng.integers(3, 6 if k * n > 2**25 else 7))
        rows = 37 if sizes.tiny else int(2 ** rng.uniform(6, 13))
        counts = rng.multinomial(rows, rng.dirichlet(np.full(groups, rng.choice([0.3, 1.0, 10.0]))))
        found.append(Drawn(k, n, tuple(int(c) for c in counts)))
    return found


def cases(sizes: Sizes) -> Iterator[Case]:
    """Forward and backward of each drawn cell."""
    for i, cell in enumerate(drawn(sizes)):
        title = f"{i}: {len(cell.counts)} groups of {sum(cell.counts)} rows, k={cell.k} n={cell.n}"
        yield f"forward {title}", lambda cell=cell: _forward(sizes, cell)
        yield f"backward {title}", lambda cell=cell: _backward(sizes, cell)


def _operands(sizes: Sizes, cell: Drawn) -> tuple[Any, ...]:
    import torch

    generator = torch.Generator(sizes.device).manual_seed(sizes.seed)
    options = {"generator": generator, "device": sizes.device}
    rows, groups = sum(cell.counts), len(cell.counts)
    x = torch.randn(rows, cell.k, **options).bfloat16()
    w = (torch.randn(groups, cell.n, cell.k, **options) / cell.k**0.5).bfloat16()
    dy = torch.randn(rows, cell.n, **options).bfloat16()
    counts = torch.tensor(cell.counts, device=sizes.device)
    return x, w, dy, counts, counts.cumsum(0).to(torch.int32)


def _forward(sizes: Sizes, cell: Drawn) -> Mapping[str, Any]:
    import torch

    import isogemm.torch

    x, w, _, counts, ends = _operands(sizes, cell)
    calls = {
        OURS: lambda: isogemm.torch.grouped_linear(x, w, counts),
        HOST: lambda: isogemm.torch.grouped_linear(x, w, cell.counts),
        TORCH: lambda: torch._grouped_mm(x, w.mT, offs=ends),
    }
    with torch.no_grad():
        got, alone = calls[OURS](), isogemm.torch.linear
        parts = [alone(rows, w[g]) for g, rows in enumerate(x.split(list(cell.counts))) if len(rows)]
        facts = {"differing": differing(got, torch.cat(parts)), "checked": got.numel(), "counts": list(cell.counts)}
        return facts | timed(sizes, calls, TORCH)


def _backward(sizes: Sizes, cell: Drawn) -> Mapping[str, Any]:
    import torch

    import isogemm.torch

    x, w, dy, counts, ends = _operands(sizes, cell)
    leaves = x.requires_grad_(), w.requires_grad_()
    outs = {
        OURS: isogemm.torch.grouped_linear(x, w, counts),
        HOST: isogemm.torch.grouped_linear(x, w, cell.counts),
        TORCH: torch._grouped_mm(x, w.mT, offs=ends),
    }
    calls = {
        name: lambda out=out: torch.autograd.grad(out, leaves, dy, retain_graph=True) for name, out in outs.items()
    }
    dx, dw = calls[OURS]()
    count, bad = 0, 0
    for g, (rows, out) in enumerate(zip(x.detach().split(list(cell.counts)), dy.split(list(cell.counts)), strict=True)):
        if len(rows):
            one, weight = rows.clone().requires_grad_(), w.detach()[g].clone().requires_grad_()
            want = torch.autograd.grad(isogemm.torch.linear(one, weight), (one, weight), out)
            begin = sum(cell.counts[:g])
            bad += differing(dx[begin : begin + len(rows)], want[0]) + differing(dw[g], want[1])
            count += want[0].numel() + want[1].numel()
    return {"differing": bad, "checked": count, "counts": list(cell.counts)} | timed(sizes, calls, TORCH)

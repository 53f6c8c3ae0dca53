"""torch's own tensor parallelism: a transformers model cut by its plan, with sums by NCCL or by symmetric memory.

Its projections of one input are one product, its attention is torch's, and products write where their sums are read.
What carries a sum is chosen when a graph is captured: `by`. NVLink multicast is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

__all__ = ["WAYS", "by", "cut"]

WAYS = ("nccl", "one-shot", "two-shot")
_way = WAYS[0]
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13's name
_shared: dict[tuple[Any, ...], tuple[Any, Any]] = {}


@contextmanager
def by(way: str) -> Iterator[None]:
    """Sums by one of `WAYS`."""
    global _way
    before, _way = _way, way
    try:
        yield
    finally:
        _way = before


def _room(rows: int, n: int, like: Any) -> tuple[Any, Any]:
    """Symmetric memory for [rows, n], made at its first use, which no graph may be."""
    from torch.distributed import _symmetric_memory as symmetric

    key = (rows, n, like.dtype)
    if key not in _shared:
        made = symmetric.empty((rows, n), dtype=like.dtype, device=like.device)
        _shared[key] = (made, symmetric.rendezvous(made, dist.group.WORLD.group_name))
    return _shared[key]


def _total(shared: Any) -> Any:
    name = dist.group.WORLD.group_name
    if _way == "one-shot":
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)
    return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", name, torch.empty_like(shared))


@torch.library.custom_op("benchmarks_ranks::product", mutates_args=())
def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, summed over ranks."""
    flat = x.reshape(-1, x.shape[-1])
    if _way == "nccl":
        y = flat @ w.t()
        dist.all_reduce(y)
    else:
        shared, _ = _room(len(flat), len(w), x)
        torch.mm(flat, w.t(), out=shared)
        y = _total(shared)
    return y.view(*x.shape[:-1], len(w))


@_product.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(w))


@torch.library.custom_op("benchmarks_ranks::total", mutates_args=())
def _summed(x: torch.Tensor) -> torch.Tensor:
    if _way == "nccl":
        y = x.clone()
        dist.all_reduce(y)
        return y
    shared, _ = _room(x.numel() // x.shape[-1], x.shape[-1], x)
    shared.copy_(x.view_as(shared))
    return _total(shared).view_as(x)


@_summed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("benchmarks_ranks::columns", mutates_args=())
def _columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, columns of all ranks side by side."""
    flat, size, n = x.reshape(-1, x.shape[-1]), dist.get_world_size(), len(w)
    if _way == "nccl":
        y = flat @ w.t()
        whole = y.new_empty(size, *y.shape)
        _all_gather(whole.view(-1), y.view(-1))
        y = whole.movedim(0, -2).flatten(-2)
    else:
        shared, handle = _room(len(flat), n, x)
        torch.mm(flat, w.t(), out=shared)
        y = x.new_empty(len(flat), size * n)
        handle.barrier(channel=0)
        for rank in range(size):
            y[:, rank * n : (rank + 1) * n].copy_(handle.get_buffer(rank, shared.shape, shared.dtype))
        handle.barrier(channel=1)
    return y.reshape(*x.shape[:-1], size * n)


@_columns.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(w) * dist.get_world_size())


class _Rows(torch.nn.Module):
    """A Linear of which a rank has some inputs."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.weight = _part(whole.weight, 1)

    def forward(self, x: Any) -> Any:
        return torch.ops.benchmarks_ranks.product(x, self.weight)


class _Head(torch.nn.Module):
    """A Linear of which a rank has some outputs, and all ranks get all."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Any) -> Any:
        return torch.ops.benchmarks_ranks.columns(x, self.weight)


class _Table(torch.nn.Module):
    """An Embedding of which a rank has some rows: those of the others are zeros, and the sum has all."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.first = weight, dist.get_rank() * len(weight)

    def forward(self, ids: Any) -> Any:
        own = ids - self.first
        mine = (own >= 0) & (own < len(self.weight))
        rows = functional.embedding(torch.where(mine, own, 0), self.weight)
        return torch.ops.benchmarks_ranks.total(torch.where(mine.unsqueeze(-1), rows, 0.0).to(rows.dtype))


class _Attention(torch.nn.Module):
    """A rank's heads: one product for queries, keys and values."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        parts = [_part(getattr(whole, name).weight, 0) for name in ("q_proj", "k_proj", "v_proj")]
        self.weight, self.widths = _joined(parts), [len(p) for p in parts]
        self.head_dim, self.layer_idx = whole.head_dim, whole.layer_idx
        self.q_norm, self.k_norm, self.o_proj = whole.q_norm, whole.k_norm, _Rows(whole.o_proj)

    def forward(self, hidden_states: Any, position_embeddings: Any, past_key_values: Any, **kwargs: Any) -> Any:
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        shape = hidden_states.shape[:-1]
        made = functional.linear(hidden_states, self.weight).split(self.widths, -1)
        q, k, v = (y.view(*shape, -1, self.head_dim) for y in made)
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = past_key_values.update(k, v, self.layer_idx)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=shape[1] > 1, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*shape, -1)), None


class _Gated(torch.nn.Module):
    """A gated block: one product for the gate and what it opens."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.weight = _joined([_part(whole.gate_proj.weight, 0), _part(whole.up_proj.weight, 0)])
        self.down_proj = _Rows(whole.down_proj)

    def forward(self, x: Any) -> Any:
        gate, up = functional.linear(x, self.weight).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


def _part(weight: Any, dim: int) -> Any:
    own = weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return torch.nn.Parameter(own.clone(), requires_grad=False)


def _joined(parts: list[Any]) -> Any:
    return torch.nn.Parameter(torch.cat(parts), requires_grad=False)


def cut(model: Any) -> Any:
    """A Qwen3 model in evaluation mode, in place: this rank's part of it."""
    for layer in model.model.layers:
        layer.self_attn, layer.mlp = _Attention(layer.self_attn), _Gated(layer.mlp)
    table = _part(model.model.embed_tokens.weight, 0)
    head = table if model.config.tie_word_embeddings else _part(model.lm_head.weight, 0)
    model.model.embed_tokens, model.lm_head = _Table(table), _Head(head)
    return model

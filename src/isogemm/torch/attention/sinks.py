"""Attention with sinks: a number for each head that takes part in the softmax, and has no value.

With m and l of `isogemm.contract.attention`, and a sink s of the query's head, each step rounded to float32:

1. ``e = exp((s * LOG2E - m) * LN2)``, the pinned exp of `isogemm.contract.rows`
2. ``f = l / (l + e)``; ``y = f * y0``, with the y0 that attention has without sinks, in float32; rounded once more

So a query's result depends on what it depends on without sinks, and on its head's sink.

The gradients are those of attention for ``f * dy`` in the place of dy and this y in the place of y0, since p sums up to
f now: ``ds = p * (dp - delta)`` with ``delta = sum of dy * y``. The gradient of a sink is ``-sum of e / (l + e) *
delta``, a chain over batch entries and queries in ascending order.
"""

from __future__ import annotations

from typing import Any

import torch

from ...contract.attention import LOG2E
from .. import reductions
from ..gemm.products import call_product
from ..operator import Tensor, define_call, refuse_vmap
from ..routing.elementwise import subnormals_kept
from .ops import differentiate, empty_pair, forward, needed, remember, remembered

_LOG2E, _LN2 = float(LOG2E), 0.6931471824645996  # ln 2 rounded to float32


def _shares(sinks: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
    """(l, e) over their sum: what the keys have of each query's probability, and the sink."""
    m, total = stats.unbind(0)
    e = reductions.exp((sinks.float() * _LOG2E).view(-1, 1).sub(m).mul_(_LN2))
    whole = total + e
    # Without a key m is -inf, e and the sum are infinite, and the share of nothing is 0; the sink has it all.
    return total / whole, torch.where(m == float("-inf"), 1.0, e / whole)


def _body(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    y, m, total = forward(q, k, v, *options, torch.float32)  # type: ignore[call-arg]
    stats = torch.stack((m, total))
    with torch.no_grad(), subnormals_kept(q):
        return y * _shares(sinks, stats)[0].unsqueeze(-1), stats


def _fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return empty_pair(q, k, v, options[-1], torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    remember(ctx, inputs[:4], inputs[4:], output)


def _back(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 12
    (q, k, v, sinks), options, (y, stats) = remembered(ctx)
    keys, sink = _shares(sinks, stats)
    found = differentiate(dy * keys.unsqueeze(-1), q, k, v, *options, y, stats, list(ctx.needs_input_grad[:3]))
    dsinks = None
    if ctx.needs_input_grad[3]:
        rows = (reductions.sum(dy * y) * sink).neg().transpose(1, 2).flatten(0, 1)  # [batch and queries, heads]
        dsinks = call_product(None, rows.new_ones(1, len(rows)), rows, 1.0, 0.0, "fma/chain", "chain", torch.float32)
        dsinks = dsinks.reshape(sinks.shape).to(sinks.dtype)
    return *needed(ctx, found), dsinks, *[None] * 8


_call = define_call(
    "attention_with_sinks",
    "(Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, SymInt? causal_offset, Tensor? start, Tensor? stop, "
    "bool ranged, float? scale, float? softcap, str contract) -> (Tensor, Tensor)",
    slice(4), _body, _fake,
    setup=_setup, backward=_back, vmap=refuse_vmap("attention with sinks", "a longer batch"),
)  # fmt: skip


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *options: Any, out_dtype: Any) -> Tensor:
    """y with the sinks [heads of q]; `options` are those of `ops.forward` from the mask to the contract."""
    y: Tensor = _call(q, k, v, sinks, *options)[0]
    return y.to(out_dtype or q.dtype)

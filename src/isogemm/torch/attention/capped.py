"""Attention with capped logits: ``softmax(softcap * tanh(scale * q @ k.T / softcap) + mask) @ v``, as Gemma 2 has it.

Step 1 of `isogemm.contract.attention` is here, each step rounded to float32:

1. ``s = chain_A over D of q * k`` from +0, ``h = 2 * sigmoid(s * (2 * scale / softcap)) - 1``, which is tanh, with the
   pinned sigmoid of `isogemm.contract.rows`; ``t = h * (softcap * LOG2E)``, ``t = t + mask * LOG2E``, -inf where hidden

The other steps are those of the definition, with products and sums rounded one by one. So a query's result depends on
what it depends on without a cap. In the gradients ``ds`` is multiplied by ``1 - h`` and by ``1 + h``.

No kernel has it: scores of some heads are held at a time, and products compute the rest. Nor has one dropout, whose
forward pass this is, too (`isogemm.torch.attention.dropout`).
"""

from __future__ import annotations

from typing import Any

import torch

from ...contract.attention import LEAF
from ..operator import Tensor
from .gradients import Forward, bound, exp2, hidden_and_added, in_blocks, logits, outside_of, product_of, side_by_side


def forward(call: Forward) -> tuple[Tensor, Tensor, Tensor]:
    """(y, m, l) in float32 of a call that has none yet; ranges are those of batch entries."""
    q, k, v = call.q, call.k, call.v
    if q.is_cpu:
        for name, x in (("start", call.start), ("stop", call.stop)):
            bound(name, x, k.shape[2])
    (b, hq, tq), (hkv, tk, _), dv = q.shape[:3], k.shape[1:], v.shape[3]
    y, stats = q.new_zeros(b, hq, tq, dv, dtype=torch.float32), q.new_zeros(2, b, hq, tq, dtype=torch.float32)
    stats[0] = -torch.inf
    if not (stats.numel() and tk):
        return y, stats[0], stats[1]
    groups, outside = hq // hkv, outside_of(call)
    if outside is not None:
        k, v = (x.masked_fill(outside.view(b, 1, tk, 1), 0) for x in (k, v))
    queries = q.unflatten(1, (hkv, groups))
    into = [x.unflatten(1, (hkv, groups)).transpose(2, 3) for x in (y, stats[0].unsqueeze(-1), stats[1].unsqueeze(-1))]
    for entries, heads in in_blocks(b, hkv, groups * tq * tk, q.device.type):
        keys, values = (x[entries, heads].flatten(0, 1) for x in (k, v))
        s = product_of(side_by_side(queries[entries, heads]), keys.mT, call, out_dtype=torch.float32)
        t, _ = logits(s, *hidden_and_added(call, entries, heads, groups, outside), call)
        keep = None if call.kept is None else call.kept(entries, heads)
        if call.start is not None:
            each = len(t) // len(call.start[entries])
            place, none = _from_start(tk, call.start[entries].clamp(0, tk).repeat_interleave(each))
            at = place.unsqueeze(1).expand_as(t)
            t, keep = (
                t.gather(2, at).masked_fill(none.unsqueeze(1), -torch.inf),
                keep and (keep[0].gather(2, at), keep[1]),
            )
            values = values.gather(1, place.unsqueeze(2).expand_as(values))
        for out, part in zip(into, _leaves(t, values, keep, call), strict=True):
            some = out[entries, heads]
            some.copy_(part.view(some.shape))
    return y, stats[0], stats[1]


def _from_start(keys: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """[n, keys] of keys counted from where each item begins, and which of them are behind the last one."""
    place = start.unsqueeze(1) + torch.arange(keys, device=start.device)
    return place.clamp(max=keys - 1), place >= keys


def _leaves(t: Tensor, v: Tensor, keep: Any, call: Forward) -> tuple[Tensor, Tensor, Tensor]:
    """(y, m, l) [n, rows, ...] of logits [n, rows, keys] and values [n, keys, dv]: steps 2 to 5.

    Order-critical: leaves ascending, counted from the first key.
    """
    n, rows, keys = t.shape
    count, behind = -(-keys // LEAF), -keys % LEAF
    t = torch.nn.functional.pad(t, (0, behind), value=-torch.inf).view(n, rows, count, LEAF).transpose(1, 2)
    v = torch.nn.functional.pad(v, (0, 0, 0, behind)).view(n * count, LEAF, -1)
    largest = t.masked_fill(t.isnan(), -torch.inf).amax(-1, keepdim=True).ceil()  # [n, count, rows, 1]
    p = exp2(t - _finite(largest)).to(v.dtype).flatten(0, 1)
    parts = [product_of(p, v.new_ones(*v.shape[:-1], 1), call, out_dtype=torch.float32)]
    if keep is not None:
        dropped = (
            torch.nn.functional.pad(~keep[0], (0, behind)).view(n, rows, count, LEAF).transpose(1, 2).flatten(0, 1)
        )
        p = p.masked_fill(dropped, 0)
    parts.insert(0, product_of(p, v, call, out_dtype=torch.float32))
    some = torch.cat(parts, -1).view(n, count, rows, -1)
    o, m = torch.zeros_like(some[:, 0]), torch.full_like(largest[:, 0], -torch.inf)
    for i in range(count):
        own = largest[:, i]
        top = torch.maximum(m, own)
        a, b = exp2(m - _finite(top)), exp2(own - _finite(top)).masked_fill(own == -torch.inf, -0.0)
        o, m = some[:, i] * b + o * a, top  # a and b are powers of two
    total = o[..., -1:]
    y = (o[..., :-1] * (1 / total) + 0.0).masked_fill(total == 0, 0.0)
    y = y if keep is None else y * keep[1]
    return y, m + 0.0, total


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m == -torch.inf, 0.0)

"""Gradients of attention: products by contract, and steps between them that IEEE 754 defines one by one.

With t, m and l as in `isogemm.contract.attention`, u = m or 0 where that is -inf, and r = 1 / l or 0 where l is 0:

1. ``p = exp2(t - u) * r`` in float32, exp2 with products and sums rounded one by one (no fma)
2. ``dp = chain over dv of dy * v``, ``delta = sum of dy * y`` in the order of `isogemm.torch.reductions`
3. ``ds = p * (dp - delta)``; p and ds rounded to the operands' dtype
4. ``dq = scale * (chain over the keys of ds * k)``, ``dk = scale * (chain over the queries of ds * q)``,
   ``dv = chain over the queries of p * dy``; queries of all heads that share k and v are one chain, and queries of one
   token, head after head, stand together in it: so zeros for tokens behind the last change nothing

No step adds across batch entries, and none is atomic. A row of dq depends on its own query and its keys, counted from
the first of the tensor. Of a hidden pair p and ds are zeros, which no fused sum sees, so kernels may leave it out;
what it adds where its dp or its score is no finite number is no part of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...contract.attention import EXP2_LEAST, EXP2_SHIFT, EXP2_TERMS, LOG2E, factor
from ...contract.spec import Contract
from ...errors import OptionError
from ...operands.tensors import memory
from .. import reductions
from ..device import column
from ..gemm import products
from ..operator import Tensor

_BUDGET = {"cpu": 2**22, "cuda": 2**27}  # elements of one matrix of probabilities that is held at a time
_SHIFT, _LEAST = float(EXP2_SHIFT), float(EXP2_LEAST)
_FIRST, *_TERMS = (float(x) for x in EXP2_TERMS["float32"])


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward call and its results; `mask` is expanded to [b, hq, tq, tk], `ranged` as in `ops.forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    offset: int | None
    start: Tensor | None
    stop: Tensor | None
    ranged: bool
    scale: float | None
    softcap: float | None
    contract: str
    # y, m, total: None of a call that is still to be computed
    y: Tensor = None
    m: Tensor = None
    total: Tensor = None
    kept: Any = None  # of dropout: (entries, heads) to which probabilities stay, and the factor of those

    @property
    def scaled_by(self) -> float:
        """What products of q and k are multiplied with."""
        return max(self.q.shape[3], 1) ** -0.5 if self.scale is None else self.scale


def gradients(dy: Tensor, call: Forward, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), an empty tensor where it is not needed."""
    q, k, v = call.q, call.k, call.v
    (b, hq, tq), (hkv, tk) = q.shape[:3], k.shape[1:3]
    empty = not (call.m.numel() and tk)
    plain = q.is_cuda and call.mask is None and call.softcap is None and call.kept is None and not empty
    fused = _fused(dy, call, needs) if plain else None
    if fused is not None:
        return fused
    found = [x.new_zeros(x.shape) if need else x.new_empty(0) for x, need in zip((q, k, v), needs, strict=True)]
    if empty:
        return found[0], found[1], found[2]
    groups = hq // hkv
    outside = outside_of(call)
    if outside is not None:  # what is not read may be anything: not even times 0
        k, v = (x.masked_fill(outside.view(b, 1, tk, 1), 0) for x in (k, v))
    delta = reductions.sum(dy.float() * call.y.float(), keepdim=True)
    dy = dy.to(v.dtype)

    def grouped(x: Tensor) -> Tensor:
        """[b, hq, ...] as [b, hkv, groups, ...]."""
        return x.unflatten(1, (hkv, groups))

    parts = [grouped(x) for x in (q, dy, delta, call.m.unsqueeze(-1), call.total.unsqueeze(-1))]
    into = grouped(found[0]).transpose(2, 3) if needs[0] else None, found[1], found[2]  # as the blocks have them
    for entries, heads in in_blocks(b, hkv, groups * tq * tk, q.device.type):
        rows = [side_by_side(x[entries, heads]) for x in parts]
        keys = [x[entries, heads].flatten(0, 1) for x in (k, v)]
        hidden, added = hidden_and_added(call, entries, heads, groups, outside)
        keep = None if call.kept is None else call.kept(entries, heads)
        for out, part in zip(into, _block(rows, keys, hidden, added, keep, call, needs), strict=True):
            if part is not None:
                some = out[entries, heads]
                some.copy_(part.view(some.shape))
    return found[0], found[1], found[2]


def _fused(dy: Tensor, call: Forward, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same by kernels that hold no scores, where they serve."""
    start, stop = (x if x is None else x.clamp(0, call.k.shape[2]).int().contiguous() for x in (call.start, call.stop))
    d = call.q.shape[3]
    found = column("attention_gradients", "cuda").gradients(
        dy, call.q, call.k, call.v, call.y, call.m, call.total, c=float(factor(call.scale, d)),
        scale=call.scaled_by, causal_offset=call.offset, start=start, stop=stop,
        arithmetic=Contract.parse(call.contract).arithmetic, needs=needs,
    )  # fmt: skip
    if found is None:
        return None
    dq, dk, dv = (x if need else call.q.new_empty(0) for x, need in zip(found, needs, strict=True))
    return dq, dk, dv


def bound(name: str, x: Tensor | None, keys: int) -> Any:
    """An end of the range of keys of each entry, in a CPU's memory; an OptionError where it is no place among them."""
    if x is None:
        return None
    ends = memory(name, x)
    for bad in ends[(ends < 0) | (ends > keys)]:
        raise OptionError(name, limit=f"0 to {keys}", value=int(bad), nearest=min(max(int(bad), 0), keys))
    return ends


def side_by_side(x: Tensor) -> Tensor:
    """[b, hkv, groups, tq, ...] as [b * hkv, tq * groups, ...]."""
    return x.transpose(2, 3).flatten(2, 3).flatten(0, 1)


def in_blocks(b: int, heads: int, size: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Slices of batch entries and of heads whose matrices fit."""
    room = max(1, _BUDGET.get(device, 2**22) // size)
    each, entries = min(heads, room), max(1, room // heads)
    for i in range(0, b, entries):
        for h in range(0, heads, each):
            yield slice(i, i + entries), slice(h, h + each)


def outside_of(call: Forward) -> Tensor | None:
    """[b, tk]: keys that no query of a batch entry reads."""
    if call.ranged and call.mask is not None:
        return ~_seen(call.mask).any(2).any(1).expand(len(call.k), -1)
    key = torch.arange(call.k.shape[2], device=call.k.device)
    found = None
    if call.start is not None:
        found = key < call.start.unsqueeze(1)
    if call.stop is not None:
        behind = key >= call.stop.unsqueeze(1)
        found = behind if found is None else found | behind
    return found


def _seen(mask: Tensor) -> Tensor:
    """Keys that queries see, once for what is broadcast: see `isogemm.contract.attention.ranges`."""
    mask = mask[tuple(slice(None) if step else slice(1) for step in mask.stride()[:3])]
    return mask if mask.dtype is torch.bool else ~(mask <= torch.finfo(mask.dtype).min)


def hidden_and_added(
    call: Forward, entries: slice, heads: slice, groups: int, outside: Tensor | None
) -> tuple[Any, Any]:
    """(hidden, added) that broadcast to [entries * heads, tq * groups, tk], or None."""
    tq, tk = call.q.shape[2], call.k.shape[2]
    hidden = added = None
    if call.mask is not None:
        mask = side_by_side(call.mask.unflatten(1, (-1, groups))[entries, heads])
        if mask.dtype is torch.bool:
            hidden = ~mask
        else:
            added = mask.float() * float(LOG2E)
    if call.offset is not None:
        query, key = (torch.arange(n, device=call.q.device) for n in (tq, tk))
        late = (key > query.unsqueeze(1) + call.offset).repeat_interleave(groups, 0)
        hidden = late if hidden is None else hidden | late
    if outside is not None:
        some = outside[entries]
        each = len(range(*heads.indices(call.k.shape[1])))
        far = some.repeat_interleave(each, 0).unsqueeze(1)
        hidden = far if hidden is None else hidden | far
    return hidden, added


def _block(
    rows: list[Tensor], keys: list[Tensor], hidden: Any, added: Any, keep: Any, call: Forward, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv) of some heads: rows are [n, tq * groups, ...], keys [n, tk, ...]."""
    (q, dy, *_), (k, v) = rows, keys
    s = product_of(q, k.mT, call, out_dtype=torch.float32)
    dp = product_of(dy, v.mT, call, out_dtype=torch.float32) if needs[0] or needs[1] else None
    if s.is_cuda and call.softcap is None and keep is None:
        p, ds = _steps_on_cuda(s, dp, rows, hidden, added, call)
    else:
        p, ds = _steps(s, dp, rows, hidden, added, keep, call)
    return (
        product_of(ds, k, call, call.scaled_by) if needs[0] else None,
        product_of(ds.mT, q, call, call.scaled_by) if needs[1] else None,
        product_of(p.mT, dy, call) if needs[2] else None,
    )


def _steps(
    s: Tensor, dp: Tensor | None, rows: list[Tensor], hidden: Any, added: Any, keep: Any, call: Forward
) -> tuple[Any, Any]:
    """(p, ds), overwriting s and dp; no ds without dp."""
    *_, delta, m, total = rows
    t, h = logits(s, hidden, added, call)
    inverse = torch.where(total == 0, 0.0, 1 / total)
    p = exp2(t.sub_(torch.where(m == float("-inf"), 0.0, m))).mul_(inverse)
    if dp is not None:
        dp = (dp if keep is None else dp.mul_(keep[1]).masked_fill_(~keep[0], 0)).sub_(delta).mul_(p)
        if h is not None:
            dp = dp.mul_(1 - h).mul_(1 + h)
    if keep is not None:
        p = p.mul_(keep[1]).masked_fill_(~keep[0], 0)
    return p.to(call.v.dtype), None if dp is None else dp.to(call.q.dtype)


def logits(s: Tensor, hidden: Any, added: Any, call: Forward) -> tuple[Tensor, Tensor | None]:
    """t of step 1, perhaps overwriting s; and tanh where logits are capped."""
    d, h = call.q.shape[3], None
    if call.softcap is None:
        t = s.mul_(float(factor(call.scale, d)))
    else:
        h = reductions.sigmoid(s.mul_(float(np.float32(2 * call.scaled_by / call.softcap)))).mul_(2).sub_(1)
        t = h * float(np.float32(call.softcap * float(LOG2E)))
    if added is not None:
        t += added
    if hidden is not None:
        t.masked_fill_(hidden, float("-inf"))
    return t, h


def _steps_on_cuda(s: Tensor, dp: Tensor | None, rows: list[Tensor], hidden: Any, added: Any, call: Forward) -> Any:
    """The same by one kernel."""
    *_, delta, m, total = rows
    c = float(factor(call.scale, call.q.shape[3]))
    steps = column("attention_steps", s.device.type).steps
    return steps(s, m, total, c=c, dtype=call.q.dtype, hidden=hidden, added=added, dp=dp, delta=delta)


def product_of(a: Tensor, b: Tensor, call: Forward, alpha: float = 1.0, out_dtype: Any = None) -> Tensor:
    return products.product(None, a, b, float(alpha), 0.0, call.contract, out_dtype)


def exp2(x: Tensor) -> Tensor:
    """2**x for x of at most 0, overwriting it: `isogemm.contract.attention.exp2` with products and sums rounded."""
    x = x.clamp_(min=_LEAST)  # NaN stays
    k = x + _SHIFT
    r = x.sub_(k - _SHIFT)
    y = r * _FIRST
    for i, term in enumerate(_TERMS):
        y = y.add_(term) if i == 0 else y.mul_(r).add_(term)
    return y.mul_(((k.view(torch.int32) & 0xFF) << 23).view(torch.float32))

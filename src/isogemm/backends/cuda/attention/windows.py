"""Attention of batch entries whose queries start in different places of a leaf: see contract/attention.py.

``attention_ranges`` has found the range of each query, and put the tokens in an order of tiles: those of a tile start
in the same place, so that they share a walk from the first start to the last stop. A program takes tiles of one batch
entry and one group of PACK query heads in turn. Entries that are not apart were computed elsewhere.

Contract: as ``attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tile import LEAF, finish, fold, leaf


@triton.jit
def attention_ranged(q, k, v, mask, start, stop, y, stats, apart, order,
                     q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k, y_b, y_h, y_t,
                     range_b, range_h, range_t, order_b, order_h, tiles, d, dv, tq, heads, group, pack, c,
                     ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TERMS: tl.constexpr, MASK: tl.constexpr,
                     EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, STATS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`start` and `stop` by strides over entry, head and token; `order` too, ROWS / pack tokens to a tile."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    item, bundle = tl.program_id(2), tl.program_id(1)
    if tl.load(apart + item) == 0:
        return
    r, tokens = tl.arange(0, ROWS), ROWS // pack
    head64, b64 = (bundle * pack + r % pack).to(tl.int64), item.to(tl.int64)
    kv = (bundle * pack // group).to(tl.int64)
    order_at = order + b64 * order_b + head64 * order_h + r // pack
    rd, rdv = tl.arange(0, D), tl.arange(0, DV)
    in_d, in_dv = rd < d, rdv < dv
    j = tl.arange(0, LEAF).to(tl.int64)
    k_at = k + b64 * k_b + kv * k_h + j[None, :] * k_t + rd[:, None]
    v_at = v + b64 * v_b + kv * v_h + j[:, None] * v_t + rdv[None, :]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        i = tl.load(order_at + tile * tokens, mask=r < tokens * pack, other=-1)
        inside, i64 = i >= 0, i.to(tl.int64)
        range_at = b64 * range_b + head64 * range_h + i64 * range_t
        begin, end = tl.load(start + range_at, mask=inside, other=0), tl.load(stop + range_at, mask=inside, other=0)
        q_at = q + b64 * q_b + head64[:, None] * q_h + i64[:, None] * q_t + rd[None, :]
        qs = tl.load(q_at, mask=inside[:, None] & in_d[None, :], other=0.0)
        mask_at = mask + b64 * mask_b + head64[:, None] * mask_h + i64[:, None] * mask_t + j[None, :] * mask_k
        hi = tl.max(end, 0)
        lo = tl.min(tl.where(begin < end, begin, hi), 0)
        o = tl.full((ROWS, DV), 0.0, tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        for n in tl.range(lo, hi, LEAF, num_stages=1):
            n64 = n.to(tl.int64)
            o_n, l_n, m_n = leaf(qs, k_at + n64 * k_t, v_at + n64 * v_t, mask_at + n64 * mask_k, in_d, in_dv, hi - n,
                                 end - n, inside, c, TERMS, MASK, EVEN_D, EVEN_DV)  # fmt: skip
            o, total, m = fold(o, total, m, o_n, l_n, m_n)
        finish(o, total, m, y, stats, y_b, y_h, y_t, b64, head64, i64, tq, heads, rdv, inside, in_dv, STATS)

"""y = softmax(scale * q @ k.T + mask) @ v in Triton, for every head size, stride and mask: see contract/attention.py.

A program owns ROWS rows of one batch entry and one group of PACK query heads, which read the same keys, and walks
leaves of 128 keys in ascending order; or it computes one leaf, whose sums go to memory for ``attention_meet``.

Contract: ``tensor_core:<device>`` on bfloat16 and float16 through ``tl.dot`` with fresh accumulators for every leaf.
Head sizes are padded with zeros, which a fused sum ignores. Every product and sum outside is rounded by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAF = tl.constexpr(128)
LEAST = tl.constexpr(-127.0)
SHIFT = tl.constexpr(12583039.0)  # 1.5 * 2**23 + 127
LOG2E = tl.constexpr(1.44269502162933349609375)


@triton.jit
def exp2(x, TERMS: tl.constexpr):
    """2**x for x of at most 0: Horner's rule on the fraction, a float of shifted bits for the whole part."""
    x = tl.maximum(x, LEAST, propagate_nan=tl.PropagateNan.ALL)
    k = x + SHIFT
    r = x - (k - SHIFT)
    y = tl.full(x.shape, TERMS[0], tl.float32)
    for i in tl.static_range(1, len(TERMS)):
        y = tl.fma(y, r, tl.full(x.shape, TERMS[i], tl.float32))
    e = (k.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return y * e


@triton.jit
def ceil(x):
    """Subnormals are kept, which tl.ceil flushes."""
    return tl.inline_asm_elementwise("cvt.rpi.f32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def finite(m):
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def is_seen(mask_at, inside):
    """Bytes of a mask that are not 0, and False outside.

    Order-critical: not by tl.load. Where 8 bits are loaded for an operand of a product with 16 rows, Triton gives each
    thread four keys in a row, so that keys of two blocks of 16 trade places: other bits in one result of some 20,000.
    """
    byte = tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u16 x; setp.ne.s32 p, $2, 0; mov.u16 x, 0; @p ld.global.u8 x, [$1];"
        " cvt.u32.u16 $0, x; }",
        "=r,l,r", [mask_at.to(tl.int64), inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return byte != 0


@triton.jit
def between(start, stop, item, tk, STARTS: tl.constexpr, STOPS: tl.constexpr):
    """The first key that an item reads, and the one behind the last."""
    lo, hi = 0, tk
    if STARTS:
        lo = tl.maximum(tl.load(start + item), 0)
    if STOPS:
        hi = tl.minimum(tl.load(stop + item), tk)
    return lo, hi


@triton.jit
def load(at, seen, inside, EVEN: tl.constexpr):
    """Lines that are `seen`, elements that are `inside` of them; EVEN: whole lines are."""
    return tl.load(at, mask=seen if EVEN else seen & inside, other=0.0)


@triton.jit
def leaf(q, k_at, v_at, mask_at, in_d, in_dv, left, limit, inside, c, TERMS: tl.constexpr, MASK: tl.constexpr,
         EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr):  # fmt: skip
    """(o_n, l_n, m_n) of one leaf. `left` keys are read; a row sees those before its `limit`; both from the first."""
    j = tl.arange(0, LEAF)
    k = load(k_at, (j < left)[None, :], in_d[:, None], EVEN_D)
    v = load(v_at, (j < left)[:, None], in_dv[None, :], EVEN_DV)
    t = tl.dot(q, k) * c
    if MASK == 1:
        t = tl.where(is_seen(mask_at, inside[:, None] & (j < left)[None, :]), t, float("-inf"))
    if MASK == 2:
        added = tl.load(mask_at, mask=inside[:, None] & (j < left)[None, :], other=0.0)
        t = t + added.to(tl.float32) * LOG2E
    t = tl.where(j[None, :] < limit[:, None], t, float("-inf"))
    m = ceil(tl.max(t, 1))
    p = exp2(t - finite(m)[:, None], TERMS).to(q.dtype)
    o = tl.dot(p, v)
    total = tl.max(tl.dot(p, tl.full((LEAF, 16), 1.0, q.dtype)), 1)  # 16 equal columns
    walked = limit > 0  # a leaf behind all that a row may see is no part of its walk, whatever its values are
    return tl.where(walked[:, None], o, 0.0), tl.where(walked, total, 0.0), tl.where(walked, m, float("-inf"))


@triton.jit
def fold(o, total, m, o_n, l_n, m_n):
    """Order-critical: leaves ascending. a and b are powers of two."""
    largest = tl.maximum(m, m_n)
    u = finite(largest)
    a = exp2(m - u, (1.0,))
    b = tl.where(m_n == float("-inf"), -0.0, exp2(m_n - u, (1.0,)))
    o = tl.fma(o_n, tl.broadcast_to(b[:, None], o.shape), o * a[:, None])
    return o, tl.fma(l_n, b, total * a), largest


@triton.jit
def canonical(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits, 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def finish(o, total, m, y, stats, y_b, y_h, y_t, item, head, i, tq, heads, rdv, inside, in_dv,
           STATS: tl.constexpr):  # fmt: skip
    """y = o / l, rounded once; `stats` is [2, batch, heads, tq]: m and l."""
    over = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
    value = tl.fma(o, tl.broadcast_to(over[:, None], o.shape), tl.full(o.shape, 0.0, tl.float32))
    value = canonical(tl.where(total[:, None] == 0, 0.0, value))
    y_at = y + item * y_b + head[:, None] * y_h + i[:, None] * y_t + rdv[None, :]
    tl.store(y_at, value.to(y.dtype.element_ty), mask=inside[:, None] & in_dv[None, :])
    line = (item * heads + head) * tq + i
    if STATS:
        tl.store(stats + line, m + 0.0, mask=inside)
        tl.store(stats + tl.num_programs(2).to(tl.int64) * heads * tq + line, canonical(total), mask=inside)


@triton.jit
def attention(q, k, v, mask, start, stop, y, stats, sums,
              q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k, y_b, y_h, y_t,
              tq, tk, d, dv, heads, group, pack, offset, c,
              ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TERMS: tl.constexpr, MASK: tl.constexpr,
              CAUSAL: tl.constexpr, STARTS: tl.constexpr, STOPS: tl.constexpr, WALK: tl.constexpr,
              EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, STATS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`heads` query heads, `group` of them to a key head, `pack` of them to a program. MASK: 0 none, 1 bool, 2 added.

    WALK: 0 one leaf, to memory; 1 the only leaf; 2 all leaves. For 0, `sums` is [batch, heads / pack, leaves, rows, dv]
    and behind it m and l, [2, batch, heads / pack, leaves, rows].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tq * pack
    tiles = tl.cdiv(rows, ROWS)
    leaves = tl.cdiv(tk, LEAF)
    tile, only = tiles - 1 - tl.program_id(0), 0  # the longest first
    if WALK == 0:
        tile, only = tl.program_id(0) // leaves, tl.program_id(0) % leaves
    item, bundle = tl.program_id(2), tl.program_id(1)
    lo, hi = between(start, stop, item, tk, STARTS, STOPS)

    r = tile * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    i, head = r // pack, bundle * pack + r % pack
    last = tl.minimum(tile * ROWS + ROWS, rows) - 1
    end = hi  # behind the last key that a row sees
    reach = tl.full((ROWS,), 0, tl.int32) + hi
    if CAUSAL:
        reach = tl.minimum(i + offset + 1, hi)
        end = tl.minimum(last // pack + offset + 1, hi)
    rd, rdv = tl.arange(0, D), tl.arange(0, DV)
    in_d, in_dv = rd < d, rdv < dv
    first = lo
    if WALK == 0:
        first = lo + only * LEAF
        if first >= end:
            return

    i64, head64, b64 = i.to(tl.int64), head.to(tl.int64), item.to(tl.int64)
    kv = (bundle * pack // group).to(tl.int64)
    q_at = q + b64 * q_b + head64[:, None] * q_h + i64[:, None] * q_t + rd[None, :]
    qs = tl.load(q_at, mask=inside[:, None] & in_d[None, :], other=0.0)
    j = tl.arange(0, LEAF).to(tl.int64)
    k_at = k + b64 * k_b + kv * k_h + (first + j)[None, :] * k_t + rd[:, None]
    v_at = v + b64 * v_b + kv * v_h + (first + j)[:, None] * v_t + rdv[None, :]
    mask_at = mask + b64 * mask_b + head64[:, None] * mask_h + i64[:, None] * mask_t + (first + j)[None, :] * mask_k

    o_n, l_n, m_n = leaf(qs, k_at, v_at, mask_at, in_d, in_dv, hi - first, reach - first, inside, c, TERMS, MASK,
                         EVEN_D, EVEN_DV)  # fmt: skip
    if WALK == 0:
        line = ((b64 * (heads // pack) + bundle) * leaves + only) * rows + r
        count = tl.num_programs(2).to(tl.int64) * (heads // pack) * leaves * rows
        tl.store(sums + line[:, None] * dv + rdv[None, :], o_n, mask=inside[:, None] & in_dv[None, :])
        tl.store(sums + count * dv + line, m_n, mask=inside)
        tl.store(sums + count * (dv + 1) + line, l_n, mask=inside)
    else:
        o = tl.full((ROWS, DV), 0.0, tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        o, total, m = fold(o, total, m, o_n, l_n, m_n)
        if WALK == 2:
            for n in tl.range(lo + LEAF, end, LEAF, num_stages=1):
                k_at += LEAF * k_t
                v_at += LEAF * v_t
                mask_at += LEAF * mask_k
                o_n, l_n, m_n = leaf(qs, k_at, v_at, mask_at, in_d, in_dv, hi - n, reach - n, inside, c, TERMS, MASK,
                                     EVEN_D, EVEN_DV)  # fmt: skip
                o, total, m = fold(o, total, m, o_n, l_n, m_n)
        finish(o, total, m, y, stats, y_b, y_h, y_t, b64, head64, i64, tq, heads, rdv, inside, in_dv, STATS)

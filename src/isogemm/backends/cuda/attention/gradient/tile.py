"""Gradients of attention in Triton, without scores in memory: the bits of `trial.by_definition`, in its orders.

Rows are queries of the heads that share keys: row ``r`` is query ``r // GROUP`` of head ``r % GROUP`` of them. Scores
and their steps are computed anew in two kernels: one keeps dk and dv of a tile of keys and walks rows, one keeps dq of
a tile of rows and walks keys. Both walk upwards from a multiple of 16, and one accumulator goes through all products,
so sums have the blocks and the order of one chain. Tiles that a row or a key cannot see are skipped: zeros change no
fused sum.

Contract: ``tensor_core:<device>`` on bfloat16 and float16 through ``tl.dot``. Every product and sum outside is rounded
by itself: compiled without contraction.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..tile import LEAST, SHIFT, between, canonical, finite, load


@triton.jit
def attention_back_stats(dy, y, m, total, stats, dy_b, dy_h, dy_t, y_b, y_h, y_t, rows, dv, heads,
                         ROWS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """u, r and delta of each row, and zeros behind them: `stats` is [3, batch, heads, programs * ROWS].

    m and total are [batch, heads, GROUP, tq].

    Order-critical: delta is `contract.rows.lane_sum` of up to 128 columns.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    item, bundle = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    i, head = (r // GROUP).to(tl.int64), bundle * GROUP + r % GROUP
    lanes = tl.arange(0, 128)
    some = inside[:, None] & (lanes < dv)[None, :]
    one = tl.load(dy + item * dy_b + head[:, None] * dy_h + i[:, None] * dy_t + lanes[None, :], mask=some, other=0.0)
    two = tl.load(y + item * y_b + head[:, None] * y_h + i[:, None] * y_t + lanes[None, :], mask=some, other=0.0)
    x = one.to(tl.float32) * two.to(tl.float32) + 0.0
    for step in tl.static_range(7):
        x = tl.sum(tl.reshape(x, (ROWS, 2, 64 >> step)), 1)  # two numbers: their order is free
    delta = tl.reshape(x, (ROWS,))
    line = (item * heads * GROUP + head) * (rows // GROUP) + i
    largest, sums = tl.load(m + line, mask=inside, other=0.0), tl.load(total + line, mask=inside, other=0.0)
    over = tl.where(sums == 0, 0.0, tl.div_rn(tl.full(sums.shape, 1.0, tl.float32), sums))
    width = tl.num_programs(0) * ROWS
    at, every = stats + (item * heads + bundle) * width + r, tl.num_programs(2).to(tl.int64) * heads * width
    tl.store(at, finite(largest))
    tl.store(at + every, tl.where(inside, over, 0.0))
    tl.store(at + 2 * every, delta)


@triton.jit
def power(s, u, over, c, hidden, MASKED: tl.constexpr, TERMS: tl.constexpr):
    """p of `contract.attention.gradient_steps`; u and over broadcast to s."""
    t = s * c
    if MASKED:
        t = tl.where(hidden, float("-inf"), t)
    x = tl.maximum(t - u, LEAST, propagate_nan=tl.PropagateNan.ALL)
    k = x + SHIFT
    r = x - (k - SHIFT)
    y = r * TERMS[0] + TERMS[1]
    for i in tl.static_range(2, len(TERMS)):
        y = y * r + TERMS[i]
    return y * (k.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True) * over


@triton.jit
def rows_at(r, step_h, step_t, GROUP: tl.constexpr):
    """Where rows begin, from the first of their heads on."""
    return (r % GROUP).to(tl.int64) * step_h + (r // GROUP).to(tl.int64) * step_t


@triton.jit
def beyond(first, step_h, step_t, GROUP: tl.constexpr):
    """`rows_at` of a tile's rows, in 32 bits: of numbers that stay in registers, half as many."""
    return first % GROUP * step_h.to(tl.int32) + first // GROUP * step_t.to(tl.int32)


@triton.jit
def walk_rows(dk, dv_, k, v, q, dy, stats, begin, end, rows, every, q_h, q_t, dy_h, dy_t, j, in_d, in_dv,
              offset, c, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
              MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, TERMS: tl.constexpr,
              STAGES: tl.constexpr, EVEN_ROWS: tl.constexpr):  # fmt: skip
    """dk and dv of keys j, over rows from `begin`, a multiple of 16, to `end`."""
    rd, rdv, first = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, ROWS)
    for n in tl.range(begin, end, ROWS, num_stages=STAGES):
        r = n + first
        inside = r < rows
        if ROWS % GROUP == 0:
            at_q = beyond(first, q_h, q_t, GROUP) + n // GROUP * q_t
            at_dy = beyond(first, dy_h, dy_t, GROUP) + n // GROUP * dy_t
        else:
            at_q, at_dy = rows_at(r, q_h, q_t, GROUP), rows_at(r, dy_h, dy_t, GROUP)
        if EVEN_D and EVEN_ROWS:
            qs = tl.load(q + at_q[:, None] + rd[None, :])
        else:
            qs = tl.load(q + at_q[:, None] + rd[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
        if EVEN_DV and EVEN_ROWS:
            dys = tl.load(dy + at_dy[:, None] + rdv[None, :])
        else:
            dys = tl.load(dy + at_dy[:, None] + rdv[None, :], mask=inside[:, None] & in_dv[None, :], other=0.0)
        u, over, delta = tl.load(stats + r), tl.load(stats + every + r), tl.load(stats + 2 * every + r)
        s = tl.dot(k, tl.trans(qs))
        hidden = j[:, None] > (r // GROUP + offset)[None, :]
        p = power(s, u[None, :], over[None, :], c, hidden, MASKED, TERMS)
        dv_ = tl.dot(p.to(dys.dtype), dys, dv_)
        dp = tl.dot(v, tl.trans(dys))
        ds = (dp - delta[None, :]) * p
        dk = tl.dot(ds.to(qs.dtype), qs, dk)
    return dk, dv_


@triton.jit
def attention_back_keys(q, k, v, dy, stats, start, stop, dk, dv_,
                        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dy_b, dy_h, dy_t, rows, tk, d, dv, heads,
                        offset, c, scale,
                        ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
                        CAUSAL: tl.constexpr, STARTS: tl.constexpr, STOPS: tl.constexpr, EVEN_D: tl.constexpr,
                        EVEN_DV: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr, EVEN_ROWS: tl.constexpr,
                        PDL: tl.constexpr):  # fmt: skip
    """dk and dv, [batch, heads, tk, ...] and contiguous, of KEYS keys. The tiles with the longest walks come first."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    bundle, item, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    lo, hi = between(start, stop, item, tk, STARTS, STOPS)
    j = tile * KEYS + tl.arange(0, KEYS)
    rd, rdv = tl.arange(0, D), tl.arange(0, DV)
    in_d, in_dv, seen = rd < d, rdv < dv, (j >= lo) & (j < hi)
    j64 = j.to(tl.int64)
    ks = tl.load(k + item * k_b + bundle.to(tl.int64) * k_h + j64[:, None] * k_t + rd[None, :],
                 mask=seen[:, None] & in_d[None, :], other=0.0)  # fmt: skip
    vs = tl.load(v + item * v_b + bundle.to(tl.int64) * v_h + j64[:, None] * v_t + rdv[None, :],
                 mask=seen[:, None] & in_dv[None, :], other=0.0)  # fmt: skip
    q += item * q_b + (bundle * GROUP).to(tl.int64) * q_h
    dy += item * dy_b + (bundle * GROUP).to(tl.int64) * dy_h
    width = tl.cdiv(rows, 128) * 128
    every = tl.num_programs(1).to(tl.int64) * heads * width
    stats += (item * heads + bundle) * width
    one, two = tl.full((KEYS, D), 0.0, tl.float32), tl.full((KEYS, DV), 0.0, tl.float32)
    begin, whole, end = 0, 0, rows
    if (tile * KEYS >= hi) | (tile * KEYS + KEYS <= lo):
        end = 0
    if CAUSAL:
        begin = tl.maximum(tile * KEYS - offset, 0) * GROUP // ROWS * ROWS
        whole = tl.cdiv(tl.maximum(tile * KEYS + KEYS - 1 - offset, 0) * GROUP, ROWS) * ROWS
        whole = tl.minimum(whole, tl.cdiv(end, ROWS) * ROWS)
        one, two = walk_rows(one, two, ks, vs, q, dy, stats, begin, whole, rows, every, q_h, q_t, dy_h, dy_t, j,
                             in_d, in_dv, offset, c, ROWS, D, DV, GROUP, True, EVEN_D, EVEN_DV, TERMS, STAGES,
                             EVEN_ROWS)  # fmt: skip
    one, two = walk_rows(one, two, ks, vs, q, dy, stats, whole, end, rows, every, q_h, q_t, dy_h, dy_t, j,
                         in_d, in_dv, offset, c, ROWS, D, DV, GROUP, False, EVEN_D, EVEN_DV, TERMS, STAGES,
                         EVEN_ROWS)  # fmt: skip
    line, stored = (item * heads + bundle) * tk + j64, j < tk
    one = canonical(tl.where(seen[:, None], one * scale, 0.0))
    two = canonical(tl.where(seen[:, None], two, 0.0))
    tl.store(dk + line[:, None] * d + rd[None, :], one.to(dk.dtype.element_ty), mask=stored[:, None] & in_d[None, :])
    tl.store(
        dv_ + line[:, None] * dv + rdv[None, :], two.to(dv_.dtype.element_ty), mask=stored[:, None] & in_dv[None, :]
    )


@triton.jit
def walk_keys(dq, q, dy, u, over, delta, k, v, begin, end, lo, hi, reach, k_t, v_t, in_d, in_dv, c,
              KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MASKED: tl.constexpr, EVEN_D: tl.constexpr,
              EVEN_DV: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dq of rows that see keys before `reach`, over keys from `begin`, a multiple of 16, to `end`."""
    rd, rdv, first = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, KEYS)
    for n in tl.range(begin, end, KEYS, num_stages=STAGES):
        j = n + first
        seen = (j >= lo) & (j < hi)
        at_k, at_v = k + n * k_t, v + n * v_t
        ks = load(at_k + first[:, None] * k_t + rd[None, :], seen[:, None], in_d[None, :], EVEN_D)
        vs = load(at_v + first[:, None] * v_t + rdv[None, :], seen[:, None], in_dv[None, :], EVEN_DV)
        s = tl.dot(q, tl.trans(ks))
        dp = tl.dot(dy, tl.trans(vs))
        hidden = (j[None, :] >= reach[:, None]) | (j < lo)[None, :]
        ds = (dp - delta[:, None]) * power(s, u[:, None], over[:, None], c, hidden, MASKED, TERMS)
        dq = tl.dot(ds.to(ks.dtype), ks, dq)
    return dq


@triton.jit
def attention_back_rows(q, k, v, dy, stats, start, stop, dq,
                        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dy_b, dy_h, dy_t, rows, tk, d, dv, heads,
                        offset, c, scale,
                        ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
                        CAUSAL: tl.constexpr, STARTS: tl.constexpr, STOPS: tl.constexpr, EVEN_D: tl.constexpr,
                        EVEN_DV: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr,
                        PDL: tl.constexpr):  # fmt: skip
    """dq, [batch, heads * GROUP, tq, d] and contiguous, of ROWS rows. The tiles with the longest walks come first."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    bundle, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    lo, hi = between(start, stop, item, tk, STARTS, STOPS)
    r = tile * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    rd, rdv = tl.arange(0, D), tl.arange(0, DV)
    in_d, in_dv = rd < d, rdv < dv
    q += item * q_b + (bundle * GROUP).to(tl.int64) * q_h
    dy += item * dy_b + (bundle * GROUP).to(tl.int64) * dy_h
    qs = tl.load(q + rows_at(r, q_h, q_t, GROUP)[:, None] + rd[None, :],
                 mask=inside[:, None] & in_d[None, :], other=0.0)  # fmt: skip
    dys = tl.load(dy + rows_at(r, dy_h, dy_t, GROUP)[:, None] + rdv[None, :],
                  mask=inside[:, None] & in_dv[None, :], other=0.0)  # fmt: skip
    width = tl.cdiv(rows, 128) * 128
    every = tl.num_programs(1).to(tl.int64) * heads * width
    stats += (item * heads + bundle) * width
    u, over, delta = tl.load(stats + r), tl.load(stats + every + r), tl.load(stats + 2 * every + r)
    k += item * k_b + bundle.to(tl.int64) * k_h
    v += item * v_b + bundle.to(tl.int64) * v_h
    reach = tl.full((ROWS,), 0, tl.int32) + hi
    whole, end = hi, hi
    if CAUSAL:
        reach = tl.minimum(r // GROUP + offset + 1, hi)
        last = tl.minimum(tile * ROWS + ROWS, rows) - 1
        end = tl.minimum(last // GROUP + offset + 1, hi)
        whole = tl.minimum(tile * ROWS // GROUP + offset + 1, hi)
    begin = lo // KEYS * KEYS
    whole = tl.maximum(whole, 0) // KEYS * KEYS
    acc = tl.full((ROWS, D), 0.0, tl.float32)
    if STARTS:
        whole = begin
    else:
        acc = walk_keys(acc, qs, dys, u, over, delta, k, v, begin, whole, lo, hi, reach, k_t, v_t, in_d, in_dv, c,
                        KEYS, D, DV, False, EVEN_D, EVEN_DV, TERMS, STAGES)  # fmt: skip
    acc = walk_keys(acc, qs, dys, u, over, delta, k, v, whole, end, lo, hi, reach, k_t, v_t, in_d, in_dv, c,
                    KEYS, D, DV, True, EVEN_D, EVEN_DV, TERMS, STAGES)  # fmt: skip
    i, head = (r // GROUP).to(tl.int64), bundle * GROUP + r % GROUP
    line = (item * heads * GROUP + head) * (rows // GROUP) + i
    tl.store(dq + line[:, None] * d + rd[None, :], canonical(acc * scale).to(dq.dtype.element_ty),
             mask=inside[:, None] & in_d[None, :])  # fmt: skip

"""What the Triton kernels of a product share: one output tile, its walk over K and its epilogue.

Contracts: ``tensor_core:<device>`` on bfloat16 and float16 through ``tl.dot`` (mma.sync or wgmma, blocks of 16 of K in
ascending order, K padded with zeros, which a fused sum ignores), and ``fma`` through float32 ``ieee`` dots, where K is
never padded: ``fma(0, 0, -0)`` is +0, so the rest of a block is walked one k at a time.

With SWAP a tile is computed as B^T A^T, so that the weights are the 16- or 64-row operand of the instruction: with few
rows of A no lanes are idle. It cannot reach the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def mul(x, y):
    """x * y rounded; never contracted into a fused multiply-add."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add(x, y):
    """x + y rounded; see `mul`."""
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def canonical(x):
    """Every NaN as 0x7fffffff: only a C that nothing was added to can hold another."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits, 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def prefetch(pointers):
    """Ask L2 for the lines at `pointers`; an L2 line is always coherent, so this may run before ``gdc_wait``."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def order_tiles(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile of a program: GROUP tiles along m share a column of B before the next one, so that both stay in L2."""
    per_group = GROUP * tiles_n
    first = (pid // per_group) * GROUP
    size = min(tiles_m - first, GROUP)
    within = pid % per_group
    return first + within % size, within // size


@triton.jit
def strides(row, col, UNIT: tl.constexpr):
    """(row, col) of a matrix, of which one is 1 by its compiled code: that of its columns (0), of its rows (1)."""
    if UNIT == 0:
        col = tl.full((), 1, tl.int64)
    elif UNIT == 1:
        row = tl.full((), 1, tl.int64)
    return row, col


@triton.jit
def walk(acc, at_a, at_b, a_k, b_k, in_a, in_b, lo, hi, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, FMA: tl.constexpr,
         EVEN_K: tl.constexpr, STREAM: tl.constexpr):  # fmt: skip
    """acc continued over K in [lo, hi). `at_a` and `at_b` point to K = 0; `in_a` and `in_b` mask their other axis."""
    rk = tl.arange(0, BLOCK_K).to(tl.int64)
    steps_a = rk[:, None] if SWAP else rk[None, :]
    steps_b = rk[None, :] if SWAP else rk[:, None]
    stream: tl.constexpr = "evict_first" if STREAM else ""
    whole = hi - (hi - lo) % BLOCK_K if FMA else hi
    x_at = at_a + lo.to(tl.int64) * a_k + steps_a * a_k
    w_at = at_b + lo.to(tl.int64) * b_k + steps_b * b_k
    for p in range(lo, whole, BLOCK_K):  # order-critical: K ascending into one accumulator
        if EVEN_K or FMA:
            x = tl.load(x_at, mask=in_a, other=0.0)
            w = tl.load(w_at, mask=in_b, other=0.0, eviction_policy=stream)
        else:
            x = tl.load(x_at, mask=in_a & (steps_a < hi - p), other=0.0)
            w = tl.load(w_at, mask=in_b & (steps_b < hi - p), other=0.0, eviction_policy=stream)
        if FMA:
            x, w = x.to(tl.float32), w.to(tl.float32)
        left, right = (w, x) if SWAP else (x, w)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        x_at += BLOCK_K * a_k
        w_at += BLOCK_K * b_k
    if FMA and not EVEN_K:
        for p in range(whole, hi):  # order-critical: one k at a time, never padded
            x = tl.load(at_a + p.to(tl.int64) * a_k, mask=in_a, other=0.0).to(tl.float32)
            w = tl.load(at_b + p.to(tl.int64) * b_k, mask=in_b, other=0.0).to(tl.float32)
            acc = tl.fma(tl.broadcast_to(x, acc.shape), tl.broadcast_to(w, acc.shape), acc)
    return acc


@triton.jit
def epilogue(acc, at, inside, rn, n, alpha, beta, c, bias, bias_step, SWAP: tl.constexpr, ALPHA: tl.constexpr,
             BETA: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """alpha, then beta * C, then bias: each rounded to float32. BETA: 0 none, 1 one, 2 any. `at` are offsets in C."""
    if ALPHA:
        acc = mul(acc, tl.full(acc.shape, alpha, tl.float32))
    if BETA > 0:
        value = tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
        if BETA == 2:
            value = mul(value, tl.full(acc.shape, beta, tl.float32))
        acc = add(acc, value)
    if BIAS:
        value = tl.load(bias + rn.to(tl.int64) * bias_step, mask=rn < n, other=0.0).to(tl.float32)
        acc = add(acc, tl.broadcast_to(value[:, None] if SWAP else value[None, :], acc.shape))
    return acc


@triton.jit
def tile(a, b, out, c, bias, m, n, k, a_row, a_col, b_row, b_col, out_row, out_col, c_row, c_col, bias_step, leaf,
         alpha, beta, tile_m, tile_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
         SWAP: tl.constexpr, FMA: tl.constexpr, EVEN_K: tl.constexpr, LEAVES: tl.constexpr, START: tl.constexpr,
         ALPHA: tl.constexpr, BETA: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
         STREAM: tl.constexpr):  # fmt: skip
    """One tile of alpha * A @ B + beta * C + bias; LEAVES cuts K into leaves of `leaf`, START begins with C.

    PDL waits for the kernel before this one; until then only B is touched, PREFETCH lines of 128 bytes of each column.
    """
    rm = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = rm.to(tl.int64), rn.to(tl.int64)
    if PDL:
        if PREFETCH > 0:
            lines = tl.arange(0, PREFETCH) * 64
            prefetch(b + tl.where(rn < n, column, 0)[:, None] * b_col + lines[None, :])
        gdc_wait()
        gdc_launch_dependents()
    if SWAP:
        rows, columns = row[None, :], column[:, None]
        in_a, in_b = (rm < m)[None, :], (rn < n)[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        rows, columns = row[:, None], column[None, :]
        in_a, in_b = (rm < m)[:, None], (rn < n)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inside = in_a & in_b
    at_a, at_b = a + rows * a_row, b + columns * b_col
    at_c = rows * c_row + columns * c_col
    zero = tile_m * 0
    if START:
        acc = tl.load(c + at_c, mask=inside, other=0.0)
    if LEAVES:
        for lo in range(zero, k, leaf):  # order-critical: each leaf a chain from +0, sums added ascending
            total = walk(tl.zeros_like(acc), at_a, at_b, a_col, b_row, in_a, in_b, lo, min(lo + leaf, k), BLOCK_K,
                         SWAP, FMA, EVEN_K, STREAM)  # fmt: skip
            acc = add(acc, total)
    else:
        acc = walk(acc, at_a, at_b, a_col, b_row, in_a, in_b, zero, k, BLOCK_K, SWAP, FMA, EVEN_K, STREAM)
    acc = epilogue(acc, at_c, inside, rn, n, alpha, beta, c, bias, bias_step, SWAP, ALPHA, BETA, BIAS)
    result = canonical(acc).to(out.dtype.element_ty)
    tl.store(out + rows * out_row + columns * out_col, result, mask=inside)

"""out = alpha * A @ B + beta * C + bias on tensor cores, K walked in ascending order into one float32 accumulator.

Contracts: ``tensor_core:<device>`` with ``chain`` or ``leafL`` (L a multiple of BLOCK_K); with SPLIT the leaves of a tree.
A is [m, k], B [k, n], any strides; bfloat16 or float16. Every tile evaluates the same chain: ``tl.dot`` feeds blocks of 16
of K to mma.sync or wgmma in ascending order, and masks pad K with zeros, which a fused sum ignores.

With SWAP the tile is computed as B^T A^T, so that the weights are the 16- or 64-row operand of the instruction: for few
rows of A this leaves no lanes idle. Before ``gdc_wait`` only B is touched, and only by prefetches into L2, which is
coherent: the kernel before this one may still be writing it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["chain"]


@triton.jit
def mul(x, y):
    """x * y rounded; the compiler may not contract it into a fused multiply-add."""
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
    """Ask L2 for the lines at `pointers`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def order_tiles(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile of a program: GROUP tiles along m share a column of B before the next one, so that both stay in L2."""
    per_group = GROUP * tiles_n
    first = (pid // per_group) * GROUP
    size = min(tiles_m - first, GROUP)
    within = pid % per_group
    return first + within % size, within // size


@triton.jit
def epilogue(acc, at, inside, rn, alpha, beta, c, bias, sbias, SWAP: tl.constexpr, ALPHA: tl.constexpr,
             BETA: tl.constexpr, BIAS: tl.constexpr, n):  # fmt: skip
    """alpha, then beta * C, then bias: each rounded to float32. BETA: 0 none, 1 one, 2 any. `at` are offsets in C."""
    if ALPHA:
        acc = mul(acc, tl.full(acc.shape, alpha, tl.float32))
    if BETA > 0:
        value = tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
        if BETA == 2:
            value = mul(value, tl.full(acc.shape, beta, tl.float32))
        acc = add(acc, value)
    if BIAS:
        value = tl.load(bias + rn.to(tl.int64) * sbias, mask=rn < n, other=0.0).to(tl.float32)
        value = tl.broadcast_to(value[:, None] if SWAP else value[None, :], acc.shape)
        acc = add(acc, value)
    return acc


@triton.jit
def chain(a, b, out, c, bias, m, n, k, a_row, a_col, b_row, b_col, out_row, out_col, c_row, c_col, sbias,
          a_item, b_item, out_item, c_item, leaf_k, alpha, beta,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
          SWAP: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
          EVEN_K: tl.constexpr, LEAF: tl.constexpr, SPLIT: tl.constexpr, START: tl.constexpr, ALPHA: tl.constexpr,
          BETA: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr):  # fmt: skip
    """One tile of one item. A_UNIT, B_UNIT: 0 where the stride along K is 1, 1 where the other one is, 2 neither.

    LEAF counts BLOCK_Ks, 0 is a chain. SPLIT programs along the batch take one leaf of leaf_k each, as items of `out`.
    """
    item = tl.program_id(1).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile_m, tile_n = order_tiles(tl.program_id(0), tiles_m, tiles_n, GROUP)
    if A_UNIT == 0:
        a_col = 1
    elif A_UNIT == 1:
        a_row = 1
    if B_UNIT == 0:
        b_row = 1
    elif B_UNIT == 1:
        b_col = 1
    if OUT_UNIT == 0:
        out_col = 1
    elif OUT_UNIT == 1:
        out_row = 1
    rm = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    if SPLIT > 0:
        leaf = item % SPLIT
        a += (item // SPLIT) * a_item + leaf * leaf_k * a_col
        b += (item // SPLIT) * b_item + leaf * leaf_k * b_row
        k = max(0, min(k - leaf.to(tl.int32) * leaf_k, leaf_k))
    else:
        a += item * a_item
        b += item * b_item
    out += item * out_item
    row, column = rm.to(tl.int64), rn.to(tl.int64)
    if PDL:
        if PREFETCH > 0:  # lines of 128 bytes of the first columns of the weights
            lines = tl.arange(0, PREFETCH) * 64
            prefetch(b + tl.where(rn < n, column, 0)[:, None] * b_col + lines[None, :])
        gdc_wait()
        gdc_launch_dependents()
    in_m, in_n = rm < m, rn < n
    if SWAP:
        at_a = a + row[None, :] * a_row + rk[:, None] * a_col
        at_b = b + column[:, None] * b_col + rk[None, :] * b_row
        inside = in_m[None, :] & in_n[:, None]
        at_out = row[None, :] * out_row + column[:, None] * out_col
        at_c = item * c_item + row[None, :] * c_row + column[:, None] * c_col
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        at_a = a + row[:, None] * a_row + rk[None, :] * a_col
        at_b = b + column[None, :] * b_col + rk[:, None] * b_row
        inside = in_m[:, None] & in_n[None, :]
        at_out = row[:, None] * out_row + column[None, :] * out_col
        at_c = item * c_item + row[:, None] * c_row + column[None, :] * c_col
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if START:
        start = tl.load(c + at_c, mask=inside, other=0.0)
        if LEAF == 0:
            acc = start
    if LEAF > 0:
        total = acc if not START else start
    for step in range(0, tl.cdiv(k, BLOCK_K)):  # order-critical: K ascending into one accumulator
        left = k - step * BLOCK_K
        if SWAP:
            mask_a = in_m[None, :] if EVEN_K else in_m[None, :] & (rk[:, None] < left)
            mask_b = in_n[:, None] if EVEN_K else in_n[:, None] & (rk[None, :] < left)
            x = tl.load(at_a, mask=mask_a, other=0.0)
            w = tl.load(at_b, mask=mask_b, other=0.0)
            acc = tl.dot(w, x, acc)
        else:
            mask_a = in_m[:, None] if EVEN_K else in_m[:, None] & (rk[None, :] < left)
            mask_b = in_n[None, :] if EVEN_K else in_n[None, :] & (rk[:, None] < left)
            x = tl.load(at_a, mask=mask_a, other=0.0)
            w = tl.load(at_b, mask=mask_b, other=0.0)
            acc = tl.dot(x, w, acc)
        at_a += BLOCK_K * a_col
        at_b += BLOCK_K * b_row
        if LEAF > 0:
            if (step + 1) % LEAF == 0:  # order-critical: leaf sums into the total, ascending
                total += acc
                acc = tl.zeros_like(acc)
    if LEAF > 0:
        if k % (LEAF * BLOCK_K) != 0:
            total += acc
        acc = total
    acc = epilogue(acc, at_c, inside, rn, alpha, beta, c, bias, sbias, SWAP, ALPHA, BETA, BIAS, n)
    tl.store(out + at_out, canonical(acc).to(out.dtype.element_ty), mask=inside)

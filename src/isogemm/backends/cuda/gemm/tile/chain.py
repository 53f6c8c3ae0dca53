"""out = alpha * A @ B + beta * C + bias for one product or a strided batch, in Triton: see `tile` for the walk over K.

A is [m, k], B [k, n], any strides in elements. One program computes one tile of one item; with SPLIT, of one leaf of a
tree of SPLIT leaves, whose float32 sums are items of `out` for `tree` to meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import order_tiles, strides, tile


@triton.jit
def chain(a, b, out, c, bias, m, n, k, a_row, a_col, b_row, b_col, out_row, out_col, c_row, c_col, bias_step,
          a_item, b_item, out_item, c_item, leaf, alpha, beta,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
          SWAP: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, FMA: tl.constexpr,
          EVEN_K: tl.constexpr, LEAVES: tl.constexpr, SPLIT: tl.constexpr, START: tl.constexpr, ALPHA: tl.constexpr,
          BETA: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
          STREAM: tl.constexpr):  # fmt: skip
    """One tile; see `strides` for UNIT."""
    item = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = order_tiles(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    a_row, a_col = strides(a_row, a_col, A_UNIT)
    b_row, b_col = strides(b_row, b_col, B_UNIT)
    out_row, out_col = strides(out_row, out_col, OUT_UNIT)
    source = item
    if SPLIT > 0:
        source = item // SPLIT
        first = (item % SPLIT) * leaf
        a += first * a_col
        b += first * b_row
        k = max(0, min(k - first, leaf)).to(tl.int32)
    tile(a + source * a_item, b + source * b_item, out + item * out_item, c + item * c_item, bias, m, n, k,
         a_row, a_col, b_row, b_col, out_row, out_col, c_row, c_col, bias_step, leaf, alpha, beta, tile_m, tile_n,
         BLOCK_M, BLOCK_N, BLOCK_K, SWAP, FMA, EVEN_K, LEAVES, START, ALPHA, BETA, BIAS, PDL, PREFETCH,
         STREAM)  # fmt: skip

"""The products of a list, each with sizes, strides and addresses of its own, in one launch: pointer arrays and groups.

``table`` holds one row of FIELDS int64 an item: the addresses of A, B, out and C, then m, n, k, then the strides of A,
B, out and C (row, column). ``tiles`` holds two int32 a program: its item and its tile within it. The walk over K is
that of `tile`, so an item has the bits that it has alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tile.tile import order_tiles, strides, tile


@triton.jit
def items(table, tiles, bias, bias_step, leaf, alpha, beta,
          TYPE: tl.constexpr, TYPE_B: tl.constexpr, TYPE_OUT: tl.constexpr, TYPE_C: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
          SWAP: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
          ALIGNED: tl.constexpr, FMA: tl.constexpr, EVEN_K: tl.constexpr, LEAVES: tl.constexpr, START: tl.constexpr,
          ALPHA: tl.constexpr, BETA: tl.constexpr, BIAS: tl.constexpr, FIELDS: tl.constexpr):  # fmt: skip
    """ALIGNED: addresses are multiples of 16 bytes and all strides but those of 1, and every k, of 16 elements."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * FIELDS
    within = tl.load(tiles + 2 * pid + 1)
    a = tl.load(row).to(tl.pointer_type(TYPE))
    b = tl.load(row + 1).to(tl.pointer_type(TYPE_B))
    out = tl.load(row + 2).to(tl.pointer_type(TYPE_OUT))
    c = tl.load(row + 3).to(tl.pointer_type(TYPE_C))
    m, n, k = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    a_row, a_col = tl.load(row + 7), tl.load(row + 8)
    b_row, b_col = tl.load(row + 9), tl.load(row + 10)
    out_row, out_col = tl.load(row + 11), tl.load(row + 12)
    c_row, c_col = tl.load(row + 13), tl.load(row + 14)
    if ALIGNED:
        a, b, out = tl.multiple_of(a, 16), tl.multiple_of(b, 16), tl.multiple_of(out, 16)
        a_row, a_col, k = tl.multiple_of(a_row, 16), tl.multiple_of(a_col, 16), tl.multiple_of(k, 16)
        b_row, b_col = tl.multiple_of(b_row, 16), tl.multiple_of(b_col, 16)
        out_row, out_col = tl.multiple_of(out_row, 16), tl.multiple_of(out_col, 16)
    a_row, a_col = strides(a_row, a_col, A_UNIT)
    b_row, b_col = strides(b_row, b_col, B_UNIT)
    out_row, out_col = strides(out_row, out_col, OUT_UNIT)
    tile_m, tile_n = order_tiles(within, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    tile(a, b, out, c, bias, m, n, k, a_row, a_col, b_row, b_col, out_row, out_col, c_row, c_col, bias_step, leaf,
         alpha, beta, tile_m, tile_n, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, FMA, EVEN_K, LEAVES, START, ALPHA, BETA, BIAS,
         False, 0, False)  # fmt: skip

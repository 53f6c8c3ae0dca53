"""out = alpha * tree(sums) + beta * C + bias: the float32 sums of N leaves met by a balanced binary tree, in Triton.

``sums`` is [items, N, m, n], contiguous; leaf 2i meets leaf 2i + 1, level by level, each sum rounded to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import add, canonical, epilogue


@triton.jit
def meet(base, inside, step, FIRST: tl.constexpr, LEAVES: tl.constexpr):
    """The sum of LEAVES leaves from FIRST on."""
    if LEAVES == 1:
        return tl.load(base + FIRST * step, mask=inside, other=0.0)
    else:  # order-critical: halves meet last
        left = meet(base, inside, step, FIRST, LEAVES // 2)
        return add(left, meet(base, inside, step, FIRST + LEAVES // 2, LEAVES // 2))


@triton.jit
def tree(sums, out, c, bias, m, n, out_row, out_col, out_item, c_row, c_col, c_item, bias_step, alpha, beta,
         LEAVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
         BIAS: tl.constexpr):  # fmt: skip
    """One tile of one item."""
    item = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(n, BLOCK_N)
    rm = (tl.program_id(0) // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = (tl.program_id(0) % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, columns = rm.to(tl.int64)[:, None], rn.to(tl.int64)[None, :]
    inside = (rm < m)[:, None] & (rn < n)[None, :]
    step = m.to(tl.int64) * n
    acc = meet(sums + item * LEAVES * step + rows * n + columns, inside, step, 0, LEAVES)
    at = rows * c_row + columns * c_col
    acc = epilogue(acc, at, inside, rn, n, alpha, beta, c + item * c_item, bias, bias_step, False, ALPHA, BETA, BIAS)
    result = canonical(acc).to(out.dtype.element_ty)
    tl.store(out + item * out_item + rows * out_row + columns * out_col, result, mask=inside)

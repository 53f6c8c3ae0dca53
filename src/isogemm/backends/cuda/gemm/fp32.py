"""What the float32 kernels of this package share on the host: operand views, epilogue parameters, sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....base.dtypes import CODE
from ....problem.product import Product, Strides

START, ADD_C, ADD_BIAS, VECTOR = 1, 2, 4, 8  # flags of include/fp32_epilogue.cu
LIMIT = 2**31 - 256  # sizes are int in the kernels, and tiles may reach beyond them


class Fp32Side(NamedTuple):
    """An operand as rows of K: A's rows, B's columns.

    Attributes
    ----------
    rows : int
    row, k, batch : int
        Steps in elements; `batch` is 0 where all items share one.
    """

    rows: int
    row: int
    k: int
    batch: int


def sides(p: Product) -> tuple[Fp32Side, Fp32Side]:
    """A and B of a product."""
    a, b = p.a, p.b
    shared = p.batch == 1
    return (
        Fp32Side(p.m, a.row, 1 if p.k == 1 else a.col, 0 if shared else a.batch),
        Fp32Side(p.n, b.col, 1 if p.k == 1 else b.row, 0 if shared else b.batch),
    )


def aligned_side(side: Fp32Side, align: int) -> bool:
    """Whether rows of K are contiguous and start at multiples of 16 bytes."""
    return align >= 16 and side.k == 1 and side.row % 4 == 0 and side.batch % 4 == 0


def serves(p: Product, arithmetics: Sequence[str], orders: Sequence[str]) -> bool:
    """Whether a product is one of float32 matrices under these contracts, with sizes that the kernels can count."""
    if p.contract.arithmetic not in arithmetics or p.contract.order.kind not in orders:
        return False
    if {p.dtype_a, p.dtype_b} != {"float32"} or p.dtype_out not in CODE:
        return False
    if p.accumulate and (p.c is None or p.dtype_c != "float32" or p.contract.order.kind == "tree"):
        return False
    return min(p.m, p.n, p.k, p.batch) >= 1 and max(p.m, p.n, p.k, p.batch) <= LIMIT


def epilogue(p: Product) -> list[tuple[str, int]]:
    """Strides of out, C and bias as kernel parameters."""
    return [("i64", int(x)) for x in (*p.out, *(p.c or Strides(0, 0, 0)), p.bias_stride)]


def types_of(p: Product) -> int:
    """The packed types of include/fp32_epilogue.cu, which are compiled in: all products of a variant have the same.

    So a product of one column, whose rows lie anyhow, is said to store several columns at once where others would.
    """
    flags = START if p.accumulate else ADD_C if p.c is not None else 0
    flags |= ADD_BIAS if p.dtype_bias is not None else 0
    if p.align >= 16 and p.out.col == 1 and all(step % 4 == 0 for step in (p.out.row, p.out.batch) if step != 1):
        flags |= VECTOR
    kinds = [0 if name is None else CODE[name] for name in (p.dtype_out, p.dtype_c, p.dtype_bias)]
    return kinds[0] | kinds[1] << 4 | kinds[2] << 8 | flags << 12


def grid(blocks: int, batch: int) -> tuple[int, int, int]:
    """Blocks of an item along x, items along y and, beyond the limit of 65535, z."""
    return blocks, min(batch, 65535), -(-batch // 65535)

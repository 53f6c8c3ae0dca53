"""The bank of mistakes: one row each. A mistake is a function from a call to calls with one wrong word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import NamedTuple

from ..case import GemmCall, Variant
from ..diagnosis import Cause
from . import bias, extents, heads, layout, quantized, rounding, scalars

__all__ = ["MISTAKES", "Mistake", "Variant", "caused", "variants_of"]


class Mistake(NamedTuple):
    """One row."""

    # from the call as it was meant to the calls that this mistake could have made of it; none where chance decides
    variants: Callable[[GemmCall], Iterator[Variant]]
    mend: str  # what to do, in one line


def unforeseen(case: GemmCall) -> Iterator[Variant]:
    """No call describes what is left to chance: `isogemm.doctor.tiles` and `isogemm.doctor.orders` read the result."""
    yield from ()


MISTAKES = MappingProxyType(
    {
        "row-column-major": Mistake(layout.order, "a row-major matrix is a column-major transpose: swap operands"),
        "trans-a": Mistake(layout.trans_a, "change op(A): N where the stored matrix is m x k, T where it is k x m"),
        "trans-b": Mistake(layout.trans_b, "change op(B): N where the stored matrix is k x n, T where it is n x k"),
        "lda": Mistake(layout.lda, "pass the distance between A's stored lines, padding included"),
        "ldb": Mistake(layout.ldb, "pass the distance between B's stored lines, padding included"),
        "ldc": Mistake(layout.ldc, "pass the distance between C's stored lines, padding included"),
        "stride-a": Mistake(layout.stride_a, "a matrix of A takes lda times its stored lines, not lda times m"),
        "stride-b": Mistake(layout.stride_b, "a matrix of B takes ldb times its stored lines"),
        "stride-c": Mistake(layout.stride_c, "a matrix of C takes ldc times its lines; less overlaps"),
        "pointer-offset": Mistake(layout.offsets, "an offset is base + i * stride, in elements, for i of that item"),
        "alpha-type": Mistake(scalars.alpha_type, "pass alpha in the compute type, not in that of the operands"),
        "beta-type": Mistake(scalars.beta_type, "pass beta in the compute type, not in that of the operands"),
        "beta-garbage": Mistake(scalars.beta_garbage, "beta = 0 for a fresh C: otherwise what was there is added"),
        "alias": Mistake(scalars.alias, "give C memory of its own: it was written while an operand was still read"),
        "k-tail": Mistake(extents.k_tail, "mask the last block of K instead of leaving it out"),
        "m-tail": Mistake(extents.m_tail, "launch ceil(m / tile) tiles of rows and mask the last"),
        "n-tail": Mistake(extents.n_tail, "launch ceil(n / tile) tiles of columns and mask the last"),
        "k-block-repeated": Mistake(extents.k_repeated, "advance both pointers after every block of K"),
        "k-block-missing": Mistake(extents.k_missing, "wait for each block of K; join every part of a split"),
        "bias-axis": Mistake(bias.axis, "broadcast the bias along rows: one number for each column of C"),
        "bias-twice": Mistake(bias.times, "add the bias once, by one part of a split"),
        "gqa-mapping": Mistake(heads.mapping, "head h reads key-value head h // (heads / kv_heads): repeat, not tile"),
        "tf32-rounding": Mistake(rounding.tf32, "ask for float32 products: allow_tf32 = False, or contract='fma'"),
        "fp16-rounding": Mistake(rounding.fp16, "keep operands out of float16: look for a cast or an autocast region"),
        "bf16-rounding": Mistake(rounding.bf16, "keep operands out of bfloat16: look for a cast or an autocast region"),
        "half-accumulator": Mistake(rounding.accumulator, "sum in float32 and round once, at the end"),
        "double-rounding": Mistake(rounding.twice, "round the float32 sum once, to the output's type"),
        "nibble-order": Mistake(quantized.nibbles, "byte j holds element j low, element j + block / 2 high"),
        "row-stride": Mistake(quantized.stride, "rows are K / block * bytes per block apart, exactly"),
        "neighbour-scale": Mistake(quantized.neighbour, "block b has the scale that is stored in block b"),
        "zero-point": Mistake(quantized.zero, "subtract the zero point, or add the block's minimum"),
        "signedness": Mistake(quantized.sign, "read codes with the sign that the format gives them"),
        "sub-block-scale": Mistake(quantized.sub_block, "each sub-block has a scale of its own"),
        "race": Mistake(unforeseen, "a barrier between the last read of memory and the next write to it"),
        "other-order": Mistake(unforeseen, "sum in a fixed order, the one that was asked for"),
    }
)  # fmt: skip
"""By name, the simpler ones first: of two that explain equally well the first is named."""


def caused(
    name: str, parameter: str, residual: float = 0.0, explained: float = 1.0, alike: tuple[str, ...] = ()
) -> Cause:
    """A mistake of the bank, or two at once with " + " between their names, as the cause of a result."""
    mend = "; ".join(MISTAKES[part].mend for part in name.split(" + "))
    return Cause(name, parameter, residual, explained, mend, alike)


def variants_of(case: GemmCall) -> Iterator[tuple[str, Variant]]:
    """Every mistake that this call allows, in every parameter."""
    for name, mistake in MISTAKES.items():
        for variant in mistake.variants(case):
            yield name, variant

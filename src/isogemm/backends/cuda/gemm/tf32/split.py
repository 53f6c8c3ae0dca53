"""Operands of float32 copied into a workspace, K contiguous and aligned whatever their strides: gemm/tf32/split.cu."""

from __future__ import annotations

from typing import NamedTuple

from .....problem.product import Product
from ...driver.kernel import Bound, ints, longs
from ...driver.nvrtc import function_of
from ..fp32 import Fp32Side, aligned_side

STEP = 32  # values in a row of shared memory


class Cut(NamedTuple):
    """K in the workspace: leaves of `leaf` elements, each followed by zeros up to `padded`; rows of `pitch` in all.

    The kernel walks `blocks` of 32 of each of `chunks` items, in leaves of `leaf_blocks`, 0 for a chain.
    """

    leaf: int
    padded: int
    pitch: int
    blocks: int
    chunks: int
    leaf_blocks: int


def chain_cut(p: Product) -> Cut:
    """K in one piece."""
    pitch = -(-p.k // 4) * 4
    return Cut(pitch, pitch, pitch, -(-p.k // STEP), 1, 0)


class Split(NamedTuple):
    """The kernel that writes an operand into the workspace, ``launch(stream, from, to)``, and what it writes."""

    launch: Bound
    nbytes: int
    items: int


def split_of(p: Product, side: Fp32Side, k: Cut, parts: int, device: int) -> Split:
    """One operand, K contiguous and aligned in the workspace: as it is with 0 parts, else as tf32 numbers."""
    items = p.batch if side.batch else 1
    rows = abs(side.row) < abs(side.k) and side.rows > 1
    vector = not rows and k.leaf == k.padded and aligned_side(side, p.align)
    defines = {"PARTS": parts, "ROWS": rows, "VECTOR": vector}
    sizes = ints(side.rows, p.k, k.pitch, items, k.leaf, k.padded)
    launch = function_of("gemm/tf32/split.cu", "split", device, defines).bind(
        ["ptr", "ptr", *longs(side.row, side.k, side.batch), *sizes],
        grid=(-(-k.pitch // 128), min(-(-side.rows // 32), 65535), min(items, 65535)),
        block=(256,),
        pdl=True,
    )
    nbytes = 4 * max(parts, 1) * items * side.rows * k.pitch
    return Split(launch, -(-nbytes // 512) * 512, items)

"""How quantized weights lie on the device: one copy for all kernels, in the order in which a tensor core takes them.

Weights W [n, k] are cut into tiles of 16 rows, and a tile into records of 64 of K (blocks of 32) or of 256
(super-blocks). Record r of tile i lies at ``(i * records + r) * record_bytes``: a tile is one run of bytes, and so is
any range of its records. Rows past n and K past k are filled up with weights of zero: the code is the zero point, all
scales are 0.

A record holds its codes, 64 of K (a step) after the other, then its scales. A step is one or two planes; a plane holds
some bits of every code: 4 + 1 of Q5, 4 + 2 of Q6, 2 + 1 of Q3. Codes are stored without sign: q + zero, with a zero of
128 for Q8_0.

In a plane of b bits a lane has b words of 32 bits for its 32 codes: those that the operand A of ``mma.m16n8k16`` (and
of ``wgmma.m64k16``, for each of its warps) wants from it in four steps of 16 of K. With lane = 4 g + t, the code of

    row g + 8 * half, K = 64 * step + 16 * j + 8 * high + 2 * t + odd

is field F = 2 * j + half of byte ``high + 2 * odd`` of a word: of word ``F // (8 / b)``, in that byte's bits from
``b * (F % (8 / b))`` on. So a word masked to one field is four codes of one row, at K = 2 t + (0, 8, 1, 9): integer
kernels store activations in that order. And 16 bits apart lie K and K + 1: kernels that dequantize take pairs there.
The first words of all lanes come first, lanes ascending, then the second ones. So a word of all lanes is a matrix of
8 x 8 pairs of bytes as ``ldmatrix`` takes it, rows g, columns 2 t + odd; transposed, 16 bits apart lie two rows.

Scales: of each block, for each slot, d and then o as float16, o with the sign with which it is added; then of each
sub-block, for each slot, s and then t as bytes (Q2_K: one byte, s below t). Slot ``2 * g + half`` is row g + 8 * half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import OptionError, ShapeError
from ....formats.blocks import BlockFormat, format_of
from ....formats.reference import decode

Bytes = npt.NDArray[np.uint8]

ROWS = 16
STEP = 64
# (bits, the lowest of them) of each plane.
_PLANES: dict[str, tuple[tuple[int, int], ...]] = {
    "Q8_0": ((8, 0),),
    "Q5_0": ((4, 0), (1, 4)),
    "Q5_1": ((4, 0), (1, 4)),
    "Q4_0": ((4, 0),),
    "Q4_1": ((4, 0),),
    "Q2_K": ((2, 0),),
    "Q3_K": ((2, 0), (1, 2)),
    "Q4_K": ((4, 0),),
    "Q5_K": ((4, 0), (1, 4)),
    "Q6_K": ((4, 0), (2, 4)),
}
FORMATS = tuple(_PLANES)
"""Names of the formats that have a layout."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sizes of a format's records, in bytes where nothing else is said."""

    format: BlockFormat
    planes: tuple[tuple[int, int], ...]  # bits of a code that a plane holds, and the lowest of them
    zero: int  # what was added to a code
    record_k: int  # K of a record: 64 or 256
    step_bytes: int  # codes of 64 of K
    # floats, ints: where d and o, and where s and t begin in a record
    floats: int
    # floats_each, ints_each: numbers of a block and a row: 1, d alone, or 2; bytes of a sub-block and a row: 0, 1 or 2
    floats_each: int
    ints: int
    ints_each: int
    record_bytes: int

    @property
    def bits(self) -> int:
        """Bits of a code, which are the words that a lane has of 64 of K."""
        return self.step_bytes // 128

    @property
    def span(self) -> int:
        """Steps of 64 of K in a record."""
        return self.record_k // STEP

    @property
    def code_bytes(self) -> int:
        """What a ring of steps brings with each: its codes, and in records of one step their scales."""
        return self.step_bytes if self.span > 1 else self.record_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a record, which stand behind its codes."""
        return self.record_bytes - self.floats

    @property
    def blocks(self) -> int:
        """Blocks of a row in a record."""
        return self.record_k // self.format.block

    @property
    def subs(self) -> int:
        """Sub-blocks of a row in a record, with an integer scale each; 0 where there are none."""
        return self.record_k // self.format.sub if self.ints_each else 0

    def tiles(self, n: int) -> int:
        """Tiles of n rows."""
        return -(-n // ROWS)

    def records(self, k: int) -> int:
        """Records of a tile."""
        return -(-k // self.record_k)

    def tile_bytes(self, k: int) -> int:
        """Bytes from tile to tile."""
        return self.records(k) * self.record_bytes

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of the whole copy."""
        return self.tiles(n) * self.tile_bytes(k)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in this layout, on the device."""

    data: Any  # tensor of uint8 [nbytes], aligned to 128
    layout: PackedLayout
    n: int
    k: int

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.layout.format.name


@cache
def layout(fmt: str | BlockFormat) -> PackedLayout:
    """The layout of a format.

    Raises
    ------
    OptionError
        The format holds floats, or is one of activations.
    """
    found = format_of(fmt)
    if found.name not in _PLANES:
        raise OptionError(
            "format of weights on a CUDA device", limit="one of " + ", ".join(FORMATS), value=found.name, nearest="Q8_0"
        )
    planes = _PLANES[found.name]
    record_k = max(found.block, STEP)
    step_bytes = 128 * sum(bits for bits, _ in planes)
    floats = step_bytes * (record_k // STEP)
    floats_each = 2 if found.offset else 1
    ints = floats + 2 * floats_each * ROWS * (record_k // found.block)
    ints_each = 0 if found.block == 32 else 2 if found.offset and found.name != "Q2_K" else 1
    record_bytes = ints + ints_each * ROWS * (record_k // found.sub)
    zero = 128 if found.name == "Q8_0" else found.zero
    return PackedLayout(
        found, planes, zero, record_k, step_bytes, floats, floats_each, ints, ints_each, record_bytes
    )  # fmt: skip


def pack(rows: Bytes, fmt: str | BlockFormat) -> Bytes:
    """Rows of blocks, uint8 [n, row bytes], in the device's layout: what `pack.lay_out` has to write, and does faster.

    Raises
    ------
    OptionError
        The format has no layout.
    ShapeError
        Rows are no whole number of blocks.
    """
    lay = layout(fmt)
    if rows.ndim != 2 or rows.shape[1] % lay.format.nbytes:
        nearest = rows.shape[-1] // lay.format.nbytes * lay.format.nbytes
        raise ShapeError(
            "rows of blocks", limit=f"[n, a multiple of {lay.format.nbytes} bytes]", value=rows.shape, nearest=nearest
        )
    codes = decode(rows, lay.format)
    n, k = codes.q.shape
    tiles, records = lay.tiles(n), lay.records(k)
    q = _padded((codes.q + lay.zero).astype(np.uint8), tiles, records * lay.record_k, lay.zero)
    parts = [_codes(q, lay, tiles, records)]
    floats = [codes.d] if codes.offset is None else [codes.d, codes.offset]
    parts.append(_numbers([x.astype("<f2").view("<u2") for x in floats], tiles, records, lay.blocks))
    if lay.ints_each:
        ints = [codes.scales] if codes.mins is None else [codes.scales, codes.mins]
        if lay.format.name == "Q2_K":
            ints = [ints[0] | ints[1] << 4]
        parts.append(_numbers([x.astype(np.uint8) for x in ints], tiles, records, lay.subs))
    whole: Bytes = np.concatenate(parts, axis=2).reshape(-1)
    return whole


def _padded(x: npt.NDArray[Any], tiles: int, columns: int, value: int = 0) -> npt.NDArray[Any]:
    """Filled up to whole tiles and `columns` columns."""
    out = np.full((tiles * ROWS, columns), value, x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _codes(q: Bytes, lay: PackedLayout, tiles: int, records: int) -> Bytes:
    """[tile, record, bytes of its codes] of stored codes [16 tiles, K]."""
    steps = records * lay.record_k // STEP
    # half, g; step, j, high, t, odd -> tile, step, g, t, (j, half), odd, high.
    laid = q.reshape(tiles, 2, 8, steps, 4, 2, 4, 2).transpose(0, 3, 2, 6, 4, 1, 7, 5).reshape(tiles, steps, 32, 8, 4)
    planes = [_plane(laid, bits, low).reshape(tiles, steps, -1) for bits, low in lay.planes]
    return np.concatenate(planes, axis=2).reshape(tiles, records, -1)


def _plane(laid: Bytes, bits: int, low: int) -> Bytes:
    """`bits` bits of [..., lane, field, byte] from `low` on."""
    fields = 8 // bits
    shifts = (bits * np.arange(fields)).astype(np.uint8)[:, None]
    part = ((laid >> low) & ((1 << bits) - 1)).reshape(*laid.shape[:3], bits, fields, 4)
    words = np.bitwise_or.reduce(part << shifts, axis=4).astype(np.uint8)
    return np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4))


def _numbers(values: list[npt.NDArray[Any]], tiles: int, records: int, each: int) -> Bytes:
    """[tile, record, bytes] of numbers [n, blocks of a row]: block, slot, then the values themselves."""
    whole = np.stack([_padded(x, tiles, records * each) for x in values], axis=-1)
    # half, g; record, block; value -> tile, record, block, g, half, value.
    laid = whole.reshape(tiles, 2, 8, records, each, len(values)).transpose(0, 3, 4, 2, 1, 5)
    return np.ascontiguousarray(laid).reshape(tiles, records, -1).view(np.uint8)


def macros(lay: PackedLayout) -> dict[str, object]:
    """The layout for quant/codes.cu."""
    (low, _), (high, _) = (*lay.planes, (0, 0))[:2]
    return {
        "Q_LOW": low, "Q_HIGH": high, "Q_ZERO": lay.zero, "Q_BLOCK": lay.format.block, "Q_SUB": lay.format.sub,
        "Q_RECORD_K": lay.record_k, "Q_RECORD_BYTES": lay.record_bytes, "Q_STEP_BYTES": lay.step_bytes,
        "Q_FLOATS": lay.floats, "Q_FLOATS_EACH": lay.floats_each, "Q_INTS": lay.ints, "Q_INTS_EACH": lay.ints_each,
        "Q_SIGNED": lay.format.name in ("Q3_K", "Q6_K"), "Q_JOINT": lay.format.name == "Q2_K",
    }  # fmt: skip

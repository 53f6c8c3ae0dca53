"""Where things lie for the integer kernels: panels of 16 weight columns, and records of quantized activations.

A panel holds its columns block by block. Codes come first, 32 of K at a time, in planes of 64-byte lines; a line holds
four codes (or their halves) of each of 16 columns. With fours numbered 0 to 7:

    byte     eight lines, one four each, XOR 0x80 (Q8_0)
    nibble   four lines: line v holds four v in low nibbles and four v + 4 in high ones
    pair     two lines: line v holds fours 4 v to 4 v + 3, two bits each
    bit      one line: bit g of each byte belongs to four g

In a block of 256, each two chunks of 32 make a span: their codes, then the integer scales and the offsets of their
sub-blocks, [sub-block][16] bytes. So a pass reads ascending addresses, which hardware fetches ahead: with all scales
behind all codes, one row took a quarter more time (Zen 4). A block ends with d, and o, of 16 columns as float16. Q3_K,
Q4_K and Q5_K take 4 bytes of each column's block more than their file, because six-bit scales become bytes; all others
take exactly its bytes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ....formats.blocks import BlockFormat

COLUMNS = 16
LINE = 64
SPANS = 4  # of a block of 256
NEAR, FAR = 256, 4096  # bytes ahead in a panel

_PLANES = {
    "Q8_0": (("byte", 8),),
    "Q5_0": (("nibble", 4), ("bit", 1)),
    "Q5_1": (("nibble", 4), ("bit", 1)),
    "Q4_0": (("nibble", 4),),
    "Q4_1": (("nibble", 4),),
    "Q2_K": (("pair", 2),),
    "Q3_K": (("pair", 2), ("bit", 1)),
    "Q4_K": (("nibble", 4),),
    "Q5_K": (("nibble", 4), ("bit", 1)),
    "Q6_K": (("nibble", 4), ("pair", 2)),
}


class Panel(NamedTuple):
    """Bytes of one block of 16 columns.

    `chunk` is the codes of 32 of K; `span` all of 64 of them, where `scales` and `mins` begin at those offsets. `d` and
    `offset` are offsets in the block.
    """

    chunk: int
    span: int
    scales: int
    mins: int
    d: int
    offset: int
    nbytes: int


class ActivationRecord(NamedTuple):
    """Byte offsets in one block of one row of activations.

    Codes first, then d; `sums` are int32, one for each sub-block: the sum of its codes times minus the stored zero
    point. Where a block of 256 has offsets (and then no zero point) they are int16, the sums themselves. `total` is the
    sum of a block of 32 as float32.
    """

    d: int
    sums: int
    total: int
    nbytes: int


@cache
def planes(fmt: BlockFormat) -> dict[str, int]:
    """Offset of each plane in a chunk."""
    found, at = {}, 0
    for name, lines in _PLANES[fmt.name]:
        found[name] = at
        at += LINE * lines
    return found


@cache
def panel(fmt: BlockFormat) -> Panel:
    """Layout of a block of 16 columns."""
    chunk = LINE * sum(lines for _, lines in _PLANES[fmt.name])
    if fmt.block == 32:
        span = scales = mins = d = chunk
    else:
        scales, count = 2 * chunk, COLUMNS * (fmt.block // fmt.sub) // SPANS
        mins = scales + count
        span = mins + (count if fmt.offset and fmt.name != "Q2_K" else 0)
        d = SPANS * span
    offset = d + 2 * COLUMNS
    return Panel(chunk, span, scales, mins, d, offset, offset + (2 * COLUMNS if fmt.offset else 0))


@cache
def record(fmt: BlockFormat) -> ActivationRecord:
    """Layout of a block of activations."""
    if fmt.block == 32:
        return ActivationRecord(32, 36, 40, 48)
    return ActivationRecord(256, 272, 272, 272 + (2 if fmt.offset else 4) * (fmt.block // fmt.sub))


def stored_zero(fmt: BlockFormat) -> int:
    """What is added to a code to store it unsigned."""
    return 128 if fmt.name == "Q8_0" else fmt.zero

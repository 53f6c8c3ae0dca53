"""Quantized products on a file's own blocks: rows read 16 at a time and turned into columns in registers.

Sixteen bytes of each row at one offset are four vectors of 32-bit lanes, a row to a lane. GGUF's blocks hold their
codes so that such a lane is four codes of one row, as in a panel (`layout`). From there on all is `dot`'s:
the same integers, the same chain. Contract: ``int32/chain``, any rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ....formats.blocks import BlockFormat
from ..emit.target import target
from ..emit.vectors import FLOAT16, I32, Emitter
from . import layout
from .dot import Walk

WIDTH = target().width
NIBBLES, PAIRS, ONES = 0x0F0F0F0F, 0x03030303, 0x01010101
# Where the 16 bytes begin that hold the block's floats, which of their four lanes, and which half; o, if there is one,
# is in the lane's upper half.
_FLOATS = {"Q2_K": (68, 3, 0), "Q3_K": (94, 3, 1), "Q6_K": (194, 3, 1)}
_CODES = {"Q8_0": 2, "Q5_0": 6, "Q5_1": 8, "Q4_0": 2, "Q4_1": 4}


class NativeBlock:
    """One block of `WIDTH` rows: its fields as vectors, a row to a lane. Nothing is loaded before it is asked for."""

    def __init__(self, e: Emitter, fmt: BlockFormat, at: Any, stride: Any) -> None:
        self.e, self.fmt = e, fmt
        self.lanes = [e.at(at, e.b.mul(stride, e.i64(lane))) for lane in range(WIDTH)]
        self.held: dict[int, list[Any]] = {}

    def words(self, offset: int) -> list[Any]:
        """Bytes [offset, offset + 16) as four vectors of 32-bit lanes."""
        if offset not in self.held:
            e, quad = self.e, ir.VectorType(I32, 4)
            rows = [e.load(e.at(lane, offset), quad, 1) for lane in self.lanes]
            self.held[offset] = e.transpose_quads([e.joined(rows[i::4]) for i in range(4)])
        return self.held[offset]

    def word(self, offset: int) -> Any:
        """Four bytes of each row; `offset` is a multiple of 4 from where a piece of 16 begins."""
        return self.words(offset // 16 * 16)[offset % 16 // 4]

    def floats(self) -> tuple[Any, Any]:
        """d, and o or None."""
        e, b = self.e, self.e.b
        at, lane, half = _FLOATS.get(self.fmt.name, (0, 0, 0))
        raw = self.words(at)[lane]
        high = b.lshr(raw, e.constant(16))
        d = e.widen(high if half else raw, FLOAT16)
        if not self.fmt.offset:
            return d, None
        o = e.widen(high, FLOAT16)
        return d, b.fneg(o) if self.fmt.offset.startswith("-") else o

    def codes(self, chunk: int) -> Callable[[int], Any]:
        """A function from the number of a four (0 to 7) of 32 codes to that four, unsigned."""
        made: dict[int, Any] = {}
        find = self._short if self.fmt.block == 32 else self._long

        def codes(g: int) -> Any:
            if g not in made:
                made[g] = find(chunk, g)
            return made[g]

        return codes

    def _short(self, chunk: int, g: int) -> Any:
        e, name, first = self.e, self.fmt.name, _CODES[self.fmt.name]
        if name == "Q8_0":
            return e.b.xor(self.words(first + g // 4 * 16)[g % 4], e.constant(0x80808080))
        value = self._field(self.words(first)[g % 4], 4 * (g // 4), NIBBLES)
        if name in ("Q5_0", "Q5_1"):
            # Bits 4 g to 4 g + 3, each to a byte of its own: the products of 1 + 2**7 + 2**14 + 2**21 do not overlap.
            four = self._field(self._fifth(), 4 * g, 15)
            spread = e.b.and_(e.b.mul(four, e.constant(0x204081)), e.constant(ONES))
            value = e.b.or_(value, e.b.shl(spread, e.constant(4)))
        return value

    def _fifth(self) -> Any:
        """32 fifth bits."""
        first = self.words(0)
        if self.fmt.name == "Q5_1":
            return first[1]
        e = self.e
        return e.b.or_(e.b.lshr(first[0], e.constant(16)), e.b.shl(first[1], e.constant(16)))

    def _long(self, chunk: int, g: int) -> Any:
        """Byte l of 32 holds a part of code l of several chunks."""
        name, half, at = self.fmt.name, chunk // 4, 4 * g
        if name in ("Q4_K", "Q5_K"):
            low = (16 if name == "Q4_K" else 48) + 32 * (chunk // 2)
            value = self._field(self.word(low + at), 4 * (chunk % 2), NIBBLES)
            return value if name == "Q4_K" else self._with(value, self.word(16 + at), chunk, ONES, 4)
        if name == "Q6_K":
            value = self._field(self.word(64 * half + 32 * (chunk % 2) + at), 4 * (chunk % 4 // 2), NIBBLES)
            return self._with(value, self.word(128 + 32 * half + at), 2 * (chunk % 4), PAIRS, 4)
        first = 16 if name == "Q2_K" else 32
        value = self._field(self.word(first + 32 * half + at), 2 * (chunk % 4), PAIRS)
        return value if name == "Q2_K" else self._with(value, self.word(at), chunk, ONES, 2)

    def _field(self, raw: Any, down: int, mask: int) -> Any:
        e = self.e
        return e.b.and_(e.b.lshr(raw, e.constant(down)) if down else raw, e.constant(mask))

    def _with(self, value: Any, raw: Any, down: int, mask: int, up: int) -> Any:
        """`value` with bits of `raw` above its own: they are `down` bits up there, and shall be `up`."""
        e = self.e
        moved = e.b.lshr(raw, e.constant(down - up)) if down > up else raw
        moved = e.b.shl(raw, e.constant(up - down)) if down < up else moved
        return e.b.or_(value, e.b.and_(moved, e.constant(mask << up)))

    def scales(self) -> tuple[list[Any], list[Any]]:
        """s and t of each sub-block as 32-bit lanes; t is empty where there is none."""
        e, b, name = self.e, self.e.b, self.fmt.name
        if name == "Q2_K":
            s, t = ([self._field(x, at, NIBBLES) for x in self.words(0)] for at in (0, 4))
            return self._bytes(s), self._bytes(t)
        if name == "Q6_K":
            return self._bytes(self.words(192), signed=True), []
        if name == "Q3_K":
            first, second, high = self.words(92)[1:]
            fours = [
                self._with(self._field((first, second)[i % 2], 4 * (i // 2), NIBBLES), high, 2 * i, PAIRS, 4)
                for i in range(4)
            ]
            return [b.sub(x, e.constant(32)) for x in self._bytes(fours)], []
        first, second, third = self.words(0)[1:]
        low, high = NIBBLES, 0x30303030
        s = [b.and_(first, e.constant(0x3F3F3F3F)), b.or_(self._field(third, 0, low), self._field(first, 2, high))]
        t = [b.and_(second, e.constant(0x3F3F3F3F)), b.or_(self._field(third, 4, low), self._field(second, 2, high))]
        return self._bytes(s), self._bytes(t)

    def _bytes(self, fours: list[Any], *, signed: bool = False) -> list[Any]:
        """Bytes of 32-bit lanes as lanes of their own."""
        e, b, found = self.e, self.e.b, []
        for four in fours:
            for i in range(4):
                if signed:
                    found.append(b.ashr(b.shl(four, e.constant(24 - 8 * i)), e.constant(24)))
                else:
                    moved = b.lshr(four, e.constant(8 * i)) if i else four
                    found.append(b.and_(moved, e.constant(255)) if i < 3 else moved)
        return found


class NativeWalk(Walk):
    """One pass: `rows` rows of activations over 16 rows of weights, `stride` bytes apart."""

    def __init__(self, e: Emitter, fmt: BlockFormat, rows: int, args: tuple[Any, ...]) -> None:
        super().__init__(e, fmt, rows, args[:5])
        self.stride = args[5]
        self.ahead = e.at(self.panel, e.b.mul(self.stride, e.i64(layout.COLUMNS)))
        self.asked = layout.COLUMNS * fmt.nbytes

    def run(self) -> None:
        """Vectors of rows one after another: two have more sums than AVX2 registers, and more code."""
        e, parts, first, acc = self.e, self.parts, self.panel, self.acc
        if parts == 1:
            super().run()
            return
        self.parts, self.asked = 1, self.asked // parts
        start, last = self.ahead, e.b.mul(self.blocks, e.i64(self.asked))
        with e.loop(e.i64(parts)) as part:
            self.panel = e.at(first, e.b.mul(self.stride, e.times(part, WIDTH)))
            self.acc = e.at(acc, e.times(part, 4 * WIDTH))
            self.ahead = e.at(start, e.b.mul(last, part))
            super().run()

    def step(self, b: Any) -> Any:
        """Address of block b of row 0; asks for the rows behind these 16, which lie in one piece as a rule."""
        e = self.e
        ahead = e.at(self.ahead, e.times(b, self.asked))
        for line in range(0, self.asked, layout.LINE):
            e.prefetch(e.at(ahead, line), locality=2)
        return e.at(self.panel, e.times(b, self.fmt.nbytes))

    def parts_of(self, w: Any, rows: list[Any], part: int) -> tuple[list[Any], list[Any], Any, Any]:
        """See `Walk.parts_of`."""
        e = self.e
        block = NativeBlock(e, self.fmt, e.at(w, e.b.mul(self.stride, e.i64(WIDTH * part))), self.stride)
        d, o = block.floats()
        if self.fmt.block == 32:
            exact, shift = self.short(block.codes(0), rows)
        else:
            exact, shift = self._unrolled(block, rows)
        return exact, shift, d, o

    def _unrolled(self, block: NativeBlock, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        e, subs = self.e, 32 // self.fmt.sub
        scales, offsets = block.scales()
        exact: list[Any] = [ir.Constant(e.ivec, None)] * len(rows)
        for chunk in range(8):
            here = [e.at(x, 32 * chunk) for x in rows]
            held = [e.at(x, self.record.sums + 4 * subs * chunk) for x in rows]
            dots = self.dots_of(block.codes(chunk), here, self.starts(held))
            for j in range(subs):
                for i in range(len(rows)):
                    exact[i] = e.b.add(exact[i], e.b.mul(scales[subs * chunk + j], dots[j][i]))
        if not offsets:
            return exact, []
        sums = [e.at(x, self.record.sums) for x in rows]
        totals = self.offsets(offsets, sums, [ir.Constant(e.ivec, None)] * len(rows))
        return exact, [e.b.sitofp(t, e.vec) for t in totals]

"""Quantized activations against 16 quantized weight columns: exact integer dots, then a float32 chain over blocks.

    S = sum_j s_j * sum_{i in j} q_i * a_i,     T = sum_j t_j * sum_{i in j} a_i
    acc = fma(float(S), d_w * d_x, acc);        acc = fma(float(T), o_w * d_x, acc)

Lanes are columns. A panel holds 16 columns block by block (see pack.py); four codes of one column are one 32-bit
lane, and one instruction multiplies them by the same four activations. Codes are unsigned there; what their zero point
adds is taken off in the integer accumulator's start. Contract: ``int32/chain``, any rows, bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from ....formats.blocks import BlockFormat
from ..emit.target import target
from ..emit.vectors import F32, FLOAT16, I8, I16, I32, Emitter, declare
from . import layout

_WIDE = {2: 320, 4: 400, 8: 512}  # bytes of 32 of K, by rows: from where lines are asked for just before they are read

WIDTH = target().width


@cache
def instructions() -> str:
    """The instruction set of this process's target: vnni, avx2 or generic, all exact."""
    from numba.core.registry import cpu_target

    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if target().isa == "avx512" and "+avx512vnni" in features:
        return "vnni"
    return "avx2" if target().isa == "avx2" and "+avx2" in features else "generic"


class _Dots:
    """Four-byte dots of one instruction set."""

    def __init__(self, e: Emitter, kind: str, wide: bool) -> None:
        self.e, self.kind, self.wide = e, kind, wide
        self.bytes = ir.VectorType(I8, 4 * WIDTH)
        self.shorts = ir.VectorType(I16, 2 * WIDTH)

    def add(self, acc: Any, codes: Any, four: Any) -> Any:
        """acc + the dot of each lane's four unsigned codes with the four signed bytes of `four`."""
        e = self.e
        if self.kind == "vnni":
            fn = declare(e.b.module, "llvm.x86.avx512.vpdpbusd.512", e.ivec, [e.ivec, self.bytes, self.bytes])
            return e.b.call(fn, [acc, e.b.bitcast(codes, self.bytes), self._everywhere(four, self.bytes)])
        if self.kind == "avx2":
            x = self._everywhere(four, self.bytes)
            if not self.wide:
                return e.b.add(acc, self._pairs(codes, x, 1))
            # Codes of eight bits would saturate a 16-bit sum of two products: nibbles do not.
            low = e.b.and_(codes, e.constant(0x0F0F0F0F))
            high = e.b.and_(e.b.lshr(codes, e.constant(4)), e.constant(0x0F0F0F0F))
            return e.b.add(e.b.add(acc, self._pairs(low, x, 1)), self._pairs(high, x, 16))
        for i in range(4):
            code = e.b.and_(e.b.lshr(codes, e.constant(8 * i)), e.constant(0xFF))
            byte = e.b.ashr(e.b.shl(four, ir.Constant(I32, 24 - 8 * i)), ir.Constant(I32, 24))
            acc = e.b.add(acc, e.b.mul(code, e.splat_value(byte, e.ivec)))
        return acc

    def add_pairs(self, acc: Any, low: Any, high: Any, two: Any) -> Any:
        """acc + low * a + high * b for numbers of 0 to 63 in each lane, and 16-bit a and b in the halves of `two`."""
        e = self.e
        pairs = e.b.or_(low, e.b.shl(high, e.constant(16)))
        if self.kind == "vnni":
            fn = declare(e.b.module, "llvm.x86.avx512.vpdpwssd.512", e.ivec, [e.ivec, self.shorts, self.shorts])
            return e.b.call(fn, [acc, e.b.bitcast(pairs, self.shorts), self._everywhere(two, self.shorts)])
        if self.kind == "avx2":
            fn = declare(e.b.module, "llvm.x86.avx2.pmadd.wd", e.ivec, [self.shorts, self.shorts])
            return e.b.add(acc, e.b.call(fn, [e.b.bitcast(pairs, self.shorts), self._everywhere(two, self.shorts)]))
        first = e.b.ashr(e.b.shl(two, ir.Constant(I32, 16)), ir.Constant(I32, 16))
        acc = e.b.add(acc, e.b.mul(low, e.splat_value(first, e.ivec)))
        return e.b.add(acc, e.b.mul(high, e.splat_value(e.b.ashr(two, ir.Constant(I32, 16)), e.ivec)))

    def _everywhere(self, x: Any, kind: Any) -> Any:
        """32 bits in every lane, as vectors of smaller numbers."""
        return self.e.b.bitcast(self.e.splat_value(x, self.e.ivec), kind)

    def _pairs(self, codes: Any, x: Any, factor: int) -> Any:
        """Two products to 16 bits (codes below 128: no saturation), two of these to 32, times `factor`."""
        e = self.e
        fn = declare(e.b.module, "llvm.x86.avx2.pmadd.ub.sw", self.shorts, [self.bytes, self.bytes])
        halves = e.b.call(fn, [e.b.bitcast(codes, self.bytes), x])
        fn = declare(e.b.module, "llvm.x86.avx2.pmadd.wd", e.ivec, [self.shorts, self.shorts])
        return e.b.call(fn, [halves, ir.Constant(self.shorts, [factor] * (2 * WIDTH))])


class Walk:
    """One pass: acc[rows, 16] for `rows` records of activations, x_rs bytes apart, over one panel."""

    def __init__(self, e: Emitter, fmt: BlockFormat, rows: int, args: tuple[Any, ...]) -> None:
        self.e, self.fmt, self.rows = e, fmt, rows
        self.acc, self.x, self.x_rs, self.panel, self.blocks = args
        self.panel_layout, self.record = layout.panel(fmt), layout.record(fmt)
        self.dots = _Dots(e, instructions(), fmt.name == "Q8_0")
        self.parts = layout.COLUMNS // WIDTH

    def run(self) -> None:
        """Emit it."""
        e = self.e
        sums = [[e.slot(e.vec) for _ in range(self.parts)] for _ in range(self.rows)]
        for slots in sums:
            for s in slots:
                e.b.store(ir.Constant(e.vec, None), s)
        with e.loop(self.blocks) as b:
            w, x = self.step(b), e.at(self.x, e.times(b, self.record.nbytes))
            rows = [e.at(x, e.b.mul(self.x_rs, e.i64(i))) for i in range(self.rows)]
            for part in range(self.parts):
                self._block(w, rows, part, [slots[part] for slots in sums])
        for i, slots in enumerate(sums):
            for part, s in enumerate(slots):
                e.store(e.canonical(e.b.load(s, typ=e.vec)), e.at(self.acc, 64 * i + 4 * WIDTH * part))

    def step(self, b: Any) -> Any:
        """Address of block b."""
        w = self.e.at(self.panel, self.e.times(b, self.panel_layout.nbytes))
        if self.fmt.block == 32:
            self._ask(w, self.panel_layout.nbytes)
        return w

    def _ask(self, at: Any, size: int) -> None:
        """Ask for the lines behind `size` bytes; few at a time, or they wait for each other.

        One row reads ascending addresses, so steadily that the hardware is ahead: asking as well cost 10 to 50 %. With
        more rows it is worth that; some with wide codes gain 10 % more when lines are asked for in order, just before
        they are read (Zen 4).
        """
        if self.rows == 1:
            return
        p = self.panel_layout
        wide = (p.chunk if self.fmt.block == 32 else p.span // 2) >= _WIDE[self.rows]
        for line in range(0, size, layout.LINE):
            self.e.prefetch(self.e.at(at, line + (layout.NEAR if wide else layout.FAR)), locality=3)

    def _block(self, w: Any, rows: list[Any], part: int, sums: list[Any]) -> None:
        """One block of one vector of columns: integers, then one or two steps of each chain."""
        e = self.e
        exact, shift, d, o = self.parts_of(w, rows, part)
        for i, x in enumerate(rows):
            scale = e.splat(e.load(e.at(x, self.record.d), F32))
            acc = e.b.load(sums[i], typ=e.vec)
            acc = e.fma(e.b.sitofp(exact[i], e.vec), e.b.fmul(d, scale), acc)  # order-critical: S, then T
            if o is not None:
                acc = e.fma(shift[i], e.b.fmul(o, scale), acc)
            e.b.store(acc, sums[i])

    def parts_of(self, w: Any, rows: list[Any], part: int) -> tuple[list[Any], list[Any], Any, Any]:
        """S and T of each row of activations, T as float32 and empty where there is none; d; o or None."""
        e, p = self.e, self.panel_layout
        if self.fmt.block == 32:
            exact, shift = self.short(codes_of_chunk(e, self.fmt, e.at(w, 4 * WIDTH * part)), rows)
        else:
            exact, shift = self._long(w, rows, part)
        d = e.load_widened(e.at(w, p.d + 2 * WIDTH * part), FLOAT16)
        o = e.load_widened(e.at(w, p.offset + 2 * WIDTH * part), FLOAT16) if self.fmt.offset else None
        return exact, shift, d, o

    def short(self, codes: Any, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """S and T of a block of 32."""
        e, r = self.e, self.record
        exact = self.dots_of(codes, rows, self.starts([e.at(x, r.sums) for x in rows]))[0]
        return exact, [e.splat(e.load(e.at(x, r.total), F32)) for x in rows] if self.fmt.offset else []

    def starts(self, held: list[Any]) -> list[list[Any]]:
        """What sums begin with, by sub-block of 32 codes and by row: what zero points add, taken off; None where 0."""
        e, subs = self.e, max(1, 32 // self.fmt.sub)
        if not layout.stored_zero(self.fmt):
            return [[None] * len(held)] * subs
        return [[e.splat_value(e.load(e.at(x, 4 * j), I32), e.ivec) for x in held] for j in range(subs)]

    def _long(self, w: Any, rows: list[Any], part: int) -> tuple[list[Any], list[Any]]:
        """Spans of two chunks of 32: sub-blocks' dots times their scales, and their offsets."""
        e, p, shifted = self.e, self.panel_layout, bool(self.fmt.offset)
        exact, shift = ([e.slot(e.ivec) for _ in some] for some in (rows, rows if shifted else []))
        for s in exact + shift:
            e.b.store(ir.Constant(e.ivec, None), s)
        with e.loop(e.i64(layout.SPANS)) as span:
            inside = e.at(w, e.times(span, p.span))
            with e.loop(e.i64(2)) as half:
                self._chunk(inside, half, e.at(e.times(span, 2), half), rows, part, exact)
            if shifted:
                mins = self._mins(e.at(inside, WIDTH * part))
                held = [e.b.load(s, typ=e.ivec) for s in shift]
                sums = [e.at(x, self.record.sums, e.times(span, 2 * len(mins))) for x in rows]
                for total, s in zip(self.offsets(mins, sums, held), shift, strict=True):
                    e.b.store(total, s)
        found = [[e.b.load(s, typ=e.ivec) for s in slots] for slots in (exact, shift)]
        return found[0], [e.b.sitofp(t, e.vec) for t in found[1]]

    def _chunk(self, inside: Any, half: Any, chunk: Any, rows: list[Any], part: int, exact: list[Any]) -> None:
        """Add one half of a span to the slots of `exact`."""
        e, p, subs = self.e, self.panel_layout, 32 // self.fmt.sub
        self._ask(e.at(inside, e.times(half, p.span // 2)), p.span // 2)
        here = [e.at(x, e.times(chunk, 32)) for x in rows]
        starts = self.starts([e.at(x, self.record.sums, e.times(chunk, 4 * subs)) for x in rows])
        codes = codes_of_chunk(e, self.fmt, e.at(inside, e.times(half, p.chunk), 4 * WIDTH * part))
        dots = self.dots_of(codes, here, starts)
        at = e.at(inside, p.scales + WIDTH * part, e.times(half, layout.COLUMNS * subs))
        for j in range(subs):
            scale = self._bytes(e.at(at, layout.COLUMNS * j), signed=True)
            if self.fmt.name == "Q2_K":  # one byte holds both
                scale = e.b.and_(scale, e.constant(15))
            for i, slot in enumerate(exact):
                e.b.store(e.b.add(e.b.load(slot, typ=e.ivec), e.b.mul(scale, dots[j][i])), slot)

    def _mins(self, at: Any) -> list[Any]:
        """Integer offsets of a span's sub-blocks."""
        e, p, both = self.e, self.panel_layout, self.fmt.name == "Q2_K"
        first = p.scales if both else p.mins
        raw = [self._bytes(e.at(at, first + layout.COLUMNS * j), signed=False) for j in range(64 // self.fmt.sub)]
        return [e.b.lshr(x, e.constant(4)) for x in raw] if both else raw

    def offsets(self, t: list[Any], sums: list[Any], totals: list[Any]) -> list[Any]:
        """T so far of each row, and the offsets of some sub-blocks times the sums that lie there."""
        for j in range(0, len(t), 2):
            twos = [self.e.load(self.e.at(x, 2 * j), I32) for x in sums]
            totals = [self.dots.add_pairs(total, t[j], t[j + 1], two) for total, two in zip(totals, twos, strict=True)]
        return totals

    def _bytes(self, at: Any, *, signed: bool) -> Any:
        """A byte of each column as 32-bit lanes."""
        raw = self.e.load(at, ir.VectorType(I8, WIDTH), 1)
        return self.e.b.sext(raw, self.e.ivec) if signed else self.e.b.zext(raw, self.e.ivec)

    def dots_of(self, codes: Any, rows: list[Any], starts: list[list[Any]]) -> list[list[Any]]:
        """Dots of 32 codes, by sub-block (as many as `starts` has) and by row."""
        e, subs = self.e, len(starts)
        found = []
        for j, begin in enumerate(starts):
            sums = []
            for x, start in zip(rows, begin, strict=True):
                # Two chains where one would wait for itself.
                chains = [start if start is not None else ir.Constant(e.ivec, None), ir.Constant(e.ivec, None)]
                split = 2 if len(rows) <= 2 else 1
                for n, g in enumerate(range(8 * j // subs, 8 * (j + 1) // subs)):
                    four = e.load(e.at(x, 4 * g), I32, 4)
                    chains[n % split] = self.dots.add(chains[n % split], codes(g), four)
                sums.append(e.b.add(*chains) if split == 2 else chains[0])
            found.append(sums)
        return found


def codes_of_chunk(e: Emitter, fmt: BlockFormat, at: Any) -> Any:
    """A function from the number of a four (0 to 7) to its unsigned codes, each plane loaded once."""
    planes = layout.planes(fmt)
    held: dict[tuple[str, int], Any] = {}

    def plane(name: str, vector: int) -> Any:
        if (name, vector) not in held:
            held[name, vector] = e.load(e.at(at, planes[name] + layout.LINE * vector), e.ivec, 4)
        return held[name, vector]

    def field(raw: Any, up: int, mask: int) -> Any:
        """Bits moved up (down, when negative) within their bytes, and masked there."""
        moved = e.b.shl(raw, e.constant(up)) if up > 0 else e.b.lshr(raw, e.constant(-up)) if up else raw
        return e.b.and_(moved, e.constant(mask * 0x01010101))

    def codes(g: int) -> Any:
        if "byte" in planes:
            return plane("byte", g)
        low = 0
        if "nibble" in planes:
            value = field(plane("nibble", g % 4), -4 * (g // 4), 15)
            low = 4
        if "pair" in planes:
            pair = field(plane("pair", g // 4), low - 2 * (g % 4), 3 << low)
            value = e.b.or_(value, pair) if low else pair
            low = low or 2
        if "bit" in planes:
            value = e.b.or_(value, field(plane("bit", 0), low - g, 1 << low))
        return value

    kept: dict[int, Any] = {}

    def once(g: int) -> Any:
        if g not in kept:
            kept[g] = codes(g)
        return kept[g]

    return once

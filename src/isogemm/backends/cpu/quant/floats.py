"""Float activations against 16 quantized weight columns: weights dequantized in registers, one chain over k.

    w = (d * s) * q  +  o * t           each operation rounded, as `isogemm.formats.reference.dequantize`;
                                        then, where it is asked for, rounded to bfloat16 or float16
    acc = fma(x[k], w, acc)             k ascending

Lanes are columns; panels are those of `pack`. Contract: ``fma/chain`` of the dequantized product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from ....formats.blocks import BlockFormat
from ..emit.target import target
from ..emit.vectors import F32, F32_BYTES, FLOAT16, FLOAT32, I8, Emitter
from . import layout
from .dot import codes_of_chunk

WIDTH = target().width


class FloatWalk:
    """One pass: acc[rows, 16] for `rows` rows of adjacent float32, x_rs bytes apart, over one panel.

    Weights are rounded to `element`, FLOAT32 for none.
    """

    def __init__(self, e: Emitter, fmt: BlockFormat, element: int, args: tuple[Any, ...]) -> None:
        self.e, self.fmt, self.p, self.element = e, fmt, layout.panel(fmt), element
        self.acc, self.x, self.x_rs, self.panel, self.blocks = args
        self.subs = 32 // fmt.sub
        self.kept: Any = None  # where a chunk's weights go, when they are the result

    def run(self, count: int) -> None:
        """`count` rows; with none, the dequantized weights themselves."""
        if not count:
            self._run_values()
            return
        e = self.e
        sums = [e.slot(e.vec) for _ in range(count)]
        with self._each_part() as part:
            for s in sums:
                e.b.store(ir.Constant(e.vec, None), s)
            with e.loop(self.blocks) as b:
                w = e.at(self.panel, e.times(b, self.p.nbytes))
                x = e.at(self.x, e.times(b, self.fmt.block * F32_BYTES))
                self._block(w, [e.at(x, e.b.mul(self.x_rs, e.i64(i))) for i in range(count)], part, sums)
            for i, s in enumerate(sums):
                e.store(e.canonical(e.b.load(s, typ=e.vec)), e.at(self.acc, 64 * i, e.times(part, 4 * WIDTH)))

    def _run_values(self) -> None:
        """The weights themselves, [k][16] with rows x_rs bytes apart, to `acc`."""
        e = self.e
        with self._each_part() as part, e.loop(self.blocks) as b:
            to = e.b.mul(self.x_rs, e.times(b, self.fmt.block))
            self.kept = e.at(self.acc, to, e.times(part, 4 * WIDTH))
            self._block(e.at(self.panel, e.times(b, self.p.nbytes)), [], part, [])

    @contextmanager
    def _each_part(self) -> Iterator[Any]:
        """Vectors of columns, each with all blocks: one piece of code, or four times as much would be compiled."""
        parts = layout.COLUMNS // WIDTH
        if parts == 1:
            yield self.e.i64(0)
            return
        with self.e.loop(self.e.i64(parts)) as part:
            yield part

    def _block(self, w: Any, rows: list[Any], part: Any, sums: list[Any]) -> None:
        e, p = self.e, self.p
        d = e.load_widened(e.at(w, p.d, e.times(part, 2 * WIDTH)), FLOAT16)
        o = e.load_widened(e.at(w, p.offset, e.times(part, 2 * WIDTH)), FLOAT16) if self.fmt.offset else None
        if self.fmt.block == 32:
            self._ask(w, p.nbytes)
            self._chunk(e.at(w, e.times(part, 4 * WIDTH)), rows, sums, [(d, o)])
            return
        with e.loop(e.i64(layout.SPANS)) as span:
            inside = e.at(w, e.times(span, p.span))
            self._ask(inside, p.span)
            with e.loop(e.i64(2)) as half:
                at = e.at(inside, e.times(half, layout.COLUMNS * self.subs), e.times(part, WIDTH))
                scales = [self._scale(e.at(at, layout.COLUMNS * j), d, o) for j in range(self.subs)]
                first = e.at(e.times(span, 64), e.times(half, 32))
                here = [e.at(x, e.times(first, F32_BYTES)) for x in rows]
                codes = e.at(inside, e.times(half, p.chunk), e.times(part, 4 * WIDTH))
                self._chunk(codes, here, sums, scales, first)

    def _ask(self, at: Any, size: int) -> None:
        for line in range(0, size, layout.LINE):
            self.e.prefetch(self.e.at(at, line + layout.FAR), locality=3)

    def _scale(self, at: Any, d: Any, o: Any) -> tuple[Any, Any]:
        """d * s and o * t of a sub-block."""
        e, kind = self.e, ir.VectorType(I8, WIDTH)
        raw = e.load(e.at(at, self.p.scales), kind, 1)
        if self.fmt.name == "Q2_K":  # one byte holds both
            both = e.b.zext(raw, e.ivec)
            s, t = e.b.and_(both, e.constant(15)), e.b.lshr(both, e.constant(4))
        else:
            s = e.b.sext(raw, e.ivec)
            t = e.b.zext(e.load(e.at(at, self.p.mins), kind, 1), e.ivec) if o is not None else None
        return e.b.fmul(d, e.b.sitofp(s, e.vec)), None if o is None else e.b.fmul(o, e.b.sitofp(t, e.vec))

    def _chunk(self, w: Any, rows: list[Any], sums: list[Any], scales: list[Any], first: Any = None) -> None:
        """32 of k from `first` of the block on, ascending: order-critical."""
        e, zero = self.e, layout.stored_zero(self.fmt)
        codes = codes_of_chunk(e, self.fmt, w)
        acc = [e.b.load(s, typ=e.vec) for s in sums]
        for k in range(32):
            raw = codes(k // 4)
            q = e.b.lshr(raw, e.constant(8 * (k % 4))) if k % 4 else raw
            q = e.b.and_(q, e.constant(255)) if k % 4 < 3 else q
            q = e.b.sub(q, e.constant(zero)) if zero else q
            scale, shift = scales[k // self.fmt.sub]
            value = e.b.fmul(scale, e.b.sitofp(q, e.vec))
            value = self._rounded(value if shift is None else e.b.fadd(value, shift))
            if self.kept is not None:
                at = e.i64(k) if first is None else e.at(first, k)
                e.store(value, e.at(self.kept, e.b.mul(self.x_rs, at)))
            for i, x in enumerate(rows):
                acc[i] = e.fma(e.splat(e.load(e.at(x, F32_BYTES * k), F32)), value, acc[i])
        for value, s in zip(acc, sums, strict=True):
            e.b.store(value, s)

    def _rounded(self, value: Any) -> Any:
        """To the nearest number of the weights' type, ties to even; dequantized weights are never NaN."""
        e, b = self.e, self.e.b
        if self.element == FLOAT32:
            return value
        if self.element == FLOAT16:
            half = ir.VectorType(ir.HalfType(), WIDTH)
            return b.fpext(b.fptrunc(value, half), e.vec)
        bits = b.bitcast(value, e.ivec)
        odd = b.and_(b.lshr(bits, e.constant(16)), e.constant(1))
        up = b.add(b.add(bits, e.constant(0x7FFF)), odd)
        return b.bitcast(b.and_(up, e.constant(0xFFFF0000)), e.vec)

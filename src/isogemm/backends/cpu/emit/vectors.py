"""Emission of vector code: loads with widening, transposes, fused multiply-adds, loops.

Everything takes byte addresses as 64-bit integers, so that one routine serves every layout. Functions are emitted once
per module with internal linkage; accumulators are stack slots that the optimizer turns into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .target import target

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
F32_BYTES = 4
# Element codes shared with the host: the value selects the widening on load.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
ELEMENT_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}
CANONICAL_NAN = 0x7FFFFFFF
CACHE_LINE = 64

Value = Any


class Emitter:
    """A builder with the vocabulary of these kernels."""

    def __init__(self, builder: ir.IRBuilder, width: int | None = None) -> None:
        self.b = builder
        self.width = target().width if width is None else width
        self.vec = ir.VectorType(F32, self.width)
        self.ivec = ir.VectorType(I32, self.width)

    # integers and addresses
    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def at(self, base: Value, *offsets: Value | int) -> Value:
        """Address arithmetic in bytes."""
        for offset in offsets:
            base = self.b.add(base, self.i64(offset) if isinstance(offset, int) else offset)
        return base

    def times(self, x: Value, factor: int) -> Value:
        return self.b.mul(x, self.i64(factor))

    def pointer(self, address: Value, to: ir.Type) -> Value:
        return self.b.inttoptr(address, ir.PointerType(to))

    def kept(self, value: Value) -> Value:
        """The same integer, which the compiler will not compute anew from others: it stays in a register."""
        return self.b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False)

    def minimum(self, x: Value, y: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    # memory
    def load(self, address: Value, typ: ir.Type, align: int = 4) -> Value:
        return self.b.load(self.pointer(address, typ), align=align, typ=typ)

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        self.b.store(value, self.pointer(address, value.type), align=align)

    def prefetch(self, address: Value, locality: int = 3, write: int = 0) -> None:
        """Ask for a line: locality 3 is every cache, 2 is from the second level on."""
        fn = declare(self.b.module, "llvm.prefetch.p0", ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
        const = [ir.Constant(I32, v) for v in (write, locality, 1)]
        self.b.call(fn, [self.pointer(address, I8), *const])

    def ahead(self, at: Value, row: Value, strip: Value, near: Value) -> Value:
        """Bytes from byte `at` of a row to the line to ask for, where rows are walked side by side.

        They are `near`; past the row's end, the same place in the row that the next strip, `strip` bytes on, has there.
        """
        lines = self.b.and_(self.at(row, CACHE_LINE - 1), self.i64(-CACHE_LINE))
        inside = self.b.icmp_signed("<", self.at(at, near), row)
        return self.b.select(inside, near, self.at(self.b.sub(strip, lines), near))

    def masked_load(self, address: Value, count: Value, typ: ir.VectorType, align: int) -> Value:
        """The first `count` lanes of a vector, zeros behind; never touches memory behind them."""
        mask = self.below(count, typ.count)
        suffix = f"v{typ.count}{'f32' if typ.element == F32 else f'i{typ.element.width}'}.p0"
        fn = declare(self.b.module, f"llvm.masked.load.{suffix}", typ, [ir.PointerType(typ), I32, mask.type, typ])
        zero = ir.Constant(typ, None)
        return self.b.call(fn, [self.pointer(address, typ), ir.Constant(I32, align), mask, zero])

    def below(self, count: Value, lanes: int) -> Value:
        """Which of so many lanes are below `count`."""
        kind = ir.VectorType(I32, lanes)
        index = ir.Constant(kind, [ir.Constant(I32, i) for i in range(lanes)])
        return self.b.icmp_signed("<", index, self.splat_value(self.b.trunc(count, I32), kind))

    # arithmetic
    def splat_value(self, scalar: Value, typ: ir.VectorType) -> Value:
        first = self.b.insert_element(ir.Constant(typ, ir.Undefined), scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, typ.count), None)
        return self.b.shuffle_vector(first, ir.Constant(typ, ir.Undefined), zeros)

    def splat(self, scalar: Value) -> Value:
        return self.splat_value(scalar, self.vec)

    def fma(self, x: Value, y: Value, acc: Value) -> Value:
        """Order-critical: one rounding, one k at a time."""
        fn = declare(self.b.module, f"llvm.fma.v{self.width}f32", self.vec, [self.vec] * 3)
        return self.b.call(fn, [x, y, acc])

    def canonical(self, x: Value) -> Value:
        """NaN payloads depend on which FMA form the compiler picked; one NaN does not."""
        nan = self.b.bitcast(ir.Constant(self.ivec, [CANONICAL_NAN] * self.width), self.vec)
        return self.b.select(self.b.fcmp_unordered("uno", x, x), nan, x)

    def constant(self, value: int) -> Value:
        return ir.Constant(self.ivec, [value] * self.width)

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, i) for i in lanes])
        return self.b.shuffle_vector(x, y, mask)

    def joined(self, parts: Sequence[Value]) -> Value:
        """Vectors, as many as a power of two, side by side in one."""
        while len(parts) > 1:
            lanes = range(2 * parts[0].type.count)
            parts = [self.shuffle(parts[i], parts[i + 1], lanes) for i in range(0, len(parts), 2)]
        return parts[0]

    # widening
    def widen(self, raw: Value, element: int) -> Value:
        """<width x i32> with a 16-bit pattern in the low half, or fp32 itself, to fp32; exact."""
        if element == FLOAT32:
            return raw
        if element == BFLOAT16:
            return self.b.bitcast(self.b.shl(raw, self.constant(16)), self.vec)
        if target().half:
            half = ir.VectorType(ir.HalfType(), self.width)
            bits = self.b.bitcast(self.b.trunc(raw, ir.VectorType(I16, self.width)), half)
            return self.b.fpext(bits, self.vec)
        return self._half_in_integers(self.b.and_(raw, self.constant(0xFFFF)))

    def _half_in_integers(self, raw: Value) -> Value:
        # Shift the exponent into place, then scale by 2^112: exact for subnormals too. Inf and NaN are patched.
        sign = self.b.shl(self.b.and_(raw, self.constant(0x8000)), self.constant(16))
        rest = self.b.and_(raw, self.constant(0x7FFF))
        shifted = self.b.shl(rest, self.constant(13))
        scale = self.b.bitcast(self.constant((127 + 112) << 23), self.vec)
        value = self.b.bitcast(self.b.fmul(self.b.bitcast(shifted, self.vec), scale), self.ivec)
        special = self.b.icmp_unsigned(">=", rest, self.constant(0x7C00))
        value = self.b.select(special, self.b.or_(shifted, self.constant(0x7F800000)), value)
        return self.b.bitcast(self.b.or_(value, sign), self.vec)

    def load_widened(self, address: Value, element: int, count: Value | None = None) -> Value:
        """`width` consecutive elements as fp32; only the first `count` of them when it is given."""
        if element == FLOAT32:
            return self.load(address, self.vec) if count is None else self.masked_load(address, count, self.vec, 4)
        raw_type = ir.VectorType(I16, self.width)
        raw = self.load(address, raw_type, 2) if count is None else self.masked_load(address, count, raw_type, 2)
        return self.widen(self.b.zext(raw, self.ivec), element)

    def gather(self, addresses: Sequence[Value], element: int) -> Value:
        """One element from each address, as fp32; for tails."""
        typ = F32 if element == FLOAT32 else I16
        out = ir.Constant(self.vec if element == FLOAT32 else ir.VectorType(I16, self.width), ir.Undefined)
        for lane, address in enumerate(addresses):
            out = self.b.insert_element(out, self.load(address, typ, ELEMENT_BYTES[element]), ir.Constant(I32, lane))
        return out if element == FLOAT32 else self.widen(self.b.zext(out, self.ivec), element)

    # transposes
    def transpose_quads(self, rows: Sequence[Value]) -> list[Value]:
        """Columns of 4 x 4 tiles, of which each 128-bit lane of four vectors holds one."""
        w, t = self.width, list[Value]()
        for i in (0, 2):
            low = [x for lane in range(0, w, 4) for x in (lane, w + lane, lane + 1, w + lane + 1)]
            t += [self.shuffle(rows[i], rows[i + 1], [x + d for x in low]) for d in (0, 2)]
        pairs = [[x for lane in range(d, w, 4) for x in (lane, lane + 1, w + lane, w + lane + 1)] for d in (0, 2)]
        return [self.shuffle(t[j], t[2 + j], lanes) for j in range(2) for lanes in pairs]

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Columns of a width x width tile: unpacks inside 128-bit lanes, then whole lanes."""
        w = self.width
        u = [x for g in range(0, w, 4) for x in self.transpose_quads(rows[g : g + 4])]
        # u[4g + j] holds rows 4g..4g+3 of column 4L + j in lane L.
        columns: list[Value] = [None] * w
        for j in range(4):
            groups = [u[4 * g + j] for g in range(w // 4)]
            for lane, column in enumerate(self._transpose_lanes(groups)):
                columns[4 * lane + j] = column
        return columns

    def _transpose_lanes(self, v: list[Value]) -> list[Value]:
        def lanes(*pick: int) -> list[int]:
            return [4 * p + e for p in pick for e in range(4)]

        if len(v) == 1:
            return v
        if len(v) == 2:
            return [self.shuffle(v[0], v[1], lanes(0, 2)), self.shuffle(v[0], v[1], lanes(1, 3))]
        even = [self.shuffle(v[i], v[i + 1], lanes(0, 2, 4, 6)) for i in (0, 2)]
        odd = [self.shuffle(v[i], v[i + 1], lanes(1, 3, 5, 7)) for i in (0, 2)]
        return [
            self.shuffle(even[0], even[1], lanes(0, 2, 4, 6)),
            self.shuffle(odd[0], odd[1], lanes(0, 2, 4, 6)),
            self.shuffle(even[0], even[1], lanes(1, 3, 5, 7)),
            self.shuffle(odd[0], odd[1], lanes(1, 3, 5, 7)),
        ]

    def tile_columns(self, addresses: Sequence[Value], element: int) -> list[Value]:
        """fp32 columns, in ascending k, of a tile whose row i starts at addresses[i].

        fp32 tiles are `width` deep. 16-bit tiles are twice as deep: pairs travel through the transpose as one
        32-bit lane and are split after it, which halves the shuffles per element.
        """
        if element == FLOAT32:
            return self.transpose([self.load(address, self.vec) for address in addresses])
        rows = [self.b.bitcast(self.load(address, self.ivec, 2), self.vec) for address in addresses]
        return self.split_pairs(self.transpose(rows), element)

    def split_pairs(self, tile: Sequence[Value], element: int) -> list[Value]:
        """fp32 columns of a tile that was transposed in 32-bit lanes: pairs, where elements have 16 bits."""
        if element == FLOAT32:
            return list(tile)
        columns: list[Value] = []
        for pair in tile:
            bits = self.b.bitcast(pair, self.ivec)
            if element == BFLOAT16:
                low, high = (
                    self.widen(bits, element),
                    self.b.bitcast(self.b.and_(bits, self.constant(0xFFFF0000)), self.vec),
                )
            else:
                low, high = self.widen(bits, element), self.widen(self.b.lshr(bits, self.constant(16)), element)
            columns += [low, high]
        return columns

    def head(self, address: Value, line: Value, k: Value, element: int) -> Value:
        """Elements before the first cache-line boundary, when all lines share it.

        Large arrays start 16 bytes past a line, so every vector load would straddle two lines; where the line stride
        maps those to one cache set, the second half is gone before the next tile wants it.
        """
        shared = self.b.icmp_signed("==", self.b.and_(line, self.i64(CACHE_LINE - 1)), self.i64(0))
        ahead = self.b.and_(self.b.neg(address), self.i64(CACHE_LINE - 1))
        count = self.b.udiv(ahead, self.i64(ELEMENT_BYTES[element]))
        return self.minimum(self.b.select(shared, count, self.i64(0)), k)

    # control
    @contextmanager
    def loop(self, count: Value, start: Value | None = None, step: int = 1) -> Iterator[Value]:
        """for i in range(start, count, step)."""
        start = self.i64(0) if start is None else start
        slot = self.slot(I64)
        self.b.store(start, slot)
        head = self.b.append_basic_block("head")
        body = self.b.append_basic_block("body")
        done = self.b.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.load(slot, typ=I64)
        self.b.cbranch(self.b.icmp_signed("<", i, count), body, done)
        self.b.position_at_end(body)
        yield i
        self.b.store(self.b.add(i, self.i64(step)), slot)
        self.b.branch(head)
        self.b.position_at_end(done)

    def slot(self, typ: ir.Type) -> Value:
        """A stack slot in the entry block; the optimizer keeps it in a register."""
        with self.b.goto_entry_block():
            return self.b.alloca(typ)


def declare(module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> Value:
    """An external function or LLVM intrinsic, declared once."""
    return cgutils.get_or_insert_function(module, ir.FunctionType(result, list(arguments)), name)


def define(module: ir.Module, name: str, arguments: int, emit: Callable[..., None], width: int | None = None) -> Value:
    """An internal function of `arguments` 64-bit integers whose body `emit(emitter, *args)` writes, once per module.

    Its vectors have `width` lanes, by default those of the target.
    """
    existing = module.globals.get(name)
    if existing is not None:
        return existing
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    builder = ir.IRBuilder(fn.append_basic_block("entry"))
    body = fn.append_basic_block("start")
    builder.branch(body)
    builder.position_at_end(body)
    emit(Emitter(builder, width), *fn.args)
    builder.ret_void()
    return fn


def switch_over(builder: Any, selector: Value, routines: dict[int, Value], args: Sequence[Value]) -> None:
    """Call the routine whose key equals `selector`."""
    end = builder.append_basic_block("switch_end")
    switch = builder.switch(selector, end)
    for key, routine in routines.items():
        block = builder.append_basic_block(f"case_{key}")
        switch.add_case(ir.Constant(I64, key), block)
        builder.position_at_end(block)
        builder.call(routine, args)
        builder.branch(end)
    builder.position_at_end(end)


Code = Callable[[Any, Sequence[Value]], None]
"""``code(builder, words)``: what emits a routine of 64-bit integers."""


def for_numbers(name: str, numbers: Iterable[int], emit: Callable[..., None], width: int | None = None) -> Code:
    """The code of a routine whose first word is a number, one of `numbers`.

    It calls a function of the other words for that number, whose body ``emit(emitter, number, words)`` writes in
    vectors of `width` lanes.
    """

    def code(builder: Any, words: Sequence[Value]) -> None:
        number, *rest = words
        routines = {
            n: define(builder.module, f"{name}_{n}", len(rest), lambda e, *xs, n=n: emit(e, n, xs), width)
            for n in numbers
        }
        switch_over(builder, number, routines, rest)

    return code

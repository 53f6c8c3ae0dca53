"""A strip of few rows' walk over weights in place, in x86 instructions on vectors of 16 lanes: 16 to 48 weight rows.

What `turn` is on vectors of 8 lanes, for a processor whose vectors of 16 take no longer: 8 k of 16 rows are 8 loads, 8
that join another half, 8 exchanges of lanes, 16 shuffles inside them and 8 sums, 40 instructions on four ports (Zen 5)
or two (Xeons) for 128 weights. Two chains of sums end at 8 weights a step, which is what comes from the second-level
cache of a Zen 5; a Xeon's port for shuffles ends at 5.3. The last k of a row are a turn like all others: x ends in -0
and the weights in +0, whose product is the -0 that changes no sum. Contract: ``fma/chain``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..emit.vectors import F32, F32_BYTES, I32, I64, Emitter
from .turn import MULTIPLES, address, assembled

LANES, QUAD, DEPTH = 16, 4, 16
HALF = DEPTH // 2  # k of a block that are transposed together
# So many bytes ahead each row is asked for, and where it ends, the row that the next strip has in its place: in a cache
# and from memory. (128 and 384 bytes are slower from memory.) And where rows are walked one vector at a time.
NEAR_BYTES, FAR_BYTES, ALONE_BYTES = 192, 256, 640
NEAR_BY_BYTES = 2**20  # of weights that come again, up to which they lie in the second-level cache
TWO_SETS = 2048  # bytes: rows a multiple of that apart fall into two sets of the first-level cache, or into one
# Registers: the compiler has the first ones for sums; then what is loaded and transposed. One row of x has the last
# ones, each element in all lanes; several are added from memory.
REGISTERS, X = 32, range(24, 32)
PAIRED_ROWS = 5  # of x, up to which there are registers for the sums of two blocks


@dataclass(frozen=True, slots=True)
class _Turn:
    """The instructions for some k of all rows: 16 and what is asked for meanwhile, or the last 8 or less, masked."""

    rows: int  # of x
    blocks: int
    masked: bool
    hint: str  # with which lines are asked for

    # Operands: sums out, sums in (tied), bases of eight weight rows, x (its first row, of several the bytes between
    # them, the fourth row and the seventh), multiples of the line, then bytes ahead, or the masks.
    @property
    def sums(self) -> int:
        return self.rows * self.blocks

    @property
    def _bases(self) -> int:
        return 2 * self.sums

    @property
    def _x(self) -> int:
        return self._bases + 2 * self.blocks

    @property
    def _lines(self) -> int:
        return self._x + min(self.rows, 2) + (self.rows - 1) // 3

    @property
    def _last(self) -> int:
        return self._lines + len(MULTIPLES)

    @property
    def tile(self) -> range:
        """Registers of what is loaded."""
        return range(self.sums, X[0] if self.rows == 1 else REGISTERS)

    def _loads(self, unit: int, free: list[int]) -> tuple[list[str], list[list[int]]]:
        """Eight k of a block, as two groups of four registers: lanes of four k of rows j, j + 4, j + 8 and j + 12."""
        half, block = divmod(unit, self.blocks)
        lines, first, second = list[str](), list[int](), list[int]()
        for j in range(QUAD):
            low, high, other, *rest = free
            for base, register in ((2 * block, low), (2 * block + 1, high)):
                lines += self._joined(self._bases + base, j, F32_BYTES * HALF * half, register)
            lines += [f"vshuff32x4 $$0x88, %zmm{high}, %zmm{low}, %zmm{other}"]
            lines += [f"vshuff32x4 $$0xdd, %zmm{high}, %zmm{low}, %zmm{high}"]
            first, second, free = [*first, other], [*second, high], [low, *rest]
        return lines, [first, second]

    def _joined(self, base: int, row: int, offset: int, register: int) -> Iterator[str]:
        """Eight k of rows j and j + 4."""
        low, high = (address(base, self._lines, j, offset) for j in (row, row + 4))
        if self.masked:  # no memory is read behind a row; what is masked off is +0
            yield f"vmovups {low}, %ymm{register} {{%k1}} {{z}}"
            yield f"vbroadcastf32x8 {high}, %zmm{register} {{%k2}}"
        else:
            yield f"vmovups {low}, %ymm{register}"
            yield f"vinsertf32x8 $$1, {high}, %zmm{register}, %zmm{register}"

    def _sums(self, unit: int, groups: list[list[int]], pairs: list[int]) -> Iterator[str]:
        """Columns of both groups, each into its sums, k ascending; behind the last block x goes on by eight k."""
        half, block = divmod(unit, self.blocks)
        again = block == self.blocks - 1 and half == 0 and not self.masked
        for q, group in enumerate(groups):
            for i in (0, 2):
                for j, end in enumerate("lh"):
                    yield f"vunpck{end}ps %zmm{group[i + 1]}, %zmm{group[i]}, %zmm{pairs[i + j]}"
            for i, column in enumerate(group):
                yield f"vunpck{'lh'[i % 2]}pd %zmm{pairs[2 + i // 2]}, %zmm{pairs[i // 2]}, %zmm{column}"
                k = QUAD * q + i
                for row in range(self.rows):
                    x = f"%zmm{X[k]}" if self.rows == 1 else f"{self._element(row, HALF * half + k)}{{1to16}}"
                    yield f"vfmadd231ps {x}, %zmm{column}, ${row * self.blocks + block}"
            if again:
                yield from self._broadcasts(HALF, range(QUAD * q, QUAD * (q + 1)))

    def _broadcasts(self, first: int, which: range) -> list[str]:
        return [f"vbroadcastss {self._element(0, first + k)}, %zmm{X[k]}" for k in which if self.rows == 1]

    def _element(self, row: int, k: int) -> str:
        """Element k of a row of x."""
        third, steps = divmod(row, 3)
        base, between = f"${self._x + third + (third > 0)}", f",${self._x + 1},{steps}" if steps else ""
        return f"{F32_BYTES * k}({base}{between})"

    def _asked(self, unit: int) -> list[str]:
        """The lines ahead of eight rows."""
        if self.masked:
            return []
        lines = [f"leaq (${self._bases + unit},${self._last}), %rax"]
        return lines + [f"prefetch{self.hint} {address('%rax', self._lines, j, 0)}" for j in range(8)]

    def text(self) -> str:
        units = self.blocks * (1 if self.masked else DEPTH // HALF)
        lines, groups = self._loads(0, list(self.tile))
        lines = [*self._broadcasts(0, range(HALF)), *lines]
        if self.masked:
            lines = [f"kmovd ${self._last + i}, %k{i + 1}" for i in range(2)] + lines
        for unit in range(units):
            free = [register for register in self.tile if not any(register in group for group in groups)]
            pairs, free = free[:QUAD], free[QUAD:]
            sums = list(self._sums(unit, groups, pairs))
            loads, groups = self._loads(unit + 1, free) if unit + 1 < units else ([], groups)
            lines += _mixed(sums, loads, self._asked(unit))
        return "\n".join(lines)


def _mixed(*parts: list[str]) -> list[str]:
    """Instructions of several parts, each in its order and spread over all."""
    placed = [((i + 1) / (len(part) + 1), line) for part in parts for i, line in enumerate(part)]
    return [line for _, line in sorted(placed, key=lambda at: at[0])]


def threes(e: Emitter, columns: Any, line: Any, in_cache: Any) -> Any:
    """How many strips of three blocks stand before those of two: blocks then end less than 16 columns behind all.

    Three have more chains of sums, and more rows than come in time from anywhere but the second-level cache, or than
    two sets of the first one keep.
    """
    blocks = e.b.sdiv(e.at(columns, LANES - 1), e.i64(LANES))
    third = e.b.sdiv(blocks, e.i64(3))
    one_left = e.b.icmp_signed("==", e.b.sub(blocks, e.times(third, 3)), e.i64(1))
    most = e.b.select(one_left, e.b.sub(third, e.i64(1)), third)
    near_by = e.b.and_(in_cache, e.b.icmp_signed("<=", e.b.mul(columns, line), e.i64(NEAR_BY_BYTES)))
    near_by = e.b.and_(near_by, e.b.icmp_signed("!=", e.b.and_(line, e.i64(TWO_SETS - 1)), e.i64(0)))
    found = e.b.select(near_by, most, e.b.and_(blocks, e.i64(1)))
    return e.b.select(e.b.icmp_signed(">=", columns, e.i64(3 * LANES)), found, e.i64(0))


def pairs(e: Emitter, columns: Any) -> Any:
    """How many columns strips of two blocks take, before a last one of one block where blocks are odd in number."""
    blocks = e.b.sdiv(e.at(columns, LANES - 1), e.i64(LANES))
    even = e.times(e.b.and_(blocks, e.i64(-2)), LANES)
    return e.minimum(even, columns)


def near(e: Emitter, flags: Any, least: tuple[int, int]) -> Any:
    """How many bytes ahead rows are asked for; `least` flags are those of one vector at a time, and of a cache."""
    alone, in_cache = (e.b.icmp_signed(">=", flags, e.i64(flag)) for flag in least)
    together = e.b.select(in_cache, e.i64(NEAR_BYTES), e.i64(FAR_BYTES))
    return e.kept(e.b.select(alone, e.i64(ALONE_BYTES), together))


@dataclass(frozen=True, slots=True)
class Weights:
    """Rows in place: the first one's address, bytes to the next one, and some times that (`turn.multiples`)."""

    start: Any
    line: Any
    lines: tuple[Any, ...]


def walk(e: Emitter, sums: list[list[Any]], w: Weights, x: list[Any], x_rs: Any, k: Any, near: Any, hint: str) -> None:
    """All of K, ascending: for rows of x, at addresses `x_rs` apart, the sums of 16 weight rows each."""
    blocks = len(sums[0])
    slots = [slot for row in sums for slot in row]
    at = [e.slot(I64) for _ in range(2 * blocks)]  # of every eighth weight row
    for i, slot in enumerate(at):
        e.b.store(e.at(w.start, e.times(w.line, 8 * i)), slot)

    def take(x: list[Any], x_rs: Any, depth: int, last: list[Any], *, masked: bool) -> None:
        bases, turn = [e.b.load(slot, typ=I64) for slot in at], _Turn(len(x), blocks, masked, hint)
        places = [*bases, x[0], *[x_rs][: len(x) - 1], *x[3::3], *w.lines, *last]
        for value, slot in zip(_sums_after(e, turn, slots, places), slots, strict=True):
            e.b.store(value, slot)
        for base, slot in zip(bases, at, strict=True):
            e.b.store(e.at(base, depth * F32_BYTES), slot)

    strip = e.times(w.line, blocks * LANES)
    whole = e.b.and_(k, e.i64(-DEPTH))
    with e.loop(whole, step=DEPTH) as kk:
        offset = e.times(kk, F32_BYTES)
        asked = e.ahead(offset, e.times(k, F32_BYTES), strip, near)
        take([e.at(row, offset) for row in x], x_rs, DEPTH, [asked], masked=False)
    left = e.b.sub(k, whole)
    with e.b.if_then(e.b.icmp_signed(">", left, e.i64(0))):
        rest = _ended(e, [e.at(row, e.times(whole, F32_BYTES)) for row in x], left)
        apart = e.i64(LANES * F32_BYTES)
        take(rest, apart, HALF, _masks(e, e.minimum(left, e.i64(HALF))), masked=True)
        with e.b.if_then(e.b.icmp_signed(">", left, e.i64(HALF))):
            rest = [e.at(row, HALF * F32_BYTES) for row in rest]
            take(rest, apart, HALF, _masks(e, e.b.sub(left, e.i64(HALF))), masked=True)


def _ended(e: Emitter, x: list[Any], left: Any) -> list[Any]:
    """Addresses of 16 elements beside one another: the last `left` of each row of x, and -0 behind them."""
    inside = e.below(left, LANES)
    negative_zeros = ir.Constant(e.vec, [ir.Constant(F32, -0.0)] * LANES)
    first = e.b.ptrtoint(e.slot(ir.ArrayType(e.vec, len(x))), I64)
    places = [e.at(first, i * LANES * F32_BYTES) for i in range(len(x))]
    for row, place in zip(x, places, strict=True):
        e.store(e.b.select(inside, e.masked_load(row, left, e.vec, F32_BYTES), negative_zeros), place)
    return places


def _masks(e: Emitter, count: Any) -> list[Any]:
    """Masks of the first `count` elements of eight, in either half of a vector."""
    low = e.b.sub(e.b.shl(ir.Constant(I32, 1), e.b.trunc(count, I32)), ir.Constant(I32, 1))
    return [low, e.b.shl(low, ir.Constant(I32, HALF))]


def _sums_after(e: Emitter, turn: _Turn, sums: list[Any], places: list[Any]) -> list[Any]:
    vectors = [*turn.tile, *(X if turn.rows == 1 else ())]
    used = [*(f"xmm{r}" for r in vectors), *(["k1", "k2"] if turn.masked else ["rax"])]
    return assembled(e, turn.text(), "v", [e.b.load(slot, typ=e.vec) for slot in sums], places, used)

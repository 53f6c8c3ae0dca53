"""Few rows against weights stored [n, k], in place: many chains at once, weights transposed four k at a time.

    acc[i, j] = fma(x[i, k], w[j, k], acc[i, j])        k ascending

The halves of a vector are loaded apart and only the 4 x 4 transposition inside them is left to shuffles: 16 of them for
64 elements, where transposing 8 x 8 in registers takes 24. A chain waits four steps for its next sum, hence several
vectors of columns in turn. Vectors of 8 lanes are as fast at this as those of 16 on processors that take two steps for
the latter. x is fp32, contiguous in k. Contract: ``fma/chain``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..emit.target import target
from ..emit.vectors import CACHE_LINE, ELEMENT_BYTES, F32, F32_BYTES, FLOAT32, I64, Code, Emitter, for_numbers
from . import turn, wide
from .turn import Asks

WIDTH = min(8, target().width)
QUAD = 4  # 32-bit lanes that one transposition takes from each weight row
STEPS = 4  # transpositions in one turn of the loop: a cache line of each weight row
MAX_ROWS = 4
# Vectors of columns at once, by rows of x: as many as the compiler keeps in 32 registers, or in 16.
BLOCKS = {1: 3, 2: 3, 3: 2, 4: 2} if target().width == 16 else {1: 2, 2: 2, 3: 2, 4: 1}
IN_ORDER = target().x86 and target().width >= turn.WIDTH  # one row of float32 has a turn of its own
if IN_ORDER:
    BLOCKS[1] = turn.BLOCKS
GOES_ON = IN_ORDER and turn.WAY.goes_on
WIDE = IN_ORDER and turn.WAY.wide and target().width == wide.LANES  # and several rows, in vectors of 16 lanes
FROM_MEMORY = 2 if GOES_ON else BLOCKS[1]  # vectors at once, for one row of float32 where they may lie there
# While a strip is walked the next one is asked for, into the second-level cache, if it has room for both. Asked for by
# some hundred bytes ahead in each row, weights came from memory at two thirds of that speed: short rows end before.
NEXT_BYTES = 2**19
AHEAD_BYTES = 384  # in each weight row, where the next strip is too large
# A flag beside `load_c`: weights lie in a cache, where asking for them costs as much as loading them. Of shorter rows
# the next strip is asked for all the same: a processor that follows a row finds its end too soon.
IN_CACHE = 2
# Others, of weights that may come from memory: the next strip is asked for from one end to the other; and it is one
# vector of columns.
THROUGH, NARROW = 4, 8
THROUGH_BYTES = 2**16  # of the next strip, which has to stay in the second-level cache until it is walked
LONG_BYTES = 1024
SET_BYTES, CACHE_WAYS = 4096, 8  # lines so far apart fall into one set of a first-level cache, and so many stay there
LINES = 3  # of each weight row that are there at once: the one that is read, and those that were asked for


def most_rows(element: int) -> int:
    """Up to how many rows of x go past a strip at once."""
    return turn.WAY.rows if lanes(element) > WIDTH else MAX_ROWS


def fits(rows: int, line: int, row: int, element: int) -> bool:
    """Whether this is the faster walk for weight rows of `row` bytes, `line` bytes apart.

    Where the next strip cannot be asked for, vectors of 16 lanes bring weights sooner: a whole line at a time. Where
    all lines fall into one set, three rows and more are walked so.
    """
    if not 0 < rows <= most_rows(element):
        return False
    if lanes(element) > WIDTH:
        return _stays_wide(line) or (turn.WAY.alone and not (rows > 2 and line % SET_BYTES == 0))
    at_once = (FROM_MEMORY if _is_in_order(rows, element) else BLOCKS[rows]) * WIDTH
    several = _stay(at_once, line) and (target().width < 16 or at_once * abs(line) <= NEXT_BYTES)
    return several or from_memory(rows, line, row, element) != 0


def from_memory(rows: int, line: int, row: int, element: int) -> int:
    """Flags for weights that may come from memory.

    Where rows lie beside one another, the next strip can be asked for from one end to the other: so it is where they
    are short, or where more than eight of them push one another out of the first-level cache.
    """
    if lanes(element) > WIDTH:
        return NARROW if turn.WAY.alone and not _stays_wide(line) else 0
    if not (GOES_ON and _is_in_order(rows, element) and 0 <= line - row < CACHE_LINE):
        return 0
    if not _stay(FROM_MEMORY * WIDTH, line):
        return THROUGH | NARROW if WIDTH * line <= THROUGH_BYTES else 0
    return THROUGH if line < turn.WAY.short else 0


def fits_in_cache(rows: int, line: int, element: int) -> bool:
    """Whether weights that lie in a cache are walked another way, faster, than those that may come from memory."""
    if lanes(element) > WIDTH:
        return _stays_wide(line)
    long = line >= LONG_BYTES or (GOES_ON and _is_in_order(rows, element))
    return long and _stay(BLOCKS[rows] * WIDTH, line)


def _is_in_order(rows: int, element: int) -> bool:
    """Whether turns are taken in instructions."""
    return IN_ORDER and rows == 1 and element == FLOAT32


def columns_at_once(rows: int, element: int, share: int) -> int:
    """Columns of a strip, or of whole strips of two kinds, for shares of about so many columns.

    Of other numbers of columns the last strip reaches back over some that are done. Of vectors of 16 lanes any number
    make whole strips, but less than two have a slower walk.
    """
    if lanes(element) > WIDTH:
        return wide.LANES if share >= 3 * wide.LANES else 2 * wide.LANES
    blocks = {BLOCKS[rows], FROM_MEMORY} if GOES_ON and _is_in_order(rows, element) else {BLOCKS[rows]}
    return math.lcm(*blocks) * WIDTH


def lanes(element: int) -> int:
    """How many lanes the vectors have by which weights of a type are walked."""
    return wide.LANES if WIDE and element == FLOAT32 else WIDTH


def _stays_wide(line: int) -> bool:
    """`_stay` of two vectors of 16 lanes."""
    return _stay(2 * wide.LANES, line, turn.WAY.in_a_set)


def _stay(at_once: int, line: int, ways: int = CACHE_WAYS) -> bool:
    """Each line of a weight row is read four times, and has to stay in the first-level cache meanwhile."""
    places = (i * line % SET_BYTES // CACHE_LINE + ahead for i in range(at_once) for ahead in range(LINES))
    return max(Counter(place % (SET_BYTES // CACHE_LINE) for place in places).values()) <= ways


class _Strip:
    """Some vectors of columns: where their weight rows are, and the sums."""

    # Where turns are taken in instructions: bytes between weight rows, some times that, and whether the next strip is
    # asked for through.
    line: Any = None
    multiples: tuple[Any, ...] = ()
    through = False

    def __init__(self, e: Emitter, element: int, bases: list[Any], lines: list[Any], x: list[Any], ahead: Any) -> None:
        self.e, self.element, self.lines, self.x, self.ahead = e, element, lines, x, ahead
        self.size = ELEMENT_BYTES[element]
        self.depth = QUAD * F32_BYTES // self.size
        self.at = [e.slot(I64) for _ in bases]
        self.acc = [[e.slot(e.vec) for _ in bases] for _ in x]
        for base, slot in zip(bases, self.at, strict=True):
            e.b.store(base, slot)

    def _add(self, columns: list[Any], k: Any, u: int, block: int, where: Any | None = None) -> None:
        """Columns of one block into all rows' sums, from element k + u on; or nothing, unless `where` holds."""
        e = self.e
        for i, column in enumerate(columns):
            for x, acc in zip(self.x, self.acc, strict=True):
                s = e.splat(e.load(e.at(x, e.times(k, F32_BYTES), (u + i) * F32_BYTES), F32))
                before = e.b.load(acc[block], typ=e.vec)
                after = e.fma(s, column, before)
                e.b.store(after if where is None else e.b.select(where, after, before), acc[block])

    def _columns(self, base: Any) -> list[Any]:
        """The columns of `depth` elements of k."""
        e, quad = self.e, ir.VectorType(F32, QUAD)
        lanes = [e.load(e.at(base, line), quad, self.size) for line in self.lines]
        joined = [e.joined(lanes[i::QUAD]) for i in range(QUAD)]
        return e.split_pairs(e.transpose_quads(joined), self.element)

    def walk(self, k: Any) -> None:
        """All of K, ascending."""
        e, step = self.e, STEPS * self.depth
        whole, rest = e.b.and_(k, e.i64(-step)), e.b.and_(k, e.i64(-self.depth))
        with e.loop(whole, step=step) as kk:
            if self.multiples:
                self._in_order(kk, k)
            else:
                self._quads(kk, STEPS)
        with e.loop(rest, start=whole, step=self.depth) as kk:
            self._quads(kk, 1)
        left = e.b.sub(k, rest)
        some, none_before = e.b.icmp_signed(">", left, e.i64(0)), e.b.icmp_signed("==", rest, e.i64(0))
        with e.b.if_then(some), e.b.if_else(none_before) as (alone, again):
            with alone, e.loop(k) as kk:
                for block, base in enumerate(self._bases(1)):
                    self._add([e.gather([e.at(base, line) for line in self.lines], self.element)], kk, 0, block)
            with again:
                self._last(k, left)

    def _last(self, k: Any, left: Any) -> None:
        """The `left` elements before k, less than a transposition has: with those before them, which are done."""
        e = self.e
        back = e.b.sub(left, e.i64(self.depth))
        first = e.b.sub(k, e.i64(self.depth))
        for block, base in enumerate(self._bases(0)):
            for i, column in enumerate(self._columns(e.at(base, e.times(back, self.size)))):
                new = e.b.icmp_signed(">=", e.i64(i), e.b.neg(back))
                self._add([column], first, i, block, new)

    def _in_order(self, here: Any, k: Any) -> None:
        """A turn in instructions (`turn`)."""
        e, [acc] = self.e, self.acc
        bases, x = self._bases(STEPS * self.depth), e.at(self.x[0], e.times(here, F32_BYTES))

        def take(asks: Asks, ahead: Any | None) -> None:
            sums = turn.sums_after(e, asks, [e.b.load(s, typ=e.vec) for s in acc], bases, ahead, x, self.multiples)
            for value, slot in zip(sums, acc, strict=True):
                e.b.store(value, slot)

        if GOES_ON:
            asks = Asks.THROUGH if self.through else Asks.ON
            take(asks, turn.ahead(e, asks, here, k, self.line, len(acc)))
            return
        with e.b.if_else(e.b.icmp_signed("!=", self.ahead, e.i64(0))) as (asks_strip, asks_not):
            with asks_strip:
                take(Asks.STRIP, self.ahead)
            with asks_not:
                take(Asks.NEAR, None)

    def _bases(self, depth: int) -> list[Any]:
        """Where each block is, in registers of their own; and on by `depth` elements of k."""
        e = self.e
        found = [e.kept(e.b.load(slot, typ=I64)) for slot in self.at]
        for base, slot in zip(found, self.at, strict=True):
            e.b.store(e.at(base, depth * self.size), slot)
        return found

    def _quads(self, k: Any, steps: int) -> None:
        e = self.e
        bases = self._bases(steps * self.depth)
        if steps == STEPS:
            with e.b.if_then(e.b.icmp_signed("!=", self.ahead, e.i64(0))):
                for address in (e.at(base, line) for base in bases for line in self.lines):
                    e.prefetch(e.at(address, self.ahead), locality=2)
        for s in range(steps):
            for block, base in enumerate(bases):
                self._add(self._columns(e.at(base, s * QUAD * F32_BYTES)), k, s * self.depth, block)


def distance(e: Emitter, far: Any, near: int, flags: Any) -> Any:
    """How far ahead weights are asked for: `far` bytes, where so many have room, else `near`; 0 where none need be."""
    ahead = e.b.select(e.b.icmp_signed("<=", far, e.i64(NEXT_BYTES)), far, e.i64(near))
    needed = e.b.icmp_signed("<", flags, e.i64(IN_CACHE))
    return e.kept(e.b.select(needed, ahead, e.i64(0)))


class _Columns:
    """All columns of a call, strip by strip: what the strips share, and which walk has which of them."""

    def __init__(self, e: Emitter, element: int, rows: int, args: tuple[Any, ...]) -> None:
        out, out_rs, x, x_rs, w, line, k, columns, flags = args
        self.e, self.element, self.rows, self.x_rs, self.w, self.line = e, element, rows, x_rs, w, line
        self.k, self.columns, self.flags = k, columns, flags
        self.inputs = [e.at(x, e.b.mul(x_rs, e.i64(i))) for i in range(rows)]
        self.outputs = [e.at(out, e.b.mul(out_rs, e.i64(i))) for i in range(rows)]
        self.in_order, self.is_wide = _is_in_order(rows, element), e.width > WIDTH
        self.multiples = turn.multiples(e, line) if self.in_order or self.is_wide else ()
        self.lines = [e.i64(0), *(e.kept(e.b.mul(line, e.i64(j))) for j in range(1, WIDTH))]
        at_once = BLOCKS.get(rows, 1) * WIDTH  # of more rows than BLOCKS has, in `_few` alone
        self.ahead = distance(e, e.times(line, at_once), AHEAD_BYTES, flags)
        self.in_cache = e.b.icmp_signed(">=", flags, e.i64(IN_CACHE))
        self.near = wide.near(e, self.flags, (NARROW, IN_CACHE)) if self.is_wide else None

    def emit(self) -> None:
        if self.is_wide:
            self._in_wide_strips()
        elif self.in_order and GOES_ON:
            through, seen = [(1, NARROW, True), (FROM_MEMORY, THROUGH, True)], (BLOCKS[1], IN_CACHE, False)
            self._by_flags([*through, seen, (FROM_MEMORY, 0, False)])
        else:
            self._by_flags([(BLOCKS[self.rows], 0, False)])

    def _in_wide_strips(self) -> None:
        e = self.e
        least = e.width if self.rows > wide.PAIRED_ROWS else 2 * e.width
        with e.b.if_else(e.b.icmp_signed(">=", self.columns, e.i64(least))) as (many, few):
            with many:
                if turn.WAY.alone:
                    narrow = e.b.icmp_signed(">=", self.flags, e.i64(NARROW))
                    with e.b.if_else(narrow) as (alone, together):
                        with alone:
                            self._strips(1, hint=turn.WAY.hint)
                        with together:
                            self._together()
                else:
                    self._together()
            with few:
                self._few()

    def _together(self) -> None:
        """Strips of several vectors of 16 lanes."""
        e = self.e
        if self.rows == 1:
            turned = e.times(wide.threes(e, self.columns, self.line, self.in_cache), 3 * e.width)
            self._strips(3, end=e.minimum(turned, self.columns))
            self._strips(2, start=turned)
        elif self.rows > wide.PAIRED_ROWS:
            self._strips(1)
        else:
            turned = wide.pairs(e, self.columns)
            self._strips(2, end=turned)
            self._strips(1, start=turned)

    def _by_flags(self, cases: Sequence[tuple[int, int, bool]]) -> None:
        """Strips of so many blocks, by the first case whose flag is set, where there are columns for one."""
        if not cases:
            self._few()
            return
        e, [(blocks, flag, through), *others] = self.e, cases
        holds = e.b.icmp_signed(">=", self.columns, e.i64(blocks * e.width))
        if flag:
            holds = e.b.and_(holds, e.b.icmp_signed(">=", self.flags, e.i64(flag)))
        with e.b.if_else(holds) as (many, few):
            with many:
                self._strips(blocks, through)
            with few:
                self._by_flags(others)

    def _strips(self, blocks: int, through: bool = False, start: Any = None, end: Any = None, hint: str = "t0") -> None:
        e, count = self.e, blocks * self.e.width
        with e.loop(self.columns if end is None else end, start=start, step=count) as j:
            # The last strip reaches back over columns that are done, and leaves them as they are.
            first = e.minimum(j, e.b.sub(self.columns, e.i64(count)))
            self._strip(e, first, count, self.lines, e.b.sub(j, first), e.i64(count), through, hint)

    def _few(self) -> None:
        """Less columns than a strip has, a vector at a time."""
        e = self.e
        with e.loop(self.columns, step=WIDTH) as j:
            left = e.minimum(e.b.sub(self.columns, j), e.i64(WIDTH))
            last = e.b.sub(left, e.i64(1))
            some = [e.b.mul(self.line, e.minimum(e.i64(i), last)) for i in range(WIDTH)]
            self._strip(Emitter(e.b, WIDTH), j, WIDTH, some, e.i64(0), left)

    def _strip(
        self,
        e: Emitter,
        first: Any,
        count: int,
        lines: list[Any],
        skip: Any,
        end: Any,
        through: bool = False,
        hint: str = "",
    ) -> None:
        """Columns first .. first + count, of which skip .. end are written; in the vectors of `e`."""
        start = e.at(self.w, e.b.mul(first, self.line))
        bases = [e.at(start, e.times(self.line, b)) for b in range(0, count, e.width)]
        s = _Strip(e, self.element, bases, lines, self.inputs, self.ahead)
        places = [e.at(out, e.times(first, F32_BYTES)) for out in self.outputs]
        self._begin(e, places, s.acc, end)
        if e.width > WIDTH:
            weights = wide.Weights(start, self.line, self.multiples)
            wide.walk(e, s.acc, weights, self.inputs, self.x_rs, self.k, self.near, hint)
        else:
            if self.in_order and lines is self.lines:
                s.line, s.multiples, s.through = self.line, self.multiples, through
            s.walk(self.k)
        with e.b.if_else(e.b.icmp_signed("==", e.b.sub(end, skip), e.i64(count))) as (at_once, singly):
            with at_once:
                _store(e, places, s.acc)
            with singly:
                _store_some(e, places, s.acc, skip, end)

    def _begin(self, e: Emitter, places: list[Any], sums: list[list[Any]], end: Any) -> None:
        """Zeros, or what is there where sums go on: of a single vector, its first `end` columns."""
        load_c = e.b.icmp_signed("!=", e.b.and_(self.flags, e.i64(1)), e.i64(0))
        for place, acc in zip(places, sums, strict=True):
            for b, slot in enumerate(acc):
                e.b.store(ir.Constant(e.vec, None), slot)
                with e.b.if_then(load_c):
                    if len(acc) > 1:
                        e.b.store(e.load(e.at(place, b * e.width * F32_BYTES), e.vec), slot)
                    else:
                        e.b.store(e.masked_load(place, end, e.vec, 4), slot)


def _store(e: Emitter, places: list[Any], sums: list[list[Any]]) -> None:
    for place, acc in zip(places, sums, strict=True):
        for b, slot in enumerate(acc):
            e.store(e.canonical(e.b.load(slot, typ=e.vec)), e.at(place, b * e.width * F32_BYTES))


def _store_some(e: Emitter, places: list[Any], sums: list[list[Any]], skip: Any, end: Any) -> None:
    """Columns skip .. end of the sums, one at a time."""
    for place, acc in zip(places, sums, strict=True):
        base = e.b.ptrtoint(e.slot(ir.ArrayType(e.vec, len(acc))), I64)
        _store(e, [base], [acc])
        with e.loop(end, start=skip) as j:
            offset = e.times(j, F32_BYTES)
            e.store(e.load(e.at(base, offset), F32), e.at(place, offset))


def quad_strips(element: int) -> Code:
    """out[rows <= most_rows(element), columns] for any number of weight rows of a type of elements.

    Words: rows, out, out_rs, x, x_rs, w, line, k, columns, flags.
    """
    return for_numbers(
        f"isogemm_quads_{element}", range(1, most_rows(element) + 1),
        lambda e, n, xs: _Columns(e, element, n, xs).emit(), lanes(element),
    )  # fmt: skip

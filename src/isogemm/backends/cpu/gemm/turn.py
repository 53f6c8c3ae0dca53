"""A turn of one row's walk over weights in place, in x86 instructions: 16 k of two or three vectors of weight rows.

What `quads` emits through the compiler for other targets and more rows. The compiler has room for two vectors' sums in
16 registers, not three: a chain waits four steps for its next sum, so that 16 sums leave the multipliers idle. The
loads of a block stand between the shuffles and sums of the block before. Of 96 weights' 68 instructions 48 have three
ports to go to: 6 weights a step at most, of which 5 are reached. What processors differ in is a `TurnWay`.
Contract: ``fma/chain``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llvmlite import binding, ir

from ..emit.target import target
from ..emit.vectors import CACHE_LINE, F32_BYTES, Emitter

WIDTH, BLOCKS, QUAD, STEPS = 8, 3, 4, 4


@dataclass(frozen=True, slots=True)
class TurnWay:
    """How a processor walks few rows, packed and in place.

    Attributes
    ----------
    blends : bool
        The halves of a vector meet by a load into both of them and a blend with a whole vector of the other row, where
        an insertion has one port to go to.
    goes_on : bool
        Each weight row is asked for some bytes ahead, and where it ends, the line that the next strip begins with; rows
        that may come from memory are fewer, which the processor then follows by itself. Else what lies behind a row
        is asked for, and all lines of the next strip as well, unless the weights lie in a cache.
    short : int
        Of weights that may come from memory, with rows of less bytes than this beside one another, the next strip is
        asked for instead, from one end to the other: what follows a row finds its end too soon.
    wide : bool
        Vectors have 16 lanes where the processor has such: `wide` has the instructions, in the place of these, and for
        more rows of x.
    rows : int
        In `wide`, up to how many rows of x: four or eight.
    alone : bool
        In `wide`, weight rows that push one another out of the first-level cache are walked one vector at a time, and
        asked for further ahead: what comes then goes before it is used, and the second-level cache has it.
    hint : str
        With which those are asked for; all other rows come into every cache.
    in_a_set : int
        Lines of weight rows beside one another that may fall into one set of the first-level cache, for `wide`.
    packed_ahead : int
        Bytes ahead that each panel of packed weights from memory is asked for; 0, the panels that come next instead.
    """

    blends: bool = False
    goes_on: bool = False
    short: int = 0
    wide: bool = False
    rows: int = 4
    alone: bool = False
    hint: str = "t0"
    in_a_set: int = 12
    packed_ahead: int = 0


# By the compiler's name of a processor. Zen 3 begins one insertion in a step and four blends, and it reads 16 rows from
# memory as fast as one array, 24 at 0.8 of that; asked for a strip ahead they come at half of it. Zen 4 takes two steps
# for vectors of 16 lanes. Zen 5 has four ports for shuffles inside 128-bit lanes, and its hint does not put lines into
# the second-level cache as they leave the first: that is 1.0 to 1.2 times as fast for rows that push one another out,
# and half as fast for weights that would fit that cache and are not there.
WAYS = {
    "znver3": TurnWay(blends=True, goes_on=True, short=1536),
    "znver4": TurnWay(),
    "znver5": TurnWay(wide=True, rows=8, alone=True, hint="nta", packed_ahead=1024),
    **dict.fromkeys(("knl", "knm"), TurnWay()),  # have not all of the instructions in `wide`
}
# Other vectors of 16 lanes, as measured on a Xeon of 2023 or later: what `prefetchnta` brought was not there when it
# was wanted, at 0.4 of the speed from the last cache; and 16 lines in a set that keeps 12 are still faster than `gemv`,
# as 32 are not.
OTHERS = TurnWay(wide=True, in_a_set=16, packed_ahead=512)
WAY = WAYS.get(target().name, OTHERS if target().width == 16 else TurnWay())
# So many bytes ahead, by blocks, each row is asked for, into the first-level cache: 24 rows are more than a processor
# follows by itself.
NEAR_BYTES = {3: 128, 2: 256}
# Registers: rows as loaded, pairs of them, one to spare, broadcasts of x; the compiler has the first three for sums.
ROWS, PAIRS, SPARE, X = range(3, 7), range(7, 11), 11, range(12, 16)
# Weight rows j behind a block's first, as index and scale of an address: multiples 1, 3, 5, 7 of a line have registers.
MULTIPLES = (1, 3, 5, 7)
_OFFSETS = ((0, 0), (1, 1), (1, 2), (3, 1), (1, 4), (5, 1), (3, 2), (7, 1))


def address(base: int | str, multiples: int, row: int, offset: int) -> str:
    """Address of one of eight weight rows: the first is in operand, or register, `base`; `multiples` is an operand."""
    multiple, scale = _OFFSETS[row]
    index = f",${multiples + MULTIPLES.index(multiple)},{scale}" if scale else ""
    return f"{offset}({base if isinstance(base, str) else f'${base}'}{index})"


class Asks(Enum):
    """What a turn asks for meanwhile."""

    NEAR = "each row, near by"
    STRIP = "each row, near by, and all rows of the next strip"
    ON = "each row, near by and on into the next strip"
    THROUGH = "the next strip, in the order of memory"


@dataclass(frozen=True, slots=True)
class _Turn:
    """The instructions for some blocks, in a processor's way, and what they ask for."""

    blocks: int
    way: TurnWay
    asks: Asks

    # Operands: sums out, sums in (tied), then bases of blocks, bases of what is asked for, x, multiples of the line.
    @property
    def _bases(self) -> int:
        return 2 * self.blocks

    @property
    def _x(self) -> int:
        return 4 * self.blocks

    def _address(self, base: int, row: int, offset: int) -> str:
        return address(base, self._x + 1, row, offset)

    def _step(self, turn: int) -> int:
        """Which four of the 16 k a block takes in its turn."""
        return turn // self.blocks

    def _loads(self, turn: int) -> Iterator[str]:
        """Four k of eight weight rows: rows j and j + 4 in the halves of a vector."""
        base, step = self._bases + turn % self.blocks, self._step(turn)
        offset = 4 * QUAD * step
        for j, r in enumerate(ROWS):
            low, high = (self._address(base, row, offset) for row in (j, j + 4))
            if not self.way.blends:
                yield f"vmovups {low}, %xmm{r}"
                yield f"vinsertf128 $$1, {high}, %ymm{r}, %ymm{r}"
            elif step % 2 == 0:  # whole vectors are those of the turn: nothing behind it is read, nor before it
                yield f"vbroadcastf128 {high}, %ymm{r}"
                yield f"vblendps $$0x0f, {low}, %ymm{r}, %ymm{r}"
            else:
                yield f"vbroadcastf128 {low}, %ymm{r}"
                yield f"vblendps $$0xf0, {self._address(base, j + 4, offset - 4 * QUAD)}, %ymm{r}, %ymm{r}"

    def _asked(self, block: int, row: int) -> Iterator[str]:
        near = self._address(self._bases + block, row, NEAR_BYTES[BLOCKS])
        ahead = self._address(3 * self.blocks + block, row, 0)
        match self.asks:
            case Asks.NEAR:
                yield f"prefetcht0 {near}"
            case Asks.STRIP:
                yield from (f"prefetcht0 {near}", f"prefetcht2 {ahead}")
            case Asks.ON:
                yield f"prefetcht0 {ahead}"
            case Asks.THROUGH:
                yield f"prefetcht2 {CACHE_LINE * (WIDTH * block + row)}(${3 * self.blocks})"

    def text(self) -> str:
        turns = self.blocks * STEPS
        lines, rows = list(self._loads(0)), [(b, j) for b in range(self.blocks) for j in range(WIDTH)]
        for turn in range(turns):
            lines += _pairs()
            if turn % self.blocks == 0:
                first = QUAD * self._step(turn)
                lines += [f"vbroadcastss {4 * (first + i)}(${self._x}), %ymm{r}" for i, r in enumerate(X)]
            for block, row in rows[turn * len(rows) // turns : (turn + 1) * len(rows) // turns]:
                lines += self._asked(block, row)
            loads = self._loads(turn + 1) if turn + 1 < turns else iter(())
            for line in _sums(turn % self.blocks):
                lines += [line, *([load] if (load := next(loads, "")) else [])]
        return "\n".join(lines)


def _pairs() -> Iterator[str]:
    """Two neighbouring k of two rows in each 128 bits: this shuffle Xeons begin twice in a step, an unpack once."""
    for i, (low, high) in enumerate(((0, 1), (2, 3))):
        for j, pick in enumerate(("0x44", "0xee")):
            yield f"vshufps $${pick}, %ymm{ROWS[high]}, %ymm{ROWS[low]}, %ymm{PAIRS[2 * i + j]}"


def _sums(block: int) -> Iterator[str]:
    """Columns from pairs, each into its sums; k ascending."""
    a, b, c, d = PAIRS

    def column(odd: bool, second: int, first: int, to: int) -> str:
        return f"vshufps $${'0xdd' if odd else '0x88'}, %ymm{second}, %ymm{first}, %ymm{to}"

    def add(k: int, register: int) -> str:
        return f"vfmadd231ps %ymm{X[k]}, %ymm{register}, ${block}"

    yield from (column(False, c, a, SPARE), column(True, c, a, a), add(0, SPARE), column(False, d, b, c))
    yield from (add(1, a), column(True, d, b, d), add(2, c), add(3, d))


def multiples(e: Emitter, line: Any) -> tuple[Any, ...]:
    """Multiples of the bytes between weight rows, as `sums_after` takes them: in registers."""
    return tuple(e.kept(e.times(line, i)) for i in MULTIPLES)


def ahead(e: Emitter, asks: Asks, here: Any, k: Any, line: Any, blocks: int) -> Any:
    """How far behind the line at element `here` of its row the one is that is asked for; THROUGH, in its strip."""
    at, row, strip = e.times(here, F32_BYTES), e.times(k, F32_BYTES), e.times(line, blocks * WIDTH)
    if asks is Asks.THROUGH:
        return e.at(strip, e.times(at, blocks * WIDTH - 1))
    return e.ahead(at, row, strip, e.i64(NEAR_BYTES[blocks]))


def sums_after(
    e: Emitter, asks: Asks, sums: list[Any], bases: list[Any], ahead: Any | None, x: Any, lines: tuple[Any, ...]
) -> list[Any]:
    """The sums after 16 more k of every block; asks for what is `ahead` bytes behind, where that is given."""
    asked = [e.at(base, ahead) for base in bases] if ahead is not None else bases
    used = [f"xmm{r}" for r in (*ROWS, *PAIRS, SPARE, *X)]
    return assembled(e, _Turn(len(sums), WAY, asks).text(), "x", sums, [*bases, *asked, x, *lines], used)


def assembled(
    e: Emitter, text: str, register: str, sums: list[Any], places: list[Any], used: Iterable[str]
) -> list[Any]:
    """What instructions make of sums, which have registers of that constraint; `used` registers are theirs besides.

    Operands are the sums out, the sums in, and then addresses and numbers, `places`, in general registers.
    """
    binding.initialize_native_asmparser()  # which Numba does not
    count, arguments = len(sums), [*sums, *places]
    inputs = [*map(str, range(count)), *["r"] * len(places)]
    constraints = ",".join([*[f"={register}"] * count, *inputs, *(f"~{{{name}}}" for name in used), "~{memory}"])
    result = ir.LiteralStructType([e.vec] * count) if count > 1 else e.vec
    found = e.b.asm(ir.FunctionType(result, [v.type for v in arguments]), text, constraints, arguments, True)
    return [e.b.extract_value(found, i) for i in range(count)] if count > 1 else [found]

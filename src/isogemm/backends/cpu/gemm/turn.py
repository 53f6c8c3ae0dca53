"""A turn of one row's walk over weights in place, in x86 instructions: 16 k of three vectors of weight rows.

What `quads` emits through the compiler for other targets and more rows. The compiler has room for two vectors' sums in
16 registers, not three: a chain waits four steps for its next sum, so that 16 sums leave the multipliers idle. Weights
of 0.3 to 6 MB in a cache take 0.73 to 0.92 of its code's time so (Zen 4, told that it had AVX2 alone), and 0.84 to 0.98
where it has 32 registers. A block's loads stand between the shuffles and sums of the block before. Of 96 weights'
68 instructions 48 have three ports to go to: 6 weights a step at most, of which 5 are reached. Contract: ``fma/chain``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import binding, ir

from ..emit.vectors import Emitter

WIDTH, BLOCKS, QUAD, STEPS = 8, 3, 4, 4
# So far ahead each weight row is asked for, into the first-level cache: 24 rows are more than a processor follows by
# itself. Where a row ends so, the next one begins.
NEAR_BYTES = 128
# Registers: rows as loaded, pairs of them, one to spare, broadcasts of x; the compiler has the first three for sums.
ROWS, PAIRS, SPARE, X = range(3, 7), range(7, 11), 11, range(12, 16)
# Weight rows j behind a block's first, as index and scale of an address: multiples 1, 3, 5, 7 of a line have registers.
MULTIPLES = (1, 3, 5, 7)
_OFFSETS = ((0, 0), (1, 1), (1, 2), (3, 1), (1, 4), (5, 1), (3, 2), (7, 1))


def _address(base: int, row: int, offset: int) -> str:
    """Address of a weight row: `base` is the operand that holds the block's first row."""
    multiple, scale = _OFFSETS[row]
    index = f",${LINES + MULTIPLES.index(multiple)},{scale}" if scale else ""
    return f"{offset}(${base}{index})"


# Operands: sums out, sums in (tied), then bases of blocks, bases of what is asked for, x, multiples of the line.
BASES, AHEAD, INPUT, LINES = 2 * BLOCKS, 3 * BLOCKS, 4 * BLOCKS, 4 * BLOCKS + 1


def _step(turn: int) -> int:
    """Which four of the 16 k a block takes in its turn."""
    return turn // BLOCKS


def _loads(turn: int) -> Iterator[str]:
    """Four k of eight weight rows: rows j and j + 4 in the halves of a vector."""
    base, offset = BASES + turn % BLOCKS, 16 * _step(turn)
    for j, r in enumerate(ROWS):
        yield f"vmovups {_address(base, j, offset)}, %xmm{r}"
        yield f"vinsertf128 $$1, {_address(base, j + 4, offset)}, %ymm{r}, %ymm{r}"


def _pairs() -> Iterator[str]:
    for i, (low, high) in enumerate(((0, 1), (2, 3))):
        for j, half in enumerate("lh"):
            yield f"vunpck{half}ps %ymm{ROWS[high]}, %ymm{ROWS[low]}, %ymm{PAIRS[2 * i + j]}"


def _sums(block: int) -> Iterator[str]:
    """Columns from pairs, each into its sums; k ascending."""
    a, b, c, d = PAIRS

    def column(half: str, second: int, first: int, to: int) -> str:
        return f"vunpck{half}pd %ymm{second}, %ymm{first}, %ymm{to}"

    def add(k: int, register: int) -> str:
        return f"vfmadd231ps %ymm{X[k]}, %ymm{register}, ${block}"

    yield from (column("l", c, a, SPARE), column("h", c, a, a), add(0, SPARE), column("l", d, b, c))
    yield from (add(1, a), column("h", d, b, d), add(2, c), add(3, d))


def _text(asks: bool) -> str:
    turns = BLOCKS * STEPS
    lines, asked = list(_loads(0)), [(b, j) for b in range(BLOCKS) for j in range(WIDTH)]
    for turn in range(turns):
        lines += _pairs()
        if turn % BLOCKS == 0:
            lines += [f"vbroadcastss {4 * (QUAD * _step(turn) + i)}(${INPUT}), %ymm{r}" for i, r in enumerate(X)]
        for b, j in asked[turn * len(asked) // turns : (turn + 1) * len(asked) // turns]:
            lines.append(f"prefetcht0 {_address(BASES + b, j, NEAR_BYTES)}")
            lines += [f"prefetcht2 {_address(AHEAD + b, j, 0)}"] if asks else []
        loads = _loads(turn + 1) if turn + 1 < turns else iter(())
        for line in _sums(turn % BLOCKS):
            lines += [line, *([load] if (load := next(loads, "")) else [])]
    return "\n".join(lines)


def multiples(e: Emitter, line: Any) -> tuple[Any, ...]:
    """Of the bytes between weight rows, as `sums_after` takes them: in registers."""
    return tuple(e.kept(e.times(line, i)) for i in MULTIPLES)


def sums_after(
    e: Emitter, sums: list[Any], bases: list[Any], ahead: Any | None, x: Any, lines: tuple[Any, ...]
) -> list[Any]:
    """The sums after 16 more k of every block; asks for what is `ahead` bytes behind, where that is given."""
    binding.initialize_native_asmparser()  # which Numba does not
    asked = [e.at(base, ahead) for base in bases] if ahead is not None else bases
    arguments = [*sums, *bases, *asked, x, *lines]
    inputs = [*map(str, range(BLOCKS)), *["r"] * (len(arguments) - BLOCKS)]
    used = [f"~{{xmm{r}}}" for r in (*ROWS, *PAIRS, SPARE, *X)]
    constraints = ",".join([*["=x"] * BLOCKS, *inputs, *used, "~{memory}"])
    kind = ir.FunctionType(ir.LiteralStructType([e.vec] * BLOCKS), [v.type for v in arguments])
    found = e.b.asm(kind, _text(ahead is not None), constraints, arguments, True)
    return [e.b.extract_value(found, i) for i in range(BLOCKS)]

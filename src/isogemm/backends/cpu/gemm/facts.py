"""What decides between kernels on this machine: measured once and kept beside the kernels, else the usual numbers.

No fact reaches a bit: each chooses between kernels that evaluate one contract. Measuring takes part of a second (see
`isogemm.backends.cpu.gemm.measure`). It is left to `isogemm warm`, or to the first process that has the kernels it
needs anyway, so that nobody waits for their compilation; where ``ISOGEMM_TUNING=off`` nothing is measured, and what
was measured before is not looked at, so that what a process does is known ahead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ....base import seen
from ....base.disk import keep, kept
from ....base.jit import cache_directory
from ....base.threads import get_num_threads
from ....base.tuning import get_tuning
from ..emit.target import target

# Routines for float32 that are timed; whoever has them all waits for no compiler.
NEEDED = frozenset({"gemv", "gemv_groups", "quads", "stream", "panels", "pack", "tile_packed"})


@dataclass(frozen=True, slots=True)
class Facts:
    """Thresholds between kernels."""

    gemv_rows: int  # rows up to which transposing weights in registers beats packing them
    stream_rows: int  # rows that rows of B [k, n] stream by, in products of more than 96^3
    skinny_rows: int  # rows up to which panels of B [n, k] are used as soon as they are packed, and A packed at once
    skinny_depth: int  # of K, that such panels have, about
    block_depth: int  # of K, that the blocks of products with more rows have, about
    seen_bytes: int  # of weights in place, up to which the same ones need not be asked for when they come again
    tile_ahead: int  # bytes ahead that register tiles ask for packed weights, which may come from memory
    serial: int  # multiply-adds below which waking a thread costs more than it saves
    ridge: float  # flops per byte where all threads' peak meets their memory's bandwidth; only the word "bound" has it
    source: str = "usual"  # or "measured"

    @property
    def stream_words(self) -> str:
        """The rows that B [k, n] streams by, in words."""
        return f"{FEW_ROWS}" + f", or {self.stream_rows} where M N K > 96^3" * (self.stream_rows > FEW_ROWS)

    @property
    def skinny_words(self) -> str:
        """The rows of panels used at once, in words: those of B [k, n] besides, where they are others."""
        return f"{self.skinny_rows}" + f" with B stored [n, k], else {SKINNY_ROWS}" * (self.skinny_rows != SKINNY_ROWS)

    def __str__(self) -> str:
        return (
            f"{self.source}: transposed in registers up to {self.gemv_rows} rows; "
            f"rows of B [k, n] passed by up to {self.stream_rows}; "
            f"panels used as packed up to {self.skinny_rows} rows, {self.skinny_depth} of K at a time, "
            f"blocks of {self.block_depth} beyond; "
            f"weights not asked for again up to {self.seen_bytes / 2**20:g} MiB; "
            f"packed ones asked for {self.tile_ahead} bytes ahead; one thread below {self.serial} multiply-adds; "
            f"ridge {self.ridge:.3g} flop/byte"
        )


# By lanes of a vector. With 16 of them a Zen 4 (benchmarks/results/cpu-znver4-2026-11-23-rows.json, and -before with a
# limit of 16) wants more than a Zen 5 or a Xeon; with 8, packing takes 0.88 of the time at 12 rows (Zen 4). The ridge:
# its 116 GFLOP/s a core over 17 GB/s.
_ROWS = {16: 16, 8: 8, 4: 16}
_ROWS_OF = {("znver4", 16): 64}
FEW_ROWS = 4  # of x, past which rows of B [k, n] go at once: their broadcasts stay in registers
# Rows for which panels are used as soon as they are packed, of about how much of K, and of how much of K blocks are: a
# Zen 4's, of any B.
SKINNY_ROWS, SKINNY_DEPTH, BLOCK_DEPTH = 192, 256, 512
# By the compiler's name of a processor: Zen 3, with a last cache of 32 MiB, walks what comes again in 0.94 of the time
# at 8 MiB and in 0.98 at 16 MiB, and what is not there after all little slower.
_SEEN_BYTES = {"znver3": 2**24}
# Zen 5 follows packed weights by itself, but not far enough: asked for so many bytes ahead, into the first-level cache,
# they come from memory 1.1 to 1.5 times as fast for 4 to 64 rows, and with up to 4 KB more slowly than without.
TILE_AHEAD = 2**13
_AHEAD = {"znver5": TILE_AHEAD}
_facts: Facts | None = None
_measuring = False
measurer: Callable[[Facts], Facts] | None = None
"""What measures, from the usual facts: `isogemm.backends.cpu.gemm.measure`; it runs products, so it is above this."""


def usual() -> Facts:
    """The numbers where nothing is measured."""
    seen, ahead = _SEEN_BYTES.get(target().name, 2**22), _AHEAD.get(target().name, 0)
    rows = _ROWS_OF.get((target().name, target().width), _ROWS[target().width])
    return Facts(rows, FEW_ROWS, SKINNY_ROWS, SKINNY_DEPTH, BLOCK_DEPTH, seen, ahead, 48 * 1024, 7.0)


def facts() -> Facts:
    """This machine's."""
    global _facts
    if _facts is None:
        _facts = (_read() if get_tuning() else None) or usual()
    return _facts


def set_facts(given: Facts | None) -> None:
    """Choose by these; by the machine's own with None. Kinds of calls that came before are planned anew."""
    global _facts
    _facts = given
    seen.forget()


def learn_facts(made: Collection[str] | None = None) -> Facts:
    """Measure and keep the facts where that has not been done and may be: now, or if `made` has the kernels."""
    global _measuring
    known = facts()
    lacking = made is not None and not NEEDED.issubset(made)
    if known.source == "measured" or _measuring or lacking or measurer is None or not get_tuning():
        return known
    _measuring = True
    try:
        found = measurer(usual())
        path = facts_file()
        if path is not None:
            with suppress(OSError):  # a full disk or a folder of somebody else's: the next process measures again
                keep(path, json.dumps(asdict(found)).encode())
        set_facts(found)
    except MemoryError:  # of the weights that are timed: the caller's product needs none of it
        return known
    finally:
        _measuring = False
    return found


def facts_file() -> Path | None:
    """The file of this machine: its processor as the compiler sees it, and the threads that a call may use."""
    folder = cache_directory()
    about = json.dumps([asdict(target()), _processor(), get_num_threads()])
    return folder and folder / f"machine-{hashlib.sha256(about.encode()).hexdigest()[:16]}.facts"


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line.strip() for line in file if line.startswith("model name")), "")
    return ""


def _read() -> Facts | None:
    path = facts_file()
    data = None if path is None else kept(path)
    if data is None:
        return None
    try:
        return Facts(**json.loads(data))
    except (ValueError, TypeError, RecursionError):  # whole, but not of this kind
        return None

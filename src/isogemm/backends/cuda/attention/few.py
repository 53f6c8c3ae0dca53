"""One leaf and up to 64 rows of a key head to a block, brought by the tensor copy engine: attention/few.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....base.dtypes import CODE
from ....contract.attention import LEAF
from ..driver.kernel import ints, longs
from .case import MOST_SUMS, AttentionCase, steps_of
from .family import loaded, mask_defines
from .hopper import CHUNK, HopperAttention, chunks_of, map_of
from .meet import meet_defines, met
from .trial import Run


class FewAttention(HopperAttention):
    """Sums of leaves go to memory, for their meeting, unless there is but one leaf."""

    name = "attention few"

    def rank(self, case: AttentionCase) -> int | None:
        if not case.hopper or (case.sums > MOST_SUMS and not _whole(case)):
            return None
        return 0 if case.short or (_whole(case) and case.rows <= 64) else 4

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return self._own(case) | meet_defines(case, not _whole(case))

    def _own(self, case: AttentionCase) -> dict[str, Any]:
        cut = {"MT": _rows(case) // 16, "WHOLE": _whole(case)}
        return {"KIND": CODE[case.dtype], "CHUNKS": chunks_of(case), **cut, **mask_defines(case)}

    def launch(self, case: AttentionCase) -> Run:
        defines, (q, k, v) = self._own(case), case.operands
        rows, chunks, each = _rows(case), chunks_of(case), _each(case)
        sizes = (case.tq, case.tk, case.d, case.dv, case.heads, case.group, case.group, case.offset or 0, each)
        steps = longs(*steps_of(q)[:3], *(case.mask or (0, 0, 0, 0)), *case.y_strides)
        bound = loaded("few", case, defines).bind(
            [*["map"] * 2, *["ptr"] * 7, *steps, *ints(*sizes), ("f32", case.c)],
            grid=(-(-case.leaves // each) * -(-case.rows // rows), case.heads // case.group, case.batch),
            block=(128,),
            shared=2 * chunks * CHUNK + rows * (128 * chunks + 16 + 272 + 16) + 1024,
            pdl=True,
        )  # fmt: skip
        map_k, map_v = map_of(case, k, 128), map_of(case, v, 128)

        def launch(
            stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int, sums: int
        ) -> None:
            bound(stream, map_k(k), map_v(v), q, mask, start, stop, y, stats, sums)

        return met(case, launch, not _whole(case))

    def reaching(self, case: AttentionCase) -> Iterator[AttentionCase]:
        wide = 64 * chunks_of(case)
        ragged = wide - 24, wide - 8
        first, second = ((5, 3), (1, 16)) if case.rows <= 16 else ((15, 2), (32, 1)) if case.rows <= 32 else (
            (33, 2), (13, 5))  # fmt: skip
        processors = case.on.multiprocessors
        if _whole(case):
            many = (7, 2) if case.rows <= 16 else (16, 2) if case.rows <= 32 else (20, 2)
            yield case.made((2, 2, *first, 100, wide, wide), bounds=False, stats=True, offset=100 - first[0], pad=0)
            sizes = 3, 2 * processors // 5, *many, 300
            yield case.made((*sizes, wide, wide), bounds=False, stats=True, offset=300 - many[0], pad=0)
            yield case.made((*sizes, *ragged), bounds=True, stats=case.masks == 2, offset=40, pad=8)
            yield case.made((*sizes, *ragged), bounds=True, stats=False, offset=-3, pad=24)
            return
        tk = case.alike_keys
        if case.leaves > 16:  # more than meet in one turn; of one query, since the definition takes long
            most = 65 * LEAF + 20
            yield case.made((2, 2, 1, _rows(case), most, wide, wide), bounds=False, stats=True, offset=most - 1, pad=0)
        yield case.made((2, 2, *first, tk, wide, wide), bounds=False, stats=True, offset=tk - first[0], pad=0)
        b = 3 if tk < 1000 else 2
        yield case.made((b, 2, *second, tk, *ragged), bounds=True, stats=case.masks == 2, offset=40, pad=8)
        yield case.made((b, 2, *second, tk, *ragged), bounds=True, stats=False, offset=-3, pad=24)
        tk = max(tk, 600)  # several leaves to a block
        sizes = 3, 7 * processors // (6 * (tk // LEAF)), 1, _rows(case) - 2, tk
        yield case.made((*sizes, *ragged), bounds=True, stats=False, offset=tk - 60, pad=0)


def _rows(case: AttentionCase) -> int:
    """Rows of a block."""
    return 16 if case.rows <= 16 else 32 if case.rows <= 32 else 64


def _units(case: AttentionCase) -> int:
    """Tiles of rows, each with its keys."""
    return -(-case.rows // _rows(case)) * (case.heads // case.group) * case.batch


def _whole(case: AttentionCase) -> bool:
    """Whether a block walks all leaves of its rows, and writes their results.

    Not where some walks may be much longer than others, and would end long after them. Half as many walks as can be
    under way, at most, or all of them: between these the next launch finds room beside some of them and not beside
    others, and its share of the memory is as uneven (H200, 256 walks of 8 leaves: 44 us, not 38).
    """
    units, processors = _units(case), case.on.multiprocessors
    alike = case.leaves <= 16 or not (case.starts or case.stops)
    fits = 0.9 * processors <= units <= 1.5 * processors or units >= 3 * processors
    return case.leaves == 1 or (alike and fits)


def _each(case: AttentionCase) -> int:
    """Leaves of a block."""
    if _whole(case):
        return case.leaves
    blocks = _units(case) * case.leaves / (2 * case.on.multiprocessors)
    return max(1, min(round(blocks), 2 if case.rows <= 16 else 4))

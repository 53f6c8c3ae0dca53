"""One leaf and up to 64 rows of a key head to a block, brought by the tensor copy engine: attention/few.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....base.dtypes import CODE
from ....contract.attention import LEAF
from .case import MOST_SUMS, AttentionCase, steps_of
from .family import Run, ints, loaded, longs, mask_defines
from .hopper import CHUNK, HopperAttention, chunks_of, map_of
from .meet import meet_defines, met

__all__ = ["FewAttention"]


class FewAttention(HopperAttention):
    """Sums of leaves go to memory, for their meeting, unless there is but one leaf."""

    name = "attention few"

    def rank(self, case: AttentionCase) -> int | None:
        return None if not case.hopper or case.sums > MOST_SUMS else 0 if case.short else 4

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return self._own(case) | meet_defines(case, case.leaves > 1)

    def _own(self, case: AttentionCase) -> dict[str, Any]:
        tiles = 1 if case.rows <= 16 else 2 if case.rows <= 32 else 4
        only = {"MT": tiles, "ONLY": case.leaves == 1}
        return {"KIND": CODE[case.dtype], "CHUNKS": chunks_of(case), **only, **mask_defines(case)}

    def launch(self, case: AttentionCase) -> Run:
        defines, (q, k, v) = self._own(case), case.operands
        rows, chunks = 16 * defines["MT"], chunks_of(case)
        sizes = (case.tq, case.tk, case.d, case.dv, case.heads, case.group, case.group, case.offset or 0)
        steps = longs(*steps_of(q)[:3], *(case.mask or (0, 0, 0, 0)), *case.y_strides)
        bound = loaded("few", case, defines).bind(
            [*["map"] * 2, *["ptr"] * 7, *steps, *ints(*sizes), ("f32", case.c)],
            grid=(case.leaves * -(-case.rows // rows), case.heads // case.group, case.batch),
            block=(128,),
            shared=2 * chunks * CHUNK + rows * (128 * chunks + 16 + 272 + 16) + 1024,
            pdl=True,
        )  # fmt: skip
        map_k, map_v = map_of(case, k, 128), map_of(case, v, 128)

        def launch(
            stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int, sums: int
        ) -> None:
            bound(stream, map_k(k), map_v(v), q, mask, start, stop, y, stats, sums)

        return met(case, launch, case.leaves > 1)

    def reaching(self, case: AttentionCase) -> Iterator[AttentionCase]:
        wide = 64 * chunks_of(case)
        ragged = wide - 24, wide - 8
        first, second = ((5, 3), (1, 16)) if case.rows <= 16 else ((15, 2), (32, 1)) if case.rows <= 32 else (
            (33, 2), (13, 5))  # fmt: skip
        tk = 100 if case.leaves == 1 else case.alike_keys
        most = 33 * LEAF + 20 if case.leaves > 16 else tk  # more than meet in one turn
        yield case.made((2, 2, *first, most, wide, wide), bounds=False, stats=True, offset=most - first[0], pad=0)
        b, longer = 3 if tk < 1000 else 2, tk + 28 * (tk <= 100)
        yield case.made((b, 2, *second, longer, *ragged), bounds=True, stats=case.masks == 2, offset=40, pad=8)
        yield case.made((b, 2, *second, tk, *ragged), bounds=True, stats=False, offset=-3, pad=24)

"""wgmma fed by the tensor copy engine, for many queries: attention/hopper.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....base.dtypes import CODE, PTX
from ..driver.kernel import ints, longs
from ..driver.tensormap import Encoder, encoder
from ..driver.wgmma import mma
from .case import AttentionCase, Strided, steps_of
from .family import Attention, edges, loaded, mask_defines
from .trial import Run
from .walk import WalkAttention

CHUNK = 16384
WARPGROUPS = 2


def chunks_of(case: AttentionCase) -> int:
    """Chunks of 64 columns."""
    return 1 if max(case.d, case.dv) <= 64 else 2


def map_of(case: AttentionCase, x: Strided, rows: int) -> Encoder:
    """The tensor map of boxes of so many rows."""
    return encoder(case.dtype, sizes=x.shape, strides=(*steps_of(x)[:3], 1), box=(1, 1, rows, 64))


class HopperAttention(Attention):
    """Head sizes to 128, rows of 16 bytes."""

    name = "attention hopper"
    plain = WalkAttention()

    def supports(self, case: AttentionCase, config: str = "") -> bool:
        return case.boxes

    def rank(self, case: AttentionCase) -> int | None:
        return 1 if case.hopper else None

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return {"KIND": CODE[case.dtype], "CHUNKS": chunks_of(case), **mask_defines(case)}

    def launch(self, case: AttentionCase) -> Run:
        operand, chunks = PTX[case.dtype], chunks_of(case)
        text = '#include "attention/common.cu"\n' + mma(operand, 128, name="mma_s")
        text += mma(operand, 64 * chunks + 8, name="mma_o", registers=True, y_across=True)
        tiles = -(-case.tq // (64 * WARPGROUPS))
        sizes = ints(case.tq, case.tk, case.dv, case.group, case.offset or 0, case.heads, tiles, case.batch)
        steps = longs(*(case.mask or (0, 0, 0, 0)), *case.y_strides)
        bound = loaded("hopper", case, self.defines(case), before=text).bind(
            [*["map"] * 3, *["ptr"] * 5, *steps, *sizes, ("f32", case.c)],
            grid=(min(tiles * case.heads * case.batch, case.on.multiprocessors),),
            block=(128 * WARPGROUPS + 128,),
            shared=(9 if chunks == 2 else 5) * CHUNK + WARPGROUPS * chunks * 8192 + 1024,
            pdl=True,
        )  # fmt: skip
        q, k, v = case.operands
        map_q, map_k, map_v = map_of(case, q, 64), map_of(case, k, 128), map_of(case, v, 128)

        def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
            bound(stream, map_q(q), map_k(k), map_v(v), mask, start, stop, y, stats)

        return run

    def reaching(self, case: AttentionCase) -> Iterator[AttentionCase]:
        wide = 64 * chunks_of(case)
        yield from edges(case, (wide, wide), (wide - 24, wide - 8))
        if case.mask is None:  # more tiles of 128 queries than multiprocessors
            yield case.made((2, 34, 200, 2, 300, wide, wide), bounds=False, stats=False, offset=100, pad=0)

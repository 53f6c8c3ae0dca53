"""float32 fused multiply-adds: attention/fma.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....base.dtypes import CODE
from ....contract.attention import LEAF
from ..driver.kernel import Parameter, ints, longs
from .case import AttentionCase
from .family import Attention, blocks_of, edges, loaded, mask_defines
from .trial import Run

ROWS = 32  # queries of a block


class FmaAttention(Attention):
    """Any strides, head sizes to 256, every dtype."""

    name = "attention fma"

    def supports(self, case: AttentionCase, config: str = "") -> bool:
        return case.fma

    def rank(self, case: AttentionCase) -> int | None:
        return 0

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return {"D": case.d, "NJ": -(-case.dv // 32), "KIND": CODE[case.dtype], **mask_defines(case)}

    def launch(self, case: AttentionCase, ranged: tuple[int, ...] = ()) -> Run:
        """`ranged` has strides of ranges and of the order, and its tiles, where queries have their own ranges."""
        columns, padded = -(-case.dv // 32), -(-case.d // 32) * 32
        kernel = loaded("fma", case, self.defines(case) | ({"RANGED": True} if ranged else {}))
        shared = 4 * (32 * padded + 32 * LEAF + max(32 * (LEAF + 1), 32 * 32 * columns))
        steps = [step for x in case.operands for step in x.strides[:3]]
        params: list[Parameter] = [
            *["ptr"] * 8, *longs(*steps, *(case.mask or (0, 0, 0, 0)), *case.y_strides),
            *ints(case.tq, case.tk, case.dv, case.group, case.offset or 0), ("f32", case.c),
            *(["ptr", "ptr", *longs(*ranged[:-1]), *ints(ranged[-1])] if ranged else []),
        ]  # fmt: skip
        tiles = -(-case.tq // ROWS)
        if ranged:
            tiles = min(ranged[-1], blocks_of(case.heads * case.batch, case.device))
        return kernel.bind(params, grid=(case.heads, tiles, case.batch), block=(256,), shared=shared, pdl=True)

    def reaching(self, case: AttentionCase) -> Iterator[AttentionCase]:
        return edges(case, (case.d, case.dv), (case.d, case.dv))

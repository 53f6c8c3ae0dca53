"""Sums of leaves meet: attention/meet.cu, behind kernels that leave sums in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....base.dtypes import CODE
from ..driver.kernel import Parameter, ints, longs
from ..driver.workspace import workspace
from .case import AttentionCase
from .family import loaded
from .trial import Run


def meet_defines(case: AttentionCase, meets: bool) -> dict[str, Any]:
    """Its macros, for the text of the code of a kernel; none where nothing meets."""
    return {f"MEET_{key}": value for key, value in _defines(case).items()} if meets else {}


def _defines(case: AttentionCase) -> dict[str, Any]:
    return {
        "OUT": CODE[case.dtype_out],
        "CAUSAL": case.offset is not None,
        "THREADS": 128 if case.dv <= 128 else 256,
        "AT_ONCE": 8 if case.leaves <= 8 else 16 if case.leaves <= 16 else 64,
    }


def met(case: AttentionCase, walk: Callable[..., None], meets: bool) -> Run:
    """`walk`, whose last address is that of sums of leaves, and their meeting; 0 where nothing meets."""
    if not meets:
        return lambda stream, *at: walk(stream, *at, 0)
    defines = _defines(case)
    sizes = (case.tq, case.tk, case.dv, case.heads, case.group, case.offset or 0, case.batch)
    grid = (case.rows, case.heads // case.group, case.batch)
    params: list[Parameter] = [*["ptr"] * 5, *longs(*case.y_strides), *ints(*sizes)]
    meet = loaded("meet", case, defines).bind(params, grid=grid, block=(defines["THREADS"],), pdl=True)
    nbytes, device = case.sums, case.device

    def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
        memory = workspace(nbytes, device)
        sums = memory.data_ptr()
        walk(stream, q, k, v, mask, start, stop, y, stats, sums)
        meet(stream, sums, y, stats, start, stop)

    return run

"""Every processor's way of walking few rows in place has the same bits, also here where another one is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic
from tests.products import F32, assert_same, product, values

from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.gemm import quads, turn, wide

pytestmark = pytest.mark.skipif(not target().x86, reason="ways are those of x86 processors")

WAYS = {**turn.WAYS, "others": turn.OTHERS}
ONE = ((1, 32, 64), (1, 71, 43), (1, 9, 6), (1, 40, 6), (1, 130, 257), (1, 100, 507), (1, 40, 1019))  # and 2 and 4 KiB
SOME = ((2, 113, 37), (2, 50, 1019), (3, 16, 129), (3, 40, 9), (3, 70, 50), (3, 40, 507), (4, 97, 16))
MORE = ((5, 70, 50), (5, 47, 16), (5, 33, 1019), (6, 97, 37), (7, 33, 24), (8, 40, 257), (8, 9, 20), (8, 64, 507))
MARGIN = 5  # elements behind each row of the output and of the weights, which nobody may take for one of them


@pytest.fixture(params=WAYS)
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The routine of few rows, as that processor has it."""
    way = WAYS[request.param]
    in_turns = quads.IN_ORDER
    monkeypatch.setattr(turn, "WAY", way)
    monkeypatch.setattr(quads, "GOES_ON", in_turns and way.goes_on)
    monkeypatch.setattr(quads, "WIDE", in_turns and way.wide and target().width == wide.LANES)
    monkeypatch.setattr(quads, "FROM_MEMORY", 2 if quads.GOES_ON else quads.BLOCKS[1])

    # Anew: Numba keeps what it has made of an intrinsic, here the first processor's way, for all that follow.
    @intrinsic
    def strips(typingctx, rows, out, out_rs, x, x_rs, w, line, k, columns, flags):
        code = quads.quad_strips(0)
        return types.void(*[types.int64] * 10), lambda context, builder, signature, args: code(builder, args)

    @numba.njit
    def routine(rows, out, out_rs, x, x_rs, w, line, k, columns, flags):
        strips(rows, out, out_rs, x, x_rs, w, line, k, columns, flags)

    return routine


def test_a_way_has_the_bits_of_the_definition(walk: Callable[..., None]) -> None:
    for m, n, k in (shape for shape in (*ONE, *SOME, *MORE) if shape[0] <= quads.most_rows(0)):
        x, kept = values((m, k), seed=m, special=True), values((n, k + MARGIN), seed=n)
        w, c = kept[:, :k], values((m, n), seed=k)
        kept[:, k:] = np.nan
        for flags in (0, quads.IN_CACHE, quads.from_memory(m, w.strides[0], 4 * k, 0)):
            for start in (None, c):
                room = np.full((m, n + MARGIN), np.nan, F32)
                if start is not None:
                    room[:, :n] = start
                _call(walk, room, x, w, flags | (start is not None))
                assert_same(room[:, :n].copy(), product(x, w.T, c=start, accumulate=start is not None))
                assert np.isnan(room[:, n:]).all()


def _call(walk: Callable[..., None], out: Any, x: Any, w: Any, flags: int) -> None:
    m, k = x.shape
    places = [(a.ctypes.data, a.strides[0]) for a in (out, x, w)]
    walk(m, *(word for place in places for word in place), k, len(w), flags)

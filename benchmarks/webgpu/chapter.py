"""The chapter's tables: some rows at once against one by one, 512 rows, and the products of a token of a 7B model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import isogemm
from isogemm.backends.webgpu.adapter import ReadyLaunch

from .products import library, operands
from .rounds import Bench, Timed, told

__all__ = ["chapter"]

LAYERS = 32
LAYER = (*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008))  # [n, k] of q, k, v, o, gate, up, down
HEAD = (32000, 4096)
CONTRACTS = {"float16": "fma/lanes32", "Q4_0": "int32/chain"}


def chapter(bench: Bench, divide: int) -> None:
    """All of it, through `isogemm.linear`."""
    n, k = (max(256, x // divide // 256 * 256) for x in LAYER[0])
    for m in (1, 2, 4, 8, 16, 512):
        bench.tried(f"M={m}", partial(library, bench, m, n, k, "float16", "fma/lanes32"))
    bench.tried("M=512", partial(library, bench, 512, n, k, "float16", "fma/chain"))
    for dtype in CONTRACTS:
        bench.tried(f"token {dtype}", partial(token, bench, divide, dtype))


def token(bench: Bench, divide: int, dtype: str) -> None:
    """Seven products, each of which waits for the one before, 32 times, and the vocabulary."""
    layer = [sized(shape, divide) for shape in LAYER]
    asked = {"a layer's 7 products": layer, "the vocabulary": [sized(HEAD, divide)]}
    rows = []
    for what, shapes in asked.items():
        row = Timed(f"{what} {dtype}", "isogemm.linear", 1, sum(n * k for n, k in shapes) // 4096, 4096, checked=False)
        rows.append(row)
        held = [operands(1, *shape, dtype) for shape in shapes]
        sets = 8 if len(held) > 1 else len(held[0].weights)
        row.nbytes = sum(x.nbytes for x in held)
        out = isogemm.webgpu.array(np.zeros((1, max(x.n for x in held)), held[0].x.dtype))
        products(held, out, 0, CONTRACTS[dtype])  # admitted before launches are kept
        bench.timed([(row, partial(in_turn, bench, held, out, sets, CONTRACTS[dtype]))], sets)
    told(bench, f"a token {dtype}", rows)
    seconds = LAYERS * rows[0].best + rows[1].best
    nbytes = LAYERS * rows[0].nbytes + rows[1].nbytes
    bench.facts.setdefault("tokens", {})[dtype] = {
        "products": LAYERS * len(LAYER) + 1, "seconds": seconds, "bytes": nbytes, "per_second": 1 / seconds,
        "gb_per_second": nbytes / seconds / 1e9,
    }  # fmt: skip
    bench.say(f"a token {dtype}: {seconds * 1e3:.2f} ms, {1 / seconds:.0f} a second, {nbytes / seconds / 1e9:.0f} GB/s")
    bench.save()


def sized(shape: tuple[int, int], divide: int) -> tuple[int, int]:
    """A weight's extents, smaller for a try in software."""
    return max(32, shape[0] // divide // 32 * 32), max(256, shape[1] // divide // 256 * 256)


def in_turn(bench: Bench, held: list[Any], out: Any, sets: int, contract: str, i: int) -> list[ReadyLaunch]:
    """Launches of all products, of which each writes where the one before has written, so that it waits."""
    with bench.adapter.recording() as found:
        products(held, out, i % sets * len(held), contract)
    return list(found)


def products(held: list[Any], out: Any, i: int, contract: str) -> None:
    """One after another; weights of one shape are others in each, as in a model."""
    for at, x in enumerate(held):
        isogemm.linear(x.there, x.weights[(i + at) % len(x.weights)], out=out[:, : x.n], contract=contract)

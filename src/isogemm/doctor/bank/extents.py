"""Mistakes about how far loops go: tails of K, M and N, blocks of K taken twice or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..case import GemmCall, Variant

TILES = (256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2)
BLOCKS = (256, 128, 64, 32, 16, 8, 4)


def _tails(extent: int) -> dict[int, list[int]]:
    """The sizes of tiles, by where the last whole one ends."""
    found: dict[int, list[int]] = {}
    for tile in TILES:
        if extent % tile:
            found.setdefault(extent - extent % tile, []).append(tile)
    return found


def _words(name: str, end: int, extent: int, tiles: list[int]) -> str:
    return f"{name} ends at {end} of {extent}: whole tiles of {' or '.join(map(str, tiles))}"


def k_tail(case: GemmCall) -> Iterator[Variant]:
    """The last part of K, less than a block, left out."""
    k = case.sizes[2]
    for end, tiles in _tails(k).items():
        yield Variant(_words("K", end, k, tiles), replace(case, counts=(*case.counts, (end, k, 0))))


def _unwritten(axis: int, case: GemmCall) -> Iterator[Variant]:
    extent = case.sizes[axis]
    for end, tiles in _tails(extent).items():
        limits = list(case.written)
        limits[axis] = end
        yield Variant(_words("MN"[axis], end, extent, tiles), replace(case, written=(limits[0], limits[1])))


m_tail, n_tail = partial(_unwritten, 0), partial(_unwritten, 1)


def _counted(times: int, words: str, case: GemmCall) -> Iterator[Variant]:
    k = case.sizes[2]
    seen = set()
    parts = [(part * k // s, (part + 1) * k // s) for s in (2, 3, 4, 8) for part in range(s)]
    for block in BLOCKS:
        count = -(-k // block)
        some = range(count) if count <= 8 else (0, 1, count // 2 - 1, count // 2, count - 2, count - 1)
        parts += [(i * block, min(k, (i + 1) * block)) for i in some]
    for start, stop in parts:
        tail = times == 0 and stop == k and start % 2 == 0 and k - start < max(TILES) and k % (k - start or 1) != 0
        if (start, stop) not in seen and 0 < stop - start < k and not tail:
            seen.add((start, stop))
            yield Variant(
                f"k from {start} to {stop} {words}", replace(case, counts=(*case.counts, (start, stop, times)))
            )


k_repeated, k_missing = partial(_counted, 2, "taken twice"), partial(_counted, 0, "left out")

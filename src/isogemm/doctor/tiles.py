"""A race in one result: tiles that hold sums with blocks of K missing or twice, each tile others, or another tile's.

Of a tile the observed errors are ``alpha * sum over blocks of (times - 1) * A[:, block] @ B[block]``. That is linear in
how often each block was summed, so least squares finds it; it counts when whole numbers remain that explain every
element of the tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .bank import caused
from .case import GemmCall
from .diagnosis import Cause
from .simulate import WIDTH, Simulated, round_to

Floats = npt.NDArray[np.float64]
Tile = tuple[int, slice, slice]

SIDES = (32, 16, 8, 4)
LOOKED_AT = 48  # wrong tiles, spread over the output
SPLITS = (2, 3, 4, 8)
BLOCKS = (256, 128, 64, 32, 16, 8)
MOST = 4  # times that a block is summed


def race(case: GemmCall, observed: npt.NDArray[np.float64], right: Simulated, fine: npt.NDArray[np.bool_]
         ) -> tuple[Cause, ...]:  # fmt: skip
    """The cause where tiles differ in what their sums lack, or hold each other's; of the largest tiles that fit."""
    shape = (case.items, *case.sizes[:2])
    error = (observed - right.value).reshape(shape)
    if case.alpha == 0 or case.sizes[2] < 2 or fine.all():
        return ()
    seen = _Seen(case, error, right.value.reshape(shape), 2 * WIDTH * right.noise.reshape(shape))
    wrong = ~fine.reshape(shape)
    for side in SIDES:
        tiles = list(_tiles(shape, side))
        off = [tile for tile in tiles if wrong[tile].any()]
        large = [tile for tile in off if 2 * error[tile].size >= side * side] or off
        words = _explained(seen, large[:: -(-len(large) // LOOKED_AT)], elsewhere=2 * len(off) <= len(tiles))
        if words and (len(off) < len(tiles) or len(set(words)) > 1):
            said = (
                f"{len(off)} of {len(tiles)} tiles of {side} x {side} hold other sums than the rest: the one at "
                f"{_at(seen, large[0])} {words[0]}. Run it again: a race differs, a condition on tiles stays"
            )
            return (caused("race", said),)
    return ()


@dataclass(frozen=True)
class _Seen:
    """Errors [items, m, n], what should be there, and what the roundings of its sum come to."""

    case: GemmCall
    error: Floats
    value: Floats
    noise: Floats

    @cached_property
    def operands(self) -> tuple[Floats, Floats]:
        """The operands as they are multiplied: rounded, with alpha."""
        case = self.case
        return case.alpha * round_to(case.a.values(), case.rounded), round_to(case.b.values(), case.rounded)

    def room(self, tile: Tile, observed: Floats) -> Floats:
        """What roundings account for where `observed` should be the value of a tile."""
        eps = float(ml_dtypes.finfo(self.case.out).eps)
        return np.asarray(self.noise[tile] + eps * (np.abs(self.value[tile]) + np.abs(observed)))


def _tiles(shape: tuple[int, int, int], side: int) -> Iterator[Tile]:
    items, m, n = shape
    for p, i, j in itertools.product(range(items), range(0, m, side), range(0, n, side)):
        yield p, slice(i, min(m, i + side)), slice(j, min(n, j + side))


def _at(seen: _Seen, tile: Tile) -> str:
    p, rows, columns = tile
    return f"[{rows.start}, {columns.start}]" if seen.case.items == 1 else f"[{p}, {rows.start}, {columns.start}]"


def _explained(seen: _Seen, tiles: list[Tile], *, elsewhere: bool) -> list[str]:
    """What each tile holds, in words; nothing where one of them cannot be explained."""
    cuts = list(_cuts(seen.case.sizes[2]))
    found = []
    for tile in tiles:
        words = _partial(seen, tile, cuts) or (_elsewhere(seen, tile) if elsewhere else "")
        if not words:
            return []
        found.append(words)
    return found


def _cuts(k: int) -> Iterator[tuple[int, ...]]:
    """Ends of blocks of K, the fewest blocks first."""
    some = {tuple(part * k // s for part in range(s + 1)) for s in SPLITS if s <= k}
    some |= {(*range(0, k, block), k) for block in BLOCKS if block < k}
    yield from sorted(some, key=len)


def _partial(seen: _Seen, tile: Tile, cuts: list[tuple[int, ...]]) -> str:
    """Which blocks of K are missing or there twice; those that explained the last tile are tried first."""
    p, rows, columns = tile
    a, b = (x[p] for x in seen.operands)
    error = seen.error[tile]
    if not np.isfinite(error).all():
        return ""
    room = seen.room(tile, seen.value[tile] + error).reshape(-1)
    for place, cut in enumerate(cuts):
        blocks = list(itertools.pairwise(cut))
        if 2 * len(blocks) > error.size:
            continue
        with np.errstate(all="ignore"):
            sums = np.stack([(a[rows, i:j] @ b[i:j, columns]).reshape(-1) for i, j in blocks], 1)
        if not np.isfinite(sums).all():
            return ""
        times = np.rint(np.linalg.lstsq(sums, error.reshape(-1), rcond=None)[0])
        held = (times.min() >= -1) & (times.max() < MOST) & times.any() & (times > -1).any()
        if held and (np.abs(error.reshape(-1) - sums @ times) <= room).all():
            cuts.insert(0, cuts.pop(place))
            return "; ".join(
                f"has k from {i} to {j} {'not at all' if t < 0 else f'{t + 1:.0f} times'}"
                for (i, j), t in zip(blocks, times, strict=True)
                if t
            )
    return ""


def _elsewhere(seen: _Seen, tile: Tile) -> str:
    """Which other tile's sums are here."""
    _, rows, columns = tile
    high, wide = rows.stop - rows.start, columns.stop - columns.start
    observed = seen.value[tile] + seen.error[tile]
    for p, i, j in itertools.product(
        range(seen.case.items), range(0, seen.value.shape[1], high), range(0, seen.value.shape[2], wide)
    ):
        other = (p, slice(i, i + high), slice(j, j + wide))
        belongs = seen.value[other]
        if belongs.shape != observed.shape or observed.size == 1:
            continue
        if (np.abs(observed - belongs) <= seen.room(other, belongs)).all():
            return f"holds what belongs to the one at {_at(seen, other)}"
    return ""

"""Which configurations of the kernel for weights out of step are worth timing, and what each is expected to take.

Constants are fitted to 194 timings of 30 products on an H200 (bf16, November 2026), within 13 % in the root mean
square; what comes first takes 2.5 % longer in the mean than the fastest that was timed. A tile's end is fitted to 84
drawn products that this kernel served: docs/design/0015-operands-out-of-step.md.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from .....problem.product import Product
from ..model import H200, Gpu, Tiling, microseconds, together
from .config import UnalignedConfig, cut, readable

PALETTE = (
    "128x8x256", "64x8x256", "32x8x256", "128x16x256", "64x16x256 c2", "128x32x128 c2", "32x32x256 c2",
    "128x64x128 c2", "64x64x128 c4", "128x128x128 c2", "64x96x128 c4",
)  # fmt: skip
# Cycles that a warpgroup takes for 64 of K, and more with full warps; of an instruction of a block of 64 rows, and of
# each of its columns; that the copy engine takes for a line.
WALK, FULL, START, COLUMN, LINE = 253.0, 156.0, 8.46, 0.63, 8.5
REFILL, STAGE = 3600.0, 522.0  # cycles from a buffer's release until it is full, and of a stage
FROM_CACHE, ACROSS = 1.41, 1.30  # of the model's for a line; of lines of rows, which lie in more words than they need
STORE, COPY = 3500.0, 2.4  # cycles of a tile's end; microseconds


@lru_cache(maxsize=4096)
def ranked(p: Product) -> tuple[UnalignedConfig, ...]:
    """Legal configurations whose tiles divide the rows of A evenly, the fastest first."""
    times = {}
    for rows, depth, cluster, parts in itertools.product((32, 64, 128), (128, 256), (1, 2, 4), range(1, 9)):
        cols = -(-p.m // (8 * cluster * parts)) * 8 * cluster
        config = UnalignedConfig(rows, cols, depth, cluster)
        us = expected(p, config, H200)
        if us is not None:
            times[config] = us
    return tuple(sorted(times, key=times.__getitem__))


def expected(p: Product, config: UnalignedConfig, gpu: Gpu) -> float | None:
    """Microseconds by the model of `isogemm.backends.cuda.gemm.model`; None where the configuration is not legal."""
    found = readable(p)
    made = cut(found.product, config, gpu.multiprocessors) if found else None
    if found is None or made is None:
        return None
    across, rows = made.geometry.x.across, made.rows * config.warpgroups
    bulk = 64 * LINE * (config.rows == 128) if across else rows * LINE * 64 / config.depth
    walk = WALK + FULL * (config.rows > 32)
    tiles = made.tiles[0] * made.tiles[1] * p.batch * config.cluster
    tiling = Tiling(
        tiles=tiles,
        waves=made.waves,
        lines=FROM_CACHE * (rows * (ACROSS if across else 1) + config.cols / config.cluster),
        work=together(walk, 4 * config.warpgroups * (START + COLUMN * config.cols), bulk),
        stage=together(REFILL / (made.stages - 1), STAGE) * 64 / config.depth,
        store=STORE,
        stores=made.waves,
    )
    return microseconds(p, tiling, gpu) + COPY * (found.copy is not None)

"""The kernels that a run times: those that serve, and with ``--sweep`` many constants of those of vectors."""

from __future__ import annotations

from itertools import product as combined


def gemv_names(rows: int, sweep: bool) -> list[str]:
    """Kernels for a few rows of x."""
    listed = ["gemv_batched" if rows > 1 else "gemv_simd_multi", "gemv_simd"]
    if not sweep:
        return [*listed, f"gemv_vector ROWS={rows} OUTPUTS={min(rows, 2)} UNROLL={8 if rows == 1 else 2}"]
    unrolls = (4, 8, 16) if rows == 1 else (1, 2, 4)
    return [*listed, *(
        f"gemv_vector WORDS={words} ROWS={rows} OUTPUTS={outputs} UNROLL={unroll} WORKGROUP={threads}"
        for words, outputs, unroll, threads in combined((2, 4), (1, 2, 4), unrolls, (64, 128))
        if outputs * unroll <= 32 and (threads == 128 or outputs == 1)
    )]  # fmt: skip


TILES = (  # TILE_M, TILE_N, DEPTH, REG_M, REG_N
    (128, 128, 16, 8, 8), (128, 128, 32, 8, 8), (64, 128, 16, 8, 8), (128, 64, 16, 8, 8), (64, 64, 16, 8, 4),
    (64, 64, 16, 4, 4), (64, 64, 32, 8, 8), (64, 128, 16, 4, 8), (128, 128, 16, 8, 4), (64, 64, 32, 4, 4),
    (256, 128, 16, 8, 8), (128, 128, 16, 16, 8),
)  # fmt: skip


def gemm_names(sweep: bool) -> list[str]:
    """Tilings of a product of matrices."""
    if not sweep:
        return ["gemm_tiled", "gemm_vector", "gemm_vector TILE_M=64 TILE_N=64 REG_M=8 REG_N=4"]
    keys = ("TILE_M", "TILE_N", "DEPTH", "REG_M", "REG_N")
    tiles = [" ".join(f"{key}={value}" for key, value in zip(keys, tile, strict=True)) for tile in TILES]
    listed = ["gemm_tiled"]
    for i, tile in enumerate(tiles):
        shared = (TILES[i][0] + TILES[i][1]) * TILES[i][2] * 4
        for buffers in (1, 2):
            if buffers * shared <= 48 * 1024:
                listed.append(f"gemm_vector {tile} BUFFERS={buffers}")
    listed += [f"gemm_vector {tiles[0]} INNER={inner} SPREAD={spread}" for inner, spread in ((1, 1), (2, 1), (4, 0))]
    return listed

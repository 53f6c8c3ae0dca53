"""The kernels that a run times: those that serve, and with ``--sweep`` many constants of those of vectors."""

from __future__ import annotations

from itertools import product as combined

__all__ = ["block_names", "gemm_names", "gemv_names", "narrow_names"]


def gemv_names(rows: int, sweep: bool) -> list[str]:
    """Kernels for a few rows of x, with lanes."""
    listed = ["gemv_batched" if rows > 1 else "gemv_simd", "gemv_vector" if rows == 1 else "gemv_vector_batched"]
    if not sweep:
        return listed
    made = [(words, outputs, unroll, threads, ahead) for words, outputs, unroll, threads, ahead in combined(
        (4,) if rows == 1 else (2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), (64, 128), (0, 1)
    ) if _sensible(rows, words, outputs, unroll, threads, ahead)]  # fmt: skip
    return [listed[0], *(
        f"gemv_vector WORDS={words} ROWS={rows} OUTPUTS={outputs} UNROLL={unroll} WORKGROUP={threads} AHEAD={ahead}"
        for words, outputs, unroll, threads, ahead in made
    )]  # fmt: skip


def _sensible(rows: int, words: int, outputs: int, unroll: int, threads: int, ahead: int) -> bool:
    """Loads that registers hold, and enough of them; other groups than 128 threads for a few of those."""
    loads, sums = outputs * unroll * words, rows * outputs * words
    if threads != 128 and (ahead or outputs != 4):
        return False
    if rows == 1:
        return 32 <= loads * (1 + ahead) <= 128 and unroll >= 2
    return 8 <= sums <= 64 and 16 <= loads * (1 + ahead) <= 64 and outputs >= 2 and (threads == 128 or unroll == 2)


def block_names(rows: int, sweep: bool) -> list[str]:
    """Kernels for quantized weights."""
    name = "gemv_q4_0" if rows == 1 else "gemm_q4_0"
    if not sweep:
        return [name]
    return [
        f"{name} ALONG={along} DOWN={down} OUTPUTS={outputs}"
        for along, down, outputs in (
            (128, 1, 4), (128, 1, 8), (128, 1, 16), (128, 1, 32), (128, 2, 8), (128, 2, 16), (64, 2, 8), (64, 1, 16),
            (64, 4, 8), (64, 2, 16), (32, 4, 8), (32, 4, 4), (64, 4, 4),
        )
    ]  # fmt: skip


def narrow_names(sweep: bool) -> list[str]:
    """Kernels for a few rows of x, in the order of a chain: small tiles."""
    if not sweep:
        return ["gemv_naive", "gemm_narrow"]
    tiles = (
        (8, 32, 32, 4, 4, 1), (8, 64, 32, 4, 4, 1), (8, 64, 32, 4, 4, 2), (8, 64, 64, 4, 4, 1), (16, 32, 32, 4, 4, 1),
        (16, 32, 32, 4, 4, 2), (16, 64, 32, 4, 4, 2), (32, 32, 32, 4, 4, 1),
    )  # fmt: skip
    return ["gemv_naive", *(_tiles(*tile) for tile in tiles)]


TILES = (  # TILE_M, TILE_N, DEPTH, REG_M, REG_N
    (128, 128, 16, 8, 8), (128, 128, 32, 8, 8), (64, 128, 16, 8, 8), (128, 64, 16, 8, 8), (64, 64, 16, 8, 4),
    (64, 64, 16, 8, 8), (64, 64, 32, 8, 4), (64, 128, 16, 4, 8), (128, 128, 16, 16, 8),
)  # fmt: skip


def _tiles(m: int, n: int, depth: int, reg_m: int, reg_n: int, buffers: int, more: str = "") -> str:
    sizes = f"TILE_M={m} TILE_N={n} DEPTH={depth} REG_M={reg_m} REG_N={reg_n} BUFFERS={buffers}"
    return f"gemm_vector {sizes}{more}"


def gemm_names(sweep: bool) -> list[str]:
    """Tilings of a product of matrices."""
    if not sweep:
        return ["gemm_tiled", "gemm_vector", "gemm_small"]
    listed = []
    for m, n, depth, reg_m, reg_n in TILES:
        listed += [_tiles(m, n, depth, reg_m, reg_n, 1)]
        listed += [_tiles(m, n, depth, reg_m, reg_n, 1, " SPREAD=0")]
    return [*listed, _tiles(128, 128, 16, 8, 8, 2), _tiles(64, 64, 16, 8, 4, 2), _tiles(64, 64, 16, 8, 8, 2)]

"""The kernels that a run times: those that serve, and with ``--sweep`` many constants of those of vectors."""

from __future__ import annotations

__all__ = ["block_names", "gemm_names", "gemv_names", "narrow_names"]


ONE = (  # WORDS, OUTPUTS, UNROLL, WORKGROUP, AHEAD, CHUNK
    (4, 1, 4, 256, 1, 0), (4, 1, 4, 32, 1, 0), (2, 1, 4, 64, 1, 0), (2, 1, 8, 64, 1, 0),
)  # fmt: skip
FOUR = (
    (2, 2, 4, 128, 1, 512), (2, 2, 4, 128, 0, 512), (2, 4, 2, 64, 0, 0), (2, 2, 4, 64, 1, 0), (2, 4, 2, 128, 0, 256),
)  # fmt: skip


def gemv_names(rows: int, sweep: bool) -> list[str]:
    """Kernels for a few rows of x, with lanes."""
    listed = ["gemv_simd", "gemv_vector"] if rows == 1 else ["gemv_batched", "gemv_vectors"]
    if not sweep:
        return listed
    keys = ("WORDS", "OUTPUTS", "UNROLL", "WORKGROUP", "AHEAD", "CHUNK")
    return [
        f"gemv_vector ROWS={rows} " + " ".join(f"{key}={value}" for key, value in zip(keys, made, strict=True))
        for made in (ONE if rows == 1 else FOUR)
    ]


def block_names(rows: int, sweep: bool) -> list[str]:
    """Kernels for quantized weights."""
    name = "gemv_q4_0" if rows == 1 else "gemm_q4_0"
    if not sweep:
        return [name]
    one, four = (
        ((128, 1, 4), (128, 1, 2), (64, 2, 4), (64, 1, 4), (32, 4, 4)),
        ((32, 4, 2), (64, 2, 2), (128, 1, 2), (64, 1, 4)),
    )
    return [f"{name} ALONG={along} DOWN={down} OUTPUTS={each}" for along, down, each in (one if rows == 1 else four)]


def narrow_names(sweep: bool) -> list[str]:
    """Kernels for a few rows of x, in the order of a chain."""
    tiles = ((16, 32, 32), (8, 64, 32), (16, 64, 32), (32, 64, 16), (32, 32, 32)) if sweep else ()
    return ["gemv_naive", "gemm_narrow", "gemm_vector", *(_tiles(*tile, 4, 4, 1) for tile in tiles)]


TILES = (  # TILE_M, TILE_N, DEPTH, REG_M, REG_N, BUFFERS, SPREAD
    (64, 128, 16, 8, 8, 1, 0), (64, 64, 16, 8, 8, 1, 0), (64, 64, 32, 8, 4, 1, 0), (64, 64, 16, 8, 4, 1, 0),
)  # fmt: skip
OF_FLOATS = ((64, 128, 8, 8, 8, 2, 0),)  # whose loads are four elements


def _tiles(m: int, n: int, depth: int, reg_m: int, reg_n: int, buffers: int, spread: int = 1) -> str:
    sizes = f"TILE_M={m} TILE_N={n} DEPTH={depth} REG_M={reg_m} REG_N={reg_n} BUFFERS={buffers}"
    return f"gemm_vector {sizes} SPREAD={spread}"


def gemm_names(sweep: bool, dtype: str) -> list[str]:
    """Tilings of a product of matrices."""
    tiles = (*TILES, *OF_FLOATS) if dtype == "float32" else TILES
    return [_tiles(*tile) for tile in tiles] if sweep else ["gemm_tiled", "gemm_vector"]

"""Which kernel: by M, then by N, then by how b lies. The contract is asked for, and no choice here changes a bit."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Crossovers", "choose"]


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Where one kernel begins to be faster than another.

    Attributes
    ----------
    tiles : int
        Rows from which tiles serve, and below which products go row by row.
    batch : int
        Rows from which a group takes several rows of x.
    wide : int
        Columns from which x is staged for a whole workgroup.
    several : int
        Columns from which a group takes several.
    source : str
        Measured, or where the numbers are from.
    """

    tiles: int = 32
    batch: int = 2
    wide: int = 16384
    several: int = 2048
    source: str = "not measured: the middle of the chapter's 16 to 64"


def choose(order: str, m: int, n: int, across: bool, at: Crossovers) -> str:
    """The name of a kernel for `m` rows and `n` columns.

    Parameters
    ----------
    order : {"chain", "lanes", "integers"}
    across : bool
        Neighbouring columns of b are neighbours in memory.
    at : Crossovers
    """
    if order == "integers":
        return "gemv_q4_0" if m < at.batch else "gemm_q4_0"
    if m >= at.tiles:
        return "gemm_tiled" if order == "chain" else "gemm_lanes"
    if order == "chain":
        return "gemv_transposed" if across else "gemv_naive"
    if m >= at.batch:
        return "gemv_batched"
    return "gemv_wide" if n >= at.wide else "gemv_simd_multi" if n >= at.several else "gemv_simd"

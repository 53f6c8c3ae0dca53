"""One hash over products of every kernel: the same whatever instructions they are compiled to.

Run as a script it prints ``isa digest``; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose the instructions.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from tests.products import BF16, F16, F32, values

import isogemm
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.gemm import execute
from isogemm.problem.settings import PLAIN, Settings

MIXES = ((F32, F32, F32), (BF16, BF16, BF16), (F16, F16, F16), (F32, F16, F32))
SHAPES = ((1, 37, 45), (3, 37, 45), (11, 19, 45), (20, 37, 45), (70, 3, 21), (200, 19, 45), (6, 9, 530), (13, 9, 830))
SCALED = Settings(isogemm.Contract(), alpha=0.3, beta=-2.0)


def digest() -> str:
    """Outputs of gemv, gemv in turns, stream, small, skinny, tiled, prepared and swapped walks, epilogues included."""
    found = hashlib.sha256()
    for da, db, dtype in MIXES:
        for m, n, k in SHAPES:
            a, w = values((m, k), da, seed=m, special=True), values((n, k), db, seed=n, special=True)
            c, bias = values((m, n), seed=k, special=True), values((n,), seed=k)
            for b in (w.T, np.ascontiguousarray(w.T), isogemm.pack(w)):
                for asked, read in ((PLAIN, {}), (SCALED, {"c": c, "bias": bias})):
                    found.update(_bytes(a, b, (m, n), dtype, asked, read))
    return found.hexdigest()


def _bytes(
    a: np.ndarray, b: Any, shape: tuple[int, int], dtype: np.dtype[Any], asked: Settings, read: dict[str, Any]
) -> bytes:
    out = np.full(shape, np.nan, dtype)
    execute.gemm(a, b, out, asked, **read)
    return out.tobytes()


if __name__ == "__main__":
    print(target().isa, digest())

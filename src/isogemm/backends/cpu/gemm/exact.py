"""Products of int8, exact in int32, by the kernels of float32.

A product of two int8 is at most 2**14, so a sum of 1024 of them is at most 2**24: float32 holds it and every sum on the
way to it, whatever their order. Such pieces of K are float32 products; their results meet as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import FLOAT32
from ....problem.settings import PLAIN

Array = NDArray[Any]
PIECE = 2**24 // 2**14


def exact_product(gemm: Callable[..., None], a: Array, b: Array, out: Array) -> None:
    """out [m, n] of int32 = a [m, k] @ b [k, n] of int8, of any strides.

    Parameters
    ----------
    gemm : callable
        ``gemm(a, b, out, settings)`` of float32.
    """
    k = a.shape[1]
    sums = np.empty(out.shape, FLOAT32)
    out[...] = 0
    for start in range(0, k, PIECE):
        here = slice(start, start + PIECE)
        gemm(a[:, here].astype(FLOAT32), b[here].astype(FLOAT32), sums, PLAIN)
        np.add(out, sums, out=out, casting="unsafe", dtype=np.int32)

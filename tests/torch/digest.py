"""One hash over every operation along rows: the same whatever instructions it is compiled to.

Run as a script it prints ``isa digest``; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose the instructions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from tests.products import DTYPES, F32, values

from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.rows import run as rows

SHAPES = ((3, 1), (2, 37), (5, 128), (2, 202), (3, 1000))


def digest() -> str:
    found = hashlib.sha256()
    for dtype in DTYPES:
        for m, n in SHAPES:
            for operation in rows.loops.KERNELS:
                found.update(outcome(operation, dtype, m, n))
    return found.hexdigest()


def outcome(operation: str, dtype: np.dtype, m: int, n: int) -> bytes:
    """Bits of one operation on [m, n], a few special values among them."""
    if operation.startswith("rope"):
        n += n % 2
    x, y = (values((m, n), dtype, seed=seed, special=True) for seed in (n, n + 1))
    weight, bias = values((n,), dtype, seed=n + 2), values((n,), F32, seed=n + 3)
    tables = values((2, m, n // 2), F32, seed=n + 4)
    others = {
        "rms_norm": (weight,),
        "layer_norm": (weight, bias),
        "silu_mul": (y,),
        "rope": tuple(tables),
        "rope_interleaved": tuple(tables),
    }
    out = np.full((m, 1 if operation in ("sum", "mean") else n), np.nan, dtype)
    rows.run(operation, x, out, *others.get(operation, ()), epsilon=1e-5)
    return out.tobytes()


if __name__ == "__main__":
    print(target().isa, digest())

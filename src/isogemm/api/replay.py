"""Run a product by the schedule of a given plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.cpu.gemm import execute
from ..backends.cpu.gemm.packed import PackedWeight
from ..errors import DTypeError, ShapeError
from .plan import Plan


def replay(plan: Plan, a: Any, b: Any) -> Any:
    """a[m, k] @ b[k, n] by `plan`; bits do not depend on which plan it is."""
    packed = isinstance(b, PackedWeight)
    shapes = tuple(a.shape), (b.k, b.n) if packed else tuple(b.shape)
    expected = (plan.m, plan.k), (plan.k, plan.n)
    if shapes != expected or packed != plan.packed:
        raise ShapeError("operands of a replay", limit=expected, value=shapes, nearest="plan these operands anew")
    types = a.dtype.name, b.dtype.name
    if types != (plan.numeric.dtype_a, plan.numeric.dtype_b):
        raise DTypeError("operands of a replay", limit=plan.numeric.dtype_a, value=types, nearest="the plan's types")
    import ml_dtypes

    out_type = np.dtype(ml_dtypes.bfloat16 if plan.numeric.out_dtype == "bfloat16" else plan.numeric.out_dtype)
    out = np.empty((plan.m, plan.n), out_type)
    execute.gemm(a, b, out, contract=plan.contract, chosen=plan.schedule)
    return out

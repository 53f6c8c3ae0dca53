"""Runs validated products on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...contract.spec import Contract

Array = NDArray[Any]


def gemm(
    a: Array,
    b: Array,
    out: Array,
    *,
    contract: Contract,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    bias: Array | None = None,
    accumulate: bool = False,
) -> None:
    """out = alpha * (a @ b) + beta * c + bias."""
    from ...contract import reference

    acc = reference.evaluate(a, b, contract, c if accumulate else None)
    out[...] = reference.epilogue(acc, alpha=alpha, beta=beta, c=c, bias=bias, out_dtype=out.dtype)


def gemm_batched(a: Array, b: Array, out: Array, *, c: Array | None = None, **options: Any) -> None:
    """`gemm` on each item of 3-D operands."""
    for i in range(out.shape[0]):
        gemm(a[i], b[i], out[i], c=None if c is None else c[i], **options)


def gemm_items(items: Sequence[tuple[Array, Array, Array, Array | None]], **options: Any) -> None:
    """`gemm` on each (a, b, out, c)."""
    for a, b, out, c in items:
        gemm(a, b, out, c=c, **options)

"""Contracts without a kernel, served by their executable definition: exact, and slower."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ....contract import reference
from ....contract.spec import Contract
from .packed import PackedWeight


def gemm_by_definition(
    a: NDArray[Any],
    b: NDArray[Any] | PackedWeight,
    out: NDArray[Any],
    *,
    contract: Contract,
    c: NDArray[Any] | None = None,
    accumulate: bool = False,
    **epilogue: Any,
) -> None:
    """out = epilogue(a @ b) as `isogemm.contract.reference` defines it."""
    if isinstance(b, PackedWeight):
        b = b.unpack().T
    acc = reference.evaluate(a, b, contract, c if accumulate else None)
    out[...] = reference.epilogue(acc, c=None if accumulate else c, out_dtype=out.dtype, **epilogue)

"""Orders made of leaves, from chains: every leaf is a chain from zero, leaf sums meet in fp32.

leafL   total = (((c0 + leaf0) + leaf1) + ...)          c0 is +0, or C
treeN   balanced binary tree over N leaves
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.floating import ieee_defaults
from ....contract.spec import Contract, Order
from .packed import PackedWeight

Array = NDArray[Any]


def gemm_in_leaves(
    gemm: Callable[..., None],
    a: Array,
    b: Array | PackedWeight,
    out: Array,
    *,
    contract: Contract,
    c: Array | None = None,
    accumulate: bool = False,
    **epilogue: Any,
) -> None:
    """out = epilogue(a @ b) with the order of `contract`; `gemm` computes the chains."""
    from ....contract import reference

    if isinstance(b, PackedWeight):
        b = b.unpack().T
    chain = Contract(contract.arithmetic, Order())
    leaves = contract.order.leaves(a.shape[1], contract.block)

    def leaf(start: int, end: int) -> NDArray[np.float32]:
        part = np.empty(out.shape, np.float32)
        gemm(a[:, start:end], b[start:end], part, contract=chain)
        return part

    with np.errstate(all="ignore"), ieee_defaults():
        if contract.order.kind == "leaf":
            total = np.zeros(out.shape, np.float32)
            if accumulate and c is not None:
                total[...] = c
            for start, end in leaves:
                total += leaf(start, end)
        else:
            total = _tree([leaf(*bounds) for bounds in leaves])
    out[...] = reference.epilogue(total, c=None if accumulate else c, out_dtype=out.dtype, **epilogue)


def _tree(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]

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
from ....contract.spec import Contract
from ....problem.settings import PLAIN

Array = NDArray[Any]


def sums_of_leaves(
    gemm: Callable[..., None], a: Array, b: Array, contract: Contract, c: Array | None
) -> NDArray[np.float32]:
    """The accumulators of a @ b; `gemm` computes the chains, and the running total of leaves starts from `c`."""
    shape = a.shape[0], b.shape[1]

    def leaf(start: int, end: int) -> NDArray[np.float32]:
        part = np.empty(shape, np.float32)
        gemm(a[:, start:end], b[start:end], part, PLAIN)
        return part

    leaves = contract.order.leaves(a.shape[1], contract.block)
    with np.errstate(all="ignore"), ieee_defaults():
        if contract.order.kind == "tree":
            return _tree([leaf(*bounds) for bounds in leaves])
        total = np.zeros(shape, np.float32)
        if c is not None:
            total[...] = c
        for start, end in leaves:
            total += leaf(start, end)
        return total


def _tree(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]

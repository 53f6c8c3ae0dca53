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
ADDED = PLAIN._replace(beta=1.0)  # to C, which is the total so far


def sums_of_leaves(
    gemm: Callable[..., None], a: Array, b: Array, contract: Contract, c: Array | None, total: Array
) -> Array:
    """The accumulators of a @ b; `gemm` computes the chains, and the running total of leaves starts from `c`.

    Those of leafL are in `total`, float32, which may be `c`: a kernel adds the total so far to a tile of a leaf's sums.
    """
    leaves = contract.order.leaves(a.shape[1], contract.block)
    if contract.order.kind == "tree":
        with np.errstate(all="ignore"), ieee_defaults():
            return _tree([_chain(gemm, a[:, start:end], b[start:end]) for start, end in leaves])
    so_far = np.broadcast_to(np.zeros(total.shape[1], np.float32), total.shape) if c is None else c
    for start, end in leaves:
        gemm(a[:, start:end], b[start:end], total, ADDED, c=so_far)
        so_far = total
    if so_far is not total:
        total[...] = so_far
    return total


def _chain(gemm: Callable[..., None], a: Array, b: Array) -> NDArray[np.float32]:
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    gemm(a, b, out, PLAIN)
    return out


def _tree(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]

"""In which order a right result was summed, where its bits can tell: held against executable contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..contract import reference
from ..errors import IsogemmError
from .case import Array, GemmCall

__all__ = ["order_of"]

CORNER = 12  # rows and columns
SPLITS = (2, 3, 4, 8, 16)


def order_of(case: GemmCall, observed: Array) -> str:
    """The first known order that gives the bits of a corner of the result; "" where none does, or nothing was asked."""
    if case.alpha != 1 or case.beta != 0 or case.bias is not None or case.weights is not None or not case.sizes[2]:
        return ""
    a, b = case.a.values()[0][:CORNER], case.b.values()[0][:, :CORNER]
    a, b = a.astype(case.a.flat.dtype), b.astype(case.b.flat.dtype)
    at = case.c.positions()[0, :CORNER, :CORNER]
    want = observed[at]
    for words, sums in _orders(a, b):
        try:
            found = sums()
        except IsogemmError:
            continue
        if found.astype(want.dtype).tobytes() == want.tobytes():
            return words
    return ""


def _orders(a: Array, b: Array) -> Iterator[tuple[str, Callable[[], Array]]]:
    """Words, and the sums of that order."""
    chains = ["fma"] if a.dtype == np.float32 else ["tensor_core:sm90", "tensor_core:sm80", "fma"]
    if a.dtype == np.float64:
        return
    for arithmetic in chains:
        chain = f"{arithmetic}/chain"
        for order in ("chain", "tree2", "tree4", "tree8", "leaf256", "leaf1024"):
            yield f"{arithmetic}/{order}", partial(reference.evaluate, a, b, f"{arithmetic}/{order}")
        for parts in SPLITS:
            yield f"split-K of {parts}, each part {chain}", partial(_blocks, a, b, -(-a.shape[1] // parts), chain)
        for size in (16, 32, 64, 128):
            yield f"blocks of {size}, each {chain}, then added", partial(_blocks, a, b, size, chain)
        yield f"{chain} from the end", partial(reference.evaluate, a[:, ::-1].copy(), b[::-1].copy(), chain)


def _blocks(a: Array, b: Array, size: int, contract: str) -> Array:
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for start in range(0, a.shape[1], size):
        part = slice(start, start + size)
        total = total + reference.evaluate(a[:, part].copy(), b[part].copy(), contract)
    return total

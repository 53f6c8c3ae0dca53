"""In which order a right result was summed, where its bits can tell: held against executable contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..contract import reference
from ..errors import IsogemmError
from .case import Array, GemmCall

CORNER = 12  # rows and columns
END = " from the end"
SPLITS = (2, 3, 4, 8, 16)


def order_of(case: GemmCall, observed: Array) -> str:
    """The first known order that gives the bits of a corner of the result; "" where none does, or no bit tells."""
    if not _plain(case):
        return ""
    a, b, want = _corner(case, observed)
    if not np.isfinite(want.astype(np.float64)).all():  # what is infinite, or no number, is so in every order
        return ""
    orders = dict(_orders(a, b))
    words = next((name for name, sums in orders.items() if _gives(sums, want)), "")
    # Sums that are exact, or rounded to few bits, are those of every order: also from the end, also of other cores.
    others = [name for name in orders if words and name != words and _unlike(name, words)]
    return "" if any(_gives(orders[name], want) for name in others) else words


def _gives(sums: Callable[[], Array], want: Array) -> bool:
    try:
        return sums().astype(want.dtype).tobytes() == want.tobytes()
    except IsogemmError:
        return False


def _unlike(name: str, words: str) -> bool:
    """Whether an order is another one even where K is short: a chain from the end, or of other arithmetic."""
    arithmetic, _, order = name.partition("/")
    return name.endswith(END) or (order == "chain" and " " not in arithmetic and arithmetic not in words)


def follows(case: GemmCall, observed: Array, contract: str) -> bool:
    """Whether a right result has the bits of a contract; True too where that cannot be told from a call.

    Raises ContractError or DTypeError: no such contract, or not for these operands.
    """
    if not _plain(case):
        return True
    a, b, want = _corner(case, observed)
    return bool(reference.evaluate(a, b, contract).astype(want.dtype).tobytes() == want.tobytes())


def _plain(case: GemmCall) -> bool:
    """Whether the call is a sum and nothing else."""
    scaled = case.alpha != 1 or case.beta != 0 or case.bias is not None
    return not (scaled or case.weights is not None) and min(case.sizes) > 0


def _corner(case: GemmCall, observed: Array) -> tuple[Array, Array, Array]:
    """Some rows of A, columns of B and what was seen there."""
    a, b = case.a.values()[0][:CORNER], case.b.values()[0][:, :CORNER]
    at = case.c.positions()[0, :CORNER, :CORNER]
    return a.astype(case.a.flat.dtype), b.astype(case.b.flat.dtype), observed[at]


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
        yield chain + END, partial(reference.evaluate, a[:, ::-1].copy(), b[::-1].copy(), chain)


def _blocks(a: Array, b: Array, size: int, contract: str) -> Array:
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for start in range(0, a.shape[1], size):
        part = slice(start, start + size)
        total = total + reference.evaluate(a[:, part].copy(), b[part].copy(), contract)
    return total

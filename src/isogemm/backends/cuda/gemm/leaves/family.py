"""Products in leaves or in a tree of them, the leaves side by side: each a chain of its own, met by a second kernel.

A leaf is a product over its part of K, and all that are equally long are the items of one batch: kernels of chains
multiply them, Hopper's or those of float32, and their configurations are this family's. A last leaf that is shorter has
a launch to itself. The sums wait in a workspace for gemm/meet.cu. With ``pairs`` in front of a configuration two leaves
that are neighbours in a tree are walked one after the other, and half as many sums are written and read again.

Where a product has few tiles and a long K, this is what keeps a chain from being as fast as kernels that cut K anyhow:
a chain of 30,000 takes 20 us on an H200 whatever runs beside it, eight leaves of it take 3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .....base.dtypes import ITEMSIZE
from .....contract.spec import Contract, Order
from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product
from ...driver.workspace import workspace
from ..hopper.family import Hopper
from ..meet import meet_of, pitched
from ..model import gpu_of, joining
from ..sgemm.family import Sgemm

__all__ = ["Leaves", "Walks", "walks"]

CHAINS: dict[str, ProductFamily] = {"tensor_core:sm90": Hopper(), "fma": Sgemm()}
MOST = 64  # leaves: with more, their sums take more bytes than what is multiplied
PAIRS, BLOCK = "pairs ", 64  # a leaf of a pair is a multiple of so many of K, the least depth of a stage
GRAIN = 16  # bytes that a leaf begins at a multiple of, wherever its matrix does


class Walks(NamedTuple):
    """The walks of a product.

    Attributes
    ----------
    even : Product
        All leaves of one length, or all pairs of them, as items of a batch.
    rest : Product or None
        The last one, where it is shorter.
    number : int
        Of sums that meet.
    met : Product
        The product, as one of so many sums.
    """

    even: Product
    rest: Product | None
    number: int
    met: Product


@lru_cache(maxsize=4096)
def walks(p: Product, pairs: bool = False) -> Walks | None:
    """None where there is one walk, or too many, or no kernel here walks them."""
    order, arithmetic = p.contract.order, p.contract.arithmetic
    if arithmetic not in CHAINS or order.kind not in ("leaf", "tree") or p.batch > 1 or min(p.m, p.n, p.k) < 1:
        return None
    if pairs:
        if order.kind == "leaf" or order.size < 4 or p.k % (order.size * BLOCK):
            return None
        half = Order("tree", order.size // 2)
        return _cut(p, half, Order("tree", 2))
    return _cut(p, order, Order())


def _cut(p: Product, order: Order, within: Order) -> Walks | None:
    """Leaves of `order`, each walked in the order `within`."""
    arithmetic = p.contract.arithmetic
    ends = [end for begin, end in order.leaves(p.k, p.contract.block) if end > begin]
    length, last = ends[0], ends[-1] - (len(ends) - 1) * ends[0]
    if not 2 <= len(ends) <= MOST or length * ITEMSIZE[p.dtype_a] % GRAIN:
        return None
    whole = len(ends) - (last < length)
    one = replace(p.sums(1, pitched(p.n)), contract=Contract(arithmetic, within), accumulate=False)
    even = replace(
        one, k=length, batch=whole, out=one.out._replace(batch=p.m * pitched(p.n)),
        a=p.a._replace(batch=length * p.a.col), b=p.b._replace(batch=length * p.b.row),
    )  # fmt: skip
    rest = replace(one, k=last, align=min(p.align, GRAIN)) if last < length else None
    return Walks(even, rest, len(ends), replace(p, contract=Contract(arithmetic, order)))


def _read(p: Product, config: str) -> tuple[Walks | None, str]:
    """The walks of a configuration, and the configuration of their kernels."""
    inner = config.removeprefix(PAIRS)
    return walks(p, inner != config), inner


class Leaves(ProductFamily):
    """The family; see the text of this module."""

    name, home = "leaves", "backends/cuda/gemm/leaves"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Those of the walks."""
        found = []
        for before in ("", PAIRS):
            walked = walks(product, bool(before))
            names = CHAINS[product.contract.arithmetic].configs(walked.even) if walked else ()
            found += [before + name for name in names if self.supports(product, before + name)]
        return tuple(found)

    def supports(self, product: Product, config: str) -> bool:
        """Whether all walks can be walked so."""
        found, inner = _read(product, config)
        family = CHAINS.get(product.contract.arithmetic)
        return found is not None and all(family.supports(p, inner) for p in (found.even, found.rest) if p and family)

    def microseconds(self, product: Product, config: str, device: int) -> float | None:
        """The walks' time, and their meeting's."""
        found, inner = _read(product, config)
        if found is None:
            return None
        family = CHAINS[product.contract.arithmetic]
        parts = [family.microseconds(p, inner, device) for p in (found.even, found.rest) if p]
        if None in parts:
            return None
        return sum(x for x in parts if x) + joining(product, found.number, gpu_of(device))

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind all of the two or three kernels."""
        found, inner = _read(product, config)
        assert found is not None, f"{config} does not serve {product}"
        family, even = CHAINS[product.contract.arithmetic], found.even
        walk = family.bind(even, inner, device)
        last = family.bind(found.rest, inner, device) if found.rest else None
        meet = meet_of(found.met, found.number, device)
        size = ITEMSIZE[product.dtype_a]
        steps = (even.batch * even.a.batch * size, even.batch * even.b.batch * size, 4 * even.batch * even.out.batch)
        nbytes = 4 * found.number * even.out.batch

        def enqueue(at: Addresses, stream: int) -> None:
            memory = workspace(nbytes, device)
            sums = memory.data_ptr()
            walk(Addresses(at.a, at.b, sums), stream)
            if last:
                last(Addresses(at.a + steps[0], at.b + steps[1], sums + steps[2]), stream)
            meet(stream, sums, at.out, at.c, at.bias)

        return enqueue

"""Products in leaves or in a tree of them, the leaves side by side: each a chain of its own, met by a second kernel.

A leaf is a product over its part of K, and all that are equally long are the items of one batch: kernels of chains
multiply them, Hopper's or those of float32, and their configurations are this family's. A last leaf that is shorter has
a launch to itself. The sums wait in a workspace for gemm/meet.cu.

Where a product has few tiles and a long K, a chain waits for itself: M 64, N 512, K 25472 takes 25 us on an H200, as
eight leaves 16 (docs/design/0011-cost-model.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .....base.dtypes import ITEMSIZE
from .....contract.spec import Contract
from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product
from ...driver.workspace import workspace
from ..hopper.family import Hopper
from ..meet import meet_of, pitched
from ..model import Gpu, gpu_of, joining
from ..sgemm.family import Sgemm

CHAINS: dict[str, ProductFamily] = {"tensor_core:sm90": Hopper(), "fma": Sgemm()}
MOST = 64  # leaves: with more, their sums take more bytes than what is multiplied
GRAIN = 16  # bytes that a leaf begins at a multiple of, wherever its matrix does


class Walks(NamedTuple):
    """The chains of a product.

    Attributes
    ----------
    even : Product
        All leaves of one length, as items of a batch.
    rest : Product or None
        The last one, where it is shorter.
    number : int
        Of leaves, both kinds.
    """

    even: Product
    rest: Product | None
    number: int


@lru_cache(maxsize=4096)
def walks(p: Product) -> Walks | None:
    """None where there is one chain, or too many, or no kernel here walks them."""
    order, family = p.contract.order, CHAINS.get(p.contract.arithmetic)
    if family is None or order.kind not in ("leaf", "tree") or p.batch > 1 or min(p.m, p.n, p.k) < 1:
        return None
    ends = [end for begin, end in order.leaves(p.k, p.contract.block) if end > begin]
    length, last = ends[0], ends[-1] - (len(ends) - 1) * ends[0]
    if not 2 <= len(ends) <= MOST or length * ITEMSIZE[p.dtype_a] % GRAIN:
        return None
    whole = len(ends) - (last < length)
    one = replace(p.sums(1, pitched(p.n)), contract=Contract(p.contract.arithmetic), accumulate=False)
    even = replace(
        one, k=length, batch=whole, out=one.out._replace(batch=p.m * pitched(p.n)),
        a=p.a._replace(batch=length * p.a.col), b=p.b._replace(batch=length * p.b.row),
    )  # fmt: skip
    rest = replace(one, k=last, align=min(p.align, GRAIN)) if last < length else None
    return Walks(even, rest, len(ends))


class Leaves(ProductFamily):
    """The family; see the text of this module."""

    name, home = "leaves", "backends/cuda/gemm/leaves"

    def configs(self, product: Product) -> tuple[str, ...]:
        """The configurations of the chains that a product is cut into."""
        found = walks(product)
        names = CHAINS[product.contract.arithmetic].configs(found.even) if found else ()
        return tuple(name for name in names if self.supports(product, name))

    def supports(self, product: Product, config: str) -> bool:
        """Whether the chains can be walked so, all of them."""
        found = walks(product)
        family = CHAINS.get(product.contract.arithmetic)
        return found is not None and all(family.supports(p, config) for p in (found.even, found.rest) if p and family)

    def microseconds(self, product: Product, config: str, device: int | Gpu) -> float | None:
        """The chains' time, and their meeting's."""
        found = walks(product)
        if found is None:
            return None
        family = CHAINS[product.contract.arithmetic]
        parts = [family.microseconds(p, config, device) for p in (found.even, found.rest) if p]
        if None in parts:
            return None
        return sum(x for x in parts if x) + joining(product, found.number, gpu_of(device))

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind all of the two or three kernels."""
        found = walks(product)
        assert found is not None, f"{config} does not serve {product}"
        family, even = CHAINS[product.contract.arithmetic], found.even
        walk = family.bind(even, config, device)
        last = family.bind(found.rest, config, device) if found.rest else None
        meet = meet_of(product, found.number, device)
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

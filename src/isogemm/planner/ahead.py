"""What is built for products to come: kernels that serve all of a variant nearly as well as any, and when.

A product's own variant first, three kernels of each family; then as many for the variants that its layer has besides,
the gradients' layouts and the same with a bias or without, and then the rest of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..problem.product import Product, Strides
from .tables import Use
from .trials import Alignment, ProductFamily, product_of, variant_of

# Of a palette's first three, one takes at most twice the time of the best kernel for 99 % of drawn products.
SOON = 3
FULL = Alignment(128, 16, 16, 16)
# y = x W', of which x' dy and dy W are the gradients, and y = x W, which some models keep: (layout, bias).
LAYER = (("NT", False), ("NN", False), ("TN", False), ("NT", True), ("NN", True))


class Ahead(NamedTuple):
    """A kernel to build: its turn, the lowest first, and a product of the variant that it is for."""

    rank: int
    use: Use
    product: Product


def ahead(families: Mapping[str, ProductFamily], product: Product) -> Iterator[Ahead]:
    """The kernels to build behind a product's first call."""
    yield from _of_palettes(families, product, 1, slice(SOON))
    for sibling in siblings(product):
        yield from _of_palettes(families, sibling, 2, slice(SOON))
    yield from _of_palettes(families, product, 3, slice(SOON, None))


def _of_palettes(families: Mapping[str, ProductFamily], product: Product, rank: int, part: slice) -> Iterator[Ahead]:
    for name, family in families.items():
        for config in family.palette(product)[part]:
            yield Ahead(rank, Use(name, config), product)


def siblings(product: Product) -> list[Product]:
    """A product of each variant that a layer has besides; none for operands that keep no 16 bytes, or an epilogue."""
    if product.c is not None or product.alpha != 1 or product.batch > 1 or Alignment.of(product) != FULL:
        return []
    own = variant_of(product)
    one = product_of(own)
    by_layout = {
        "NT": (Strides(one.k, 1), Strides(1, one.k)),
        "NN": (Strides(one.k, 1), Strides(one.n, 1)),
        "TN": (Strides(1, one.m), Strides(one.n, 1)),
    }
    every = (
        replace(one, a=a, b=b, out=Strides(one.n, 1), dtype_bias=one.dtype_b if bias else None, bias_stride=1)
        for layout, bias in LAYER
        for a, b in [by_layout[layout]]
    )
    return [sibling for sibling in every if variant_of(sibling) != own]

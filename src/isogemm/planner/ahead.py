"""What is built for products to come: kernels that serve all of a variant nearly as well as any, and when.

A product's own variant first, three kernels of each family; then as many for the variants that its layer has besides,
the gradients' layouts and the same with a bias or without, and then the rest of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..problem.numeric import letter
from ..problem.product import Product, Strides
from .tables import Use
from .trials import Alignment, ProductFamily, variant_of

# Of a palette: by the models, one of three takes at most twice the best's time for 97 to 99 % of drawn products.
SOON = 3
FULL = Alignment(128, 16, 16, 16)
# y = x W', of which x' dy and dy W are the gradients, and y = x W, which some models keep: (layout, bias).
LAYER = (("NT", False), ("NN", False), ("TN", False), ("NT", True), ("NN", True))
M, N, K = 32, 64, 1024  # a variant has no sizes


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
    layout = letter(product.a) + letter(product.b)
    by_layout = {
        "NT": (Strides(K, 1), Strides(1, K)),
        "NN": (Strides(K, 1), Strides(N, 1)),
        "TN": (Strides(1, M), Strides(N, 1)),
    }
    plain = product.c is None and product.alpha == 1 and product.batch == 1
    if not plain or layout not in by_layout or letter(product.out) != "N" or Alignment.of(product) != FULL:
        return []
    one = replace(product, m=M, n=N, k=K, out=Strides(N, 1), bias_stride=1)
    every = (
        replace(one, a=a, b=b, dtype_bias=(product.dtype_bias or product.dtype_b) if bias else None)
        for name, bias in LAYER
        for a, b in [by_layout[name]]
    )
    own = variant_of(product)
    return [sibling for sibling in every if variant_of(sibling) != own]

"""Lists of products in one launch: pointer arrays (one size) and groups (any sizes), over `kernels.items`.

Sizes, strides and addresses of all items go to the device as one table, from page-locked memory and without waiting.
A captured graph reads that memory again at every replay, so tables of captured launches are kept for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .....base.dtypes import TRITON
from .....planner.choose import Option, choose
from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, Strides
from ...driver import facts
from ...driver.kernel import Bound
from ...driver.triton_build import build
from ..tile.family import Tile, flags, unit

FIELDS = 15  # of a row of the table
# By mean rows an item; measured on an H200, 2026-11-21, as strided products of the same tiles.
CONFIGS = {16: "w64 x16 k128 s4 n4", 32: "w64 x32 k64 s4 n4", 64: "w64 x64 k64 s4 n4", 2**62: "x128 w128 k64 s4 n8"}
FMA_CONFIGS = {16: "w64 x16 k32 s3 n4", 2**62: "x64 w64 k16 s3 n4"}
LARGEST = 2**30  # of an extent: the kernel counts in 32 bits, up to a tile beyond it
_kept: list[Any] = []


class ItemsFamily(ProductFamily):
    """The family "items": a list of one is a product, which is how it is admitted. It is never tuned."""

    name, home = "items", "backends/cuda/gemm/lists"

    def configs(self, product: Product) -> tuple[str, ...]:
        """None: lists choose their own, see `run_items`."""
        del product
        return ()

    def supports(self, product: Product, config: str) -> bool:
        """Every order but a tree; no batch, no dependent launch."""
        tile = Tile.parse(config)
        return tile is not None and tile.lines is None and uniform([product])

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Launches a list of one."""

        def launch(at: Addresses, stream: int) -> None:
            _enqueue([(product, at)], config, device, stream)

        return launch


FAMILY = ItemsFamily()


def uniform(products: Sequence[Product]) -> bool:
    """Whether one launch can serve them: equal types, contract and epilogue, no batch, no tree, no tf32."""
    kinds = {
        (p.dtype_a, p.dtype_b, p.dtype_out, p.dtype_c, p.dtype_bias, p.bias_stride, p.contract, p.alpha, p.beta,
         p.accumulate)
        for p in products
    }  # fmt: skip
    contract = products[0].contract
    known = contract.arithmetic == "fma" or contract.arithmetic.startswith("tensor_core:")
    if not known or len(kinds) != 1 or contract.order.kind == "tree":
        return False
    return all(p.batch == 1 and max(p.m, p.n, p.k) < LARGEST for p in products)


def run_items(items: Sequence[tuple[Product, Addresses]], device: int, stream: int) -> None:
    """Enqueue products with at least one element and one step of K each; see `uniform`.

    One launch for all that are of one variant (layouts, alignment): it is a variant that is admitted.
    """
    parts: dict[tuple[Any, ...], list[tuple[Product, Addresses]]] = {}
    for item in items:
        parts.setdefault(_looks(item[0]), []).append(item)
    # Any refusal comes before the first launch.
    configs = [_admitted([product for product, _ in part], device) for part in parts.values()]
    for part, config in zip(parts.values(), configs, strict=True):
        _enqueue(part, config, device, stream)


def _looks(product: Product) -> tuple[Any, ...]:
    """What tells variants of a list apart, quickly: all else is equal there, see `uniform`."""
    worst = min([16, *(s & -s for s in _steps(product))])
    return unit(product.a), unit(product.b), unit(product.out), product.c and unit(product.c), product.align, worst


def _admitted(products: Sequence[Product], device: int) -> str:
    """The configuration for a list by its mean number of rows, which cannot reach the bits, or another admitted one."""
    from ..choose import chooser

    rows, contract = sum(p.m for p in products) / len(products), products[0].contract
    table = FMA_CONFIGS if contract.arithmetic == "fma" else CONFIGS
    best = next(config for limit, config in table.items() if rows <= limit)
    here = chooser(device)
    here.check_arithmetic(contract)
    options = [Option(FAMILY, config) for config in dict.fromkeys((best, *table.values()))]
    what, nearest = f"lists of {contract}", "gemm, item by item"
    config: str = choose(options, products[0], here.admissions, what=what, nearest=nearest).config
    return config


def _enqueue(items: Sequence[tuple[Product, Addresses]], config: str, device: int, stream: int) -> None:
    import torch

    tile = Tile.parse(config)
    assert tile is not None
    products = [product for product, _ in items]
    words, programs = fill(items, tile.block_m, tile.block_n)
    host = torch.empty(words.size, dtype=torch.int64, pin_memory=True)
    host.numpy()[:] = words
    table = host.to(torch.device("cuda", device), non_blocking=True)
    if facts.is_capturing(device):
        _kept.append(host)
    where = table.data_ptr()
    run = _bound(tuple(products), tile, device, programs)
    run(stream, where, where + 8 * FIELDS * len(items), items[0][1].bias)


def fill(items: Sequence[tuple[Product, Addresses]], block_m: int, block_n: int) -> tuple[NDArray[np.int64], int]:
    """The table of a list: rows of FIELDS words, then one word a program (item, tile), and the count of programs."""
    none = Strides(0, 0, 0)
    rows = np.array(
        [(*at[:4], p.m, p.n, p.k, *p.a[:2], *p.b[:2], *p.out[:2], *(p.c or none)[:2]) for p, at in items], np.int64
    )
    tiles = -(-rows[:, 4] // block_m) * -(-rows[:, 5] // block_n)
    programs = int(tiles.sum())
    pairs = np.empty((programs, 2), np.int32)
    pairs[:, 0] = np.repeat(np.arange(len(items)), tiles)
    pairs[:, 1] = np.arange(programs) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return np.concatenate([rows.ravel(), pairs.view(np.int64).ravel()]), programs


def _bound(products: tuple[Product, ...], tile: Tile, device: int, programs: int) -> Bound:
    """The launch of products of one variant, compiled for what all of them have in common."""
    import triton.language as tl

    from .items import items as kernel

    first = products[0]
    order = first.contract.order
    kinds = {"TYPE": first.dtype_a, "TYPE_B": first.dtype_b, "TYPE_OUT": first.dtype_out, "TYPE_C": first.dtype_c}
    constants = flags(first, tile, first.contract.arithmetic == "fma") | {
        **{name: getattr(tl, kind or "float32") for name, kind in kinds.items()},
        "FIELDS": FIELDS,
        "A_UNIT": _common(unit(p.a) for p in products),
        "B_UNIT": _common(unit(p.b) for p in products),
        "OUT_UNIT": _common(unit(p.out) for p in products),
        "ALIGNED": all(_aligned(p) for p in products),
        "EVEN_K": all(flags(p, tile, False)["EVEN_K"] for p in products),
    }
    fixed = {
        "bias_step": first.bias_stride,
        "leaf": min(order.size, 2**30) if order.kind == "leaf" else 0,
        "alpha": first.alpha,
        "beta": first.beta,
    }
    signature = {"table": "*i64", "tiles": "*i32", "bias": f"*{TRITON[first.dtype_bias or 'float32']}"}
    signature |= {"bias_step": "i64", "leaf": "i32", "alpha": "fp32", "beta": "fp32"}
    built = build(
        kernel, signature, constants, aligned=("table",), capability=facts.device(device).capability,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return built.bind(device, (programs,), fixed)


def _common(units: Any) -> int:
    found = set(units)
    return int(found.pop()) if len(found) == 1 else 2


def _aligned(product: Product) -> bool:
    return product.align >= 16 and product.k % 16 == 0 and all(s % 16 == 0 for s in _steps(product))


def _steps(product: Product) -> Iterator[int]:
    """The strides that the kernel is not compiled for: all but the 1 that `unit` names, were they 1 as well."""
    for x in (product.a, product.b, product.out):
        known = unit(x)
        yield from (step for step, place in ((x.col, 0), (x.row, 1)) if place != known)

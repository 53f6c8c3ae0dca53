"""What a copy of Hopper's kernels brings: a chunk of 64 of K, or all that a block loads of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as pairs
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from isogemm.backends.cuda.gemm.hopper import family
from isogemm.backends.cuda.gemm.hopper.config import HopperConfig, geometry
from isogemm.contract.spec import Contract
from isogemm.planner.trials import golden_products, variant_of
from isogemm.problem.product import Product, Strides

HOPPER = family.Hopper()
CHAIN, LEAF, TREE = (Contract.parse(f"tensor_core:sm90/{order}") for order in ("chain", "leaf256", "tree2"))
DEEP = (
    "w64x8x256 s6", "w32x16x256 s5 c1x4", "64x24x128 s8 c1x2", "64x24x128 s8 c1x8", "64x64x128 s4", "16x16x256 s3",
    "64x40x256 s2 c2x1", "128x64x128 s4",
)  # fmt: skip


def linear(layout: str, m: int, n: int, k: int, **more: Any) -> Product:
    """A packed product of that layout."""
    a = Strides(k, 1) if layout[0] == "N" else Strides(1, m)
    b = Strides(n, 1) if layout[1] == "N" else Strides(1, k)
    fixed = {"contract": CHAIN, "dtype_out": "bfloat16", "a": a, "b": b, "out": Strides(n, 1)}
    return Product(m=m, n=n, k=k, dtype_a="bfloat16", dtype_b="bfloat16", **(fixed | more))


def chunks(product: Product, text: str) -> tuple[int, int]:
    """Of both operands."""
    found = geometry(product, HopperConfig.parse(text))
    assert found is not None
    return found.chunks(product)


@pytest.mark.parametrize(
    ("text", "layout", "k", "found"),
    [
        ("w64x8x256 s6", "NT", 1344, (4, 4)),
        ("w64x8x256 s6", "NT", 1352, (0, 0)),  # no whole chunks
        ("w64x8x64 s6", "NT", 1344, (0, 0)),  # a stage is a chunk
        ("64x24x128 s8 c1x2", "NT", 1344, (1, 2)),  # two blocks share X: each brings a chunk of it
        ("64x24x128 s8 c1x4", "NT", 1344, (0, 2)),  # four bring rows of each chunk
        ("128x64x128 s4", "TN", 1352, (0, 2)),  # across K: one box of up to 64 rows or columns
        ("64x64x256 s3 c2x1", "TN", 1352, (4, 2)),
        ("64x64x512 s2", "TN", 1344, (0, 0)),  # a box has up to 256 lines
    ],
)
def test_a_copy_brings_a_stage_where_one_box_has_it(text, layout, k, found):
    assert chunks(linear(layout, 512, 768, k), text) == found


def test_of_several_items_a_copy_along_k_brings_a_chunk():
    """A map of chunks has no axis for items."""
    several = replace(linear("NT", 512, 768, 1024), batch=3, a=Strides(1024, 1, 1 << 20), out=Strides(768, 1, 1 << 20))
    assert chunks(several, "64x64x128 s4") == (0, 0)


VARIANTS = {
    "plain": {},
    "biased": {"dtype_bias": "bfloat16"},
    "scaled": {"alpha": 2.0},
    "accumulate": {"dtype_out": "float32", "c": Strides(768, 1), "dtype_c": "float32", "accumulate": True},
    "batched": {"batch": 3},
    "shared": {"batch": 3},  # one b
}


@pytest.mark.parametrize("contract", [CHAIN, LEAF, TREE], ids=str)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_that_serve_were_copies_of_a_trial(variant, layout, contract):
    """What a copy brings selects code, and is no part of a verdict: some golden product's has to bring as much."""
    for k in (256, 512, 1024, 1344, 1352, 4096):
        product = linear(layout, 512, 768, k, contract=contract, **VARIANTS[variant])
        if product.batch > 1:
            a, b, out = (x._replace(batch=1 << 20) for x in (product.a, product.b, product.out))
            product = replace(product, a=a, b=b if variant == "batched" else product.b, out=out)
        alike = [golden for golden in golden_products(product) if variant_of(golden) == variant_of(product)]
        for text in DEEP:
            if not HOPPER.supports(product, text):
                continue
            tried = {chunks(golden, text) for golden in alike if HOPPER.supports(golden, text)}
            refused = product.accumulate and contract is TREE  # for want of golden bits
            assert refused or chunks(product, text) in tried, (text, k)


@pytest.mark.parametrize("text", DEEP)
@pytest.mark.parametrize(("layout", "k"), [("NT", 1344), ("NT", 1352), ("NN", 1344), ("TN", 1352)])
def test_boxes_have_what_copies_bring(monkeypatch, text, layout, k):
    """All copies of all blocks that share a stage's operand have its bytes, and maps reach to the ends of operands."""
    maps: list[dict[str, Any]] = []
    monkeypatch.setattr(family, "encoder", lambda dtype, **about: maps.append(about))
    monkeypatch.setattr(family.facts, "device", lambda ordinal: SimpleNamespace(multiprocessors=132))
    monkeypatch.setattr(family, "function_of", lambda *code, **more: SimpleNamespace(bind=lambda *given, **way: None))
    product, config = linear(layout, 512, 768, k), HopperConfig.parse(text)
    g = geometry(product, config)
    if not HOPPER.supports(product, text):
        assert g.y.across  # a box of columns across K fills 64 lines, and there is no room for them
        return
    HOPPER.bind(product, text, 0)
    defines = family.source(product, g)[1]
    sides = ((g.x, g.x_rows, config.cn, min(config.rows, 64)), (g.y, config.cols, config.cm, 64))
    for (side, rows, split, line), in_a_copy, about, name in zip(sides, g.chunks(product), maps, "XY", strict=True):
        whole = in_a_copy > 0
        assert defines[f"{name}_WHOLE"] == whole
        lines = -(-rows // line) * line if side.across else rows
        copies = split * (1 if whole else config.depth // 64 * (lines // line if side.across else 1))
        assert about["swizzle"] == 2 * about["box"][-1]
        assert prod(about["box"]) * copies == config.depth * lines
        assert max(about["box"]) <= 256
        reach = sum((size - 1) * step for size, step in zip(about["sizes"], about["strides"], strict=True))
        assert reach == (k - 1) * (side.step if side.across else 1) + (side.size - 1) * (
            1 if side.across else side.step
        )


def operands(m: int, n: int, k: int, layout: str) -> Iterator[Any]:
    """a and b on the GPU; where K is contiguous, what lies behind it is no number."""
    from tests.backends.cuda.device import draw

    for rows, letter, seed in ((m, layout[0] == "N", 1), (n, layout[1] == "T", 2)):
        x = draw((rows, k + 64), "bfloat16", seed)
        x[:, k:] = float("nan")
        yield x[:, :k] if letter else x.T.contiguous()[:k].T


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("text", DEEP)
def test_whole_stages_bring_what_chunks_do(text, layout):
    """The last stage is not full; the other kernel's stages are a chunk."""
    from tests.backends.cuda.device import same, torch
    from tests.backends.cuda.forced import run, strides

    ran = whole = 0
    for (m, n, k), contract in pairs(((72, 200, 1344), (8, 136, 704)), (CHAIN, LEAF)):
        a, b = operands(m, n, k, layout)
        outs = [torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        product = replace(
            linear(layout, m, n, k, contract=contract), a=strides(a), b=strides(b.T), out=strides(outs[0]), align=16
        )
        if not HOPPER.supports(product, text):
            continue
        for config, out in zip(("128x128x64 s4", text), outs, strict=True):
            run("hopper", config, product, family.Addresses(a.data_ptr(), b.data_ptr(), out.data_ptr()))
        same(outs[1], outs[0], f"{text} {layout} {m}x{n}x{k} {contract}")
        ran, whole = ran + 1, whole + any(chunks(product, text))
    assert ran or layout != "NT"
    assert whole or not ran

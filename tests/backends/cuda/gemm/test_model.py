"""The model of a product's time: what it has to say whatever its constants are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmarks.common import RESULTS
from benchmarks.gpu.cases import Case, cases
from benchmarks.gpu.engine import posed
from tools.time_kernels import regret

from isogemm.backends.cuda.driver import facts
from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.backends.cuda.gemm.hopper import model
from isogemm.backends.cuda.gemm.hopper.config import HopperConfig, fits, serves
from isogemm.backends.cuda.gemm.hopper.model import expected, ranked
from isogemm.backends.cuda.gemm.hopper.palette import PALETTE
from isogemm.backends.cuda.gemm.model import H200, Gpu, Tiling, copying, gpu_of, intake
from isogemm.problem.product import Product

DRAWN = [posed(case) for case in cases(["random"], seed=11, count=40) if case.dtype != "float32"]
READABLE = [p for p in DRAWN if serves(p)]


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts.DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 62914560, 232448, 4917.0, None)
    monkeypatch.setattr(facts, "device", lambda ordinal: known)


@pytest.mark.parametrize("product", READABLE, ids=lambda p: f"{p.m}x{p.n}x{p.k}")
def test_the_ranking_is_legal_and_by_time(product: Product) -> None:
    found = ranked(product)
    times = [expected(product, c, H200) for c in found]
    assert times == sorted(times)
    assert all(fits(product, c) for c in found)


@pytest.mark.parametrize("product", READABLE, ids=lambda p: f"{p.m}x{p.n}x{p.k}")
def test_no_product_is_faster_than_the_hardware(product: Product) -> None:
    """989 TFLOP/s, and operands once from memory at the rate of the bus."""
    best = expected(product, ranked(product)[0], H200)
    assert best > 2 * product.m * product.n * product.k / 989e6 * 0.8
    assert best > 2 * (product.m * product.k + product.n * product.k) / (H200.memory * 1e3) * 0.6


@pytest.mark.parametrize("product", READABLE, ids=lambda p: f"{p.m}x{p.n}x{p.k}")
def test_more_to_do_and_less_to_do_it_with_take_longer(product: Product) -> None:
    config = ranked(product)[0]
    here = expected(product, config, H200)
    assert expected(replace(product, k=4 * product.k), config, H200) > here
    assert expected(product, config, Gpu(66, H200.memory)) >= here
    assert expected(product, config, Gpu(132, 2000.0)) > here


@pytest.mark.parametrize(
    ("tiles", "waves", "share"),
    [
        (1, 1, 132 / 32), (16, 1, 64), (32, 1, 128), (40, 1, 120), (66, 1, 132), (67, 1, 67), (107, 1, 107),
        (132, 1, 132), (200, 1, 132), (200, 2, 100), (128, 2, 64),
    ],
)  # fmt: skip
def test_what_a_launch_takes_in_is_less_where_the_next_one_does_not_fit_beside_it(
    tiles: int, waves: int, share: float
) -> None:
    """The third is of 132 multiprocessors; two blocks may share one, and clusters may not fit."""
    cut = Tiling(tiles, waves, lines=72.0, work=100.0, stage=100.0, store=0.0, stores=0)
    assert intake(cut, H200) == pytest.approx(share / 132)


@pytest.mark.parametrize(("clusters", "launches"), [(5, 3), (7, 2), (8, 1), (15, 1), (16, 1)])
def test_clusters_of_two_launches_fit_side_by_side_where_the_gpu_holds_as_many(clusters: int, launches: int) -> None:
    """Of eight blocks it holds 15: eight of them leave no room for another eight, and sixteen do not fit at once."""
    cut = Tiling(8 * clusters, 1, lines=72.0, work=100.0, stage=100.0, store=0.0, stores=0, room=120)
    assert intake(cut, H200) == pytest.approx(launches * 8 * clusters / 132)


@pytest.mark.parametrize("tiles", [67, 88, 117])
def test_what_a_launch_takes_in_falls_slowly_where_the_next_one_waits(tiles: int) -> None:
    cut = Tiling(tiles, 1, lines=72.0, work=100.0, stage=100.0, store=0.0, stores=0, late=True)
    assert intake(cut, H200) == pytest.approx((tiles / 132) ** (1 / 3))


@pytest.mark.parametrize(
    ("m", "n", "tile", "stages"),
    [
        (1, 2560, "w32x8x256", 7), (8, 3744, "w32x8x256", 7), (16, 2560, "w32x16x256", 6), (4, 12288, "w128x8x128", 4),
        (1, 1920, "w32x8x256", 11), (1, 4096, "w32x8x256", 11), (24, 2560, "w32x24x256", 7),
    ],
)  # fmt: skip
def test_a_ring_of_few_rows_is_full_but_where_the_next_launch_waits(m: int, n: int, tile: str, stages: int) -> None:
    """80, 117, 80 and 96 blocks; then 60 and 128, between which lie those that follow one another late, and 24 rows."""
    found = {c.stages for c in ranked(posed(Case("random", "drawn", m, n, 4096))) if str(c).startswith(f"{tile} s")}
    assert found == {stages}


@pytest.mark.parametrize(
    ("n", "short", "full"), [(2560, "w32x8x256 s7 e", "w32x8x256 s11 e"), (6144, "w64x8x256 s4 e", "w64x8x256 s6 e")]
)
def test_a_full_ring_is_expected_to_take_longer_there(n: int, short: str, full: str) -> None:
    """Wherever a full one comes from: a table, or kernels that are built before anything is asked for."""
    product = posed(Case("random", "drawn", 1, n, 4096))
    less, more = (HopperConfig.parse(text) for text in (short, full))
    assert less is not None
    assert more is not None
    assert 1.02 < expected(product, more, H200) / expected(product, less, H200) < 1.06


def test_a_short_k_has_no_ring_to_shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """71 blocks, and two stages of K: what is under way is little, whatever comes next."""
    product, config = posed(Case("random", "drawn", 1, 4544, 512)), HopperConfig.parse("w64x8x256 s4 e")
    assert config in ranked(product)
    assert config is not None
    here = expected(product, config, H200)
    monkeypatch.setattr(model, "_crowded", lambda *asked: False)
    assert expected(product, config, H200) == here


def test_tiles_that_begin_off_a_line_of_the_cache_pay_for_two() -> None:
    """Columns of B that are contiguous: 64 of them are a line of 128 bytes, 56 mostly lie in two."""
    across = posed(Case("random", "drawn", 58, 2048, 28352, layout="NN"))
    along = posed(Case("random", "drawn", 58, 2048, 28352))
    narrow, whole = (HopperConfig.parse(f"64x{cols}x128 s7 e") for cols in (56, 64))
    assert narrow is not None
    assert whole is not None
    assert expected(across, narrow, H200) > 1.01 * expected(along, narrow, H200)  # its instructions take as long
    assert expected(across, whole, H200) == pytest.approx(expected(along, whole, H200), rel=0.01)


@pytest.mark.parametrize("product", DRAWN, ids=lambda p: f"{p.m}x{p.n}x{p.k}")
def test_every_drawn_product_has_a_kernel_with_a_time(product: Product) -> None:
    """Odd ones too: one of Hopper's, as it lies or after a copy, besides the plain ones."""
    found = {
        name: [family.microseconds(product, config, 0) for config in family.configs(product)]
        for name, family in FAMILIES.found.items()
        if name in ("chain", "hopper", "padded")
    }
    assert all(us and us > 0 for times in found.values() for us in times)
    assert found["chain"]
    assert found["hopper"] or found["padded"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h200-2026-11-28-replayed", "87 products: 2.6% in the mean"),
        ("h200-2026-11-28-neighbours", "44 products: 4.0% in the mean"),
        ("h200-2026-11-23-hopper-seed1", "26 products: 5.0% in the mean"),
        ("h200-2026-11-23-hopper-seed2", "34 products: 2.4% in the mean"),
        ("h200-2026-11-23-unaligned-seed3", "21 products: 5.8% in the mean"),
        ("h200-2026-11-24-kernels-801", "52 products: 3.0% in the mean"),
        ("h200-2026-11-24-kernels-803", "50 products: 2.1% in the mean"),
        ("h200-2026-11-26-kernels-31", "93 products: 4.4% in the mean"),
        ("h200-2026-11-28-in-a-row", "62 products: 3.1% in the mean"),
        ("h200-2026-11-28-in-a-row-first", "65 products: 3.7% in the mean"),
        ("h200-2026-11-28-kernels-61", "45 products: 3.4% in the mean"),
        ("h200-2026-11-28-few-across", "19 products: 4.7% in the mean"),
        ("h100-2026-11-28-kernels-51", "39 products: 4.5% in the mean"),
        ("h200-2026-11-30-fp32-3301", "25 products: 2.2% in the mean"),
        ("h200-2026-11-30-fp32-filled", "18 products: 3.0% in the mean"),
        ("h200-2026-11-30-pitch", "34 products: 3.8% in the mean"),
        ("h200-2026-11-30-few-tiles", "63 products: 2.2% in the mean"),
        ("h200-2026-11-30-clusters-2101", "43 products: 2.0% in the mean"),
        ("h200-2026-11-30-clusters-2102", "48 products: 2.9% in the mean"),
        ("h200-2026-11-30-mid-linears", "14 products: 3.3% in the mean"),
        ("h200-2026-11-30-mid-sizes", "60 products: 3.3% in the mean"),
        ("h200-2026-11-30-firsts", "108 products: 3.1% in the mean"),
        ("h200-2026-11-29-kernels-across", "45 products: 3.7% in the mean"),
    ],
)
def test_the_figures_of_the_design_are_those_of_the_model(name: str, said: str) -> None:
    """What is on file is what the model expects, and what it puts first there costs what docs/design/0011 says."""
    lines = (RESULTS / f"gpu-{name}.jsonl").read_text().splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    for row in rows:
        case = Case("random", "drawn", row["m"], row["n"], row["k"], dtype=row["dtype"], layout=row["layout"])
        for use, us in row["expected"].items():
            name, _, config = use.partition(" ")
            assert FAMILIES.found[name].microseconds(posed(case), config, 0) == pytest.approx(us, rel=1e-3)
    assert regret(rows).startswith(said)


def test_a_bus_that_the_driver_does_not_name_is_an_h200_s(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = replace(facts.device(0), memory=0.0, multiprocessors=78)
    monkeypatch.setattr(facts, "device", lambda ordinal: unknown)
    assert gpu_of(0) == Gpu(78, H200.memory)
    assert copying(0, H200) > 0


def test_a_few_configurations_serve_nearly_all_products_nearly_as_well() -> None:
    """Where kernels or the model have changed so much that they do not: draw a new palette."""
    family = FAMILIES.found["hopper"]
    near = 0
    for product in READABLE:
        found = family.palette(product)
        assert all(family.supports(product, config) for config in found)
        least = min(filter(None, (family.microseconds(product, config, 0) for config in found)))
        near += least <= 1.3 * expected(product, ranked(product)[0], H200)
    assert near >= 0.8 * len(READABLE)
    plain = next(p for p in READABLE if p.a.col == p.b.row == 1)
    assert family.palette(plain) == PALETTE  # what has no room any longer would be left out in silence
    odd = replace(READABLE[0], k=1001, a=READABLE[0].a._replace(row=1001), b=READABLE[0].b._replace(col=1001))
    assert not family.palette(odd)
    assert FAMILIES.found["padded"].palette(odd) == family.palette(READABLE[0])

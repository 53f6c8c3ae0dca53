"""Weights out of step, read as they lie: what is served, how it is cut, and on a GPU every bit among NaNs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product as every
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.cuda.compiled import Kernels, kernels
from tests.backends.cuda.gemm.test_padded import pose

from isogemm.backends.cuda.gemm.hopper.config import SHARED
from isogemm.backends.cuda.gemm.model import H200
from isogemm.backends.cuda.gemm.unaligned import family
from isogemm.backends.cuda.gemm.unaligned.config import STAGES, UnalignedConfig, cut, readable
from isogemm.backends.cuda.gemm.unaligned.family import Unaligned
from isogemm.backends.cuda.gemm.unaligned.model import expected
from isogemm.contract.spec import Contract
from isogemm.problem.product import Product, Strides

__all__ = ["kernels"]  # the fixture
FAMILY = Unaligned()
RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


CONFIGS = ("128x8x128", "128x8x256", "32x16x256", "64x32x256 c2", "32x64x128 c4", "128x128x128 c2", "64x128x128")


@given(
    st.integers(1, 300), st.integers(1, 40000), st.integers(1, 40000), st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.integers(1, 3), st.sampled_from(CONFIGS), st.sampled_from([132, 114, 78]),
)  # fmt: skip
def test_tiles_cover_the_product_and_stages_fit(
    m: int, n: int, k: int, layout: str, batch: int, text: str, multiprocessors: int
) -> None:
    found, config = readable(pose(m, n, k, layout, batch)), UnalignedConfig.parse(text)
    assert config is not None
    assert str(config) == text
    made = cut(found.product, config, multiprocessors) if found else None
    if made is None:
        return
    assert 1 <= made.rows <= config.rows // config.warpgroups
    along_b, along_a = made.tiles
    each = made.rows * config.warpgroups * config.cluster
    assert (along_b - 1) * each < n <= along_b * each
    assert (along_a - 1) * config.cols < m <= along_a * config.cols
    assert -(-along_b * along_a * batch // made.clusters) <= made.waves
    assert made.clusters * config.cluster <= multiprocessors
    assert 1024 + made.stages * made.stage <= SHARED
    assert STAGES[0] <= made.stages <= STAGES[1]


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_equal_zeros_keep_their_signs(monkeypatch, zeros) -> None:
    bound: list[float] = []
    monkeypatch.setattr(family.facts, "device", lambda device: SimpleNamespace(multiprocessors=132))
    monkeypatch.setattr(family, "encoder_of", lambda *about: None)
    monkeypatch.setattr(family, "bind_copies", lambda sides, device: None)
    monkeypatch.setattr(family, "_bind", lambda product, *about: bound.append(product.alpha))
    for alpha in zeros:
        FAMILY.bind(replace(pose(8, 77, 123), alpha=alpha), "128x8x128", 0)
    assert [str(alpha) for alpha in bound] == [str(alpha) for alpha in zeros]


def test_the_figures_of_the_design_are_those_of_the_model() -> None:
    """What the model puts first among the timed ones costs what docs/design/0015 says."""
    found: dict[tuple[int, int, int, str], list[tuple[float, float]]] = {}
    for line in (RESULTS / "gpu-h200-2026-11-26-unaligned.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        config = UnalignedConfig.parse(row["config"])
        assert config is not None
        us = expected(pose(row["m"], row["n"], row["k"], row["layout"]), config, H200)
        assert us is not None
        found.setdefault((row["m"], row["n"], row["k"], row["layout"]), []).append((us, median(row["us"])))
    assert (len(found), sum(map(len, found.values()))) == (30, 194)
    errors = [math.log(us / timed) for timings in found.values() for us, timed in timings]
    assert math.sqrt(mean(x * x for x in errors)) == pytest.approx(0.127, abs=0.002)
    regrets = [min(timings)[1] / min(timed for _, timed in timings) - 1 for timings in found.values()]
    assert mean(regrets) == pytest.approx(0.025, abs=0.001)


@pytest.mark.parametrize(
    ("product", "served", "copied"),
    [
        (pose(8, 128, 256), False, False),
        (pose(8, 128, 257), True, True),
        (pose(8, 129, 256), False, False),
        (pose(8, 129, 256, "NN"), True, False),
        (pose(9, 129, 256, "TN"), True, True),
        (replace(pose(8, 128, 256), align=2), True, True),
        (pose(8, 128, 260, batch=3), True, True),
        (pose(1000, 128, 257), False, False),
        (pose(8, 128, 257, dtype="float32"), False, False),
        (replace(pose(8, 128, 257), dtype_b="float16"), False, False),
        (replace(pose(8, 128, 257), contract=Contract.parse("tensor_core:sm90/leaf4096")), False, False),
        (replace(pose(8, 128, 257), b=Strides(2, 514)), False, False),
    ],
)
def test_what_is_served_and_what_of_it_is_copied(product: Product, served: bool, copied: bool) -> None:
    found = readable(product)
    assert (found is not None) == bool(FAMILY.configs(product)) == served
    assert (found is not None and found.copy is not None) == copied


def test_every_configuration_that_is_offered_stays_in_registers(kernels: Kernels) -> None:
    products = [pose(m, 1003, k, layout) for (m, k), layout in every(((9, 1001), (65, 1002)), ("NT", "NN", "TN", "TT"))]
    # The first and the third of one size, and the second of the other: of every layout all three.
    asked = [
        (product, config)
        for i, product in enumerate(products)
        for config in FAMILY.configs(product)[(i + i // 4) % 2 : 3 : 2]
    ]
    made = [kernels.build("unaligned", config, product) for product, config in asked]
    for (product, config), (multiply, copy) in zip(asked, made, strict=True):
        assert (copy.name, multiply.name) == ("pad", "unaligned")
        assert copy.spilled == multiply.spilled == 0, (product, config)
        assert not multiply.hasty(ahead=True), (product, config)
        products_made = 2 * 4 * int(config.split()[0].split("x")[2]) // 64
        assert multiply.machine_counts("HGMMA")[0] == products_made, (product, config)


def test_words_are_shifted_where_lines_begin_at_odd_elements(kernels: Kernels) -> None:
    """Two words are read for one where a line can begin in the middle of one, and the walk reads no others."""
    cases = [(1001, 0, True), (1002, 0, False), (1000, 1, True)]
    made = [kernels.build("unaligned", "64x16x128", pose(9, 1003, k, gap=gap)) for k, gap, _ in cases]
    for (k, gap, shifted), (multiply, _) in zip(cases, made, strict=True):
        (words,) = multiply.machine_counts("LDS")
        # Two stages' and the first of a tile.
        assert 4 * 16 * (1 + shifted) <= words <= 5 * 16 * (1 + shifted), (k, gap)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lines_begin_anywhere_among_nans(layout: str, dtype: str) -> None:
    """Every byte of a word of 16 at which a line can begin; what lies around operands and results is NaN."""
    import torch
    from tests.backends.cuda import forced
    from tests.backends.cuda.device import Mode

    mode = Mode(dtype, dtype, None, "tensor_core:sm90/chain")
    nan, kind = float("nan"), getattr(torch, dtype)

    def laid(values: torch.Tensor, letter: str, gap: int, offset: int) -> torch.Tensor:
        rows, columns = values.shape
        step = (columns if letter == "N" else rows) + gap
        flat = torch.full((max(rows, columns) * step * 2 + 64,), nan, dtype=kind, device="cuda")
        view = flat.as_strided((rows, columns), (step, 1) if letter == "N" else (1, step), offset)
        return view.copy_(values)

    wrong, tried = [], 0
    for (m, n, k), offset in every([(1, 137, 333), (13, 264, 2568), (67, 1001, 129), (130, 72, 7)], range(8)):
        a = torch.randn(m, k, device="cuda").to(kind)
        b = torch.randn(k, n, device="cuda").to(kind)
        # The same numbers in step, zeros behind K: for Hopper's kernels.
        k8, n8 = -(-k // 8) * 8, -(-n // 8) * 8
        want = torch.zeros(m, n8, dtype=kind, device="cuda")
        a8, b8 = torch.zeros(m, k8, dtype=kind, device="cuda"), torch.zeros(n8, k8, dtype=kind, device="cuda").t()
        a8[:, :k], b8[:k, :n] = a, b
        forced.run("hopper", "64x64x64 s4", *forced.pose(a8, b8, want, mode))
        around = torch.full((m * n + 64,), nan, dtype=kind, device="cuda")
        out = around[16 + offset : 16 + offset + m * n].view(m, n)
        x, w = laid(a, layout[0], offset, 3), laid(b, layout[1], offset, offset)
        product, at = forced.pose(x, w, out, mode)
        for config in CONFIGS:
            if FAMILY.supports(product, config):
                around.fill_(nan)
                forced.run("unaligned", config, product, at)
                tried += 1
                stray = int((~around.isnan()).sum()) - out.numel()
                if stray or not torch.equal(out.view(torch.int16), want[:, :n].contiguous().view(torch.int16)):
                    wrong.append(f"{m} x {n} x {k} at {offset} [{config}]")
    assert tried > 150
    assert not wrong, wrong

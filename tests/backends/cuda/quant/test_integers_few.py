"""Integer products of few rows of x on the GPU: any number of rows, however shared out, has the CPU's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.compiled import Kernels, kernels
from tests.backends.cuda.quant.test_integers import FORMATS_BY_NAME, product, weight
from tests.quant.draws import KINDS, WEIGHTS, values

import isogemm
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.integers import few, kernel
from isogemm.backends.cuda.quant.integers.few import FewCodes
from isogemm.backends.cuda.quant.integers.kernel import KERNEL
from isogemm.backends.cuda.quant.layout import Packed, layout

__all__ = ["kernels"]  # the fixture

MOST = 33
# Rows of x, and a configuration that takes so many.
CHOSEN = (
    (1, FewCodes(1, 1, 14, 3, 256, "fused", 1)),
    (1, FewCodes(1, 4, 2, 2, 256, "fused", 1)),
    (2, FewCodes(1, 3, 2, 3, 256, "fused", 2)),
    (8, FewCodes(1, 1, 5, 2, 256, "fused", 8)),
    (1, FewCodes(1, 2, 3, 2, 256, "staged")),
    (7, FewCodes(1, 1, 14, 3, 256, "staged")),
    (3, FewCodes(1, 6, 2, 2, 256, "staged")),
    (16, FewCodes(2, 1, 14, 2, 256, "staged")),
    (9, FewCodes(2, 1, 10, 3, 256, "staged")),
    (13, FewCodes(2, 6, 2, 2, 256, "staged")),
    (10, FewCodes(2, 1, 3, 3, 256, "staged", 0, 3)),
    (15, FewCodes(2, 3, 2, 2, 256, "staged", 0, 2)),
    (14, FewCodes(2, 2, 3, 3, 256, "staged", 0, 1)),
    (16, FewCodes(2, 1, 14, 2, 256, "staged", 0, 2)),
    (24, FewCodes(3, 1, 14, 2, 256, "staged")),
    (17, FewCodes(3, 4, 1, 2, 256, "staged")),
    (31, FewCodes(4, 1, 14, 2, 256, "staged")),
    (32, FewCodes(4, 3, 2, 2, 256, "staged", 0, 2)),
    (25, FewCodes(4, 1, 5, 4, 256, "staged", 0, 1)),
    (12, FewCodes(2, 5, 1, 2)),
    (33, FewCodes(2, 1, 3, 2)),
    (20, FewCodes(1, 2, 2, 2)),
)
SHORT = (
    (16, FewCodes(2, 1, 14, 4, 128, "staged")),
    (32, FewCodes(4, 1, 3, 5, 128, "staged")),
    (6, FewCodes(1, 5, 1, 3, 128, "staged")),
    (11, FewCodes(2, 4, 1, 3, 128)),
)


def operands(fmt: Any, n: int, k: int, seed: int) -> tuple[Any, Packed, np.ndarray]:
    """x [33, k] and a weight on the device, and what the CPU makes of them.

    Among ordinary rows are a NaN, an infinity, a row of zeros, and scales that float16 has as zero and as infinity.
    """
    from tests.backends.cuda.device import upload

    x = np.concatenate([values(kind, -(-MOST // len(KINDS)), k, seed) for kind in KINDS])[:MOST]
    np.random.default_rng(seed).shuffle(x)
    x[4, k - 1], x[11, 0], x[6], x[1, : k // 2], x[9, k // 2 :] = np.nan, -np.inf, 0, 2.0**-25, 2.0**25
    w, packed = weight(fmt, n, k, seed)
    return upload(x), packed, isogemm.linear(x, w, activations="q8")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_every_way_to_share_out_has_the_cpus_bits(fmt: Any) -> None:
    """Ragged tiles of W, teams without one, K that ends inside a span, before a warp's first one, or on its edge."""
    from tests.backends.cuda.device import same

    for n, k in ((37, 5 * fmt.block), (150, 6 * 256), (490, 1024 + fmt.block)):
        x, packed, want = operands(fmt, n, k, n)
        for m, c in (*CHOSEN, *(SHORT if fmt.block == 32 else ())):
            same(product(x[:m], packed, chosen=c), want[:m], f"{fmt} {m} x {n} x {k} {c}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_every_number_of_rows_has_the_cpus_bits(name: str) -> None:
    """In the configurations that are chosen, for few tiles to a multiprocessor and for many."""
    from tests.backends.cuda.device import same

    fmt = FORMATS_BY_NAME[name]
    for n, k in ((200, 1536), (12773, 512 + fmt.block)):
        x, packed, want = operands(fmt, n, k, n)
        for m in range(1, MOST + 1):
            same(product(x[:m], packed), want[:m], f"{m} x {n} x {k}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "Q6_K"])
def test_parts_have_the_cpus_bits(name: str) -> None:
    """Rows side by side, the last part of fewer; contiguous ones, and such as begin anywhere."""
    from tests.backends.cuda.device import same, torch

    fmt = FORMATS_BY_NAME[name]
    for n, k in ((37, 1280), (520, 512 + fmt.block)):
        x, packed, want = operands(fmt, n, k, n)
        apart = torch.full((2 * MOST, k + 3), float("nan"), device="cuda")[::2, 1 : k + 1]
        apart.copy_(x)
        for each, m in ((8, 9), (8, 32), (16, 17), (16, 24), (16, 32), (16, 33)):
            chosen = kernel.parts(packed.layout, m, each, n, k)
            assert chosen is not None
            same(product(x[:m], packed, chosen=chosen), want[:m], f"{m} x {n} x {k} by {each}")
            room = torch.full((m, 2 * n), float("nan"), device="cuda")
            KERNEL.run(apart[:m], packed, room[:, ::2], None, chosen)
            same(room[:, ::2].contiguous(), want[:m], f"{m} x {n} x {k} by {each}, apart")
            assert room[:, 1::2].isnan().all()


def test_rows_are_parted_where_w_has_few() -> None:
    """Blocks side by side leave no multiprocessor without work, as long as the codes of a part fit."""
    c = kernel.config(layout("Q4_K"), 64, 512, 8192)
    assert isinstance(c, FewCodes)
    assert 0 < c.each < 64
    assert kernel.parts(layout("Q4_K"), 64, 32, 2560, 65536) is None
    assert not isinstance(kernel.config(layout("Q4_K"), 512, 28672, 4096), FewCodes)


def test_verdicts_of_parts_hold_for_any_number_of_rows() -> None:
    """The last part runs the code of the others, so the rows of a part are all that selects it."""
    case = QuantCase("q8", "Q6_K", "bfloat16", "bfloat16", None, 35, 2560, 9728)
    config = kernel.parts(layout("Q6_K"), 35, 8, 2560, 9728)
    assert config is not None
    assert KERNEL.code(case, config) == KERNEL.code(replace(case, m=30), config)
    assert KERNEL.code(case, config) != KERNEL.code(case, config._replace(each=16))
    assert KERNEL.tile(config) == 8


def test_configurations_take_their_rows() -> None:
    """One to 32 rows: all of the tiles, in as many warps as have barriers and registers, and in shared memory."""
    thin, wide = ((1, 256), (4096, 4096), (2560, 9728), (4096, 14336)), ((19456, 2560), (28672, 4096), (28672, 8192))
    for fmt in WEIGHTS:
        lay = layout(fmt)
        for n, k in (*thin, *wide, (152064, 8192)):
            for m in range(1, 33):
                c = kernel.config(lay, m, n, k)
                if not isinstance(c, FewCodes):
                    assert m > 8
                    continue
                each = c.each or m
                assert c.tiles == -(-each // 8)
                assert c.split <= c.teams
                assert not c.split or (c.tiles % 2 == 0 and c.x == "staged")
                assert (c.rows == m) == (c.x == "fused") == (m == 1)
                warps = c.group * (c.teams + c.split)
                assert warps <= (15 if c.group > 1 else 16)
                assert c.stages >= 2
                assert c.ring(lay) + few.x_bytes(lay, each, k, c.x) <= few.SHARED


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_what_kernels_declare_fits_beside_what_they_ask_for(fmt: Any) -> None:
    """Chains that are handed on take 14 KiB where teams have several warps: any n, and k that leave little room."""
    lay = layout(fmt)
    for n in range(16, 14000, 16 * 44):
        for k in range(256, 16385, 256):
            for m in (1, 9, 17, 25):
                if c := few.usual(lay, m, n, k):
                    asked = c.ring(lay) + few.x_bytes(lay, m, k, c.x)
                    assert asked + c.declared <= 227 * 1024, (m, n, k, c)


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [("Q4_K", 32, 5120, 4096), ("Q2_K", 17, 8464, 5120), ("Q8_0", 9, 2048, 2048), ("Q4_0", 14, 28672, 4096)],
)
def test_kernels_declare_what_is_counted(kernels: Kernels, name: str, m: int, n: int, k: int) -> None:
    lay = layout(name)
    c = few.usual(lay, m, n, k)
    assert c is not None
    c.bind(QuantCase("q8", name, "float32", "float32", None, m, n, k), 0)
    (made,) = kernels.loaded
    kept = 1024  # by the system, of each block, and none of the 227 KiB
    assert made.resources["SHARED"] - kept <= c.declared <= made.resources["SHARED"] - kept + 127


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1"])
def test_scales_are_multiplied_by_tensor_cores(kernels: Kernels, name: str) -> None:
    """An outer product for each sum of a block; then float(S) and a step of the chain, or two, for each element."""
    lay, chosen = layout(name), {}
    for m in (1, 7, 16, 32):
        usual = few.usual(lay, m, 28672, 4096)
        assert usual is not None
        chosen[m] = usual._replace(x="staged", rows=0)
        chosen[m].bind(QuantCase("q8", name, "float32", "float32", None, m, 28672, 4096), 0)
    for (m, c), made in zip(chosen.items(), kernels.loaded, strict=True):
        dots, outer, fused, scaled = made.machine_counts("IMMA", "HMMA", "FFMA", "FMUL")
        steps = 2 if lay.format.offset else 1
        each = 2 if m == 1 else 4  # elements of a lane that count
        assert dots >= 8 * c.tiles
        assert outer == steps * dots
        assert fused == (1 + steps) * each * dots
        assert scaled == 0
        assert not {line for line in made.machine_code if "FTZ" in line}
        # Of one row every block makes the codes: this is not the kernel that serves.
        assert made.spilled <= 16 or m == 1

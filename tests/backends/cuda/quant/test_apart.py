"""Products with weights that warps of their own dequantize: the bits of those that dequantize for themselves."""

from __future__ import annotations

import functools
import re

import pytest
from tests.backends.cuda.compiled import kernels
from tests.backends.cuda.quant.test_many import check as check_by
from tests.backends.cuda.quant.test_many import drawn, packed_of, poisoned, product, same, there, weight

from isogemm.backends.cuda.quant import apart
from isogemm.backends.cuda.quant.apart import KERNEL, ApartConfig
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.layout import FORMATS, layout
from isogemm.errors import LimitError
from isogemm.formats.blocks import FORMATS as ALL

__all__ = ["kernels"]  # the fixture
torch = pytest.importorskip("torch")
gpu = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CONFIGS = tuple(
    ApartConfig(*cut) for cut in (
        ("x", 16, 16, 256, 14, 4, 8, 2), ("x", 16, 40, 256, 7, 3, 4, 2), ("x", 32, 64, 256, 4, 3, 8, 1),
        ("w", 16, 24, 256, 10, 4, 8, 2), ("w", 32, 48, 256, 5, 3, 8, 2), ("w", 48, 24, 256, 6, 3, 12, 2),
        ("x", 32, 64, 128, 9, 4, 8, 2), ("x", 48, 136, 64, 9, 3, 8, 1), ("w", 16, 8, 256, 20, 9, 16, 2),
        ("w", 48, 16, 256, 7, 4, 16, 2), ("x", 64, 40, 128, 7, 4, 8, 2), ("w", 32, 48, 128, 10, 4, 8, 2),
        ("w", 96, 56, 64, 12, 4, 12, 2), ("w", 128, 88, 64, 8, 3, 8, 2), ("w", 256, 64, 64, 4, 2, 4, 4),
    )
)  # fmt: skip
SERVED = [(name, config) for name in ("Q4_0", "Q4_K", "Q6_K") for config in CONFIGS]
SKIPPING = (
    ApartConfig("w", 48, 160, 64, 8, 4, 8, 1),
    ApartConfig("w", 48, 72, 128, 7, 4, 8, 2),
    ApartConfig("w", 32, 72, 256, 4, 3, 8, 1),
)
SUPER = [(name, config) for name in ("Q5_K", "Q6_K") for config in SKIPPING]


check = functools.partial(check_by, kernel=KERNEL)


@gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name, dtype):
    k = ALL[name].block * (9 if ALL[name].block == 32 else 5)
    for m, n in ((1, 48), (9, 72), (17, 200), (100, 64), (257, 129)):
        check(drawn(m, k, dtype), weight(name, n, k))


@gpu
@pytest.mark.parametrize(("name", "config"), SERVED, ids=str)
def test_every_configuration_has_the_same_bits(name, config):
    for m, n, k in ((1, 16, 512), (8, 300, 1024), (17, 16, 256), (65, 1000, 768), (300, 520, 2560)):
        check(drawn(m, k), weight(name, n, k), config=config)


@gpu
@pytest.mark.parametrize("config", CONFIGS[:8:2], ids=str)
def test_many_tiles_to_a_block_again_and_again(config):
    """Warps that dequantize are ahead of products by some stages, and into the next tile."""
    w, x = weight("Q4_0", 6000, 256), drawn(500, 256).cuda()
    packed, want = packed_of(w), product(x, w, None, BF16)
    for _ in range(20):
        got = poisoned(500, 6000, dtype=BF16)
        KERNEL.run(x, packed, got, None, config)
        same(got, want)


@gpu
@pytest.mark.parametrize(("name", "config"), SUPER, ids=str)
def test_scales_of_super_blocks_come_with_every_stage(name, config):
    """A warp skips stages: where another one brought the scales, 2538 of 705024 elements were wrong."""
    w, x = weight(name, 4224, 2560), drawn(168, 2560).cuda()
    packed, want = packed_of(w), product(x, w, None, BF16)
    for _ in range(10):
        got = poisoned(168, 4224, dtype=BF16)
        KERNEL.run(x, packed, got, None, config)
        same(got, want)


@gpu
@pytest.mark.parametrize("out", [BF16, F16, F32])
@pytest.mark.parametrize("kind", [None, BF16, F32])
@pytest.mark.parametrize(
    "config", [ApartConfig("x", 16, 56, 256, 6, 3, 4, 2), ApartConfig("w", 32, 56, 256, 5, 3, 4, 2)], ids=str
)
def test_types_of_results_and_of_a_bias(out, kind, config):
    bias = None if kind is None else torch.randn(131, generator=torch.Generator().manual_seed(1)).to(kind).cuda()
    check(drawn(50, 256), weight("Q4_K", 131, 256), bias, out, config)
    if bias is not None:
        check(drawn(50, 256), weight("Q4_K", 131, 256), bias.repeat_interleave(2)[::2], out, config)


# Without a GPU from here on.


def test_refusals():
    packed = there("Q4_0", 48, 64)
    with pytest.raises(LimitError, match="nearest legal choice: 512"):
        KERNEL.run(torch.zeros(513, 64, dtype=BF16), packed, torch.zeros(513, 48))


def test_configurations():
    for name, config in SERVED + SUPER:
        assert apart.legal(layout(name), config), (name, config)
    for wrong in (("x", 24, 40, 256, 8, 4, 8, 2), ("x", 16, 40, 256, 24, 4, 8, 2)):
        assert not apart.legal(layout("Q4_0"), ApartConfig(*wrong))
    assert str(CONFIGS[0]) == "x16x16x256 s14 m4 d8 e2"
    for name in FORMATS:
        for m in (1, 8, 17, 33, 64, 200, 512):
            for n, k in ((512, 14592), (28672, 4096), (2560, 9728), (100, 256)):
                assert apart.legal(layout(name), apart.best(name, m, n, k))


def test_stages_in_hand_are_fewer_than_parities_tell_apart():
    """A warp that passes a stage's barrier a phase early makes wrong weights, and stops a product for good."""
    assert apart.legal(layout("Q4_0"), ApartConfig("x", 32, 48, 128, 11, 5, 8, 2))
    assert not apart.legal(layout("Q4_0"), ApartConfig("x", 32, 48, 128, 8, 5, 8, 2))
    assert not apart.legal(layout("Q4_0"), ApartConfig("x", 32, 48, 128, 11, 3, 8, 2))
    # A stage of super-blocks is a whole share of a record.
    for depth, several in ((64, True), (128, True), (192, False), (256, True)):
        config = ApartConfig("w", 48, 8, depth, 8, 3, 3, 1)
        assert apart.legal(layout("Q5_0"), config)
        assert apart.legal(layout("Q5_K"), config) is several


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_products_do_not_wait_for_one_another(kernels, name):
    """No spills; products are waited for once, at the end of a tile; and no stage asks for the block's place."""
    for m in (36, 169, 512) if name == "Q4_K" else (169,):
        case = QuantCase("same", name, "bfloat16", "bfloat16", None, m, 2048, 4096)
        KERNEL.build(case, KERNEL.configure(case, 132), 0)
    for kernel in kernels.loaded:
        assert kernel.spilled == 0
        assert not kernel.hasty()
        code = "\n".join(kernel.instructions)
        left = [int(found, 16) for found in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)", code)]
        assert left == [1, 0]
        assert "S2UR" not in code[code.index("WARPGROUP.ARRIVE") : code.rindex("HGMMA")]

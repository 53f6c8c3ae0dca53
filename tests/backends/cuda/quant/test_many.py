"""Products of many tokens with quantized weights, and such weights as floats: the bits of what `dequantize` says."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.compiled import kernels
from tests.backends.cuda.device import NAMES, same, upload
from tests.quant.draws import blocks

import isogemm
from isogemm.backends.cuda.quant import apart, dequantize
from isogemm.backends.cuda.quant import many as quant_many
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.layout import FORMATS, Packed, layout, pack
from isogemm.backends.cuda.quant.many import KERNEL, ManyConfig, ManyWalk
from isogemm.errors import DTypeError, LayoutError, ShapeError
from isogemm.formats.blocks import FORMATS as ALL

__all__ = ["kernels"]  # the fixture
torch = pytest.importorskip("torch")
gpu = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CONFIGS = tuple(
    ManyWalk(ManyConfig(*cut)) for cut in (
        (1, 1, 16, 8), (1, 1, 176, 4), (2, 1, 64, 3), (2, 1, 128, 8), (2, 2, 64, 5),
        (2, 2, 128, 4), (2, 1, 256, 4), (3, 1, 96, 6), (2, 1, 128, 4, 2),
    )
)  # fmt: skip


@functools.cache
def weight(name: str, n: int, k: int, kind: str = "normal") -> isogemm.QuantizedMatrix:
    """`kind` blocks: random bytes under scales of all magnitudes."""
    fmt = ALL[name]
    if kind == "blocks":
        rows = blocks(fmt, n, k // fmt.block)
        return isogemm.QuantizedMatrix.from_bytes(rows.tobytes(), shape=(n, k), format=name)
    w = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
    w[1 % n] = 0
    return isogemm.quantize(w, name)


def packed_of(w: isogemm.QuantizedMatrix) -> Packed:
    data = torch.from_numpy(pack(np.asarray(w.rows), w.format)).cuda()
    return Packed(data, layout(w.format), *w.shape)


def floats(w: isogemm.QuantizedMatrix, dtype: Any) -> Any:
    """``w.dequantize(dtype)`` as a tensor on the device."""
    return upload(w.dequantize(NAMES[dtype]))


def drawn(m: int, k: int, dtype: Any = BF16) -> Any:
    generator = torch.Generator().manual_seed(m * 1000 + k)
    return (torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-3, 4, (m, 1), generator=generator))).to(
        dtype
    )


def poisoned(*shape: int, dtype: Any = F32) -> Any:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def product(x: Any, w: isogemm.QuantizedMatrix, bias: Any = None, out: Any = F32) -> Any:
    return isogemm.linear(x.cuda(), floats(w, x.dtype), bias, out_dtype=NAMES[out])


def check(
    x: Any, w: isogemm.QuantizedMatrix, bias: Any = None, out: Any = F32, config: Any = None,
    kernel: Any = KERNEL,
) -> None:  # fmt: skip
    x = x.cuda()
    got = poisoned(len(x), len(w), dtype=out)
    kernel.run(x, packed_of(w), got, bias, config)
    same(got, product(x, w, bias, out))


@gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name, dtype):
    k = ALL[name].block * (9 if ALL[name].block == 32 else 5)
    for m, n in ((33, 200), (100, 64), (257, 129)):
        check(drawn(m, k, dtype), weight(name, n, k))


@gpu
@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_all_magnitudes(name):
    k = 512
    check(drawn(70, k), weight(name, 144, k, "blocks"))


@gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_every_configuration_has_the_same_bits(name, config):
    assert quant_many.legal(layout(name), config.config)
    for m, n, k in ((1, 16, 256), (65, 1000, 768), (300, 520, 2560)):
        check(drawn(m, k), weight(name, n, k), config=config)


@gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_many_tiles_to_a_block(config):
    check(drawn(1200, 256), weight("Q4_0", 3000, 256), out=BF16, config=config)


@gpu
@pytest.mark.parametrize("out", [BF16, F16, F32])
@pytest.mark.parametrize("kind", [None, BF16, F32])
def test_types_of_results_and_of_a_bias(out, kind):
    bias = None if kind is None else torch.randn(131, generator=torch.Generator().manual_seed(1)).to(kind).cuda()
    check(drawn(50, 256), weight("Q4_K", 131, 256), bias, out)
    if bias is not None:
        check(drawn(50, 256), weight("Q4_K", 131, 256), bias.repeat_interleave(2)[::2], out)


@gpu
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_parts_behind_one_another(name):
    """Two launches make one product; what follows waits for both."""
    w, x = weight(name, 1031, 1024), drawn(300, 1024).cuda()
    bias = torch.randn(1031, generator=torch.Generator().manual_seed(2)).cuda()
    packed, want = packed_of(w), product(x, w, bias, BF16)
    walk = ManyWalk(ManyConfig(2, 1, 256, 4), 640, ManyConfig(2, 1, 96, 4))
    for _ in range(20):
        got = poisoned(300, 1031, dtype=BF16)
        KERNEL.run(x, packed, got, bias, walk)
        after = got.clone()
        same(after, want)


BOTH = pytest.mark.parametrize("kernel", [KERNEL, apart.KERNEL], ids=["many", "apart"])


@gpu
@BOTH
@pytest.mark.parametrize("k", [32, 64, 96, 128, 160, 2080])
def test_lengths_that_end_within_a_stage(k, kernel):
    check(drawn(40, k), weight("Q5_1", 70, k), kernel=kernel)


@gpu
@BOTH
def test_special_values(kernel):
    x = drawn(64, 256)
    for row, column, value in ((3, 5, float("inf")), (4, 9, float("nan")), (5, 1, -float("inf")), (6, 0, 1e38)):
        x[row, column] = value
    x[7] = -0.0
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K"):
        check(x, weight(name, 40, 256), out=BF16, kernel=kernel)
        check(x, weight(name, 40, 256, "blocks"), kernel=kernel)


@gpu
@BOTH
def test_strides_and_neighbours(kernel):
    w = weight("Q4_K", 100, 512)
    wide = drawn(90, 1024).cuda()
    x = wide[::2, 256:768]
    held = poisoned(47, 120)
    kernel.run(x, packed_of(w), held[1:46, 7:107])
    same(held[1:46, 7:107], product(x.contiguous(), w))
    assert held[0].isnan().all()
    assert held[46].isnan().all()
    assert held[:, :7].isnan().all()
    assert held[:, 107:].isnan().all()


@gpu
def test_a_row_alone_equals_that_row_in_any_batch():
    w, x = weight("Q5_K", 300, 1024), drawn(700, 1024).cuda()
    packed, whole = packed_of(w), poisoned(700, 300)
    KERNEL.run(x, packed, whole)
    for first, last in ((0, 1), (5, 38), (64, 200), (100, 612)):
        part = poisoned(last - first, 300)
        KERNEL.run(x[first:last], packed, part)
        same(part, whole[first:last])


@gpu
def test_in_a_graph():
    w, x = weight("Q4_0", 256, 512), drawn(128, 512).cuda()
    packed, out = packed_of(w), poisoned(128, 256)
    KERNEL.run(x, packed, out)
    out.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.run(x, packed, out)
    x.copy_(drawn(128, 512) * 2)
    graph.replay()
    same(out, product(x, w))


@gpu
@pytest.mark.parametrize("kind", ["normal", "blocks"])
@pytest.mark.parametrize("name", FORMATS)
def test_floats_of_every_format(name, kind):
    for n, k in ((37, ALL[name].block * 3), (200, 1024)):
        w = weight(name, n, k, kind)
        for dtype in (BF16, F16, F32):
            out = poisoned(n, k, dtype=dtype)
            dequantize.run(packed_of(w), out)
            same(out, floats(w, dtype))


@gpu
def test_floats_of_some_rows():
    w = weight("Q6_K", 200, 512)
    held = poisoned(70, 520, dtype=BF16)
    dequantize.run(packed_of(w), held[1:51, :512], 32)
    same(held[1:51, :512], floats(w, BF16)[32:82])
    assert held[0].isnan().all()
    assert held[51:].isnan().all()
    assert held[:, 512:].isnan().all()


# Without a GPU from here on.


def there(name: str, n: int, k: int) -> Packed:
    lay = layout(name)
    return Packed(torch.empty(lay.nbytes(n, k), dtype=torch.uint8), lay, n, k)


def test_refusals():
    packed, x = there("Q4_0", 48, 64), torch.zeros(40, 64, dtype=BF16)
    out = torch.zeros(40, 48)
    for wrong, error in (
        ((x[:, :32], packed, out), ShapeError),
        ((x, packed, out[:, :16]), ShapeError),
        ((x, packed, out, torch.zeros(47)), ShapeError),
        ((x[0], packed, out), ShapeError),
        ((x.float(), packed, out), DTypeError),
        ((x, packed, out.double()), DTypeError),
        ((torch.zeros(40, 65, dtype=BF16)[:, :64], packed, out), LayoutError),
        ((torch.zeros(64, 40, dtype=BF16).T, packed, out), LayoutError),
        ((x, packed, torch.zeros(48, 40).T), LayoutError),
    ):
        with pytest.raises(error):
            KERNEL.run(*wrong)
    for out, first, error in (
        (torch.zeros(48, 32), 0, ShapeError),
        (torch.zeros(48, 64), 16, ShapeError),
        (torch.zeros(16, 64), 8, ShapeError),
        (torch.zeros(16, 64, dtype=torch.int32), 0, DTypeError),
        (torch.zeros(64, 16).T, 0, LayoutError),
        (torch.zeros(16, 65)[:, :64], 0, LayoutError),
    ):
        with pytest.raises(error):
            dequantize.run(packed, out, first)


def test_nothing_to_do():
    packed = there("Q4_0", 48, 64)
    KERNEL.run(torch.zeros(0, 64, dtype=BF16), packed, torch.zeros(0, 48))
    dequantize.run(packed, torch.zeros(0, 64), 48)


def test_configurations():
    for name in FORMATS:
        for m in (9, 33, 64, 200, 512, 4096):
            for n, k in ((19456, 2560), (28672, 4096), (2560, 9728), (100, 256)):
                parts = quant_many.best(name, m, n, k).parts(n)
                assert all(quant_many.legal(layout(name), part.config) for part in parts)
                assert sum(part.rows for part in parts) == n
                assert [part.first for part in parts] == [0, parts[0].rows][: len(parts)]
                assert all(part.first % 64 == 0 for part in parts)
    walk = ManyWalk(ManyConfig(2, 1, 128, 8), 640, ManyConfig(3, 1, 96, 4, 2))
    assert (str(walk), str(ManyWalk(walk.config))) == ("2x1x128 s8 to 640, 3x1x96 s4 c2", "2x1x128 s8")
    assert walk.parts(1000) == ((0, 640, walk.config), (640, 360, walk.rest))
    assert [part.rows for part in walk.parts(200)] == [64, 136]
    assert [part.rows for part in walk.parts(100)] == [100]
    many = ManyConfig(2, 1, 256, 12)
    assert not quant_many.legal(layout("Q4_0"), many)
    assert many.shared(layout("Q4_0")) > quant_many.SHARED


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_products_do_not_wait_for_one_another(kernels, name):
    """No spills; and no product is waited for before the next one: a serialised walk leaves none in flight."""
    for m in (64, 512) if name == "Q4_K" else (512,):
        case = QuantCase("same", name, "bfloat16", "bfloat16", None, m, 28672, 4096)
        KERNEL.build(case, KERNEL.configure(case, 132), 0)
    for kernel in kernels.loaded:
        assert kernel.spilled == 0
        assert not kernel.hasty()
        found = [re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)", line) for line in kernel.instructions]
        left = [int(wait[1], 16) for wait in found if wait]
        assert len(left) > 4
        assert left.count(0) == 1  # at the end of a tile


@pytest.mark.parametrize("name", FORMATS)
def test_dequantizing_compiles(kernels, name):
    dequantize.bind.cache_clear()
    for dtype in ("bfloat16", "float16", "float32"):
        dequantize.bind(layout(name), dtype, 256, 1024, 1024, 0)
    assert len(kernels.loaded) == 3
    assert all(kernel.spilled == 0 for kernel in kernels.loaded)

"""Products of a few rows with quantized weights on the device: bits of the definition, whatever shares out the work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.device import BF16, DTYPES, FP16, Guarded, Mode, check_sample, draw, expected, same, torch
from tests.backends.cuda.quant.test_layout import drawn

from isogemm.backends.cuda.quant import few, layout, pack
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.few import KERNEL, FewConfig
from isogemm.backends.cuda.quant.layout import FORMATS
from isogemm.errors import DeviceError, DTypeError, IsogemmError, LayoutError, LimitError, ShapeError
from isogemm.formats.blocks import format_of
from isogemm.formats.reference import dequantize

gpu = pytest.mark.gpu
halves = pytest.mark.parametrize("mode", [BF16, FP16], ids=str)
formats = pytest.mark.parametrize("name", FORMATS)
M = (1, 2, 3, 8, 9, 16, 17, 25, 32)


def blocks_of(name: str, k: int) -> int:
    """Blocks of a row of at least k."""
    return -(-k // format_of(name).block)


def weight(name: str, n: int, k: int, dtype: str, seed: int = 0) -> tuple[Any, Any]:
    """A packed weight [n, >= k], and what it means, rounded once."""
    rows = drawn(name, n, blocks_of(name, k), seed)
    w = torch.from_numpy(dequantize(rows, format_of(name))).cuda()
    packed = pack.lay_out(torch.from_numpy(rows).cuda(), name, n, w.shape[1])
    return packed, w.to(DTYPES[dtype])


def product(x: Any, packed: Any, dtype: str, bias: Any = None, config: FewConfig | None = None) -> Any:
    """A product whose output was NaN before, and nothing around it written."""
    out = Guarded((x.shape[0], packed.n), dtype)
    KERNEL.run(x, packed, out.view, bias, config)
    out.check(out.view.clone(), "around")
    return out.view


@gpu
@formats
@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (33, 5), (100, 12)])
def test_the_device_packs_as_the_host(name, n, blocks):
    rows = drawn(name, n, blocks)
    k = blocks * format_of(name).block
    wide = torch.zeros((n, rows.shape[1] + 7), dtype=torch.uint8, device="cuda")
    wide[:, : rows.shape[1]] = torch.from_numpy(rows)
    packed = pack.lay_out(wide[:, : rows.shape[1]], name, n, k)
    assert np.array_equal(packed.data.cpu().numpy(), layout.pack(rows, name))


@gpu
@formats
@halves
def test_rows_of_ones_and_zeros_return_the_weights(name: str, mode: Mode) -> None:
    """Every weight, rounded once; scales over all of float16's range, and rows whose weights overflow left out."""
    fmt, n = format_of(name), 50
    rows = drawn(name, n, blocks_of(name, 320))
    fields = rows.reshape(n, -1, fmt.nbytes).view(fmt.dtype)[..., 0]
    rng = np.random.default_rng(1)
    for field in fmt.scales:
        d = fields[field.name]
        fields[field.name] = (d * np.exp2(rng.integers(-24, 8, d.shape))).astype(np.float16)
    w = torch.from_numpy(dequantize(rows, fmt)).cuda().to(DTYPES[mode.dtype])
    packed = pack.lay_out(torch.from_numpy(rows).cuda(), name, n, w.shape[1])
    eye = torch.eye(w.shape[1], device="cuda").to(w.dtype)
    got = torch.cat([product(part, packed, "float32") for part in eye.split(32)]).T
    finite = torch.isfinite(w).all(1)
    assert int(finite.sum()) > n // 2
    same((got + 0.0)[finite], (w.float() + 0.0)[finite], f"{name} {mode}")


@gpu
@formats
@halves
def test_products_have_the_bits_of_the_definition(name: str, mode: Mode) -> None:
    packed, w = weight(name, 100, 768, mode.dtype)
    x = draw((max(M), packed.k), mode.dtype, 3, special=True)
    want = expected(x, w.T, mode.definition)
    # Tiles with two warps, and with one.
    for m in M:
        for config in (None, FewConfig(2, 0, 256, xstages=2), FewConfig(0, 2, 256, 3, 2), FewConfig(1, 1, 256)):
            same(product(x[:m], packed, mode.dtype, config=config), want[:m], f"{name} {mode} m = {m} {config}")


@gpu
@pytest.mark.parametrize("name", [f for f in FORMATS if format_of(f).block == 32])
@pytest.mark.parametrize("k", [32, 64, 96, 288, 544, 1056])
def test_k_may_end_anywhere(name: str, k: int) -> None:
    packed, w = weight(name, 19, k, "bfloat16", k)
    x = draw((11, packed.k), "bfloat16", k)
    for m in (1, 11):
        want = expected(x[:m], w.T, BF16.definition)
        for config in (None, FewConfig(1, 0, 256, xstages=2)):
            same(product(x[:m], packed, "bfloat16", config=config), want, f"{name} k = {k} {config}")


@gpu
@halves
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bias", ["float32", "bfloat16", "float16"])
def test_bias_and_output(mode: Mode, out: str, bias: str) -> None:
    packed, w = weight("Q4_K", 70, 512, mode.dtype)
    x, b = draw((7, packed.k), mode.dtype, 1), draw((70,), bias, 2)
    want = expected(x, w.T, mode.definition, bias=b, out_dtype=out)
    same(product(x, packed, out, b), want, f"{mode} {bias} {out}")


CONFIGS = (
    FewConfig(2, 0, 512, xstages=3),
    FewConfig(15, 0, 256, xstages=2),
    FewConfig(0, 3, 256, stages=3),
    FewConfig(12, 2, 256, xstages=2),
    FewConfig(1, 2, 512, part=512),
    FewConfig(0, 8, 256, xstages=2),
    FewConfig(3, 1, 1024, part=512),
    FewConfig(0, 1, 256, stages=4),
)


@gpu
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q3_K"])
@pytest.mark.parametrize("m", [1, 7, 12, 20])
def test_configurations_agree(name: str, m: int) -> None:
    """More tiles than a pass takes, chunks that end early, tiles of one warp beside tiles of two."""
    packed, w = weight(name, 9001, 2304, "bfloat16")
    x = draw((m, packed.k), "bfloat16", 5)
    want = product(x, packed, "bfloat16").clone()
    check_sample(want, x, w.T, BF16)
    for config in CONFIGS:
        if config.shared(packed.layout, m, packed.k) <= few.SHARED:
            same(product(x, packed, "bfloat16", config=config), want, f"{name} {config}")


@gpu
def test_replays_see_new_activations() -> None:
    packed, w = weight("Q4_K", 4096, 1024, "bfloat16")
    x, out = draw((4, 1024), "bfloat16", 1), torch.empty((4, 4096), dtype=torch.bfloat16, device="cuda")
    KERNEL.run(x, packed, out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            KERNEL.run(x, packed, out)
    for seed in (2, 3):
        x.copy_(draw((4, 1024), "bfloat16", seed))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        check_sample(out, x, w.T, BF16)


def packed_on_host() -> layout.Packed:
    lay = layout.layout("Q4_0")
    return layout.Packed(torch.zeros(lay.nbytes(20, 64), dtype=torch.uint8), lay, 20, 64)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"x": (2, 65)}, ShapeError, r"\[m, 64\]"),
        ({"x": (33, 64), "out": (33, 20)}, LimitError, "0 to 32"),
        ({"out": (2, 21)}, ShapeError, r"\(2, 20\)"),
        ({"bias": (21,)}, ShapeError, r"\(20,\)"),
        ({"dtype": torch.float32}, DTypeError, "bfloat16 or float16"),
        ({"row": 68}, LayoutError, "multiples of 16 bytes"),
        ({"bias": (20,), "bias_dtype": torch.int32}, DTypeError, "bias"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[IsogemmError], said: str) -> None:
    rows, columns = change.get("x", (2, 64))
    room = torch.zeros((rows, change.get("row", columns + -columns % 8)), dtype=change.get("dtype", torch.bfloat16))
    out = torch.zeros(change.get("out", (2, 20)), dtype=torch.bfloat16)
    bias = torch.zeros(change["bias"], dtype=change.get("bias_dtype", torch.float32)) if "bias" in change else None
    with pytest.raises(error, match=said):
        KERNEL.run(room[:, :columns], packed_on_host(), out, bias)


def test_packing_refuses() -> None:
    rows = torch.zeros((3, 36), dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"\(2, 36\)"):
        pack.lay_out(rows, "Q4_0", 2, 64)
    with pytest.raises(DTypeError, match="uint8"):
        pack.lay_out(rows.to(torch.int8), "Q4_0", 3, 64)
    with pytest.raises(DeviceError, match="CUDA device"):
        pack.lay_out(rows, "Q4_0", 3, 64)
    with pytest.raises(ShapeError, match="Q4_0"):
        pack.lay_out(rows, "Q4_0", 3, 65)


def test_takes() -> None:
    def takes(name: str, m: int, dtype: str) -> bool:
        return KERNEL.takes(QuantCase("same", name, dtype, dtype, None, m, 100, 256))

    assert takes("Q4_K", 32, "float16")
    assert not takes("Q4_K", 33, "float16")
    assert not takes("Q4_K", 1, "float32")
    assert not takes("F16", 1, "float16")


@formats
@pytest.mark.parametrize("m", [1, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (19456, 2560), (64, 53248), (151936, 2560), (16, 256)])
def test_chosen_configurations_fit(name: str, m: int, n: int, k: int) -> None:
    lay = layout.layout(name)
    chosen = few.configure(lay, m, n, k, 132)
    assert chosen.shared(lay, m, k) <= few.SHARED
    assert 0 < chosen.whole + chosen.split <= few.TILES
    assert chosen.threads <= 32 * few.WARPS
    assert chosen.stages >= 2


@formats
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (19456, 2560), (151936, 2560), (4096, 14336)])
def test_a_configuration_fits_every_row_of_its_tiles(name: str, n: int, k: int) -> None:
    """Kernels are tried with other numbers of rows than they were chosen for, of as many tiles."""
    lay = layout.layout(name)
    for m in range(2, 33):
        last = -(-m // 8) * 8
        assert few.configure(lay, m, n, k, 132) == few.configure(lay, last, n, k, 132)
        chosen = few.configure(lay, last, n, k, 132)
        assert chosen.shared(lay, last, k) <= few.SHARED

"""Quantized weights on a CUDA device: the definition's bits, which are the CPU's, in every batch, place and company."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from tests.backends.cuda.device import download as host
from tests.backends.cuda.device import upload as cuda
from tests.products import BF16, F16, F32, assert_same
from tests.quant.draws import LONG, WEIGHTS, blocks, values

import isogemm
from isogemm.quant import FORMATS, QuantizedMatrix, quantize

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

SWEEP = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 512, 1000,
         1024, 2048, 4096)  # fmt: skip
PATHS = {"q8": (F32, "q8"), "q8 bf16": (BF16, "q8"), "bf16": (BF16, None), "fp16": (F16, None), "fp32": (F32, "fp32"),
         "fp32 bf16": (BF16, "fp32")}  # fmt: skip
MAIN = ("q8", "bf16", "fp16", "fp32")
ROWS = 23  # different rows of x, in larger batches repeated: what a row is depends on nothing else


def weight(fmt, n: int, k: int, seed: int = 0) -> QuantizedMatrix:
    """Random blocks, all bit patterns of codes and scales."""
    return QuantizedMatrix.from_bytes(blocks(fmt, n, k // fmt.block, seed), shape=(n, k), format=fmt)


def activations(m: int, k: int, dtype, seed: int = 0) -> np.ndarray:
    x = np.concatenate([values(kind, m, k, seed)[i::4] for i, kind in enumerate(("normal", "heavy", "zeros", "ties"))])
    with np.errstate(over="ignore"):
        return x[:m].astype(dtype)


def wanted(x: np.ndarray, w: QuantizedMatrix, activations=None, **options) -> np.ndarray:
    """What the CPU computes, under the device's contract."""
    if activations is None and x.dtype != F32:
        options.setdefault("contract", "tensor_core:sm90/chain")
    return isogemm.linear(x, w, activations=activations, **options)


@cache
def posed(fmt: str, path: str, n: int, k: int):
    """(x, w, the CPU's result) of ROWS rows."""
    dtype, how = PATHS[path]
    x, w = activations(ROWS, k, dtype), weight(FORMATS[fmt], n, k)
    return x, w, wanted(x, w, how)


def sizes(fmt) -> tuple[tuple[int, int], ...]:
    """(n, k): ragged both, and whole tiles."""
    return ((77, 768), (272, 512)) if fmt.block == 256 else ((77, 96), (272, 512))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_the_definition_of_every_format(fmt, path):
    for n, k in sizes(fmt):
        x, w, want = posed(fmt.name, path, n, k)
        there = w.to("cuda")
        for m in (1, 3, 16, 17, 33, 128, 300):
            rows = np.arange(m) * 7 % ROWS
            got = isogemm.linear(cuda(x[rows]), there, activations=PATHS[path][1])
            assert_same(host(got), want[rows])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("path", MAIN)
def test_the_sweep_of_m(fmt, path):
    """A row alone, and at any place of a batch of any size, in any company."""
    x, w, want = posed(fmt.name, path, 272, 512)
    there = w.to("cuda")
    rng = np.random.default_rng(3)
    for m in SWEEP:
        rows = rng.permutation(np.arange(m) % ROWS)
        got = isogemm.linear(cuda(x[rows]), there, activations=PATHS[path][1])
        assert_same(host(got), want[rows])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_dequantized_weights_are_the_host_s(fmt):
    for n, k in sizes(fmt):
        w = weight(fmt, n, k)
        there = w.to("cuda")
        for dtype in (F32, BF16, F16):
            assert_same(host(there.dequantize(dtype)), w.dequantize(dtype))


@pytest.mark.parametrize("fmt", [FORMATS["Q5_1"], FORMATS["Q4_K"]], ids=str)
@pytest.mark.parametrize("path", MAIN)
def test_bias_types_and_layouts(fmt, path):
    n, k = sizes(fmt)[0]
    x, w, _ = posed(fmt.name, path, n, k)
    there, how = w.to("cuda"), PATHS[path][1]
    for bias_dtype in (F32, BF16):
        bias = values("normal", 1, n)[0].astype(bias_dtype)
        for out_dtype in (None, F32, BF16):
            want = wanted(x, w, how, bias=bias, out_dtype=out_dtype)
            got = isogemm.linear(cuda(x), there, cuda(bias), activations=how, out_dtype=out_dtype)
            assert_same(host(got), want)
    want = wanted(x, w, how)
    given = cuda(x)
    wide = torch.zeros(ROWS, 2 * k + 6, dtype=given.dtype, device="cuda")
    wide[:, 6 : 6 + k] = given
    for view in (wide[:, 6 : 6 + k], given.t().contiguous().t()):
        assert_same(host(isogemm.linear(view, there, activations=how)), want)
    assert_same(host(isogemm.linear(given.view(1, ROWS, k), there, activations=how)), want[None])
    assert_same(host(isogemm.linear(given[3], there, activations=how)), want[3])
    swapped = given[:22].view(2, 11, k).transpose(0, 1)
    assert_same(host(isogemm.linear(swapped, there, activations=how)), want[:22].reshape(2, 11, n).swapaxes(0, 1))
    for out in (
        torch.full((ROWS, n), torch.nan, dtype=given.dtype, device="cuda"),
        torch.full((n, ROWS), torch.nan, dtype=given.dtype, device="cuda").t(),
        torch.full((ROWS, n + 9), torch.nan, dtype=given.dtype, device="cuda")[:, 5 : 5 + n],
    ):
        assert isogemm.linear(given, there, activations=how, out=out) is out
        assert_same(host(out.contiguous()), want)


@pytest.mark.parametrize("path", MAIN)
def test_neighbours_and_numbers_that_are_none(path):
    x, w, want = posed("Q4_K", path, 272, 512)
    there, how = w.to("cuda"), PATHS[path][1]
    for m in (5, 40):
        rows = np.arange(m) % ROWS
        odd = x[rows].copy()
        odd[1, 7], odd[3, 300] = np.inf, np.nan
        got = host(isogemm.linear(cuda(odd), there, activations=how))
        keep = [i for i in range(m) if i not in (1, 3)]
        assert_same(got[keep], want[rows][keep])
        assert_same(got[[1, 3]], wanted(odd[[1, 3]], w, how))


@pytest.mark.parametrize("fmt", [FORMATS["Q4_0"], FORMATS["Q6_K"]], ids=str)
def test_slices_of_rows(fmt):
    x, w, want = posed(fmt.name, "bf16", 272, 512)
    for there in (w.to("cuda"), w.to("cuda", native=True)):
        data = there._packed.packed.data.data_ptr()
        for part in (slice(16, 77), slice(0, 33), slice(5, 40), slice(271, None), slice(None, None, -3), slice(9, 9)):
            cut = there[part]
            got = host(isogemm.linear(cuda(x), cut))
            assert_same(got, np.ascontiguousarray(want[:, part]))
            assert_same(host(cut.dequantize()), w[part].dequantize())
        shared = there[64:128]
        size = there._packed.packed.layout.tile_bytes(512)
        assert shared._packed.packed.data.data_ptr() == data + 4 * size or 4 * size % 128


@pytest.mark.parametrize("fmt", [FORMATS["Q4_0"], FORMATS["Q4_K"]], ids=str)
def test_other_orders_and_arithmetics(fmt):
    n, k = 77, 1024
    w = weight(fmt, n, k)
    there = w.to("cuda")
    x, short = activations(9, k, F32), activations(9, k, BF16)
    for options in (
        {"contract": "int32/leaf256"}, {"contract": "int32/tree4"}, {"activations": "fp32", "contract": "fma/leaf512"},
        {"activations": "same"}, {"contract": "int32/leaf512", "bias": values("normal", 1, n)[0]},
    ):  # fmt: skip
        given = {name: cuda(v) if name == "bias" else v for name, v in options.items()}
        assert_same(host(isogemm.linear(cuda(x), there, **given)), isogemm.linear(x, w, **options))
    for options in (
        {"contract": "tensor_core:sm90/leaf256"}, {"contract": "fma"}, {"contract": "int32/tree2"},
        {"activations": "fp32", "contract": "fma/tree2"},
    ):  # fmt: skip
        assert_same(host(isogemm.linear(cuda(short), there, **options)), isogemm.linear(short, w, **options))


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16"])
def test_formats_without_blocks(fmt):
    w = quantize(values("normal", 40, 96), fmt)
    there = w.to("cuda")
    x = activations(9, 96, F32)
    assert_same(host(isogemm.linear(cuda(x), there)), isogemm.linear(x, w))
    short = activations(9, 96, BF16)
    assert_same(host(isogemm.linear(cuda(short), there)), wanted(short, w))
    assert_same(host(there[3:9].dequantize()), w[3:9].dequantize())


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("m", [0, 3])
def test_nothing_to_compute(m, n):
    w = quantize(np.ones((n, 64), F32), "Q4_0").to("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        assert isogemm.linear(torch.zeros(m, 64, dtype=dtype, device="cuda"), w).shape == (m, n)
    empty = quantize(np.ones((n, 0), F32), "Q4_0").to("cuda")
    bias = torch.arange(n, dtype=torch.float32, device="cuda")
    got = isogemm.linear(torch.zeros(m, 0, device="cuda"), empty, bias)
    assert torch.equal(got, bias.expand(m, n))


@pytest.mark.parametrize("path", MAIN)
@pytest.mark.parametrize("m", [1, 40])
def test_streams_and_captured_graphs(path, m):
    fmt = LONG[2].name
    x, w, want = posed(fmt, path, 272, 512)
    there, how = w.to("cuda"), PATHS[path][1]
    rows = np.arange(m) % ROWS
    given = cuda(x[rows])
    isogemm.linear(given, there, activations=how)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        later = given.clone()
        got = isogemm.linear(later, there, activations=how)
    stream.synchronize()
    assert_same(host(got), want[rows])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = isogemm.linear(given, there, activations=how)
    for shift in (1, 5):
        given.copy_(cuda(x[(rows + shift) % ROWS]))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(host(got), want[(rows + shift) % ROWS])


def test_devices_that_differ_are_named():
    from isogemm.errors import DeviceError, OptionError

    w = weight(FORMATS["Q4_0"], 8, 64)
    x = torch.zeros(2, 64)
    with pytest.raises(DeviceError, match=r"w\.to\('cuda:0'\)"):
        isogemm.linear(x.cuda(), w)
    with pytest.raises(DeviceError, match=r"x\.to\('cuda:0'\)"):
        isogemm.linear(x, w.to("cuda"))
    with pytest.raises(DeviceError):
        w.to("cuda").panels()
    with pytest.raises(OptionError):
        quantize(np.ones((2, 256), F32), "Q8_K").to("cuda")


def test_what_is_printed_and_kept():
    w = weight(FORMATS["Q4_0"], 64, 128)
    there = w.to("cuda")
    assert there.device == "cuda:0"
    assert there.to("cuda") is there
    assert there.to("cpu") is w
    assert repr(there) == "QuantizedMatrix(64 x 128, Q4_0, 4608 bytes, on cuda:0: 4608 bytes)"
    assert repr(w.to("cuda", native=True)) == "QuantizedMatrix(64 x 128, Q4_0, 4608 bytes, on cuda:0: 9216 bytes)"

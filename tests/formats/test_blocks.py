"""Blocks taken apart and put together, bit for bit against the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.quant.draws import KINDS, LONG, QUANTIZED, SHORT, WEIGHTS, blocks, values

import isogemm
from isogemm.errors import FormatError
from isogemm.formats import reference
from isogemm.quant import FORMATS, QuantizedMatrix, quantize

GOLDEN = Path(__file__).parent / "ggml.npz"


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{got.itemsize}"))


def oracle(fmt, rows):
    return quants.dequantize(rows, gguf.GGMLQuantizationType[fmt.name])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 5), (70, 9)])
def test_dequantize_is_the_packages(fmt, n, count):
    rows = blocks(fmt, n, count)
    want = oracle(fmt, rows)
    w = QuantizedMatrix.from_bytes(rows, shape=(n, count * fmt.block), format=fmt)
    same(w.dequantize(), want)
    same(reference.dequantize(rows, fmt), want)
    for dtype in ("bfloat16", "float16"):
        with np.errstate(over="ignore"):
            same(w.dequantize(dtype), want.astype(w.dequantize(dtype).dtype))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_are_formats_too(name):
    fmt, x = FORMATS[name], values("heavy", 7, 33)
    w = quantize(x, name)
    same(w.rows.reshape(-1), quants.quantize(x, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(-1))
    same(w.dequantize(), oracle(fmt, w.rows).reshape(x.shape))
    same(w.dequantize(), reference.dequantize(w.rows, fmt))
    same(w.array().astype(np.float32), w.dequantize())


@pytest.mark.parametrize("fmt", SHORT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_is_the_packages(fmt, kind):
    x = values(kind, 37, 96)
    with np.errstate(all="ignore"):
        want = quants.quantize(x, gguf.GGMLQuantizationType[fmt.name])
    same(quantize(x, fmt).rows, want)


@settings(max_examples=60)
@given(st.sampled_from(SHORT), st.integers(0, 2**32 - 1), st.integers(-126, 14))
def test_quantize_any_bits(fmt, seed, exponent):
    """Every significand, signs and magnitudes mixed over a block."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (2, 64), dtype=np.uint32)
    low = max(0, exponent + 127 - int(rng.integers(1, 60)))
    bits = (bits & np.uint32(0x807FFFFF)) | (rng.integers(low, exponent + 128, (2, 64)).astype(np.uint32) << 23)
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        want = quants.quantize(x, gguf.GGMLQuantizationType[fmt.name])
    same(quantize(x, fmt).rows, want)


@pytest.mark.parametrize("fmt", [*LONG, FORMATS["Q8_K"]], ids=str)
def test_super_blocks_are_those_of_ggml(fmt):
    """Bytes that ggml's own reference wrote, compiled without fused operations; see the file's `about`."""
    with np.load(GOLDEN) as golden:
        same(quantize(golden["x"], fmt).rows, golden[fmt.name])


@pytest.mark.parametrize("fmt", LONG, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_super_blocks_come_back_close(fmt, kind):
    """The package's own dequantizer reads them, and the error is that of the format."""
    x = values(kind, 9, 512)
    w = quantize(x, fmt)
    back = oracle(fmt, w.rows)
    same(w.dequantize(), back)
    if kind in ("normal", "rows", "shifted") and np.abs(x).max() > 1e-3:
        allowed = {"Q2_K": 0.4, "Q3_K": 0.2, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.03}[fmt.name]
        assert np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2)) < allowed


@pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
def test_layout_dtype_and_threads_do_not_matter(fmt):
    x = values("normal", 33, 512).astype(np.float16)
    want = quantize(x.astype(np.float32), fmt).rows
    for threads in (1, 3):
        isogemm.set_num_threads(threads)
        same(quantize(x, fmt).rows, want)
        same(quantize(np.asfortranarray(x), fmt).rows, want)
        same(quantize(x[::-1, ::-1].copy()[::-1, ::-1], fmt).rows, want)
    same(quantize(x[4:9], fmt).rows, want[4:9])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3e38])
def test_what_no_scale_can_hold_is_refused(fmt, wrong):
    x = values("normal", 5, 512)
    x[3, 300] = wrong
    with pytest.raises(FormatError, match=r"blk: w\[3, 300\]") as caught:
        quantize(x, fmt, name="blk")
    assert ("65504" in str(caught.value)) == (wrong == 3e38)


@pytest.mark.parametrize(
    ("fmt", "value", "limit", "nearest"),
    [("F16", 1e38, "65504", "BF16"), ("F16", -65520, "65504", "BF16"), ("F16", 3.4028e38, "65504", "F32"),
     ("BF16", 3.4028e38, "3.3895e38", "F32")],
)  # fmt: skip
def test_a_number_that_a_float_format_makes_infinite_is_refused(fmt, value, limit, nearest):
    x = values("normal", 5, 8)
    x[3, 6] = value
    with pytest.raises(FormatError, match=rf"^blk: w\[3, 6\] in {fmt}: .*{limit}.*nearest legal choice: {nearest}"):
        quantize(x, fmt, name="blk")
    x[3, 6], x[2, 1], x[1, 0] = 65519 if fmt == "F16" else 3.39e38, np.inf, np.nan  # these two are kept as they are
    kept = quantize(x, fmt).dequantize()
    assert np.isfinite(kept[3, 6])
    assert np.isinf(kept[2, 1])
    assert np.isnan(kept[1, 0])

"""Quantized matrices: views, strides, slices, and bytes that are not what they should be."""

from __future__ import annotations

import numpy as np
import pytest
from tests.formats.test_blocks import same
from tests.quant.draws import WEIGHTS, blocks, values

import isogemm
from isogemm.errors import DTypeError, FormatError, LayoutError, OptionError, ShapeError
from isogemm.quant import FORMATS, QuantizedMatrix, quantize


def matrix(fmt, n: int = 6, count: int = 3, **options) -> QuantizedMatrix:
    data = blocks(fmt, n, count).tobytes()
    return QuantizedMatrix.from_bytes(data, shape=(n, count * fmt.block), format=fmt, **options)


def test_weights_in_the_place_of_the_format_are_named_and_not_printed():
    with pytest.raises(DTypeError, match=r"^format: limit: .* got: ndarray; .*: quantize\(w, 'Q4_K'\)$"):
        quantize("Q4_K", np.ones((300, 256), np.float32))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_it_knows_its_format_shape_and_strides(fmt):
    w = matrix(fmt, name="blk.0.w")
    assert w.shape == (6, 3 * fmt.block)
    assert w.ndim == 2
    assert len(w) == 6
    assert w.format is fmt
    assert w.strides == (3 * fmt.nbytes, fmt.nbytes)
    assert w.nbytes == 18 * fmt.nbytes
    assert w.row_offset(5) == 15 * fmt.nbytes
    assert repr(w) == f"QuantizedMatrix('blk.0.w', 6 x {3 * fmt.block}, {fmt.name}, {w.nbytes} bytes)"


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_rows_are_sliced_without_copies(fmt):
    w = matrix(fmt)
    whole = w.dequantize()
    for part in (slice(2, 5), slice(None, None, 2), slice(None, None, -1), slice(4, 1, -2), slice(5, 5), slice(-2, 99)):
        cut = w[part]
        assert cut.shape == (len(range(*part.indices(6))), w.shape[1])
        assert not len(cut) or np.shares_memory(cut.rows, w.rows)
        same(cut.dequantize(), whole[part])
    for wrong in (2, (0, 1), "a", slice("a", "b"), slice(None, None, 0)):
        with pytest.raises(OptionError, match="slice of rows"):
            w[wrong]


def test_rows_may_lie_apart():
    fmt = FORMATS["Q4_0"]
    room = np.full((5, 3 * fmt.nbytes + 7), 0xFF, np.uint8)
    room[:, : 3 * fmt.nbytes] = blocks(fmt, 5, 3)
    w = QuantizedMatrix.from_bytes(room[:, : 3 * fmt.nbytes], shape=(5, 96), format="Q4_0")
    assert np.shares_memory(w.rows, room)
    assert "rows 61 bytes apart" in repr(w)
    same(w.dequantize(), matrix(fmt, 5).dequantize())


def test_a_stride_off_by_one_block_is_caught():
    """986 = 29 * 34 is aligned to blocks like 952 = 28 * 34: only the strides themselves tell."""
    data = blocks(FORMATS["Q8_0"], 8, 29)
    for wrong, error in (
        ({"data": data[:, :952].tobytes(), "row_stride": 986}, LayoutError),
        ({"data": data.tobytes()}, FormatError),
        ({"data": data}, LayoutError),
    ):
        with pytest.raises(error, match=r"blk\.1") as caught:
            QuantizedMatrix.from_bytes(shape=(8, 896), format="Q8_0", name="blk.1", **wrong)
        assert "28 blocks of 34" in str(caught.value)
        if wrong["data"] is not data:
            assert "29 blocks of 34" in str(caught.value)
    QuantizedMatrix.from_bytes(data[:, :952].tobytes(), shape=(8, 896), format="Q8_0", row_stride=952)


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("missing", [1, 7, 100])
def test_bytes_that_are_cut_short(fmt, missing):
    data = blocks(fmt, 6, 3).tobytes()
    with pytest.raises(FormatError, match=r"blk\.2: bytes of a") as caught:
        QuantizedMatrix.from_bytes(data[:-missing], shape=(6, 3 * fmt.block), format=fmt, name="blk.2", origin=4096)
    assert f"at byte {4096 + len(data) - missing}" in str(caught.value)
    assert f"{len(data)} bytes" in str(caught.value)


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01], ids=hex)
def test_scales_that_are_no_numbers(fmt, bits):
    for field in fmt.scales:
        data = blocks(fmt, 6, 3)
        at = 2 * fmt.nbytes + field.offset
        data[4, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        where = 1000 + 4 * data.shape[1] + at
        with pytest.raises(FormatError, match=f"blk.3: scale {field.name} of block 2 of row 4, at byte {where}"):
            QuantizedMatrix.from_bytes(data, shape=(6, 3 * fmt.block), format=fmt, name="blk.3", origin=1000)
        lazily = QuantizedMatrix(data, (6, 3 * fmt.block), fmt)
        with pytest.raises(FormatError, match="row 1, at byte"):
            lazily[3:].dequantize()
        lazily[:4].dequantize()


def test_numbers_are_whole():
    data = bytes(6 * 34)
    w = QuantizedMatrix.from_bytes(data, shape=np.array([6, 32]), format="Q8_0", row_stride=np.int64(34))
    assert w.shape == (6, 32)
    for shape in ((6.5, 32), (6.0, 32), ("6", 32)):
        with pytest.raises(ShapeError, match=r"shape: limit: \(n, k\)"):
            QuantizedMatrix.from_bytes(data, shape=shape, format="Q8_0")
    with pytest.raises(LayoutError, match=r"row stride of Q8_0 .*got: '34'"):
        QuantizedMatrix.from_bytes(data, shape=(6, 32), format="Q8_0", row_stride="34")


def test_shapes_and_data_that_make_no_sense():
    good = blocks(FORMATS["Q4_0"], 2, 1)
    for options, error in (
        ({"shape": (2,)}, ShapeError),
        ({"shape": (2, 33)}, ShapeError),
        ({"shape": (-1, 32)}, ShapeError),
        ({"shape": "ab"}, ShapeError),
        ({"format": "Q4"}, OptionError),
        ({"data": [1, 2]}, LayoutError),
        ({"data": None}, LayoutError),
        ({"data": good[:, ::2]}, LayoutError),
        ({"data": good.astype(np.int64)[:, ::2]}, LayoutError),
    ):
        given = {"data": good, "shape": (2, 32), "format": "Q4_0", **options}
        with pytest.raises(error):
            QuantizedMatrix.from_bytes(given.pop("data"), **given)


def test_empty_matrices():
    for shape in ((0, 64), (5, 0), (0, 0)):
        w = QuantizedMatrix.from_bytes(b"", shape=shape, format="Q4_0")
        assert w.dequantize().shape == shape
        assert quantize(np.ones(shape, np.float32), "Q4_0").dequantize().shape == shape
        assert quantize(np.ones(shape, np.float32), "F16").nbytes == shape[0] * shape[1] * 2


def test_what_cannot_be_quantized_or_converted():
    x = values("normal", 4, 64)
    for call, error in (
        (lambda: quantize(x[0], "Q4_0"), ShapeError),
        (lambda: quantize(x.astype(int), "Q4_0"), DTypeError),
        (lambda: quantize(x.tolist(), "Q4_0"), DTypeError),
        (lambda: quantize(x, "Q4_K"), ShapeError),
        (lambda: quantize(x, "Q4_0").dequantize(np.int8), DTypeError),
        (lambda: quantize(x, "Q4_0").array(), OptionError),
    ):
        with pytest.raises(error):
            call()


def test_public_names():
    assert isogemm.quantize is quantize
    assert isogemm.QuantizedMatrix is QuantizedMatrix


@pytest.mark.parametrize("columns", [64, 65])
def test_what_messages_name_is_text_and_a_whole_number(columns):
    data = np.full((2, 68), 0xFF, np.uint8)  # neither has finite scales
    for wrong in (3, None, b"w"):
        with pytest.raises(DTypeError, match=r"^name: limit: text; got: "):
            QuantizedMatrix.from_bytes(data, shape=(2, columns), format="Q8_0", name=wrong)
        with pytest.raises(DTypeError, match=r"^name: limit: text; got: "):
            quantize(np.ones((2, columns), np.float32), "Q8_0", name=wrong)
    for wrong in ("x", 1.5, None):
        with pytest.raises(DTypeError, match=r"^origin: limit: a whole number; got: "):
            QuantizedMatrix.from_bytes(data, shape=(2, columns), format="Q8_0", origin=wrong)


def test_a_mask_over_bytes_is_not_dropped():
    data = blocks(FORMATS["Q8_0"], 2, 2)
    with pytest.raises(DTypeError, match=r"^data: limit: an array without a mask; got: a masked array; "):
        QuantizedMatrix.from_bytes(np.ma.masked_array(data, data > 3), shape=(2, 64), format="Q8_0")

"""The formats as data: sizes and offsets of the file format, and what does not fit is refused by name."""

from __future__ import annotations

import re

import gguf
import pytest
from tests.quant.draws import QUANTIZED, WEIGHTS

from isogemm.errors import OptionError, ShapeError
from isogemm.quant import FORMATS, format_of

BYTES = {
    "Q8_0": (32, 34), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
}  # fmt: skip


def test_every_block_has_its_size():
    assert {name: (f.block, f.nbytes) for name, f in FORMATS.items()} == BYTES
    for name, f in FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (f.block, f.nbytes)
    assert FORMATS["Q6_K"].bits_per_weight == 6.5625


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_fields_fill_the_block_without_gaps(fmt):
    at = 0
    for field in fmt.fields:
        assert field.offset == at
        at += field.nbytes
    assert at == fmt.nbytes == fmt.dtype.itemsize


def test_rows_of_896_columns():
    assert [FORMATS[n].row_bytes(896) for n in ("Q8_0", "Q5_0", "Q4_0", "F32")] == [952, 616, 504, 3584]
    assert FORMATS["Q8_0"].row_offset(5, 896) == 4760


@pytest.mark.parametrize("fmt", [f for f in WEIGHTS if f.block == 256], ids=str)
def test_no_partial_super_blocks(fmt):
    with pytest.raises(ShapeError, match=re.escape("blk.0: columns")) as caught:
        fmt.row_bytes(896, "blk.0")
    assert caught.value.value == 896
    assert str(caught.value.nearest).startswith(fmt.fallback)
    assert FORMATS[fmt.fallback].row_bytes(896)


def test_odd_rows_fall_back_to_floats():
    assert {fmt.fitting(17).name for fmt in QUANTIZED} == {"F16"}
    assert FORMATS["Q4_K"].fitting(512).name == "Q4_K"


def test_names():
    assert format_of("q4_k") is FORMATS["Q4_K"]
    assert format_of("FP16") is FORMATS["F16"]
    assert format_of(FORMATS["Q8_0"]) is FORMATS["Q8_0"]
    for wrong in ("Q4K", 5, None):
        with pytest.raises(OptionError, match="one of F32, F16"):
            format_of(wrong)

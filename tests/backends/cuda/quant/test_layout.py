"""The layout of quantized weights on the device: every number of a weight is found where the formula says."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.backends.cuda.quant.layout import FORMATS, layout, pack
from isogemm.errors import OptionError, ShapeError
from isogemm.formats.blocks import format_of
from isogemm.formats.reference import decode

SHAPES = [(1, 1), (16, 2), (17, 3), (5, 8), (33, 5)]  # rows, blocks of a row


def drawn(name: str, n: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes, with finite scales."""
    fmt = format_of(name)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (n, blocks * fmt.nbytes), np.uint8)
    fields = rows.reshape(n, blocks, fmt.nbytes).view(fmt.dtype)[..., 0]
    for field in fmt.scales:
        fields[field.name] = rng.standard_normal((n, blocks)).astype(np.float16)
    return rows


def code_at(data: np.ndarray, lay, k: int, row: int, at: int) -> int:
    """One stored code, by the formula of the module's documentation, in plain arithmetic."""
    tile, g, half = row // 16, row % 8, row % 16 // 8
    step, j, high, t, odd = at // 64, at % 64 // 16, at % 16 // 8, at % 8 // 2, at % 2
    per = lay.record_k // 64
    base = tile * lay.tile_bytes(k) + step // per * lay.record_bytes + step % per * lay.step_bytes
    field, lane, found = 2 * j + half, 4 * g + t, 0
    for bits, low in lay.planes:
        word, shift = field // (8 // bits), bits * (field % (8 // bits))
        byte = int(data[base + 128 * word + 4 * lane + high + 2 * odd])
        found |= (byte >> shift & ((1 << bits) - 1)) << low
        base += 128 * bits
    return found


def number_at(data: np.ndarray, lay, k: int, row: int, index: int, each: int, kind: str, which: int):
    """d or o of block `index` of a row, or s or t of a sub-block."""
    base = row // 16 * lay.tile_bytes(k) + index // each * lay.record_bytes
    slot, block = 2 * (row % 8) + row % 16 // 8, index % each
    if kind == "float":
        at = base + lay.floats + 2 * ((block * 16 + slot) * lay.floats_each + which)
        return data[at : at + 2].view("<f2")[0]
    return int(data[base + lay.ints + (block * 16 + slot) * lay.ints_each + which])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "blocks"), SHAPES)
def test_every_number_lies_where_the_formula_says(name, n, blocks):
    rows, lay = drawn(name, n, blocks), layout(name)
    codes = decode(rows, lay.format)
    k = codes.q.shape[1]
    data = pack(rows, name)
    assert data.shape == (lay.nbytes(n, k),)
    stored = [[code_at(data, lay, k, i, p) for p in range(k)] for i in range(n)]
    assert np.array_equal(np.array(stored) - lay.zero, codes.q)
    for i in range(n):
        for b in range(blocks):
            each = lay.blocks
            assert number_at(data, lay, k, i, b, each, "float", 0) == np.float16(codes.d[i, b])
            if codes.offset is not None:
                assert number_at(data, lay, k, i, b, each, "float", 1) == np.float16(codes.offset[i, b])
        for j in range(codes.scales.shape[1] if lay.ints_each else 0):
            s = number_at(data, lay, k, i, j, lay.subs, "int", 0)
            t = number_at(data, lay, k, i, j, lay.subs, "int", 1) if lay.ints_each == 2 else s >> 4
            s = s & 15 if name == "Q2_K" else s
            assert (s if s < 128 or codes.mins is not None else s - 256) == codes.scales[i, j]
            assert codes.mins is None or t == codes.mins[i, j]


@pytest.mark.parametrize("name", FORMATS)
def test_padding_is_weights_of_zero(name):
    lay, blocks = layout(name), 1
    n, k = 3, format_of(name).block
    data = pack(drawn(name, n, blocks), name)
    whole = lay.records(k) * lay.record_k
    for row in range(16):
        for at in range(whole):
            if row >= n or at >= k:
                assert code_at(data, lay, k, row, at) == lay.zero
    for row in range(n, 16):
        assert number_at(data, lay, k, row, 0, lay.blocks, "float", 0) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_sizes(name):
    lay = layout(name)
    sizes = {
        "Q8_0": 1088, "Q5_0": 704, "Q5_1": 768, "Q4_0": 576, "Q4_1": 640, "Q2_K": 1344, "Q3_K": 1824, "Q4_K": 2368,
        "Q5_K": 2880, "Q6_K": 3360,
    }  # fmt: skip
    assert lay.record_bytes == sizes[name]
    assert lay.record_bytes % 16 == 0
    assert lay.bits == sum(bits for bits, _ in lay.planes)
    assert lay.nbytes(17, lay.record_k) == 2 * lay.record_bytes


def test_refusals():
    with pytest.raises(OptionError, match="nearest legal choice: Q8_0"):
        layout("BF16")
    with pytest.raises(ShapeError, match="multiple of 18 bytes"):
        pack(np.zeros((2, 19), np.uint8), "Q4_0")

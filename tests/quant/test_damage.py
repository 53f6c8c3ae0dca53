"""Damaged files, by hypothesis: what a table, a header or a block says is true, or an error names tensor and offset."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from tests.quant.draws import LONG, SHORT, WEIGHTS, blocks, values

import isogemm
from isogemm.errors import FormatError, IsogemmError, ShapeError
from isogemm.quant import FORMATS, QuantizedMatrix, load

KINDS = gguf.GGMLQuantizationType
fuzzed = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
sizes = st.one_of(st.integers(0, 600), st.sampled_from([2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]))
names = st.text(st.characters(codec="utf-8"), max_size=20)


def gguf_file(tensors: list[tuple[str, tuple[int, ...], int, int]], data: bytes, *, count: int | None = None) -> bytes:
    """A file by hand: (name, shape, type, offset) of each tensor, whatever they say; and the data behind them."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count is None else count, 0)
    for name, shape, kind, offset in tensors:
        text = name.encode()
        head += struct.pack("<Q", len(text)) + text + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32) + data


def used(path: Path) -> None:
    """Everything that a file says it holds, read and multiplied."""
    file = load(path)
    for name, tensor in file.items():
        assert file.entries[name].offset + file.entries[name].nbytes <= path.stat().st_size
        for part in tensor if isinstance(tensor, list) else [tensor]:
            if isinstance(part, QuantizedMatrix):
                x = np.ones((1, part.shape[1]), np.float32)
                assert part.dequantize().shape == part.shape
                for w in (part, part.in_place()) if part.format.activations else ():
                    assert isogemm.linear(x, w).shape == (1, len(part))
            else:
                assert np.asarray(part).tobytes() is not None


def read(path: Path, data: bytes) -> str:
    """The error of using a file, "" where there is none. Any other kind of error escapes."""
    path.write_bytes(data)
    try:
        used(path)
    except IsogemmError as error:
        return str(error)
    return ""


@fuzzed
@given(
    st.lists(
        st.tuples(names, st.lists(sizes, max_size=5), st.one_of(st.integers(0, 45), st.just(2**32 - 1)), sizes),
        min_size=1, max_size=3,
    ),
    st.integers(0, 4096),
    st.one_of(st.none(), sizes),
)  # fmt: skip
def test_tables_that_say_anything(tmp_path, tensors, size, count):
    table = [(name, tuple(shape), kind, offset) for name, shape, kind, offset in tensors]
    read(tmp_path / "any.gguf", gguf_file(table, bytes(size), count=count))


@fuzzed
@given(st.sampled_from(WEIGHTS), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_offsets_beyond_the_file(tmp_path, fmt, n, count, offset):
    """Where the data lie elsewhere than the table says, the tensor and its first missing byte are named."""
    size = n * count * fmt.nbytes
    data = gguf_file([("blk.7.w", (n, count * fmt.block), KINDS[fmt.name], offset)], bytes(size))
    text = read(tmp_path / "off.gguf", data)
    start = len(data) - size + offset
    assert bool(text) == (offset > 0)
    if offset:
        assert text.startswith("blk.7.w: ")
        assert f"bytes {start} to {start + size}" in text
        assert f"{offset} bytes are missing" in text


@fuzzed
@given(st.sampled_from(WEIGHTS), st.sampled_from(WEIGHTS), st.integers(1, 40))
def test_types_that_are_others(tmp_path, fmt, wrong, n):
    """A tensor of another type than the table says reaches into the next one, or beyond the file, or ends too early.

    Where it only ends too early nothing can be known, and what is read lies in its own bytes.
    """
    k = 256
    size, told = n * fmt.row_bytes(k), n * wrong.row_bytes(k)
    room = -(-size // 32) * 32
    tensors = [("a", (n, k), KINDS[wrong.name], 0), ("b", (n, k), KINDS[fmt.name], room)]
    text = read(tmp_path / "type.gguf", gguf_file(tensors, bytes(room + size)))
    assert bool(text) == (told > room)
    if text:
        assert text.startswith(f"a: {wrong.name} [{n}, 256], bytes ")
        assert "where b begins" in text or "bytes are missing" in text
    text = read(tmp_path / "type.gguf", gguf_file(tensors[:1], bytes(size)))
    assert bool(text) == (told > size)
    if text:
        assert text.startswith("a: ")
        assert f"{told - size} bytes are missing, from block {size // wrong.nbytes} on" in text


@fuzzed
@given(
    st.sampled_from(WEIGHTS), st.integers(1, 6), st.integers(1, 4), st.data(),
    st.sampled_from([0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF]),
)  # fmt: skip
def test_scales_that_are_no_numbers(tmp_path, fmt, n, count, data, bits):
    """Wherever it is, whoever meets it first: the panels, a product in place, a slice, or `dequantize`."""
    rows = blocks(fmt, n, count)
    field = data.draw(st.sampled_from(fmt.scales))
    row, block = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, count - 1))
    at = block * fmt.nbytes + field.offset
    rows[row, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
    path = tmp_path / "scale.gguf"
    path.write_bytes(gguf_file([("blk.0.w", (n, count * fmt.block), KINDS[fmt.name], 0)], rows.tobytes()))
    where = path.stat().st_size - rows.size + row * rows.shape[1] + at
    x = np.ones((2, count * fmt.block), np.float32)
    message = rf"^blk\.0\.w: scale {field.name} of block {block} of row {{}}, at byte {where}: limit"
    for call, r in (
        (lambda w: isogemm.linear(x, w), row),
        (lambda w: isogemm.linear(x, w.in_place()), row),
        (lambda w: isogemm.linear(x, w, activations="fp32"), row),
        (lambda w: w.panels(), row),
        (lambda w: w.check(), row),
        (lambda w: w[row:].dequantize(), 0),
        (lambda w: isogemm.linear(x.astype(np.float16), w[row : row + 1]), 0),
    ):
        with pytest.raises(FormatError, match=message.format(r)):
            call(load(path)["blk.0.w"])
    load(path)["blk.0.w"][:row].dequantize()


@fuzzed
@given(st.sampled_from(WEIGHTS), st.integers(1, 6), st.integers(1, 3), st.data())
def test_blocks_that_are_cut_short(tmp_path, fmt, n, count, data):
    rows = blocks(fmt, n, count)
    whole = gguf_file([("blk.0.w", (n, count * fmt.block), KINDS[fmt.name], 0)], rows.tobytes())
    missing = data.draw(st.integers(1, rows.size))
    text = read(tmp_path / "cut.gguf", whole[:-missing])
    assert text.startswith("blk.0.w: ")
    assert f"{missing} bytes are missing, from block {(rows.size - missing) // fmt.nbytes} on" in text


@pytest.mark.parametrize("fmt", LONG, ids=str)
@pytest.mark.parametrize("k", [896, 384, 32, 255, 1])
def test_rows_that_super_blocks_do_not_fill(tmp_path, fmt, k):
    """Refused wherever such a matrix could come from, with the format that fits."""
    near = fmt.fitting(k).name
    data = gguf_file([("blk.0.w", (4, k), KINDS[fmt.name], 0)], bytes(4096))
    text = read(tmp_path / "k.gguf", data)
    messages = [text]
    for call in (
        lambda: QuantizedMatrix.from_bytes(bytes(4096), shape=(4, k), format=fmt, name="blk.0.w"),
        lambda: isogemm.quantize(np.ones((4, k), np.float32), fmt, name="blk.0.w"),
    ):
        with pytest.raises(ShapeError) as caught:
            call()
        messages.append(str(caught.value))
    for text in messages:
        assert text.startswith(
            f"blk.0.w: columns of a {fmt.name} matrix: limit: a multiple of its block, 256; got: {k}"
        )
        assert f"nearest legal choice: {near}, whose block is {FORMATS[near].block}" in text


@fuzzed
@given(st.data(), st.sampled_from(SHORT))
def test_flipped_bits_of_a_small_file(tmp_path, data, fmt):
    """Anywhere: in the header, the table or the blocks."""
    tensors = [("a", (3, 64), KINDS[fmt.name], 0), ("norm", (7,), KINDS.F32, -(-6 * fmt.nbytes // 32) * 32)]
    room = values("normal", 1, 7)[0].tobytes()
    whole = gguf_file(tensors, blocks(fmt, 3, 2).tobytes().ljust(tensors[1][3], b"\0") + room)
    assert not read(tmp_path / "bits.gguf", whole)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    text = read(tmp_path / "bits.gguf", bytes(damaged))
    assert not text or ": " in text


def test_errors_of_a_header_name_the_byte(tmp_path):
    """What the package finds wrong by itself, too: it raises whatever it comes to."""
    good = gguf_file([("w", (3, 64), KINDS.Q4_0, 0)], bytes(108))
    table = 24
    for at, change, words in (
        (4, b"\x09", "header, at byte 4: .*version 9"),
        (16, b"\x01", r"table of tensors, at byte \d+: limit"),
        (table + 8, b"\xff", r"table of tensors, at byte \d+: .*UnicodeDecodeError"),
    ):
        text = read(tmp_path / "header.gguf", good[:at] + change + good[at + len(change) :])
        assert re.search(rf"^header\.gguf: {words}", text), text
    text = read(tmp_path / "k.gguf", gguf_file([("w", (3, 65), KINDS.Q4_0, 0)], bytes(108)))
    assert text.startswith("w: columns of a Q4_0 matrix: ")
    assert f"got: 65, in the table at byte {table}" in text


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=8,
)
pieces = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3", "Q4_K"]), json_values),
        "shape": st.one_of(st.lists(sizes, max_size=3), json_values),
        "data_offsets": st.one_of(st.lists(st.integers(-9, 99), max_size=3), json_values),
    },
)


@fuzzed
@given(st.dictionaries(names, st.one_of(pieces, json_values), max_size=3), st.integers(0, 100))
def test_safetensors_headers_that_say_anything(tmp_path, header, size):
    text = json.dumps(header).encode()
    read(tmp_path / "any.safetensors", struct.pack("<Q", len(text)) + text + bytes(size))


@fuzzed
@given(st.data())
def test_flipped_and_cut_safetensors(tmp_path, data):
    whole = save({"w": values("normal", 3, 8), "b": values("normal", 1, 3)[0]})
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    text = read(tmp_path / "bits.safetensors", bytes(damaged))
    assert text or len(damaged) == len(whole)


def test_tensors_that_share_bytes(tmp_path):
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [at, at + 16]} for name, at in (("b", 8), ("a", 0))}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(24)
    first = 8 + len(text)
    (tmp_path / "both.safetensors").write_bytes(data)
    message = rf"^a: F32 \[4\], bytes {first} to {first + 16}: .*where b begins; got: 8 bytes"
    with pytest.raises(FormatError, match=message):
        load(tmp_path / "both.safetensors")

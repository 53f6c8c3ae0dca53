"""Files: mapped without copies, and every way in which one can be cut short or damaged is an error with a name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.formats.test_blocks import same
from tests.quant.draws import WEIGHTS, blocks, values

import isogemm
from isogemm.errors import FormatError, IsogemmError, OptionError, ShapeError
from isogemm.quant import QuantizedMatrix, load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with every format, an expert tensor, a vector and metadata of many types."""
    path = tmp_path_factory.mktemp("files") / "model.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint32("test.number", 7)
    writer.add_array("test.words", ["a", "bc", ""])
    writer.add_array("test.floats", [1.0, 2.5])
    for fmt in WEIGHTS:
        kind = gguf.GGMLQuantizationType[fmt.name]
        writer.add_tensor(f"blk.{fmt.name}", blocks(fmt, 6, 3), raw_dtype=kind)
    writer.add_tensor("experts", blocks(WEIGHTS[0], 12, 2).reshape(3, 4, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", values("normal", 1, 33)[0])
    writer.add_tensor("half", values("normal", 3, 5).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_tensors_are_views_of_the_file(model):
    file = load(model)
    assert len(file) == len(WEIGHTS) + 3
    for fmt in WEIGHTS:
        w = file[f"blk.{fmt.name}"]
        assert isinstance(w, QuantizedMatrix)
        assert (w.shape, w.format, w.name) == ((6, 3 * fmt.block), fmt, f"blk.{fmt.name}")
        same(w.rows, blocks(fmt, 6, 3))
        assert not w.rows.flags.writeable
        x = values("normal", 2, w.shape[1])
        read = QuantizedMatrix.from_bytes(blocks(fmt, 6, 3), shape=w.shape, format=fmt)
        same(isogemm.linear(x, w), isogemm.linear(x, read))
    same(file["norm"], values("normal", 1, 33)[0])
    same(file["half"], values("normal", 3, 5).astype(np.float16))
    experts = file["experts"]
    assert [e.shape for e in experts] == [(4, 64)] * 3
    same(experts[1].rows, blocks(WEIGHTS[0], 12, 2)[4:8])
    assert file.metadata["test.number"] == 7
    assert file.metadata["test.words"] == ["a", "bc", ""]
    with open(model, "rb") as handle:
        entry = file.entries["blk.Q4_K"]
        handle.seek(entry.offset)
        assert handle.read(entry.nbytes) == file.raw("blk.Q4_K").tobytes()


def test_safetensors_are_views_of_the_file(tmp_path):
    x = values("normal", 4, 64)
    tensors = {
        "w": x,
        "b": x.astype(ml_dtypes.bfloat16),
        "h": x.astype(np.float16),
        "i": np.arange(5),
        "s": np.float32(3),
    }
    save_file({name: np.asarray(t) for name, t in tensors.items()}, tmp_path / "m.safetensors", {"made": "here"})
    file = load(str(tmp_path / "m.safetensors"))
    assert file.metadata == {"made": "here"}
    for name, want in tensors.items():
        same(file[name], np.asarray(want))
        assert not file[name].flags.owndata
    w = isogemm.quantize(file["b"], "Q4_0")
    same(w.rows, isogemm.quantize(x.astype(ml_dtypes.bfloat16).astype(np.float32), "Q4_0").rows)


def test_a_file_cut_anywhere_names_what_is_missing(model, tmp_path):
    whole, damaged = model.read_bytes(), tmp_path / "cut.gguf"
    file = load(model)
    start = min(e.offset for e in file.entries.values())
    cuts = [*range(0, start, 7), *(e.offset + e.nbytes - 1 for e in file.entries.values() if e.nbytes)]
    for cut in cuts:
        damaged.write_bytes(whole[:cut])
        with pytest.raises(FormatError) as caught:
            load(damaged)
        text = str(caught.value)
        assert "byte" in text
        if cut >= start:
            first = next(e for e in file.entries.values() if e.offset + e.nbytes > cut)
            assert text.startswith(f"{first.name}: ")
            assert "bytes are missing" in text


def test_flipped_bytes_never_escape_as_other_errors(model, tmp_path):
    whole, damaged = model.read_bytes(), tmp_path / "flipped.gguf"
    start = min(e.offset for e in load(model).entries.values())
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(400):
        data = bytearray(whole)
        data[int(rng.integers(0, start))] ^= int(rng.integers(1, 256))
        damaged.write_bytes(data)
        try:
            for tensor in load(damaged).values():
                repr(tensor)
        except IsogemmError as error:
            kinds.add(type(error))
    assert FormatError in kinds


def _gguf_with(tmp_path: Path, name: str, shape: tuple[int, ...], kind: int, size: int) -> Path:
    """A minimal file by hand: one tensor, whatever its table says."""
    text = name.encode()
    table = struct.pack("<Q", len(text)) + text + struct.pack("<I", len(shape))
    table += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table
    head += bytes(-len(head) % 32)
    path = tmp_path / "hand.gguf"
    path.write_bytes(head + bytes(size))
    return path


def test_tables_that_lie(tmp_path):
    kinds = gguf.GGMLQuantizationType
    with pytest.raises(ShapeError, match=r"blk\.0: columns of a Q4_K matrix.*Q5_0"):
        load(_gguf_with(tmp_path, "blk.0", (4, 896), kinds.Q4_K, 4 * 504))
    with pytest.raises(FormatError, match=r"blk\.0: type.*got: 999"):
        load(_gguf_with(tmp_path, "blk.0", (4, 256), 999, 1000))
    with pytest.raises(FormatError, match=r"blk\.0: Q4_0 .* bytes are missing, from block 30 on"):
        load(_gguf_with(tmp_path, "blk.0", (4, 256), kinds.Q4_0, 30 * 18 + 5))
    with pytest.raises(FormatError, match="bytes are missing"):
        load(_gguf_with(tmp_path, "blk.0", (2**40, 2**30), kinds.Q8_0, 100))
    file = load(_gguf_with(tmp_path, "blk.0", (4, 256), kinds.IQ4_NL, 32 * 18))
    with pytest.raises(FormatError, match=r"blk\.0: type at byte .*IQ4_NL"):
        file["blk.0"]
    bad = _gguf_with(tmp_path, "blk.0", (4, 64), kinds.Q4_0, 8 * 18)
    data = bytearray(bad.read_bytes())
    at = load(bad).entries["blk.0"].offset + 3 * 18
    data[at : at + 2] = b"\xff\xff"
    bad.write_bytes(data)
    with pytest.raises(FormatError, match=rf"blk\.0: scale d of block 1 of row 1, at byte {at}"):
        isogemm.linear(np.ones((1, 64), np.float32), load(bad)["blk.0"])


def test_safetensors_that_lie(tmp_path):
    path = tmp_path / "bad.safetensors"

    def write(header: object, size: int) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))

    good = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    text = json.dumps(good).encode()
    for header, size, words in (
        ({"w": good}, 23, "w: bytes"),
        ({"w": {**good, "shape": [2, 4]}}, 32, "w: bytes of F32"),
        ({"w": {**good, "data_offsets": [8, 4]}}, 24, "w: bytes"),
        ({"w": {**good, "shape": "x"}}, 24, "header, at byte 8"),
        ({"w": {"dtype": "F32"}}, 24, "header, at byte 8"),
        ({"w": {**good, "shape": [2**62] * 30}}, 24, "w: "),
        ({"w": {**good, "shape": [2**62] * 5000}}, 24, "w: entry of the header.*no file has"),
        ({"w": {**good, "data_offsets": [10**4299, 10**4299]}}, 24, "w: entry of the header.*no file has"),
        ({"w": {**good, "dtype": "Q4_K", "shape": [4, 256]}}, 24, "w: type, of a tensor from byte .*Q4_K"),
        (b"{", 24, "length of the header|header, at byte 8"),
        (b"[]", 24, "header, at byte 8"),
        (b'{"w": %b, "v": %b, "w": %b}' % (text, text, text), 24, "header, at byte 8.*'w' is there twice"),
        (b'{"w": %b}' % text.replace(b"[0, ", b'[8, 32], "data_offsets": [0, '), 32, "'data_offsets' is there twice"),
        ({"w": {**good, "shape": [2.9, 3]}}, 24, "w: entry of the header.*float"),
        ({"w": {**good, "shape": "23"}}, 24, "w: entry of the header"),
    ):
        write(header, size)
        with pytest.raises(FormatError, match=words):
            load(path)
    padded = b'{"w": %b}  ' % text
    path.write_bytes(struct.pack("<Q", len(padded) - 1) + padded + bytes(24))  # all elements a byte off
    with pytest.raises(FormatError, match=r"bytes behind the header, from byte \d+: limit: 24,.*got: 25"):
        load(path)
    write({"w": good, "v": {**good, "data_offsets": [32, 56]}}, 56)
    with pytest.raises(FormatError, match=r"bytes behind the header.*limit: 48,.*got: 56"):
        load(path)
    for raw in (b"", b"GG", struct.pack("<Q", 2**60) + b"{}"):
        path.write_bytes(raw)
        with pytest.raises(FormatError):
            load(path)
    with pytest.raises(OptionError, match="cannot open"):
        load(tmp_path / "none.gguf")


def test_metadata_is_what_the_package_reads(tmp_path):
    """Arrays are read here: of text, of every number, empty ones; and are written again."""
    kinds = gguf.GGUFValueType
    numbers = {
        kinds.UINT8: [0, 255], kinds.INT8: [-128, 127], kinds.UINT16: [0, 65535], kinds.INT16: [-(2**15)],
        kinds.UINT32: [2**32 - 1], kinds.INT32: [-(2**31), 5, 6], kinds.FLOAT32: [1.5, -0.0], kinds.FLOAT64: [0.1],
        kinds.UINT64: [2**64 - 1], kinds.INT64: [-(2**63)], kinds.BOOL: [True, False, True],
    }  # fmt: skip
    path = tmp_path / "in.gguf"
    writer = gguf.GGUFWriter(path, "test")
    for kind, values_ in numbers.items():
        writer.add_key_value(f"array.{kind.name}", values_, kinds.ARRAY, sub_type=kind)
        writer.add_key_value(f"one.{kind.name}", values_[0], kind)
    words = ["", "a", "\u65e5\u672c", "x" * 300, "\0"]
    writer.add_array("words", words)
    writer.add_string("word", words[2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    given = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    found = load(path)
    assert found.metadata == given
    assert found.metadata["words"] == words
    types = {name: [int(t) for t in field.types] for name, field in gguf.GGUFReader(path).fields.items()}
    assert {name: kinds_ for name, _, kinds_ in found.fields()} == types


def test_without_the_package(model, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OptionError, match=r"isogemm\[gguf\]"):
        load(model)

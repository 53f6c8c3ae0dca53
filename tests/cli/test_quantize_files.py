"""`isogemm quantize` and `isogemm inspect` as a new user meets them: shards, names, full disks, keys that stop them."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
from safetensors.numpy import save_file
from tests.cli.test_quantize import run
from tests.formats.test_blocks import same
from tests.quant.draws import blocks, values

import isogemm
from isogemm.errors import DTypeError, FormatError, OptionError
from isogemm.quant import FORMATS, load

ROOT = Path(__file__).parents[2]
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as it is downloaded: two files, an index, a config."""
    found = tmp_path / "modèle"
    found.mkdir()
    tensors = [
        {"a.weight": values("normal", 6, 256), "a.bias": values("normal", 1, 6)[0]},
        {"b": values("normal", 2, 512, 1)},
    ]
    for name, part in zip(NAMES, tensors, strict=True):
        save_file(part, found / name, {"format": "pt"})
    files = {"b": NAMES[1], "a.weight": NAMES[0], "a.bias": NAMES[0]}
    (found / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (found / "config.json").write_text("{}")
    return found


def test_a_model_in_several_files_is_one(folder, tmp_path):
    index, out = folder / "model.safetensors.index.json", tmp_path / "out.gguf"
    for path in (folder, index, str(index)):
        file = load(path)
        assert list(file) == ["b", "a.weight", "a.bias"]
        assert [p.name for p in file.files] == [NAMES[1], NAMES[0]]
        for name in file:
            want = load(folder / file.file_of(name).name)
            same(file[name], want[name])
            assert file.raw(name).tobytes() == want.raw(name).tobytes()
    text = run("inspect", folder, "--check")
    assert all(name in text for name in (*NAMES, "3 tensors"))
    text = run("quantize", folder, out, "-f", "Q4_K")
    assert "2 x Q4_K, 1 x F32" in text
    assert f"{sum((folder / n).stat().st_size for n in NAMES)} -> {out.stat().st_size} bytes" in text
    same(load(out)["b"].rows, isogemm.quantize(values("normal", 2, 512, 1), "Q4_K").rows)
    with pytest.raises(OptionError, match="another file than IN"):
        run("quantize", folder, folder / NAMES[0], "-f", "Q4_K")


def test_folders_that_are_none(folder, tmp_path):
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    for files, error, words in (
        ({"b": "../" + NAMES[0]}, FormatError, r"b: entry of model.*the name of a file beside it"),
        ({"b": 3}, FormatError, "b: entry of model"),
        ({"b": ""}, FormatError, "b: entry of model"),
        ({"c": NAMES[0]}, FormatError, f"c: entry of model.*a tensor of {NAMES[0]}"),
        ({"b": "gone.safetensors"}, OptionError, "gone.safetensors, which is not there"),
        ({"b": index.name}, FormatError, "length of the header"),
        ("x", FormatError, "index: limit: JSON"),
        (None, FormatError, "index: limit: JSON"),
    ):
        index.write_text(json.dumps({**listed, "weight_map": files}))
        for path in (index, folder):
            with pytest.raises(error, match=words):
                load(path)
    index.write_text(f'{{"weight_map": {{"b": "{NAMES[0]}", "b": "{NAMES[1]}"}}}}')
    with pytest.raises(FormatError, match=r"index: .*'b' is there twice"):
        load(folder)
    index.write_text("[")
    with pytest.raises(FormatError, match="index: limit: JSON"):
        load(folder)
    index.unlink()
    with pytest.raises(OptionError, match=f"weights in the folder .*got: {NAMES[0]}, {NAMES[1]}; nearest"):
        load(folder)
    (folder / NAMES[1]).unlink()
    assert list(load(folder)) == ["a.bias", "a.weight"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="got: none of them"):
        load(tmp_path / "empty")


@pytest.mark.parametrize("path", [None, 3, b"x", ["x"], 1.5], ids=str)
def test_what_is_no_path(path):
    with pytest.raises(DTypeError, match="path: limit: a str or a path"):
        load(path)


def test_paths_that_cannot_be():
    for path in ("a\0b", "x" * 5000, "", "no/such.gguf", "no/such.index.json"):
        with pytest.raises(OptionError, match=r"cannot open|weights in the folder"):
            load(path)


def test_outputs_by_other_names(folder, tmp_path):
    source, out = folder / NAMES[0], tmp_path / "out.gguf"
    with pytest.raises(OptionError, match=r"OUT: limit: the name of a \.gguf file.*nearest legal choice: .*out\.gguf"):
        run("quantize", source, tmp_path / "out.safetensors", "-f", "Q4_K")
    with pytest.raises(
        OptionError, match=rf"cannot write.*nearest legal choice: {tmp_path}/model-00001-of-00002\.gguf"
    ):
        run("quantize", source, tmp_path, "-f", "Q4_K")
    for options in (("-f", "Q8_K"), ("-f", "Q4_0", "--fallback", "Q8_K"), ("-f", "Q4_0", "--fallback", "x")):
        with pytest.raises(OptionError, match="Q8_0"):
            run("quantize", source, out, *options)
    assert not out.exists()
    out.write_bytes(b"old")
    run("quantize", source, out, "-f", "Q4_K", "--fallback", "KEEP")
    assert load(out).entries["a.weight"].type == "Q4_K"


def test_names_are_no_markup(tmp_path, monkeypatch):
    names = ["a[/b]", "[bold]c", "\u65e5\u672c", ":smile:"]
    save_file({name: values("normal", 2, 64) for name in names}, tmp_path / "in.safetensors")
    text = run("inspect", tmp_path / "in.safetensors")
    assert all(name in text for name in names)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    run("quantize", tmp_path / "in.safetensors", tmp_path / "out.gguf", "-f", "Q4_0")
    assert set(load(tmp_path / "out.gguf")) == set(names)
    header = json.dumps({"\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(FormatError, match=r"header, at byte 8.*surrogates"):
        run("inspect", tmp_path / "bad.safetensors")


def test_blocks_of_other_formats_are_copied(tmp_path):
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "test")
    data = blocks(FORMATS["Q4_0"], 3, 2)  # as many bytes in as large a block
    writer.add_tensor("iq", data, raw_dtype=kind)
    writer.add_tensor("w", values("normal", 3, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "1 x IQ4_NL, 1 x Q8_0" in run("quantize", tmp_path / "in.gguf", tmp_path / "out.gguf", "-f", "Q8_0")
    made = load(tmp_path / "out.gguf")
    assert made.entries["iq"].shape == (3, 64)
    assert made.raw("iq").tobytes() == data.tobytes()
    assert "not checked: 1 of IQ4_NL" in run("inspect", tmp_path / "out.gguf", "--check")


def _with_array(path: Path, kind: int, count: int, data: bytes) -> Path:
    """A file by hand with one array, which the package does not write."""
    key = b"odd"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(head + struct.pack("<IIQ", 9, kind, count) + data)
    return path


def test_arrays_that_the_package_does_not_write(tmp_path):
    kinds = gguf.GGUFValueType
    out = tmp_path / "out.gguf"
    for kind in (kinds.STRING, kinds.UINT32, kinds.BOOL):
        source = _with_array(tmp_path / "in.gguf", kind, 0, b"")
        run("quantize", source, out, "-f", "Q4_0")
        assert load(out).metadata["odd"] == []
        assert {name: types for name, _, types in load(out).fields()}["odd"] == [kinds.ARRAY, kind]
    out.unlink()
    inner = struct.pack("<IQ", kinds.UINT8, 2) + b"\1\2"
    source = _with_array(tmp_path / "in.gguf", kinds.ARRAY, 2, inner * 2)
    assert load(source).metadata["odd"] == [1, 2, 1, 2]
    with pytest.raises(OptionError, match=r"metadata odd: .*an array of arrays"):
        run("quantize", source, out, "-f", "Q4_0")
    for count, data in ((2, struct.pack("<Q", 1) + b"a"), (1, struct.pack("<Q", 2**63)), (2**60, bytes(64))):
        with pytest.raises(FormatError, match=r"in\.gguf: header, at byte \d+: limit: the file's \d+ bytes"):
            load(_with_array(tmp_path / "in.gguf", kinds.STRING, count, data))
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_a_file_without_weights_says_so(tmp_path):
    save_file({"b": values("normal", 1, 64)[0]}, tmp_path / "in.safetensors")
    text = run("quantize", tmp_path / "in.safetensors", tmp_path / "out.gguf", "-f", "Q4_0")
    assert "nothing was quantized: no 2-D weight of F32, F16, BF16" in text
    save_file({}, tmp_path / "in.safetensors")
    text = run("quantize", tmp_path / "in.safetensors", tmp_path / "out.gguf", "-f", "Q4_0")
    assert "out.gguf: no tensors; " in text


def _started(tmp_path: Path, *arguments: object, before: str = "") -> subprocess.Popen[str]:
    code = f"import sys; {before}; from isogemm.cli.commands import main; sys.argv = ['isogemm', *sys.argv[1:]]; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="the system has no such limit")
@pytest.mark.parametrize("size", [1, 3000, 100_000])
def test_no_space_leaves_no_file(tmp_path, size):
    """While the header is written, in the middle of a tensor, and when what is left is written at the end."""
    save_file({f"w{i}": values("normal", 64, 512) for i in range(4)}, tmp_path / "in.safetensors")
    before = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    process = _started(tmp_path, "quantize", "in.safetensors", "out.gguf", "-f", "Q8_0", before=before)
    _, text = process.communicate(timeout=300)
    assert process.returncode == 2, text
    assert "isogemm: cannot write: limit: a writable file" in text
    assert "the tensors take 139264 bytes" in text
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="the system has other signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_what_is_stopped_leaves_no_file(tmp_path, name):
    save_file({"w": values("normal", 2, 64)}, tmp_path / "in.safetensors")
    # Signals are as in a terminal, also where tests run under nohup or in the background of a script.
    waits = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL); "
    waits += "import time, isogemm.cli.quant as c; c._bytes_of = lambda *a: (print('now', flush=True), time.sleep(200))"
    process = _started(tmp_path, "quantize", "in.safetensors", "out.gguf", "-f", "Q4_0", before=waits)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    assert len(list(tmp_path.glob(".out.gguf.*.tmp"))) == 1
    time.sleep(0.1)  # into the wait
    process.send_signal(getattr(signal, name))
    _, text = process.communicate(timeout=300)
    assert process.returncode in (1, 128 + getattr(signal, name), 130)
    assert "Traceback" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_handlers_of_signals_are_those_from_before(folder, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run("quantize", folder, tmp_path / "out.gguf", "-f", "Q4_K")
    assert signal.getsignal(signal.SIGTERM) is before

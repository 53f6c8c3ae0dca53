"""`isogemm quantize` and `isogemm inspect`, on files."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.formats.test_blocks import same
from tests.quant.draws import values
from typer.testing import CliRunner

import isogemm
from isogemm.cli.commands import app, main
from isogemm.errors import FormatError, OptionError, ShapeError
from isogemm.quant import load


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {
        "a.weight": values("normal", 6, 512).astype(ml_dtypes.bfloat16),
        "b.weight": values("normal", 5, 96),
        "b.bias": values("normal", 1, 5)[0],
        "ids": np.arange(4),
    }
    save_file(tensors, tmp_path / "in.safetensors", {"made": "here"})
    return tmp_path / "in.safetensors"


def test_a_model_is_quantized_and_inspected(source, tmp_path):
    out = tmp_path / "out.gguf"
    text = run("quantize", source, out, "--format", "q4_k", "--fallback", "Q5_0")
    assert "1 x Q4_K" in text
    assert "1 x Q5_0" in text
    given, made = load(source), load(out)
    assert set(made) == set(given)
    assert made.metadata["made"] == "here"
    same(made["a.weight"].rows, isogemm.quantize(given["a.weight"], "Q4_K").rows)
    same(made["b.weight"].rows, isogemm.quantize(given["b.weight"], "Q5_0").rows)
    same(made["b.bias"], given["b.bias"])
    same(made["ids"], given["ids"])
    assert not list(tmp_path.glob("*.part"))
    again = tmp_path / "again.gguf"
    run("quantize", out, again, "--format", "Q8_0")
    assert again.read_bytes() == out.read_bytes()
    listing = run("inspect", out, "--check")
    for words in ("a.weight", "Q4_K", "6 x 512", "288", "4.5000", "no: k % 256 = 96; Q4_K becomes Q5_0", "4 tensors"):
        assert words in listing
    assert "b.bias" not in run("inspect", out, "--match", "*.weight")


def test_what_does_not_fit_is_refused_before_anything_is_written(source, tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(ShapeError, match=r"b\.weight.*--fallback Q5_0"):
        run("quantize", source, out, "--format", "Q4_K")
    with pytest.raises(OptionError, match="another file"):
        run("quantize", source, source, "--format", "Q8_0")
    with pytest.raises(OptionError, match="one of F32"):
        run("quantize", source, out, "--format", "Q9")
    assert not out.exists()
    run("quantize", source, out, "--format", "Q4_K", "--fallback", "keep")
    assert load(out).entries["b.weight"].type == "F32"
    run("quantize", source, out, "--format", "Q4_K", "--keep", "b.*")
    assert load(out).entries["b.weight"].type == "F32"


def test_weights_that_are_no_numbers_leave_no_file(tmp_path):
    x = values("normal", 4, 64)
    x[2, 3] = np.nan
    save_file({"w": x}, tmp_path / "in.safetensors")
    with pytest.raises(FormatError, match=r"w: w\[2, 3\]"):
        run("quantize", tmp_path / "in.safetensors", tmp_path / "out.gguf", "--format", "Q4_0")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_damage_is_found_by_check(tmp_path):
    save_file({"w": values("normal", 4, 64)}, tmp_path / "in.safetensors")
    out = tmp_path / "out.gguf"
    run("quantize", tmp_path / "in.safetensors", out, "--format", "Q4_0")
    data = bytearray(out.read_bytes())
    at = load(out).entries["w"].offset
    data[at : at + 2] = b"\xff\xff"
    out.write_bytes(data)
    run("inspect", out)
    with pytest.raises(FormatError, match=f"w: scale d of block 0 of row 0, at byte {at}"):
        run("inspect", out, "--check")


def test_what_cannot_be_written_is_one_line(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["isogemm", "quantize", str(source), str(tmp_path / "no" / "out.gguf"), "-f", "F16"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "isogemm: cannot write: limit: a writable file" in capsys.readouterr().err
    for out in (tmp_path, source / "out.gguf"):  # a folder; inside of a file
        with pytest.raises(OptionError, match="cannot write"):
            run("quantize", source, out, "--format", "F16")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64], ids=str)
def test_scalars_stay_scalars(tmp_path, dtype):
    tensors = {"scale": np.array(3, dtype), "weight": values("normal", 4, 256)}
    save_file(tensors, tmp_path / "in.safetensors")
    run("quantize", tmp_path / "in.safetensors", tmp_path / "out.gguf", "--format", "Q4_K")
    made = load(tmp_path / "out.gguf")["scale"]
    assert (made.shape, made.dtype, made[()]) == ((), dtype, 3)
    assert "scale" in run("inspect", tmp_path / "out.gguf", "--check")


def test_files_of_others_are_not_written_over(source, tmp_path):
    """The file that is written first has a name that nobody has: not the input's, either."""
    out, given = tmp_path / "out.gguf", source.read_bytes()
    near = source.rename(tmp_path / "out.gguf.part")
    run("quantize", near, out, "--format", "Q4_K", "--fallback", "keep")
    assert near.read_bytes() == given
    assert set(load(out)) == set(load(near))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "out.gguf.part"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_only_a_file_is_written_over(source, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, ""):
        with pytest.raises(OptionError, match="cannot write: limit: a writable file"):
            run("quantize", source, out, "--format", "Q4_K", "--fallback", "keep")
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "pipe"]


def test_weights_that_are_quantized_already_are_counted(source, tmp_path):
    out, again = tmp_path / "out.gguf", tmp_path / "again.gguf"
    assert "already" not in run("quantize", source, out, "--format", "Q4_K", "--fallback", "Q5_0")
    assert "2 weights are quantized already (Q4_K, Q5_0) and were copied" in run("quantize", out, again, "-f", "Q8_0")
    text = run("quantize", out, again, "-f", "Q8_0", "--keep", "a.*")
    assert "1 weight is quantized already (Q5_0) and was copied" in text


def test_patterns_that_match_nothing_are_refused(source, tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(OptionError, match=r"--keep.*a\.wieght.*nearest.*a\.weight"):
        run("quantize", source, out, "--format", "Q8_0", "--keep", "b.*", "--keep", "a.wieght")
    assert not out.exists()
    with pytest.raises(OptionError, match=r"--match.*zzz.*nearest legal choice: ids"):
        run("inspect", source, "--match", "zzz")

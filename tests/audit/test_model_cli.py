"""`isogemm audit --hf`: exit statuses, messages and files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
FEW = ["--random", "--tokens", "9", "--m", "2,3"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="float32")
    config.save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def test_a_model_that_holds(run, folder, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    words = ["--mode", "convert", "--relation", "population", "--out", str(out), "--html", str(page)]
    status, text, _ = run("audit", "--hf", folder, *FEW, *words)
    assert status == 0, text
    content = json.loads(out.read_text())
    assert (content["schema"], content["ok"]) == ("isogemm.model_audit.v1", True)
    assert content["options"]["batches"] == [2, 3]
    assert "convert: no bit changed" in text
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_model_that_changes_has_a_line_that_replays(run, folder):
    words = ["--mode", "plain", "--relation", "micro-batches", "--dtype", "bf16"]
    status, text, _ = run("audit", "--hf", folder, *FEW, *words)
    assert status == 1, text
    (line,) = [x.strip() for x in text.splitlines() if x.strip().startswith("isogemm audit --hf")]
    assert run(*line.split()[1:])[:2] == (1, text)
    assert run("audit", "--hf", folder, *FEW, *words, "--require", "none")[0] == 0


def test_a_model_with_quantized_weights(run, folder, tmp_path):
    out = tmp_path / "r.json"
    words = ["--mode", "convert", "--relation", "population", "--quantize", "Q4_0", "--out", str(out)]
    status, text, _ = run("audit", "--hf", folder, *FEW, *words)
    assert status == 0, text
    found = json.loads(out.read_text())
    options = found["options"]
    assert options["quantize"] == "Q4_0"
    assert "--quantize Q4_0" in " ".join(options["words"])
    assert sum(found["quantized"]["formats"].values()) > 0
    assert "quantized: " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf", "nowhere"], "config.json"),
        (["--quantize", "Q4_0"], "--hf"),
        (["--hf", "FOLDER", "--random", "--quantize", "Q9"], "Q8_0"),
        (["--hf", "FOLDER", "--random", "--mode", "plain", "--quantize", "Q4_0"], "convert"),
        (["--random"], "--hf"),
        (["--mode", "plain"], "--hf"),
        (["--hf", "FOLDER"], "--random"),
        (["--hf", "FOLDER", "--random", "--provider", "numpy"], "--mode"),
        (["--hf", "FOLDER", "--random", "--mode", "fast"], "plain"),
        (["--hf", "FOLDER", "--random", "--relation", "padding"], "left-padding"),
        (["--hf", "FOLDER", "--random", "--dtype", "int8"], "bfloat16"),
        (["--hf", "FOLDER", "--random", "--device", "abacus"], "device"),
    ],
    ids=str,
)
def test_bad_usage_is_one_line(run, folder, words, message):
    status, _, error = run("audit", *[folder if word == "FOLDER" else word for word in words])
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_config_that_transformers_cannot_read(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    status, _, error = run("audit", "--hf", str(tmp_path), "--random")
    assert status == 2
    assert "transformers" in error


@pytest.mark.parametrize(
    "config",
    [[], {"hidden_size": "a"}, {"hidden_size": -4}, {"num_attention_heads": 0}],
    ids=str,
)
def test_a_config_that_makes_no_model(run, folder, config):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config if config else config))
    status, _, error = run("audit", "--hf", folder, "--random")
    assert status == 2
    assert f"the model in {folder}: limit: one that transformers reads" in error
    assert "nearest legal choice: a config.json as the model's page has it, or download it again" in error


def test_weights_that_are_damaged(run, folder):
    (Path(folder) / "model.safetensors").write_bytes(b"junk")
    status, _, error = run("audit", "--hf", folder)
    assert status == 2
    assert f"the model in {folder}: limit: one that transformers reads" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "zz"], "unknown mode"),
        (["--relation", "zz"], "unknown relation"),
        (["--require", "zz"], "require: limit"),
        (["--m", "0"], "--m: limit: batches of at least 2"),
        (["--m", "1,2"], "--m: limit: batches of at least 2"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(run, folder, monkeypatch, words, said):
    monkeypatch.setattr("isogemm.audit.load", lambda *_, **__: pytest.fail("loaded"))
    status, _, error = run("audit", "--hf", folder, "--random", *words)
    assert status == 2
    assert said in error


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_names_the_extra(run, folder, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    status, _, error = run("audit", "--hf", folder, "--random")
    assert status == 2
    assert f"needs {package}" in error
    assert "isogemm[hf]" in error


def test_options_of_the_sweep_are_refused(run, folder):
    for words in (["--full"], ["--match", "*"]):
        status, _, error = run("audit", "--hf", folder, *FEW, *words)
        assert status == 2, words
        assert words[0] in error

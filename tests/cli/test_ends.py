"""How commands end where something is in the way: what cannot be written or read, is not meant, or has no reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.process import ROOT
from tests.program.small import program

from isogemm.quant import load

UNREAD = 141  # as a shell has it of a command that a closed pipe ended
A, B = np.ones((4, 8), np.float32), np.ones((8, 3), np.float32)
CASE = {"observed": A @ B, "a": A, "b": B}


def unread(*words: object) -> int:
    """The exit status of a command whose standard output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    return done.returncode


@pytest.mark.skipif(os.name == "nt", reason="the system has other pipes")
def test_a_closed_pipe_is_no_verdict_and_files_are_there(tmp_path: Path) -> None:
    assert unread("isogemm", "version") == UNREAD
    assert unread("isogemm", "plan", 4, 8, 8) == UNREAD  # by rich
    (tmp_path / "shapes.csv").write_text("8,8\n")
    words = ("--shapes", tmp_path / "shapes.csv", "--m", "1,2", "--relation", "rerun", "--no-speed")
    assert unread("isogemm", "audit", "-p", "numpy", *words, "--json", tmp_path / "r.json") == UNREAD
    assert (tmp_path / "r.json").exists()
    made = program(batch=2).save(tmp_path / "plan")
    assert unread("isogemm", "program", "explain", made, "--html", tmp_path / "p.html") == UNREAD
    assert unread("isogemm", "program", "run", made, "--steps", 2, "--trace", tmp_path / "t.json") == UNREAD
    assert (tmp_path / "p.html").exists()
    assert (tmp_path / "t.json").exists()


def ended(shell: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command whose streams a shell arranges; $@ is the command."""
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-m", "isogemm", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_what_cannot_be_printed_is_no_verdict(tmp_path: Path) -> None:
    np.savez(tmp_path / "right.npz", **CASE)
    (tmp_path / "s.csv").write_text("8,8\n")
    words = ("audit", "-p", "numpy", "--shapes", "s.csv", "--m", "1,2", "--relation", "rerun", "--no-speed")
    for command in (("doctor", "right.npz"), (*words, "--json", "r.json"), ("plan", 4, 8, 8)):
        done = ended(">/dev/full", tmp_path, *command)
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1].startswith("isogemm: the output cannot be written: [Errno ")
    assert (tmp_path / "r.json").exists()
    assert ended("2>/dev/full", tmp_path, "describe", 1, 1, 1, "--dtype", "zz").returncode == 2


@pytest.mark.skipif(os.name == "nt", reason="the system has another shell")
def test_closed_streams_change_no_status(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("8,8\n")
    words = ("audit", "--shapes", "s.csv", "--m", "1,2", "--relation", "rerun", "--no-speed")
    done = ended(">&-", tmp_path, *words, "-p", "numpy", "--require", "none")
    assert (done.returncode, done.stdout) == (0, "")
    for command in (("audit", "--m", "x"), ("describe", 1, 1, 1, "--dtype", "zz")):
        for shell in ("2>&-", "<&- >&- 2>&-"):
            done = ended(shell, tmp_path, *command)
            assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["describe", "9999999999", "999999999999", "9999999999999"], "m, n, k: limit: matrices of at most 2**63 - 1"),
        (["describe", "9" * 30, "1", "1"], "m, n, k: limit: matrices of at most 2**63 - 1"),
        (["describe", "4", "4", "4", "--lda", "9" * 19], "--lda: limit: a matrix of at most"),
        (["describe", "1", "1", "1", "--dtype", "zz"], "--dtype: limit: float32, bfloat16, float16, int8; got: zz"),
        (["tune", "--model", "Qwen3-4B", "--dtype", "zz"], "--dtype: limit: float32, bfloat16, float16; got: zz"),
        (["plan", "1", "1", "1", "--threads", "100000"], "threads: limit: at most "),
        (["plan", "9" * 23, "1", "1"], "m, n, k: limit: matrices of at most 2**63 - 1"),
        (["plan", "1", "1", "1", "--groups", "1,x"], "nearest legal choice: 3,100"),
        (["plan", "4", "4", "4", "--heads", "1,1", "--mask", "window:" + "9" * 20], "nearest legal choice: causal"),
        (["plan", "4", "4", "4", "--heads", "1,1", "--mask", "window:" + "9" * 5000], "nearest legal choice: causal"),
        (["describe", "4", "4", "4", "--batch", str(2**62)], f"got: {2**62}; nearest legal choice: {2**57 - 1}"),
        (["describe", "4", "4", "9" * 20, "--batch", str(2**62)], "m, n, k: limit: "),
        (["trace", "gemv_simd", "--shape", "1,8,99999999999", "--thread", "0,1,1"], "K to trace: limit: at most"),
        (["warm", "--device", "mars"], "--device: limit: with --model"),
        (["warm", "--m", "0"], "--m: limit: with --model"),
        (["doctor", "case.npz", "--count", "5"], "--count: limit: without case.npz"),
        (["describe", "cublasSgemm", "--shared", "a"], "--shared: limit: with M N K"),
        (["describe", "gemm_nt_q4_k", "--batch", "7", "--lda", "3"], "--batch, --lda: limit: with M N K"),
        (["study", "report", "so2", "--device", "cuda", "--quick", "--seed", "3"], "--device, --quick, --seed: limit"),
        (["study", "--list", "--device", "mars"], "--device: limit: without --list"),
        (["audit", "--replay", ""], "malformed replay"),
        (["audit", "--hf", "model", "--tp", ""], "--tp: limit: whole numbers"),
        (["audit", "--hf", "model", "--tp", "0"], "--tp: limit: numbers of ranks, from 1,"),
        (["audit", "--json", "."], "nearest legal choice: report.json"),
        (["audit", "--html", str(ROOT)], f"nearest legal choice: {ROOT / 'report.html'}"),
        (["program", "explain", "PLAN", "--html", "."], "cannot write: limit: a writable file"),
        (["program", "run", "PLAN", "--trace", "."], "nearest legal choice: trace.json"),
        (["study", "prefill", "--out", __file__], "cannot write: limit: a writable file"),
        (["study", "prefill", "--out", "/proc/x"], "cannot write: limit: a writable file"),
        (["study", "report", "no-such", "--out", __file__], "cannot write: limit: a writable file"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line_before_any_work(run, tmp_path, monkeypatch, words, said):
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr("isogemm.study.site.open_site", work)
    monkeypatch.setattr("isogemm.program.program.Program.start", work)
    if "PLAN" in words:
        program(batch=2).save(tmp_path)
    status, _, error = run(*[str(tmp_path) if word == "PLAN" else word for word in words])
    assert status == 2
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["--tokens", "0"], ["--tp", "7"], ["--batch", "-1"], ["--phase", "zz"]], ids=" ".join
)
def test_operations_are_refused_before_ceilings_are_measured(run, monkeypatch, words):
    monkeypatch.setattr("isogemm.cli.ops._ceilings", lambda *_: pytest.fail("measured"))
    status, _, error = run("ops", "Qwen3-4B", *words)
    assert status == 2
    assert error.startswith(f"isogemm: {words[0].strip('-')}: limit: ")


def test_a_nearest_product_is_legal(run):
    near = run("plan", "9" * 23, "7", "3")[2].split("nearest legal choice: ")[1].strip("()\n").split(", ")
    assert run("plan", *near)[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [("x.npy", "it is none"), ("junk.npz", "it is none"), ("tell.npz", "got: tell"), ("none.npz", "No such file")],
)
def test_what_is_no_case_is_told_apart(run, tmp_path, name, said):
    np.save(tmp_path / "x.npy", A)
    (tmp_path / "junk.npz").write_text("no archive")
    np.savez(tmp_path / "tell.npz", tell=1, **CASE)
    status, _, error = run("doctor", str(tmp_path / name))
    assert status == 2
    assert said in error
    assert "pickle" not in error


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="the system has no such name")
def test_a_model_is_not_quantized_into_what_is_printed(tmp_path):
    save_file({"w": np.ones((2, 32), np.float32)}, tmp_path / "in.safetensors")
    command = [sys.executable, "-m", "isogemm", "quantize", tmp_path / "in.safetensors", "/dev/stdout", "-f", "Q4_0"]
    with open(tmp_path / "out.gguf", "wb") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "/dev/stdout is no file" in done.stderr
    assert (tmp_path / "out.gguf").read_bytes() == b""


def test_advice_about_weights_can_be_followed(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = np.ones((2, 33), np.float32)
    save_file({"[red]b": weights}, "odd.safetensors")
    save_file({"w v": np.full((2, 32), np.nan, np.float32)}, "nan.safetensors")
    words = ("out.gguf", "-f", "Q4_0")
    assert run("quantize", "odd.safetensors", *words)[2].endswith("or --keep '[[]red]b'\n")
    assert run("quantize", "odd.safetensors", *words, "--keep", "[red]b")[2].endswith(": '[[]red]b'\n")
    assert run("quantize", "odd.safetensors", *words, "--keep", "[[]red]b")[0] == 0
    assert load("out.gguf").entries["[red]b"].type == "F32"
    assert run("quantize", "nan.safetensors", *words)[2].endswith("nearest legal choice: --keep 'w v'\n")
    Path("empty.gguf").touch()
    assert "got: no bytes: the file is empty" in run("inspect", "empty.gguf")[2]


def test_a_long_quantization_says_in_a_log_how_far_it_is(run, tmp_path, monkeypatch):
    monkeypatch.setattr("isogemm.base.progress.EVERY", 0.0)
    save_file({"w": np.ones((2, 32), np.float32)}, tmp_path / "in.safetensors")
    _, _, error = run("quantize", str(tmp_path / "in.safetensors"), str(tmp_path / "out.gguf"), "-f", "Q4_0")
    assert "isogemm: 1 of 1 after 0 s: w" in error

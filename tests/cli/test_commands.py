"""The command line: exit statuses, messages and files."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process import python

import isogemm
from isogemm import __version__

FAKES = "tests.audit.fakes"
SMALL = ["--m", "1,2,16", "--no-speed"]


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    (tmp_path / "shapes.csv").write_text("24,40,fake\n")
    return str(tmp_path / "shapes.csv")


def test_version(run) -> None:
    assert run("--version")[:2] == run("version")[:2] == (0, f"isogemm {__version__}\n")


def test_audit_holds_and_writes_its_files(run, shapes: str, tmp_path: Path) -> None:
    out, page = tmp_path / "new" / "r.json", tmp_path / "new" / "r.html"
    status, text, _ = run("audit", "--shapes", shapes, *SMALL, "--json", str(out), "--html", str(page))
    assert status == 0, text
    content = json.loads(out.read_text())
    assert content["ok"]
    assert [p["name"] for p in content["providers"]] == ["isogemm", "numpy"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "isogemm: no bit changed" in text
    assert "Required: isogemm held" in text


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["-p", f"{FAKES}:by_m"], 1),  # one's own is what has to hold
        (["-p", f"isogemm,{FAKES}:honest,{FAKES}:by_m"], 1),
        (["-p", f"{FAKES}:honest"], 0),
        (["-p", f"{FAKES}:by_m", "--require", "isogemm"], 0),
        (["-p", f"{FAKES}:by_m", "--require", f"{FAKES}:by_m"], 1),
        (["-p", f"{FAKES}:by_m", "--require", "none"], 0),
        (["--require", f"{FAKES}:honest,isogemm"], 0),
        (["--require", f"{FAKES}:raises"], 1),
        (["--require", f"{FAKES}:honest", "--require", f"{FAKES}:zeros"], 1),
        (["-p", f"{FAKES}:honest", "--require", f"{FAKES}:honest", "--relation", "packing"], 3),  # n/a is not held
    ],
    ids=str,
)
def test_exit_status(run, shapes: str, words: list[str], status: int) -> None:
    assert run("audit", "--shapes", shapes, *SMALL, *words)[0] == status


def test_a_change_that_was_not_required_away_is_said_last(run, shapes: str) -> None:
    mine = f"{FAKES}:by_m"
    status, text, _ = run("audit", "--shapes", shapes, *SMALL, "-p", mine, "--require", "isogemm")
    last = text.splitlines()[-1]
    assert status == 0
    assert last == f"Not required, and bits changed: {mine}. For exit status 1 then, add: --require isogemm,{mine}"
    status, text, _ = run("audit", "--shapes", shapes, *SMALL, "-p", mine, *last.split("add: ")[1].split())
    assert status == 1
    assert text.splitlines()[-1] == f"Required: isogemm, {mine} did not hold"


@pytest.mark.parametrize(("name", "full"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_dtype_names(run, shapes: str, name: str, full: str) -> None:
    words = ["audit", "--shapes", shapes, *SMALL, "-p", "isogemm", "--relation", "rerun", "--dtype", name]
    status, text, _ = run(*words)
    assert status == 0
    assert f"1 linear, {full}," in text
    assert run("plan", "4", "8", "8", "--dtype", name) == run("plan", "4", "8", "8", "--dtype", full)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--relation", "layuot"], "nearest legal choice: layout"),
        (["--relation", "telepathy"], "nearest legal choice: none named, for all"),
        (["-p", "nunpy"], "nearest legal choice: numpy"),
        (["--replay", "provider=numpy&relation=packing&m=2&n=4&k=4&seed=0"], "the field dtype is missing"),
        (["--shapes", "shapes.cvs"], "nearest legal choice: shapes.csv"),
        (["--shapes", "zzz"], "nearest legal choice: a path that exists"),
        (["--weights", "shapes.cvs"], "nearest legal choice: shapes.csv"),
    ],
    ids=str,
)
def test_messages_help(run, shapes: str, monkeypatch, words: list[str], advice: str) -> None:
    monkeypatch.chdir(Path(shapes).parent)
    status, _, error = run("audit", *words)
    assert status == 2
    assert advice in error


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "--hf", "model", "--tp", "1,2", "--provider", "mine.py:linear"],
        ["audit", "--hf", "model", "--tp", "1,2", "--m", "3"],
        ["audit", "--hf", "model", "--tp", "1,2", "--relation", "rerun"],
        ["audit", "--hf", "model", "--tp", "1,2", "--no-speed"],
        ["audit", "--hf", "model", "--limit", "4"],
        ["audit", "--hf", "model", "--no-speed"],
        ["audit", "--replay", "provider=numpy", "--seed", "0"],
        ["audit", "--replay", "provider=numpy", "--json", "x.json"],
        ["doctor", "case.npz", "--format", "Q4_0"],
        ["doctor", "case.npz", "--m", "3"],
        ["doctor", "--selftest", "--torch"],
    ],
    ids=" ".join,
)
def test_options_that_nothing_would_read_are_refused(run, words):
    status, _, error = run(*words)
    assert status == 2
    assert f"{[word for word in words if word.startswith('--')][-1]}: limit: without" in error


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        (["--tokens", "67"], "--hf"),
        (["--tp", "1,2"], "--hf"),
        (["--mode", "plain"], "--hf"),
        (["--limit", "4"], "--weights"),
        (["--match", "*"], "--weights"),
    ],
)
def test_options_of_something_else_say_of_what(run, words, beside):
    """A default that is given counts: nobody gives what he does not want to be read."""
    status, _, error = run("audit", *words)
    assert status == 2
    assert f"{words[0]}: limit: with {beside}" in error


def test_ranks_that_are_no_numbers_name_their_own_option(run):
    status, _, error = run("audit", "--hf", "model", "--tp", "two")
    assert status == 2
    assert error.startswith("isogemm: --tp: limit: whole numbers")


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "-p", "nonsense"],
        ["audit", "-p", "no_such_module:f"],
        ["audit", "-p", f"{FAKES}:no_such_function"],
        ["audit", "--model", "no-such-model"],
        ["audit", "--shapes", "/no/such/file"],
        ["audit", "--weights", "/no/such/file"],
        ["audit", "--model", "Qwen3-4B", "--shapes", "x"],
        ["audit", "--match", "x"],
        ["audit", "--dtype", "int8"],
        ["audit", "--m", "many"],
        ["audit", "--relation", "telepathy"],
        ["audit", "--seed", "-1"],
        ["audit", "--json", "/proc/no/such/folder.json"],
        ["audit", "--json", "report", "--html", "./report"],
        ["audit", "--shapes", "x.csv", "--json", "x.csv"],
        ["audit", "--no-such-option"],
        ["audit", "--replay", "gibberish"],
        ["audit", "--replay", "provider=numpy&relation=population&m=2&n=4&k=4&dtype=float32&seed=0"],
        ["audit", "--replay", "provider=numpy&relation=telepathy&m=2&n=4&k=4&dtype=float32&seed=0"],
        ["audit", "--replay", "provider=nonsense&relation=packing&m=2&n=4&k=4&dtype=float32&seed=0"],
        ["audit", "--replay", "provider=numpy&relation=packing&m=0&n=4&k=4&dtype=float32&seed=0"],
        ["audit", "--replay", "provider=numpy&relation=schedule&chunks=a+b&n=4&k=4&dtype=float32&seed=0"],
        ["audit", "--replay", "provider=numpy&relation=neighbours&m=4&contents=cats&n=4&k=4&dtype=float32&seed=0"],
        ["audit", "--replay", "provider=numpy&relation=layout&m=2&layout=Z/C&n=4&k=4&dtype=float32&seed=0"],
        ["plan", "8", "8"],
        ["plan", "8", "8", "-8"],
        ["plan", "8", "8", "8", "--trans", "XY"],
        ["plan", "8", "8", "8", "--tp", "2", "--heads", "4,2"],
        ["plan", "8", "8", "8", "--tp", "2", "--format", "Q4_0"],
        ["warm", "products", "--model", "Qwen3-4B"],
        ["plan", "8", "8", "8", "--dtype", "complex64"],
        ["plan", "8", "8", "8", "--heads", "32"],
        ["ops", "Qwen3-4B", "--dtype", "f64"],
        ["program", "lower", "/no/such/config.json", "--out", "x"],
        ["program", "lower", __file__, "--out", "x"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_clear_message_and_status_2(run, words: list[str]) -> None:
    status, out, err = run(*words)
    assert status == 2, out
    assert err.strip()
    assert "Traceback" not in err
    if err.startswith("isogemm: "):
        assert len(err.splitlines()) == 1
        assert "nearest legal choice" in err


def test_bad_usage_leaves_an_existing_report_alone(run, shapes: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("kept")
    assert run("audit", "-p", "nonsense", "--shapes", shapes, "--json", str(tmp_path / "r.json"))[0] == 2
    assert (tmp_path / "r.json").read_text() == "kept"


def test_bad_usage_leaves_neither_files_nor_folders(run, shapes: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = ("audit", "-p", "nonsense", "--shapes", shapes, "--json", str(tmp_path / "new" / "r.json"))
    assert run(*words, "--html", str(tmp_path / "r.html"))[0] == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_leaves_the_old_report(run, shapes: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "r.json").write_text("kept")

    def full(path: Path, *_: Any, **__: Any) -> None:
        path.open("wb").close()  # there is room for a name
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", full)
    words = ("--relation", "rerun", "--json", str(tmp_path / "r.json"))
    status, text, error = run("audit", "--shapes", shapes, *SMALL, *words)
    assert status == 2
    assert "isogemm: no bit changed" in text  # what was found is said all the same
    assert "No space left on device" in error
    assert (tmp_path / "r.json").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "shapes.csv"]


@pytest.mark.parametrize(
    "error", [None, OSError("libtorch.so: cannot open shared object file")], ids=["none", "broken"]
)
def test_a_provider_that_was_named_and_did_not_run_is_no_pass(
    run, shapes: str, tmp_path: Path, monkeypatch, error: OSError | None
) -> None:
    def no_torch(name: str, *rest: Any, **options: Any) -> Any:
        if name == "torch" and error:
            raise error
        return real(name, *rest, **options)

    real = builtins.__import__
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(builtins, "__import__", no_torch)
    out = tmp_path / "r.json"
    words = ("audit", "--shapes", shapes, *SMALL, "--relation", "rerun")
    status, text, _ = run(*words, "-p", "torch", "--json", str(out))
    assert status == 3
    said = text.splitlines()[-2]  # the last one names the file
    assert said.startswith("Did not run, which is no pass: torch (")
    assert said.endswith("Exit status 3")
    assert not json.loads(out.read_text())["ok"]
    assert run(*words, "-p", "torch,isogemm", "--require", "torch")[0] == 3
    assert run(*words, "-p", "torch,isogemm", "--require", "isogemm")[0] == 0  # said, and not asked for
    assert run(*words, "-p", "torch,numpy", "--require", "none")[0] == 0
    assert run(*words, "-p", f"torch,{FAKES}:by_m", "--relation", "population")[0] == 1  # what was seen counts first
    case = "provider=torch&relation=population&m=2&against=1&n=4&k=4&dtype=float32&seed=0"
    status, _, said = run("audit", "--replay", case)
    assert status == 3
    assert "cannot replay: " in said


def test_a_case_that_has_no_meaning_for_its_provider_was_not_seen_to_fail(run) -> None:
    case = "provider=numpy&relation=packing&m=2&n=8&k=8&dtype=float32&seed=0"
    status, text, _ = run("audit", "--replay", case)
    assert status == 3
    assert "numpy prepares no weights" in text


def test_plan(run) -> None:
    status, out, _ = run("plan", "4", "64", "32", "--threads", "2")
    assert status == 0
    assert "fma/chain" in out
    assert "k = 32" in out
    status, out, _ = run("plan", "4", "64", "32", "--json", "--trans", "nn", "--dtype", "bfloat16")
    assert status == 0
    content = json.loads(out)
    assert content["shape"] == {"m": 4, "n": 64, "k": 32}
    assert (content["trans_a"], content["trans_b"]) == ("N", "N")


def fresh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "isogemm", *words], capture_output=True, text=True, check=False)


def test_replay_in_a_fresh_process_finds_the_same_mismatch(run, shapes: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    run("audit", "-p", f"{FAKES}:by_position", "--shapes", shapes, *SMALL, "--seed", "7", "--json", str(out))
    relations = {r["relation"]: r for r in json.loads(out.read_text())["providers"][0]["relations"]}
    drift = relations["position"]["drifts"][0]
    import shlex

    words = [word for word in shlex.split(drift["replay"]) if "=" not in word or "&" in word]
    assert words[0] == "isogemm"
    again = fresh(*words[1:])
    assert again.returncode == 1, again.stderr
    for part in (drift["got_bits"], drift["expected_bits"], f"[{drift['row']}, {drift['column']}]", "seed 7"):
        assert part in again.stdout
    held = fresh(*words[1:-1], words[-1].replace("by_position", "honest"))
    assert held.returncode == 0, held.stderr
    assert "held" in held.stdout


def test_audit_does_not_import_torch(shapes: str) -> None:
    code = (
        "import sys; from isogemm import cli; sys.argv = ['isogemm', 'audit', '-p', 'numpy', '--require', 'none',"
        f" '--shapes', {shapes!r}, '--m', '1,2']\n"
        "try: cli.command_line()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules; assert 'altair' not in sys.modules"
    )
    python("-c", code)


def test_a_script_audits_its_own_function_and_the_command_line_replays_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.audit.fakes import by_m\n"
        "def lin(x, w): return by_m(x, w)\n"
        "if __name__ == '__main__':\n"
        "    import isogemm.audit\n"
        "    report = isogemm.audit.run([lin], [(24, 40)], require=[], sweep=[1, 2], speed=False)\n"
        "    print(next(iter(report.providers)), report.drifts('mine.py:lin')[0].case.text())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def there(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    script = there("mine.py")
    assert script.returncode == 0, script.stderr
    name, line = script.stdout.split()
    assert name == "mine.py:lin"
    again = there("-m", "isogemm", "audit", "--replay", line)
    assert again.returncode == 1, again.stderr
    assert "48 of 48 outputs changed" in again.stdout  # both rows differ alone


def test_plan_for_a_gpu_without_one_and_without_a_table(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from isogemm.backends.cuda.driver import facts as device
    from isogemm.backends.cuda.plans import work

    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(work, "shipped_tables", lambda: ())
    status, _, err = run("plan", "16", "2560", "4096", "--device", "cuda", "--dtype", "bf16")
    assert status == 2
    assert "a GPU, or a shipped tuning table" in err


def test_a_configuration_in_brackets_is_printed(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from isogemm.backends.cuda.driver import facts as device

    monkeypatch.setattr(device, "count", lambda: 0)
    status, out, _ = run("plan", "16", "6144", "2560", "--device", "cuda", "--dtype", "bf16")
    assert status == 0
    plan = isogemm.plan(16, 6144, 2560, dtype="bfloat16", device="cuda")
    assert f"{plan.family} [{plan.config}]" in out


def test_plan_for_a_gpu_reads_the_shipped_table(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.planner.test_explain import TABLE

    from isogemm.backends.cuda.driver import facts as device
    from isogemm.backends.cuda.plans import work

    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(work, "shipped_tables", lambda: (TABLE,))
    status, out, _ = run("plan", "16", "4096", "2560", "--device", "cuda", "--dtype", "bf16")
    assert status == 0
    assert "that GPU is not here" in " ".join(out.split())
    status, out, _ = run("plan", "16", "4096", "2560", "--device", "cuda", "--dtype", "bf16", "--json")
    assert json.loads(out)["config"] == "small"
    contract = "tensor_core:sm90/leaf4096"
    words = ("--device", "cuda", "--dtype", "bf16", "--contract", contract, "--json")
    status, out, _ = run("plan", "16", "4096", "2560", *words)
    assert json.loads(out)["numeric"]["contract"] == contract


def test_plan_on_the_cpu_takes_a_contract(run) -> None:
    status, out, _ = run("plan", "4", "5", "6", "--contract", "fma/leaf4096")
    assert status == 0
    assert "fma/leaf4096" in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--model", "Qwen3-4B"], "an NVIDIA GPU; got: none here"),
        ([], "one of --model, --shapes; got: none"),
        (["--model", "Qwen3-4B", "--shapes", "x.csv"], "one of --model, --shapes; got: both"),
        (["--shapes", "x.csv", "--attention", "4096"], "with --model"),
        (["--model", "Qwen3-4B", "--dtype", "int4"], "int4"),
        (["--model", "Qwen3-4B", "--m", "many"], "--m"),
    ],
    ids=str,
)
def test_tune_says_what_is_wrong(run, monkeypatch: pytest.MonkeyPatch, words: list[str], what: str) -> None:
    from isogemm.backends.cuda.driver import facts as device

    monkeypatch.setattr(device, "count", lambda: 0)
    status, _, err = run("tune", *words)
    assert status == 2
    assert what in err


def test_tune_writes_a_table_and_goes_on(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shapes: str) -> None:
    from tests.planner.fakes import FakeFamily
    from tests.planner.test_tuning import FakeBench, chooser

    from isogemm.backends.cuda.driver import facts as device
    from isogemm.backends.cuda.gemm import choose
    from isogemm.lab import tune
    from isogemm.planner import admission
    from isogemm.planner.tables import load

    bench = FakeBench(lambda name, m: 1.0)
    monkeypatch.setattr(admission, "fingerprint", lambda home: home)  # the family has no sources
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(tune, "GpuBench", lambda device: bench)
    monkeypatch.setattr(tune, "prepare_in_processes", lambda device, jobs: {})
    out = tmp_path / "new" / "t.json"
    words = ("tune", "--shapes", shapes, "--m", "1,4", "--out", str(out))
    for _ in range(2):
        monkeypatch.setattr(choose, "_choosers", {0: chooser(FakeFamily("f", offered=("only",)))})
        status, text, _ = run(*words)
        assert status == 0, text
    assert "1 products" in text
    assert [m for m, _ in bench.rough] == [1, 4], "the second run timed again what the first had"
    (row,) = load(out).rows
    assert (row.key.n, row.key.k, set(row.us)) == (24, 40, {1, 4})
    assert row.key.contract == "tensor_core:sm90/chain"


@pytest.mark.parametrize("heads", ["3," + "9" * 5000, "\u0661,2"])
def test_numbers_that_are_none_are_refused_in_words(run, heads: str) -> None:
    status, _, said = run("plan", "1", "1", "64", "--heads", heads)
    assert status == 2
    assert "whole numbers" in said

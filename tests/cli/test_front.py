"""What a new user types first: info, warm, examples in every help, progress in a log, words before tables."""

from __future__ import annotations

import io
import json
import shlex
import sys

import numpy as np
import pytest
import typer
from tests.audit.fakes import K, N

import isogemm
from isogemm import audit
from isogemm.audit import words
from isogemm.base import jit, progress
from isogemm.cli import warm
from isogemm.cli.commands import app
from isogemm.cli.examples import EXAMPLES
from isogemm.cli.info import facts

COMMANDS = typer.main.get_command(app).commands


def test_info_says_what_a_report_of_a_problem_needs(run):
    status, text, _ = run("info")
    found = json.loads(run("info", "--json")[1])
    assert status == 0
    assert found["isogemm"] == isogemm.__version__
    assert "numpy" in found["packages"]
    assert found["threads"] == isogemm.get_num_threads()
    assert all(f"{name} " in text for name in found)
    assert str(jit.cache_directory()) in found["kernels"]


def test_info_counts_what_is_compiled(tmp_path, monkeypatch):
    here = tmp_path / "kernels-1-now"
    monkeypatch.setattr(jit, "cache_directory", lambda: here)
    assert facts()["kernels"].startswith(f"none compiled yet in {here}")
    for folder in (here, tmp_path / "kernels-0-then"):
        folder.mkdir()
        (folder / "a.kernel").write_bytes(bytes(500_000))
    text = facts()["kernels"]
    assert text.startswith(f"1 compiled, 0.5 MB, in {here}")
    assert "1 older folders beside it, 0.5 MB" in text


def test_warm_runs_every_step_of_the_parts_that_are_named(run, monkeypatch):
    done = []
    parts = {name: lambda name=name: iter([(name, lambda: done.append(name))]) for name in ("one", "two")}
    monkeypatch.setattr(warm, "PARTS", parts)
    status, text, _ = run("warm", "two", "one")
    assert (status, done) == (0, ["two", "one"])
    assert text.startswith("two, one: ready after ")
    assert run("warm")[0] == 0
    assert done[2:] == ["one", "two"]
    status, _, error = run("warm", "tow")
    assert status == 2
    assert "nearest legal choice: two" in error


@pytest.mark.parametrize("part", warm.PARTS)
def test_the_first_step_of_each_part_computes(part):
    pytest.importorskip("torch")
    name, step = next(warm.PARTS[part]())
    assert name
    step()


def test_every_command_has_examples_that_it_takes():
    assert set(EXAMPLES) == set(COMMANDS)
    for name, lines in EXAMPLES.items():
        assert COMMANDS[name].epilog, name
        for line in lines:
            program, command, *typed = shlex.split(line, comments=True)
            assert (program, command) == ("isogemm", name)
            COMMANDS[name].make_context(name, typed, resilient_parsing=False)


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch):
    now, log = [100.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", log)
    with progress.progress_bar() as tell:
        for step in range(25):
            tell(step, 25, "work")
            now[0] += 1.0
    assert log.getvalue().splitlines() == ["isogemm: 10 of 25 after 10 s: work", "isogemm: 20 of 25 after 20 s: work"]


@pytest.mark.parametrize(("value", "lines"), [("1", 0), ("0", 1), ("", 1)])
def test_it_can_be_told_to_be_quiet(value, lines, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path / "kernels")
    monkeypatch.setenv("ISOGEMM_QUIET", value)
    monkeypatch.setattr(jit, "_said", False)
    jit.announce()
    jit.announce()
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_an_audit_says_first_what_was_asked_and_what_it_means():
    mine = "tests.audit.fakes:by_m"
    report = audit.run([mine, "isogemm"], [(N, K)], sweep=[1, 2], relations=["population"], speed=False)
    first, second = str(report).splitlines()[:2]
    assert first == words.asked(report)
    assert second.startswith("Found: isogemm kept every bit")
    assert f"; {mine} did not: " in second


def test_a_name_of_a_hub_is_told_that_folders_are_local(run):
    status, _, error = run("audit", "--hf", "gpt2")
    assert status == 2
    assert "nothing is downloaded" in error
    assert "hf download gpt2 --local-dir gpt2" in error


def test_public_names_are_what_is_listed():
    ours = pytest.importorskip("isogemm.torch")
    later = ("TrainerCallback", "register_quantizer")  # these load transformers, which a star import does not
    assert dir(ours) == sorted((*ours.__all__, *later))
    assert issubclass(isogemm.ShapeError, isogemm.IsogemmError)
    with pytest.raises(
        isogemm.ShapeError, match=r"^inner dimensions differ: a is \[3, 8\], b is \[7, 5\]; b needs 8 rows"
    ):
        isogemm.matmul(*(np.ones(shape, np.float32) for shape in ((3, 8), (7, 5))))

"""The stamp, rows, files and thread limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.process import python

import isogemm
from isogemm.errors import OptionError
from isogemm.lab import (
    SCHEMA,
    Ceilings,
    Timing,
    Work,
    command_line,
    environment,
    limit_threads,
    read_json,
    row,
    verdict,
    write_json,
)
from isogemm.lab import stamp as stamp_module


@pytest.fixture
def timings():
    return {"isogemm": Timing.of("isogemm", [1.0] * 5, 3), "numpy": Timing.of("numpy", [2.0] * 5, 2)}


def make_row(timings, **more):
    return row(
        "square n=2",
        command="python -m benchmarks.cpu --only n=2",
        timings=timings,
        verdicts=[verdict(timings["isogemm"], timings["numpy"])],
        kernel="tiled",
        correctness={"checked": 4, "differing": 0},
        work=Work(flops=10**9, nbytes=10**9),
        ceilings=Ceilings(1, 4e9, 1e9),
        seed=7,
        shape=[2, 2, 2],
        **more,
    )


def test_a_row_says_what_how_fast_how_right_and_how_to_repeat_it(timings):
    result = make_row(timings)
    assert result["command"] == "python -m benchmarks.cpu --only n=2"
    assert (result["kernel"], result["seed"], result["shape"]) == ("tiled", 7, [2, 2, 2])
    assert result["correctness"] == {"checked": 4, "differing": 0}
    numpy = result["timings"]["numpy"]
    assert (numpy["median"], numpy["p5"], numpy["p95"], numpy["calls"]) == (2.0, 2.0, 2.0, 2)
    assert (numpy["gflop_per_second"], numpy["gb_per_second"], numpy["roofline"]) == (0.5, 0.5, 0.5)
    assert result["verdicts"][0] | {"low": 0, "high": 0} == {
        "ours": "isogemm",
        "peer": "numpy",
        "ratio": 2.0,
        "low": 0,
        "high": 0,
        "word": "FASTER",
        "rounds": 5,
    }


def test_results_round_trip_through_a_file(tmp_path, timings):
    path = write_json(tmp_path / "new" / "r.json", [make_row(timings)], environment=environment(), ceilings=[1])
    content = read_json(path)
    assert content["schema"] == SCHEMA
    assert content["rows"] == [make_row(timings)]
    assert content["ceilings"] == [1]
    assert content["environment"]["packages"]["numpy"] == np.__version__
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object(), np.float32(1)])
def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, timings, bad):
    path = write_json(tmp_path / "r.json", [], environment={})
    before = path.read_bytes()
    with pytest.raises(OptionError):
        write_json(path, [make_row(timings, bad=bad)], environment={})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_json(tmp_path / "r.json", [{"a": 1}], environment={})

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, [{"a": 2}], environment={})
    assert read_json(path)["rows"] == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other.v1"}'])
def test_foreign_files_are_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=str(path)):
        read_json(path)


def test_the_stamp_is_json_and_names_the_machine():
    stamp = environment()
    assert json.loads(json.dumps(stamp, allow_nan=False)) == stamp
    assert stamp["cpu"]["model"]
    assert stamp["cpu"]["usable"] >= 1
    assert {"python", "isogemm", "numba"} <= set(stamp["packages"])
    assert stamp["threads"] == isogemm.get_num_threads()
    assert any(pool["user_api"] == "blas" for pool in stamp["pools"])
    assert str(Path.home()) not in json.dumps(stamp["pools"])


def test_the_stamp_tells_clean_dirty_and_no_checkout_apart(tmp_path, monkeypatch):
    def git(*words):
        options = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *options, *words], check=True, capture_output=True)

    module = tmp_path / "stamp.py"
    module.write_text("")
    monkeypatch.setattr(stamp_module, "__file__", str(module))
    assert stamp_module._git() is None
    git("init", "-q")
    assert stamp_module._git() is None  # inside a repository that does not hold it
    git("add", "stamp.py")
    git("commit", "-qm", "one")
    clean = stamp_module._git()
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    module.write_text("changed")
    assert stamp_module._git() == clean | {"dirty": True}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["/env/bin/python3.11", "-m", "benchmarks.cpu", "--only", "m=1 n=2"],
            "python -m benchmarks.cpu --only 'm=1 n=2'",
        ),
        (["/env/bin/python", "/env/bin/isogemm", "audit"], "isogemm audit"),
        ([], ""),
    ],
)
def test_the_command_is_one_that_can_be_typed(monkeypatch, words, line):
    monkeypatch.setattr(sys, "orig_argv", words)
    assert command_line() == line


def test_thread_limits_reach_every_library_and_are_put_back():
    from threadpoolctl import threadpool_info

    def blas():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    def nested_and_failing():
        with limit_threads(1):
            assert (set(blas()), isogemm.get_num_threads()) == ({1}, 1)
            with limit_threads(2):
                assert isogemm.get_num_threads() == 2
            assert (set(blas()), isogemm.get_num_threads()) == ({1}, 1)
            raise RuntimeError("out")

    before, ours = blas(), isogemm.get_num_threads()
    with pytest.raises(RuntimeError, match="out"):
        nested_and_failing()
    assert (blas(), isogemm.get_num_threads()) == (before, ours)
    with pytest.raises(OptionError), limit_threads(0):
        pytest.fail("entered")
    assert (blas(), isogemm.get_num_threads()) == (before, ours)


def test_thread_limits_reach_torch_where_it_is_loaded(monkeypatch):
    class Torch:
        count = 5

        def get_num_threads(self):
            return self.count

        def set_num_threads(self, count):
            self.count = count

    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    with limit_threads(1):
        assert torch.count == 1
    assert torch.count == 5


def test_the_lab_loads_neither_torch_nor_numba():
    code = "import isogemm.lab, sys; print([m for m in ('torch', 'numba', 'rich', 'typer') if m in sys.modules])"
    assert python("-c", code).strip() == "[]"

"""``isogemm program`` from a config.json to losses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from tests.program.small import MODEL, program, tokens, weights
from typer.testing import CliRunner

from isogemm.cli import app
from isogemm.errors import OptionError
from isogemm.program import load
from isogemm.program.executor import CANARIES
from isogemm.program.explain import advice
from isogemm.program.picture import LINES, MAP, WIDTH
from isogemm.program.program import from_data

SLACK = 0.002  # microseconds: times are rounded to thousandths


def called(*words):
    result = CliRunner().invoke(app, ["program", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def losses(text):
    return [line for line in text.splitlines() if line.startswith("step ")]


def test_from_a_config_to_the_same_losses_by_two_plans(tmp_path):
    config, one, other = tmp_path / "config.json", tmp_path / "one", tmp_path / "other"
    config.write_text(json.dumps(MODEL.to_dict() | {"model_type": "qwen3"}))
    sizes = (config, "--batch", 4, "--tokens", 8, "--leaf", 8)
    called("lower", *sizes, "--out", one, "--threads", 1)
    called(
        "lower", *sizes, "--out", other, "--threads", 3, "--micro-batches", 2, "--recompute", "--mode", "fast", "--tune"
    )
    assert "nothing is wrong" in called("check", one)
    told = called("explain", other, "--html", tmp_path / "page.html")
    pictures((tmp_path / "page.html").read_text(), load(other))
    assert "backward.L1" in told
    assert "live at once" in told
    assert "The bits cannot differ" in called("diff", one, other)
    found = [losses(called("run", one, "--steps", 2)), losses(called("run", other, "--steps", 2))]
    assert len(found[0]) == 2
    assert found[0] == found[1]


def pictures(text, made):
    """A rectangle for each tensor and each operation, inside of their picture; nothing is brought from elsewhere."""
    assert "http" not in text
    assert "src=" not in text
    memory, timeline = (ElementTree.fromstring(x) for x in re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert [x[0].text.split()[0] for x in memory] == [x["name"] for x in made.layout["tensors"]]
    assert [x[0].text.split()[0] for x in timeline] == [op["name"] for op in made.plan["ops"]]
    for picture, high in ((memory, MAP), (timeline, LINES)):
        for one in picture:
            x, y, width, height = (float(one.get(name)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + width <= WIDTH + 0.3
            assert 0 <= y <= y + height <= high + 0.3


def test_a_plan_says_its_kernels_and_times():
    """The time falls with the threads that have work; a plan of other kernels is refused."""
    one, many = (program(threads=threads) for threads in (1, 3))
    times = [sum(op["isogemm"]["expected_us"] for op in made.plan["ops"]) for made in (one, many)]
    assert 0 < times[1] < times[0]
    alone = next(op["isogemm"]["expected_us"] for op in many.plan["ops"] if op["kernel_id"] == "loss")
    assert alone == next(op["isogemm"]["expected_us"] for op in one.plan["ops"] if op["kernel_id"] == "loss")
    one.plan["isogemm"]["kernels"] = "0" * 16
    with pytest.raises(OptionError, match=r"isogemm\.kernels: limit: .* got: 0{16}, of another version; .*: lower"):
        from_data(one.plan, one.layout)
    with pytest.raises(OptionError, match="optimizer: limit: adamw; got: sgd"):
        program(optimizer="sgd")


def test_a_program_runs_once():
    given, (ids, targets) = weights(), tokens()
    assert program().run(given, (ids, targets)) == program(threads=1).start(given).step(ids, targets)
    prefill = program(phase="prefill").run(given, (ids,))
    decoded = program(phase="decode").run(given, (ids[:, 0], [0] * len(ids)))
    assert (prefill[:, 0].view("u4") == decoded.view("u4")).all()
    assert "live at once" in program().explain()


def test_a_trace_nests(tmp_path):
    """Every event lies within the one that it began in: a step, phases, and the operations of the plan in its order."""
    made = program(batch=2)
    made.save(tmp_path)
    called("run", tmp_path, "--steps", 1, "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    open_ = []
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        depth = {"step": 0, "phase": 1}.get(event["cat"], 2)
        open_ = open_[:depth]
        assert len(open_) == depth
        assert all(a - SLACK <= begin and end <= b + SLACK for a, b in open_), event
        open_.append((begin, end))
    assert list(dict.fromkeys(x["name"] for x in events if x["cat"] == "phase")) == made.plan["phases"]
    found = [event["name"] for event in events if event["cat"] not in ("step", "phase") and event["name"] != CANARIES]
    assert found == [op["name"] for op in made.plan["ops"]]


def test_a_folder_that_cannot_take_the_program_is_refused_before_anything_is_lowered(tmp_path, monkeypatch):
    program(phase="prefill").save(tmp_path / "taken")
    (tmp_path / "file").write_text("mine")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL.to_dict()))
    monkeypatch.setattr("isogemm.program.lower", None)
    for out, said in (("taken", "a plan of one phase"), ("file", "a folder to write into")):
        error = CliRunner().invoke(app, ["program", "lower", str(config), "--out", str(tmp_path / out)]).exception
        assert isinstance(error, OptionError)
        assert f"folder of a program: limit: {said}; got: {tmp_path / out}" in str(error)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["config.json", "file", "taken"]


def test_another_leaf_is_other_numbers(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL.to_dict()))
    for leaf in (8, 16):
        called("lower", config, "--batch", 4, "--tokens", 8, "--leaf", leaf, "--out", tmp_path / str(leaf))
    assert "The bits may differ" in called("diff", tmp_path / "8", tmp_path / "16")


def test_tiles_that_starve_threads_are_told():
    """Tiles of 4 rows on 16 keep 4 of 12 threads busy."""
    op = {
        "op_id": 37, "phase": "backward", "kernel_id": "gemm", "shape": {"m": 16, "n": 256, "k": 64},
        "dispatch": {"split_axis": "m", "tile_m": 4, "tile_n": 256, "threads": 12, "schedule": "static"},
    }  # fmt: skip
    plan = {"schema": "ck.train.exec.v1", "runtime": {"threads": 12, "mode": "deterministic"}, "ops": [op]}
    assert advice(plan) == ["op 37 (gemm): tiles of 4 x 256 on 16 x 256 keep 4 of 12 threads busy"]
    op["dispatch"]["tile_m"] = 1
    assert advice(plan) == []


def test_tokens_are_decoded_with_the_same_bits_by_two_plans(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(replace(MODEL, hidden_size=64, intermediate_size=96).to_dict()))
    for name, threads in (("one", 1), ("other", 3)):
        words = ("--phase", "decode", "--batch", 2, "--tokens", 8, "--quantize", "Q4_0", "--threads", threads)
        called("lower", config, *words, "--out", tmp_path / name)
    found = [called("run", tmp_path / name, "--steps", 3) for name in ("one", "other")]
    assert len(losses(found[0])) == 3
    assert found[0] == found[1]
    called("lower", config, "--phase", "prefill", "--batch", 2, "--tokens", 8, "--out", tmp_path / "prefill")
    assert len(losses(called("run", tmp_path / "prefill", "--steps", 1))) == 1

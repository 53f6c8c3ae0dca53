"""What decides between kernels on a machine: no choice of it reaches a bit, and it is kept whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.products import F32, assert_same, product, values

import isogemm
from isogemm.backends.cpu.emit import descriptor as f
from isogemm.backends.cpu.gemm import execute, facts, measure
from isogemm.backends.cpu.gemm.facts import Facts
from isogemm.backends.cpu.gemm.tasks import task_for
from isogemm.base.disk import keep
from isogemm.base.tuning import set_tuning
from isogemm.problem.settings import PLAIN

USUAL = facts.usual()
LEAST = Facts(0, 0, 0, 1, 1, 0, 0, 0, 0.0, "least")
MOST = Facts(64, 16, 2**62, 2**62, 2**62, 2**62, 2**14, 2**62, 1e9, "most")
CHOICES = {
    "usual": USUAL,
    "least": LEAST,
    "most": MOST,
    "packed early": replace(USUAL, gemv_rows=3, serial=0),
    "asked for": replace(MOST, seen_bytes=0, tile_ahead=2**13 + 1),
    "shallow": replace(MOST, gemv_rows=3, skinny_depth=8),
}


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    yield
    set_tuning("off")
    facts.set_facts(None)


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measuring is allowed, and what is found is kept in a folder of this test."""
    path = tmp_path / "a folder" / "machine.facts"
    monkeypatch.setattr(facts, "facts_file", lambda: path)
    set_tuning("on")
    facts.set_facts(None)
    return path


def never(usual: Facts) -> Facts:
    raise AssertionError("measured")


@pytest.mark.parametrize("name", CHOICES)
def test_no_choice_reaches_a_bit(name: str) -> None:
    facts.set_facts(CHOICES[name])
    few = (1, 71, 43), (1, 259, 130), (2, 130, 37), (4, 97, 64), (7, 150, 129), (13, 67, 1031), (12, 300, 257)
    for m, n, k in (*few, (30, 66, 75), (200, 40, 33)):
        x, w = values((m, k), seed=1, special=True), values((n, k), seed=2)
        wanted, packed = product(x, w.T), isogemm.pack(w)
        for _ in range(3):  # the same weights again are not asked for
            for weight in (w, packed):
                assert_same(isogemm.linear(x, weight), wanted)
            out = np.full((m, n), np.nan, F32)
            execute.gemm(x, w.T, out, PLAIN)
            assert_same(out, wanted)
        assert_same(isogemm.matmul(x, np.ascontiguousarray(w.T)), wanted)
        c = values((m, n), seed=3)
        out = c.copy()
        execute.gemm(x, packed, out, PLAIN._replace(accumulate=True), c=out)
        assert_same(out, product(x, w.T, c=c, accumulate=True))


def test_choices_choose() -> None:
    """Else the bits above would be equal for no reason."""
    x, w = values((1, 300)), values((256, 300))
    rows, out = values((12, 300)), np.empty((12, 256), F32)

    def walks(name: str) -> list[Any]:
        facts.set_facts(CHOICES[name])
        one, many = (task_for(a, w.T, out[: len(a)], None, 2) for a in (x, rows))
        return [
            *(int(task.rows[1, f.STRATEGY]) for task in (one, many)), int(one.rows[1, f.SEEN]), many.threads > 1
        ]  # fmt: skip

    blocks = {}
    for name in ("usual", "shallow"):
        facts.set_facts(CHOICES[name])
        row = task_for(values((300, 100)), values((64, 100)).T, np.empty((300, 64), F32), None, 1).rows[1]
        blocks[name] = int(row[f.A_MODE]), int(row[f.KC])
    assert blocks == {"usual": (f.PACK_BLOCK, 100), "shallow": (f.PACK_ALL, 9)}
    b, large = np.ascontiguousarray(values((300, 256))), isogemm.pack(np.zeros((4100, 1030), F32))
    streams, asks = {}, []
    for name in ("usual", "most", "asked for"):
        facts.set_facts(CHOICES[name])
        few = [task_for(rows[:, :k], b[:k], out, None, 2).rows[1, f.STRATEGY] for k in (300, 40)]
        streams[name] = [int(strategy) == f.STREAM for strategy in few]
    assert streams == {"usual": [False] * 2, "most": [True, False], "asked for": [True, False]}  # where it is not small
    for weight in (isogemm.pack(w), large):
        row = task_for(values((12, weight.shape[1])), weight, np.empty((12, weight.shape[0]), F32), None, 2).rows[1]
        asks.append((int(row[f.SEEN]), int(row[f.FROM_MEMORY])))
    assert asks == [(0, 2**13), (f.NEVER_SEEN, 2**13)]
    assert walks("most") == [f.QUADS, f.GEMV, 0, False]
    assert walks("least") == [f.TILED, f.TILED, 0, True]
    assert walks("asked for") == [f.QUADS, f.GEMV, f.NEVER_SEEN, False]
    assert walks("packed early") == [f.QUADS, f.TILED, 0, True]


def test_what_was_measured_is_read_again(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(LEAST, source="measured", ridge=3.5)
    monkeypatch.setattr(facts, "measurer", lambda usual: found)
    assert facts.facts() == USUAL
    assert facts.learn_facts() == found == facts.facts()
    monkeypatch.setattr(facts, "measurer", never)  # once
    assert facts.learn_facts() == found
    facts.set_facts(None)
    assert facts.facts() == found
    assert "measured" in str(isogemm.plan(1, 64, 64))
    set_tuning("off")
    facts.set_facts(None)
    assert facts.facts() == USUAL


def test_nothing_is_measured_where_that_is_refused_or_would_compile(
    allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "measurer", never)
    assert facts.learn_facts({"panels", "pack"}) == USUAL
    set_tuning("off")
    assert facts.learn_facts() == facts.learn_facts(facts.NEEDED) == USUAL
    assert not allowed.exists()


@pytest.mark.parametrize("data", [b"", b"{", b'{"gemv_rows": 8}', None])
def test_what_is_damaged_is_not_taken(allowed: Path, data: bytes | None) -> None:
    keep(allowed, json.dumps(asdict(LEAST)).encode() if data is None else data)
    if data is None:
        facts.set_facts(None)
        assert facts.facts() == LEAST
        allowed.write_bytes(allowed.read_bytes()[:-9])
    facts.set_facts(None)
    assert facts.facts() == USUAL


def test_a_folder_that_cannot_be_written_costs_nothing_else(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed.parent.write_bytes(b"a file where the folder would be")
    found = replace(LEAST, source="measured")
    monkeypatch.setattr(facts, "measurer", lambda usual: found)
    assert facts.learn_facts() == found


def test_a_machine_without_memory_computes_as_usual(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STORE", 2**62)
    assert facts.learn_facts() == facts.facts() == USUAL
    assert not allowed.exists()


def test_a_race_and_a_kill_leave_no_half_file(allowed: Path) -> None:
    writer = (
        "import sys; from isogemm.base.disk import keep; from pathlib import Path\n"
        "print('begun', flush=True)\n"
        "while True: keep(Path(sys.argv[1]), sys.argv[2].encode())"
    )
    texts = [json.dumps(asdict(replace(LEAST, serial=i, source="x" * 60000))) for i in (1, 2)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [
        subprocess.Popen([sys.executable, "-c", writer, str(allowed), text], stdout=subprocess.PIPE, env=environment)
        for text in texts
    ]
    try:
        for each in writers:
            assert each.stdout is not None
            assert each.stdout.readline() == b"begun\n"
        while facts._read() is None:
            pass
        for i in range(300):
            if i == 150:
                writers[0].kill()
            found = facts._read()
            assert found is not None
            assert found.serial in (1, 2)
    finally:
        for each in writers:
            each.kill()
            each.communicate()
    assert facts._read() is not None


@pytest.mark.parametrize("wins", [0, 1])
def test_the_faster_way_is_chosen(wins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks of this test's own: what is timed are real kernels, on few weights."""
    ran = []

    def clock(runs: Any, rounds: int = 1) -> list[float]:
        for run in runs:
            run()
        ran.append(len(runs))
        return [1.0, 2.0] if wins == 0 else [2.0, 1.0]

    monkeypatch.setattr(measure, "times", clock)
    monkeypatch.setattr(measure, "STORE", 2**24)
    monkeypatch.setattr(measure, "_busy", lambda threads: False)
    monkeypatch.setattr(measure, "get_num_threads", lambda: 2)
    found = measure.measure(USUAL)
    assert set(ran) == {2}
    assert found.source == "measured"
    assert (found.gemv_rows, found.seen_bytes) == ((64, 2**18) if wins == 0 else (8, 2**24))
    assert (found.skinny_rows, found.skinny_depth) == ((512, 2048) if wins == 0 else (192, 256))
    assert found.stream_rows == (16 if wins == 0 else 4)
    assert found.tile_ahead == (0 if wins == 0 else 2**13)
    assert found.block_depth == (1024 if wins == 0 else 512)
    assert found.serial == (2**19 if wins == 0 else 2**14)
    assert facts.facts() == USUAL


@pytest.mark.parametrize(("together", "threads", "first"), [(1.0, 2, 2**16), (1.2, 2, 2**19), (1.2, 64, 2**24)])
def test_threads_that_win_nothing_are_left_alone_up_to_what_waking_them_costs(
    together: float, threads: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they neither win nor lose, from the usual size on they are taken: at other times they may win."""
    monkeypatch.setattr(measure, "times", lambda runs, rounds: [1.0, together])
    monkeypatch.setattr(measure, "_busy", lambda threads: False)
    monkeypatch.setattr(measure, "get_num_threads", lambda: threads)
    assert measure._serial(replace(USUAL, serial=2**16)) == first


def test_packed_weights_that_are_timed_from_memory_never_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, launch = set[int](), measure.launch_single

    def watched(task: Any, *operands: Any) -> None:
        seen.add(int(task.rows[1, f.SEEN]))
        launch(task, *operands)
        seen.add(int(task.rows[1, f.SEEN]))

    monkeypatch.setattr(measure, "launch_single", watched)
    assert measure._tile_ahead(np.ones(2**20, F32), USUAL) in (0, facts.TILE_AHEAD)
    assert seen == {f.NEVER_SEEN}


@pytest.mark.parametrize(
    ("won", "first"),
    [("0011111", 4), ("0000000", 128), ("1111111", 1), ("0011011", 4), ("0011110", 4), ("0100111", 16)],
)
def test_a_size_that_another_program_spoiled_does_not_decide(won: str, first: int) -> None:
    assert measure._first_won([2**i for i in range(7)], [word == "1" for word in won]) == first


def test_a_size_that_was_disturbed_does_not_have_all_larger_ones_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that lie in a cache are walked in a quarter of the time where nothing is asked for (two threads)."""
    turns = iter(range(100))

    def clock(runs: Any, rounds: int) -> list[float]:
        disturbed = next(turns) % 7 == 2  # of seven sizes the third, whenever it is timed
        return [1.0, 2.0 if disturbed else 0.9]

    monkeypatch.setattr(measure, "times", clock)
    assert measure._seen_bytes(np.ones(2**22, F32), USUAL) == 2**24


def test_a_condition_that_changes_nothing_is_not_said():
    assert "M <= 192: skinny" in str(isogemm.plan(4, 64, 32))
    facts.set_facts(replace(facts.facts(), skinny_rows=512))
    try:
        assert "M <= 512 with B stored [n, k], else 192: skinny" in str(isogemm.plan(4, 64, 32))
    finally:
        facts.set_facts(None)

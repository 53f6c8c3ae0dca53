"""Live timing beside captures and other products, and records that are not as they should be."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from tests.planner.fakes import linear
from tests.planner.hosted import Here, P

from isogemm.base import tuning
from isogemm.planner import live, records
from isogemm.planner.timed import ProductClass

OTHER = linear(16, 64, 1024)
TIMES = {"best": 12.0, "second": 9.0}.__getitem__


@pytest.fixture(autouse=True)
def budget(monkeypatch):
    monkeypatch.setattr(tuning, "_budget", 30.0)


def admitted_for_another() -> Here:
    """Where a product of another K has the second kernel alone, and no capture is under way yet."""
    here = Here()
    here.f.legal = lambda p, c: p.k != 512 or c == "second"
    here.settle(here.chooser.serve(P))
    here.f.legal = lambda p, c: True
    return here


def test_what_is_first_served_while_a_graph_is_captured_is_not_watched():
    here = admitted_for_another()
    here.machine.captures = True
    relay = here.chooser.serve(OTHER)
    assert here.call(relay, OTHER) == "second"
    assert not here.bench.tasks
    assert not here.live._watches


def test_a_capture_waits_for_what_is_prepared():
    here = admitted_for_another()
    relay, waited = here.chooser.serve(OTHER), []
    (watch,) = here.live._watches.values()

    def wait(seconds):
        waited.append(seconds)
        here.machine.captures = False
        here.bench.work()
        here.machine.captures = True
        return True

    watch.prepared.wait = wait
    here.machine.captures = True
    assert here.call(relay, OTHER) == "best"
    assert waited == [live.PATIENCE]


def test_watches_are_bounded(monkeypatch):
    monkeypatch.setattr(live, "MOST", 4)
    here = Here(own=("best", "second"), clock=TIMES)
    products = [linear(16, 48, 512 + 64 * i) for i in range(9)]
    relays = [here.chooser.serve(p) for p in products]
    assert len(here.live._watches) <= 4
    assert here.settle(relays[0], products[0]) == "second"  # its relay holds it


def test_nothing_is_timed_while_others_are_at_work():
    here = Here(own=("best", "second"), clock=TIMES)
    relay = here.chooser.serve(P)
    here.bench.work()
    here.bench.tasks.append((0, lambda: None))
    for _ in range(3):
        here.call(relay)
    assert not here.bench.rounds
    assert here.settle(relay) == "second"


def test_a_leader_that_is_called_keeps_its_place():
    here = Here(own=("best", "second"), clock={"best": 10.0, "second": 9.0}.__getitem__)
    other = linear(15, 48, 512)
    first, second = here.chooser.serve(P), here.chooser.serve(other)
    here.bench.work()
    here.bench.valid = False
    here.call(first)
    for _ in range(3):
        for _ in range(live.OTHERS - 4):
            here.call(second, other)
        here.call(first)
    (watch,) = here.live._watches.values()
    assert watch.leader == P


def test_keys_of_records_are_equal_in_any_order(tmp_path):
    here = records.Records(tmp_path)
    here.put({"a": "1", "b": "2"}, {"value": "found"})
    assert here.get({"b": "2", "a": "1"}) == {"value": "found"}


@pytest.mark.parametrize("damage", ["schema", "bytes", "value", "half", "depth"])
def test_a_record_that_is_not_whole_is_none(damage, tmp_path):
    here = records.Records(tmp_path)
    here.put({"of": "x"}, {"state": "admitted"})
    (path,) = tmp_path.glob("*.json")
    text = path.read_bytes()
    path.write_bytes(
        {
            "schema": text.replace(records.SCHEMA.encode(), b"isogemm.admission.v1"),
            "bytes": b"\xff\xfe",
            "value": text.replace(b'"admitted"', b"1"),
            "half": text[: len(text) // 2],
            "depth": b"[" * 1_000_000,
        }[damage]
    )
    assert path.read_bytes() != text
    assert here.get({"of": "x"}) is None
    assert not list(here.each())


LIVE = {"best": 9.0, "second": 7.0, "right": 5.0}.__getitem__
MORE = {"offered": ("right",), "own": ("best", "second")}


def test_another_library_voids_what_was_found(tmp_path):
    first = Here(tmp_path, LIVE, **MORE)
    assert first.settle(first.chooser.serve(P)) == "right"
    other = Here(tmp_path, LIVE, **MORE)
    other.chooser.admissions.stamp = {**other.chooser.admissions.stamp, "cublaslt": "another"}
    assert other.call(other.chooser.serve(P)) != "right"


def test_another_alignment_is_another_record(tmp_path):
    first = Here(tmp_path, LIVE, **MORE)
    assert first.settle(first.chooser.serve(P)) == "right"
    again, other = Here(tmp_path, LIVE, **MORE), replace(P, align=16)
    assert again.chooser.verdict(again.library, other, "right", trial=False).state == "absent"
    assert not again.live.candidates.found(ProductClass.of(other)).us


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_record_of_another_user_is_none(tmp_path):
    here = records.Records(tmp_path)
    here.put({"of": "x"}, {"state": "admitted"})
    (path,) = tmp_path.glob("*.json")
    os.chown(path, 12345, -1)
    assert here.get({"of": "x"}) is None

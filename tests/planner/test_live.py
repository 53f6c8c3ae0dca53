"""Choosing at run time, on a device that is this process: what serves when, what is timed, and what is kept."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.planner.fakes import flip, linear, view
from tests.planner.hosted import Here, Kernels, P, operands, out_of

from isogemm.backends.cuda.plans.plan import explain_on
from isogemm.base import tuning
from isogemm.base.tuning import set_tuning
from isogemm.planner import candidates, records
from isogemm.planner.ahead import siblings
from isogemm.planner.live import OTHERS, ROUNDS
from isogemm.planner.relay import Relay
from isogemm.planner.tables import Hint, Use
from isogemm.planner.timed import ProductClass, Timed
from isogemm.planner.trials import variant_of
from isogemm.problem.product import Addresses, Strides


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_budget", 30.0)


def test_who_comes_while_its_class_settles_is_not_forgotten() -> None:
    """Another thread has its kernel, and is about to watch for a faster one, when that has been found."""
    here = Here(clock={"best": 12.0, "second": 9.0}.__getitem__, own=("best", "second"))
    relay, late = here.chooser.serve(P), list[Relay]()
    choice = here.chooser.choose(P)

    class Watches(dict[Any, Any]):
        def pop(self, *key: Any) -> Any:
            if not late:
                late.append(Relay(choice.launch))
                here.live._watch(P, late[0], choice, 30.0)
            return super().pop(*key)

    here.live._watches = Watches(here.live._watches)
    assert here.settle(relay) == here.settle(late[0]) == "second"
    assert not here.live._watches
    assert "watching" not in late[0].now.__qualname__


def test_the_first_call_takes_what_is_ready_and_the_fastest_takes_over_where_it_is_held() -> None:
    here = Here(clock={"best": 12.0, "second": 9.0, "third": 30.0}.__getitem__, own=("best", "second"))
    relay = here.chooser.serve(P)
    assert here.call(relay) == "best"  # nothing was ready: the model's first was waited for
    assert here.settle(relay) == "second"
    n = len(here.bench.rounds)
    held = relay.now
    here.call(relay)
    assert relay.now is held
    assert len(here.bench.rounds) == n


def test_what_is_ready_serves_while_the_better_is_compiled() -> None:
    here = Here(expects={"best": 10.0, "second": 18.0, "third": 25.0}, clock={"best": 9.0, "second": 18.0}.__getitem__)
    here.f.legal = lambda p, c: p.k != 512 or c != "best"
    here.settle(here.chooser.serve(P))
    here.f.legal = lambda p, c: c != "third"
    assert here.bench.compiled == [("f", "second")]
    other = linear(16, 64, 1024)
    relay = here.chooser.serve(other)
    assert here.call(relay, other) == "second"
    assert ("f", "best") not in here.bench.compiled
    assert here.settle(relay, other) == "best"


def test_kernels_are_built_ahead_once_each_though_a_first_product_may_not_want_them() -> None:
    """Behind what is likeliest for a product; `wide` serves no product of few rows."""
    here, made = Here(), list[Any]()
    here.f.palette = lambda product: ("third", "wide") if product.m > 16 else ("third",)
    here.live.preparing.make = lambda use, product: made.append((use.config, variant_of(product)))
    here.chooser.serve(P)
    here.bench.work()
    every = [variant_of(x) for x in (P, *siblings(P))]
    likeliest = len(made) - 9
    assert made[likeliest:] == [("third", every[0]), *((c, v) for v in every[1:] for c in ("third", "wide"))]
    here.chooser.serve(linear(300, 48, 512))
    here.bench.work()
    assert made[likeliest + 9 :] == [*made[:likeliest], ("wide", every[0])]


def test_products_of_any_strides_are_served() -> None:
    """What is built for others fails no call."""
    here = Here()
    here.f.palette = lambda product: ("third",)
    here.chooser.serve(linear(16, 48, 512, a=Strides(0, 0)))
    here.bench.work()


def test_the_best_of_each_family_is_timed_though_its_model_is_further_off() -> None:
    expects = {"other": 18.0, "worse": 19.0}
    for factor, found in ((1.0, "other"), (1.2, "best")):  # 1.8 and 2.2 times the best's
        here = Here(clock={"best": 12.0, "other": 7.0}.__getitem__, own=("best",))
        here.chooser.families["g"] = Kernels(
            "g", here.bench, offered=("other", "worse"), expects=lambda p, c, factor=factor: factor * expects[c]
        )
        assert here.settle(here.chooser.serve(P)) == found
        assert ("g", "worse") not in here.bench.compiled


def test_what_is_far_from_the_best_is_not_waited_with() -> None:
    here = Here(expects={"best": 10.0, "second": 25.0})
    here.f.legal = lambda p, c: p.k != 512 or c == "second"
    here.settle(here.chooser.serve(P))
    here.f.legal = lambda p, c: True
    other = linear(16, 64, 1024)
    assert here.call(here.chooser.serve(other), other) == "best"


def test_wrong_bits_are_never_chosen_neither_by_the_model_nor_by_the_clock() -> None:
    here = Here(clock={"best": 1.0, "second": 9.0, "third": 5.0}.__getitem__, faults={"best": flip()})
    relay = here.chooser.serve(P)
    assert here.call(relay) == "second"
    assert here.settle(relay) == "third"
    assert all("best" not in names for names in here.bench.rounds)


def test_a_librarys_algorithms_are_compared_at_first_use_and_compete() -> None:
    wrong = {"broken": flip(lambda p: p.m == 16)}
    here = Here(
        clock={"best": 9.0, "right": 5.0, "broken": 1.0}.__getitem__,
        own=("best",),
        offered=("broken", "right"),
        wrong=wrong,
    )
    relay = here.chooser.serve(P)
    assert here.call(relay) == "best"
    assert here.settle(relay) == "right"
    found = here.live.candidates.found(ProductClass.of(P))
    assert set(found.admitted) == {Use("library", "right")}
    assert set(found.refused) == {Use("library", "broken")}
    assert all("broken" not in names for names in here.bench.rounds)
    assert sorted(p.m for p in here.bench.compared) == [9, 16]
    there = here.chooser.verdict(here.library, replace(P, m=12), "right", trial=False)
    assert there.state == "admitted"
    for other in (linear(17, 48, 512), linear(16, 64, 512), replace(P, align=16)):
        assert here.chooser.verdict(here.library, other, "right", trial=False).state == "absent"


def test_an_algorithm_that_is_wrong_at_an_end_of_the_class_is_refused() -> None:
    here = Here(own=("best",), offered=("broken",), wrong={"broken": flip(lambda p: p.m == 9)}, clock=lambda c: 1.0)
    relay = here.chooser.serve(P)
    assert here.settle(relay) == "best"
    assert not here.live.candidates.found(ProductClass.of(P)).admitted


def test_an_algorithm_is_admitted_for_no_rows_beyond_those_that_were_compared() -> None:
    """Packed, the class's last rows are a multiple of 8 that lines of 13 are not: another variant, left out."""
    here = Here(own=("best",), offered=("right",))
    product = replace(linear(13, 48, 512), a=Strides(1, 13))
    here.chooser.serve(product)
    here.bench.work()
    assert (kind := ProductClass.of(product)).high == 16
    assert [p.m for p in here.bench.compared] == [9, 13]
    assert here.live.candidates.found(kind).admitted == {Use("library", "right"): (9, 13)}
    beyond = replace(linear(15, 48, 512), a=Strides(1, 15))
    assert ProductClass.of(beyond) == kind
    assert here.live.candidates.admission(beyond, Use("library", "right")) is None


def test_what_was_found_serves_later_processes_without_timing(tmp_path: Path) -> None:
    times = {"best": 9.0, "second": 7.0, "third": 30.0, "right": 5.0, "broken": 1.0}
    more: dict[str, Any] = {"offered": ("broken", "right"), "wrong": {"broken": flip()}, "own": ("best", "second")}
    first = Here(tmp_path, times.__getitem__, **more)
    assert first.settle(first.chooser.serve(P)) == "right"
    second = Here(tmp_path, times.__getitem__, **more)
    assert second.call(second.chooser.serve(P)) == "right"
    assert not second.bench.tasks
    assert not second.bench.rounds
    here = explain_on(P, second.chooser)
    assert (here.config, here.reason) == ("right", "timed live at m 16, 4.19 us, 3 candidates")
    near = replace(P, m=10)
    assert second.call(second.chooser.serve(near), near) == "right"
    changed = Here(tmp_path, times.__getitem__, **more)
    changed.library.source = "v2"
    assert changed.call(changed.chooser.serve(P)) != "right"


def test_nothing_is_timed_while_capturing_and_the_likeliest_is_captured() -> None:
    here = Here()
    here.f.legal = lambda p, c: p.k != 512 or c == "second"
    here.settle(here.chooser.serve(P))
    here.f.legal = lambda p, c: True
    other = linear(16, 64, 1024)
    relay = here.chooser.serve(other)
    rounds = len(here.bench.rounds)
    assert here.call(relay, other) == "second"
    here.bench.work()
    here.machine.captures = True
    for _ in range(3):
        assert here.call(relay, other) == "best"
    assert len(here.bench.rounds) == rounds
    here.machine.captures = False
    here.settle(relay, other)
    assert len(here.bench.rounds) > rounds


def test_warm_settles_products_before_their_first_calls() -> None:
    times = {"best": 12.0, "second": 9.0, "right": 5.0, "broken": 1.0}
    here = Here(None, times.__getitem__, own=("best", "second"), offered=("broken", "right"), wrong={"broken": flip()})
    set_tuning("off")
    products = [linear(m, n, 512) for m in (8, 16) for n in (48, 64)]
    told: list[Any] = []
    here.live.warm(products, lambda *said: told.append(said), budget=30.0)
    assert [done for done, _, _ in told] == list(range(8))
    assert not here.live._watches
    rounds = len(here.bench.rounds)
    set_tuning("on")
    for product in products:
        assert here.call(here.chooser.serve(product), product) == "right"
    assert len(here.bench.rounds) == rounds


@pytest.mark.parametrize(("valid", "timed"), [(True, 16), (False, 15)])
def test_a_product_that_is_called_no_more_holds_up_no_other_of_its_class(valid: bool, timed: int) -> None:
    """Prompts of other lengths, say: the first one may never come again, with a round that counts or with none."""
    other = linear(15, 48, 512)
    here = Here(clock={"best": 10.0, "second": 9.0}.__getitem__, own=("best", "second"))
    first, second = here.chooser.serve(P), here.chooser.serve(other)
    here.bench.work()
    assert here.call(first) == "best"
    here.bench.valid = valid
    assert here.call(second, other) == "best"
    here.bench.valid = True
    assert [here.call(second, other) for _ in range(OTHERS + ROUNDS)][-1] == here.call(first) == "second"
    assert here.live.candidates.found(ProductClass.of(P)).m == timed
    assert not here.live._watches


@pytest.mark.parametrize("calls", [0, 2])
def test_warm_settles_a_class_that_another_product_leads_or_that_is_timed_for_one_of_its_own(calls: int) -> None:
    here = Here(clock={"best": 10.0, "second": 9.0}.__getitem__, own=("best", "second"))
    other, timed = linear(15, 48, 512), here.chooser.timed
    first = here.chooser.serve(other)
    here.bench.work()
    for _ in range(calls):
        here.call(first, other)
    here.live.warm([P], lambda *progress: None, budget=30.0)
    assert not here.live._watches
    here = Here(clock={"best": 10.0, "second": 9.0}.__getitem__, own=("best", "second"))
    here.chooser.timed = lambda p: iter([Hint(Use("f", "best"), "a table")] if p.m == 16 else timed(p))
    here.f.bind(P, "best", 0)
    here.chooser.verdict(here.f, P, "best")
    here.chooser.serve(other)
    here.live.warm([P], lambda *progress: None, budget=30.0)


def test_what_fails_for_one_product_is_found_for_the_others_of_its_class() -> None:
    here = Here(clock={"best": 10.0, "second": 9.0}.__getitem__, own=("best", "second"))
    other, at_hand = linear(15, 48, 512), here.live.candidates.at_hand
    first, second = here.chooser.serve(other), here.chooser.serve(P)
    here.bench.work()

    def fails(product: Any) -> Any:
        if product == other:
            raise RuntimeError("no room")
        return at_hand(product)

    here.live.candidates.at_hand = fails
    for _ in range(ROUNDS + 2):
        here.call(second)
    assert (here.call(first, other), here.call(second)) == ("best", "second")
    assert not here.live._watches


def test_launches_that_are_made_anew_for_each_call_lead_to_the_fastest_and_are_held_by_nobody() -> None:
    here = Here(clock={"best": 10.0, "second": 9.0}.__getitem__, own=("best", "second"))
    here.chooser.serve(P)
    here.bench.work()
    (watch,) = here.live._watches.values()
    served = []
    for _ in range(ROUNDS + 2):
        served.append(here.call(here.chooser.serve(P)))
        assert len(watch.relays) <= 1
    assert (served[0], served[-1]) == ("best", "second")
    assert len(here.bench.rounds) == ROUNDS


@pytest.mark.parametrize("budget", ["off", 0])
def test_switched_off_nothing_is_timed_and_nothing_done_elsewhere(budget: Any) -> None:
    set_tuning(budget)
    here = Here(offered=("right",))
    relay = here.chooser.serve(P)
    for _ in range(3):
        assert here.call(relay) == "best"
    assert not here.bench.tasks
    assert not here.bench.rounds


def test_the_budget_bounds_what_is_timed() -> None:
    here = Here(own=("best", "second"), expects={"best": 2000.0, "second": 2100.0}, clock=lambda c: 2000.0)
    set_tuning(9)  # two rounds of 4 ms
    here.settle(here.chooser.serve(P))
    assert len(here.bench.rounds) == 2
    here = Here(own=("best", "second"), expects={"best": 9000.0, "second": 9100.0})
    here.settle(here.chooser.serve(P))
    assert not here.bench.rounds


@pytest.mark.parametrize(("us", "in_a_row"), [(5.0, 10), (20.0, 10), (70.0, 4), (2000.0, 1)])
def test_short_kernels_are_timed_behind_their_like(us: float, in_a_row: int) -> None:
    here = Here(own=("best", "second"), expects={"best": us, "second": 1.1 * us})
    here.settle(here.chooser.serve(P))
    assert here.bench.in_a_row == in_a_row


@pytest.mark.parametrize(("us", "behind", "serves"), [(10.0, 0.7, "right"), (10.0, 0.9, "best"), (400.0, 0.7, "best")])
def test_what_a_library_s_kernel_waits_in_a_stream_alone_does_not_count(us: float, behind: float, serves: str) -> None:
    """Ten in a row wait nine times; a kernel that is timed alone waits for none of its like."""
    clock = {"best": us, "right": us + behind}
    here = Here(own=("best",), offered=("right",), expects={"best": us}, clock=clock.__getitem__)
    assert here.settle(here.chooser.serve(P)) == serves


def test_a_call_waits_for_no_round() -> None:
    here = Here(clock={"best": 12.0, "second": 9.0}.__getitem__, own=("best", "second"))
    relay = here.chooser.serve(P)
    here.bench.work()
    here.bench.finished = False
    for _ in range(4):
        assert here.call(relay) == "best"
    assert len(here.bench.rounds) == 1
    here.bench.finished = True
    assert here.settle(relay) == "second"


def test_a_round_that_was_enqueued_too_slowly_does_not_count() -> None:
    here = Here(clock={"best": 12.0, "second": 9.0}.__getitem__, own=("best", "second"))
    here.bench.valid = False
    assert here.settle(here.chooser.serve(P), calls=40) == "best"
    assert not here.live.candidates.found(ProductClass.of(P)).us


def test_what_fails_behind_a_call_is_nothing_to_its_caller() -> None:
    here = Here(own=("best", "second"))
    here.bench.round = lambda *_: 1 / 0
    relay = here.chooser.serve(P)
    assert here.settle(relay) == "best"
    assert "watching" not in relay.now.__qualname__


def test_products_of_a_class_share_what_is_timed() -> None:
    here = Here(clock={"best": 12.0, "second": 9.0}.__getitem__, own=("best", "second"))
    one, other = P, replace(P, m=10)
    relays = here.chooser.serve(one), here.chooser.serve(other)
    here.settle(relays[0], one)
    assert here.call(relays[1], other) == "second"
    assert len({names[0] for names in here.bench.rounds if len(names) > 1}) == 1


@pytest.mark.parametrize(
    ("m", "low", "high"),
    [
        (1, 1, 1),
        (2, 2, 8),
        (9, 9, 16),
        (64, 57, 64),
        (65, 65, 72),
        (128, 121, 128),
        (129, 129, 144),
        (1030, 1025, 1152),
    ],
)
def test_classes_of_rows(m: int, low: int, high: int) -> None:
    assert ProductClass.of(replace(P, m=m))[2:] == (low, high)


def test_a_record_that_is_none_is_nothing_found() -> None:
    full = Timed(
        16, {Use("f", "best"): 9.0}, {Use("library", "a"): (9, 16)}, {Use("library", "b"): (16, 16)}, "2026-11-23"
    )
    assert Timed.load(full.dump()) == full
    for text in ("", "{}", "[]", '{"m": 1}', full.dump()[:-9]):
        assert Timed.load(text) == Timed()


def _tunes(folder: str, ks: Sequence[int], barrier: Any) -> None:
    here = Here(Path(folder), {"best": 12.0, "second": 9.0}.__getitem__, own=("best", "second"))
    barrier.wait()
    for k in ks:
        product = linear(16, 48, k)
        here.settle(here.chooser.serve(product), product)


def test_products_that_never_end_are_known_in_bounded_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of attention while tokens come, say: each step has another K. What is thrown away comes back from disk."""
    monkeypatch.setattr(candidates, "MOST", 8)
    monkeypatch.setattr(records, "MOST", 20)
    monkeypatch.setattr(records, "OFTEN", 4)
    here = Here(tmp_path, own=("best", "second"))
    products = [linear(16, 48, 512 + 64 * i) for i in range(40)]
    for product in products:
        here.settle(here.chooser.serve(product), product)
    assert len(here.live.candidates._found) <= 8
    assert len(list(tmp_path.glob("*.json"))) < 24
    last, known = products[-1], len(here.bench.rounds)
    here.live.candidates._found.clear()
    assert here.settle(here.chooser.serve(last), last) == "best"
    assert len(here.bench.rounds) == known


def test_records_that_are_read_outlive_those_that_nobody_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processes that write a few each, which look with their first one."""
    monkeypatch.setattr(records, "MOST", 4)
    records.Records(tmp_path).put({"of": "old"}, {"value": "found"})
    for i in range(12):
        here = records.Records(tmp_path)
        assert here.get({"of": "old"}) == {"value": "found"}
        here.put({"of": str(i)}, {})
        for path in tmp_path.glob("*.json"):  # a file system may count in seconds
            os.utime(path, (path.stat().st_atime - 10, path.stat().st_mtime - 10))
    assert len(list(tmp_path.glob("*.json"))) <= 5
    assert records.Records(tmp_path).get({"of": "0"}) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes begin as copies here")
def test_two_processes_lose_nothing_to_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    runs = [context.Process(target=_tunes, args=(str(tmp_path), ks, barrier)) for ks in ((64, 96, 128), (96, 128, 160))]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
        assert run.exitcode == 0
    here = Here(tmp_path, own=("best", "second"))
    for k in (64, 96, 128, 160):
        found = here.live.candidates.found(ProductClass.of(linear(16, 48, k)))
        assert list(found.us) == [Use("f", "second"), Use("f", "best")]


def test_a_writer_that_is_killed_leaves_nothing_half_written(tmp_path: Path) -> None:
    times = {"best": 12.0, "second": 9.0}
    here = Here(tmp_path, times.__getitem__, own=("best", "second"))
    here.settle(here.chooser.serve(P))
    for path in list(tmp_path.glob("*.json")):  # what a killed writer leaves: a part beside the file
        path.with_name(f".{path.name}.0011.tmp").write_bytes(path.read_bytes()[:20])
    again = Here(tmp_path, times.__getitem__, own=("best", "second"))
    assert again.call(again.chooser.serve(P)) == "second"
    assert not again.bench.rounds


def test_threads_may_call_while_a_kernel_takes_over() -> None:
    here = Here(clock={"best": 12.0, "second": 9.0}.__getitem__, own=("best", "second"))
    relay = here.chooser.serve(P)
    a, b = operands(P)
    here.bench.work()
    outs = [out_of(P) for _ in range(4)]

    def calls(out: np.ndarray) -> None:
        for _ in range(20):
            relay.now(Addresses(a.ctypes.data, b.ctypes.data, out.ctypes.data), 0)

    threads = [threading.Thread(target=calls, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = view(outs[0].ctypes.data, P.out, (1, P.m, P.n), "bfloat16")
    assert all((out.view(np.uint16) == want[0].view(np.uint16)).all() for out in outs)
    assert here.call(relay) == "second"

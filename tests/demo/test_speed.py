"""The demo's verdicts: the peer at its best, and no word where the times could not tell."""

from __future__ import annotations

import threadpoolctl

from isogemm import lab
from isogemm.demo import forward, speed


def _row(ours, peer):
    timings = {"peer": lab.Timing.of("peer", peer, 1), "isogemm": lab.Timing.of("isogemm", ours, 1)}
    return speed.judge("work", timings, "isogemm", "peer")


def test_steady_times_get_a_word():
    assert _row([1.0] * 5, [2.0] * 5).verdict.word == "FASTER"
    assert _row([2.0] * 5, [1.0] * 5).verdict.word == "SLOWER"


def test_an_interval_on_both_sides_of_one_is_ambiguous():
    assert _row([1.0, 1.0, 1.0, 1.0, 1.0], [0.6, 0.7, 1.1, 1.6, 1.7]).verdict.word == "AMBIGUOUS"


def test_a_peer_that_stalls_is_ambiguous_although_its_median_is_slow():
    # It can do the work in 2.5 ms and mostly takes 11: the interval lies above 1, and says nothing about the library.
    row = _row([4.0] * 7, [11.0, 11.0, 2.5, 11.0, 11.0, 11.0, 11.0])
    assert row.verdict.low > 1
    assert row.verdict.word == "AMBIGUOUS"


def test_numpy_counts_at_its_best_and_its_threads_come_back(monkeypatch):
    monkeypatch.setattr(speed, "BLOCKS", 5)
    monkeypatch.setattr(speed, "BLOCK_SECONDS", 0.001)
    blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
    seen = []
    pools = blas.lib_controllers
    with blas.limit(limits=2):

        def run(provider):
            if provider is forward.NUMPY:
                seen.append(pools[0].get_num_threads())

        row = speed.measure(speed.Workload("nothing", run), forward.ISOGEMM, forward.NUMPY)
        assert {pool.get_num_threads() for pool in pools} == {2}
    assert set(seen) == {1, 2}
    assert list(row.timings) == ["numpy, 1 thread", "numpy, 2 threads", "isogemm"]
    best = min(row.timings[name].median for name in list(row.timings)[:2])
    assert row.timings[row.verdict.peer].median == best
    assert row.to_dict()["verdict"]["peer"] == row.verdict.peer

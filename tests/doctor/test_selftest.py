"""A drawn share of the selftest; the whole of it is ``isogemm doctor --selftest``."""

from __future__ import annotations

import numpy as np

from isogemm.doctor import MISTAKES
from isogemm.doctor.search import joined, search
from isogemm.doctor.selftest import alarms, chances, drawn, planted, scores


def test_planted_mistakes_are_named():
    found = scores(1, seed=3)
    assert len(found) > 0.8 * len(MISTAKES)
    assert [name for name, score in found.items() if score.found < 1] == []


def test_what_chance_decides_is_named():
    found = chances(12, seed=3)
    assert {name: score.found for name, score in found.items()} == {"race": 1, "other-order": 1}
    assert min(score.planted for score in found.values()) > 3


def test_right_results_are_right():
    found = alarms(60, seed=1)
    assert len(found) >= 7
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert np.sum([count for count, _ in found.values()]) > 30


def test_what_reads_memory_that_nobody_knows_explains_no_wrong_element():
    """Two mistakes leave one element right by luck; a read far behind the buffers says nothing of all others."""
    rng = np.random.default_rng(1)
    case = drawn(rng, "single", "bfloat16")
    pairs = [variant for name, variant in joined(case) if name == "k-block-missing + k-block-repeated"]
    found = search(case, planted(pairs[len(pairs) // 2].case, rng), pairs=False)
    assert not {"trans-a", "trans-b", "lda", "ldb"} & {cause.name for cause in found.causes}

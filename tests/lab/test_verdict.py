"""Verdicts on made-up samples."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.errors import OptionError
from isogemm.lab import Timing, fastest, verdict


def timing(name: str, samples) -> Timing:
    return Timing.of(name, list(samples), 1)


def noisy(seconds: float, spread: float, seed: int, rounds: int = 9):
    return seconds * np.random.default_rng(seed).uniform(1 - spread, 1 + spread, rounds)


def test_the_ratio_is_of_medians_and_above_one_when_ours_is_faster():
    result = verdict(timing("ours", [1, 2, 3, 4, 100]), timing("peer", [6, 6, 6, 6, 6]))
    assert result.ratio == 2.0
    assert (result.ours, result.peer, result.rounds) == ("ours", "peer", 5)
    assert result.low <= result.ratio <= result.high


@pytest.mark.parametrize(
    ("ours", "peer", "word"), [(1.0, 1.3, "FASTER"), (1.3, 1.0, "SLOWER"), (1.0, 1.0, "EQUAL"), (1.0, 1.01, "EQUAL")]
)
def test_clear_cases(ours, peer, word):
    assert verdict(timing("ours", noisy(ours, 0.004, 1)), timing("peer", noisy(peer, 0.004, 2))).word == word


def test_noise_wider_than_the_difference_is_ambiguous():
    """But for what an interval of 95 % leaves."""
    pairs = [(timing("ours", noisy(1.0, 0.4, s)), timing("peer", noisy(1.03, 0.4, s + 1000))) for s in range(100)]
    results = [verdict(ours, peer) for ours, peer in pairs]
    assert sum(result.word == "AMBIGUOUS" for result in results) >= 90
    assert all(result.low < 1 < result.high for result in results if result.word == "AMBIGUOUS")


def test_a_spell_that_slows_half_of_the_rounds_does_not_move_the_ratio():
    spell = np.repeat([1.0, 1.2], [4, 5])
    ours, peer = (
        timing(name, each * spell * noisy(1.0, 0.002, seed))
        for name, each, seed in (("ours", 1.0, 1), ("peer", 1.1, 2))
    )
    moved = timing("peer", np.array(peer.samples) * np.where(np.arange(9) == 4, 1 / 1.2, 1))  # its fifth came before it
    for result in (verdict(ours, peer), verdict(ours, moved)):
        assert result.ratio == pytest.approx(1.1, rel=0.005)
        assert result.word == "FASTER"


def test_a_difference_within_the_margin_is_never_called_faster():
    result = verdict(timing("ours", [1.0] * 9), timing("peer", [1.015] * 9))
    assert (result.low, result.high) == (1.015, 1.015)
    assert result.word == "EQUAL"
    assert verdict(timing("ours", [1.0] * 9), timing("peer", [1.015] * 9), margin=0.01).word == "FASTER"


def test_rounds_are_paired_so_that_a_slow_machine_cancels():
    spell = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    paired = verdict(timing("ours", spell), timing("peer", spell * 1.1))
    unpaired = verdict(timing("ours", spell), timing("peer", np.append(spell, 1.0) * 1.1))
    assert paired.word == "FASTER"
    assert paired.low == pytest.approx(1.1)
    assert paired.high == pytest.approx(1.1)
    assert unpaired.word == "AMBIGUOUS"


@pytest.mark.parametrize("rounds", [1, 4])
def test_few_rounds_decide_nothing(rounds):
    result = verdict(timing("ours", [1.0] * rounds), timing("peer", [5.0] * rounds))
    assert result.word == "AMBIGUOUS"
    assert result.against(1.0) == "AMBIGUOUS"


def test_the_same_samples_give_the_same_verdict():
    ours, peer = timing("ours", noisy(1.0, 0.1, 3)), timing("peer", noisy(1.1, 0.1, 4))
    assert verdict(ours, peer) == verdict(ours, peer)


@pytest.mark.parametrize(("bar", "word"), [(1.2, "MET"), (1.6, "NOT MET"), (1.5, "AMBIGUOUS")])
def test_a_bar_is_met_only_by_the_whole_interval(bar, word):
    result = verdict(timing("ours", [1.0] * 9), timing("peer", [1.4, 1.45, 1.48, 1.49, 1.5, 1.51, 1.52, 1.55, 1.6]))
    assert result.low < 1.5 < result.high
    assert result.against(bar) == word


def test_the_fastest_peer():
    timings = {"a": timing("a", [3.0]), "b": timing("b", [2.0]), "ours": timing("ours", [1.0])}
    assert fastest(timings).name == "ours"
    assert fastest(timings, "a", "b", "absent").name == "b"
    with pytest.raises(OptionError):
        fastest(timings, "absent")


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_bad_margin(margin):
    with pytest.raises(OptionError):
        verdict(timing("ours", [1.0]), timing("peer", [1.0]), margin=margin)

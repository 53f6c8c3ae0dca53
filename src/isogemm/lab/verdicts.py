"""Verdicts: is one candidate faster than another, or can these samples not tell?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from .timing import Timing

Word = Literal["FASTER", "SLOWER", "EQUAL", "AMBIGUOUS"]
Bar = Literal["MET", "NOT MET", "AMBIGUOUS"]

# The chance that five samples all fall on one side of their median is 1 in 16; below that an interval says nothing.
MIN_ROUNDS = 5
RESAMPLES = 2000
COVERAGE = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Speed of one candidate relative to a peer.

    Attributes
    ----------
    ours, peer : str
        Names of the two.
    ratio : float
        See `relative_speed`: above 1, ours is faster.
    low, high : float
        95 % bootstrap interval of the ratio.
    word : {"FASTER", "SLOWER", "EQUAL", "AMBIGUOUS"}
    rounds : int
        Samples behind it.
    """

    ours: str
    peer: str
    ratio: float
    low: float
    high: float
    word: Word
    rounds: int

    def against(self, bar: float) -> Bar:
        """Whether the ratio reaches `bar`: only when the whole interval does, or does not, is that decided."""
        if self.rounds >= MIN_ROUNDS:
            if self.low >= bar:
                return "MET"
            if self.high < bar:
                return "NOT MET"
        return "AMBIGUOUS"

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x {self.peer} [{self.low:.2f}, {self.high:.2f}] {self.word}"


def verdict(ours: Timing, peer: Timing, *, margin: float = 0.02, seed: int = 0) -> Verdict:
    """Compare two timings by a bootstrap of their `relative_speed`.

    Timings with equally many samples came from one `interleave` and are resampled by rounds, in pairs; otherwise
    each is resampled by itself.

    FASTER: the interval lies above 1 and the ratio above ``1 + margin``. SLOWER: the interval lies below 1 and
    the ratio below ``1 / (1 + margin)``. EQUAL: the interval lies within the margin. Anything else, and anything
    from fewer than five rounds, is AMBIGUOUS.

    Parameters
    ----------
    ours, peer : Timing
    margin : float
        Smallest relative difference worth a word.
    seed : int
        Of the bootstrap: the same samples give the same verdict.

    Raises
    ------
    OptionError
        `margin` is negative or not a number.
    """
    if not 0 <= margin < float("inf"):
        raise OptionError("margin", limit="zero or a positive number", value=margin, nearest=0.02)
    ratio = relative_speed(ours.samples, peer.samples)
    ratios = _bootstrap(np.array(ours.samples), np.array(peer.samples), seed)
    low, high = (float(q) for q in np.percentile(ratios, COVERAGE))
    rounds = min(len(ours.samples), len(peer.samples))
    return Verdict(ours.name, peer.name, ratio, low, high, _word(ratio, low, high, margin, rounds), rounds)


def relative_speed(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times as fast ours is: the median over rounds of the peer's time over ours.

    Sample r of two timings that came from one `interleave` are neighbours in time, so a spell that slowed both, or a
    clock that falls half way through (a GPU at its power limit), cancels. Of samples that are no pairs it is the ratio
    of medians.
    """
    return float(_ratio(np.array(ours), np.array(peer)))


def fastest(timings: Mapping[str, Timing], *names: str) -> Timing:
    """The timing with the least median, among `names` where given.

    Raises
    ------
    OptionError
        None of the names was timed.
    """
    chosen = [timings[n] for n in names if n in timings] if names else list(timings.values())
    if not chosen:
        raise OptionError("names", limit=f"some of {list(timings)}", value=names, nearest="a name that was timed")
    return min(chosen, key=lambda t: t.median)


def _bootstrap(ours: NDArray[np.float64], peer: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(ours), (RESAMPLES, len(ours)))
    others = picks if len(ours) == len(peer) else rng.integers(0, len(peer), (RESAMPLES, len(peer)))
    return _ratio(ours[picks], peer[others])


def _ratio(ours: NDArray[np.float64], peer: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis."""
    if ours.shape == peer.shape:
        return np.asarray(np.median(peer / ours, axis=-1))
    return np.asarray(np.median(peer, axis=-1) / np.median(ours, axis=-1))


def _word(ratio: float, low: float, high: float, margin: float, rounds: int) -> Word:
    top, bottom = 1 + margin, 1 / (1 + margin)
    if rounds < MIN_ROUNDS:
        return "AMBIGUOUS"
    if low > 1 and ratio > top:
        return "FASTER"
    if high < 1 and ratio < bottom:
        return "SLOWER"
    return "EQUAL" if bottom <= low and high <= top else "AMBIGUOUS"

"""From a call and what it left to a diagnosis: the right result first, then each mistake, then two at once.

Each mistake is simulated at some hundred places of the output, wrong ones and others, and only what explains those is
simulated everywhere. So a mistake costs a small fraction of a product, and pairs can be tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.progress import Tell
from .bank import caused, variants_of
from .case import Array, GemmCall, Variant
from .diagnosis import Cause, Diagnosis
from .simulate import EPS, Simulated, explained, simulate
from .tiles import race

Places = npt.NDArray[np.int64]

COARSE, WRONG, OTHERS = 24, 192, 128  # places of samples
GAIN, LOSS = 0.97, 0.03  # shares of wrong elements that are explained, and of others that no longer are
LUCK = 0.3  # share of right elements among those of which a mistake says nothing
RARE = 0.02  # the same, where the mistake says nothing of any wrong element
TOLD = 8  # elements of which it says something are enough
SPREAD = 0.2  # share of elements that are wrong where all have few digits
UNKNOWN = 0.75  # share of wrong elements of which a mistake says nothing
TINY = 2.0**-149
WORK = 2**29  # products of elements that are tried for pairs, whatever else the machine does: some 10 s
SLOW = 256  # steps of a sum that take as long as a pair does otherwise
EARLY = 32  # lines
LARGE = 2**18  # elements of an operand
SPECIAL = 2048  # places at which what is computed element by element is verified


class Fit(NamedTuple):
    """How well a mistaken call explains what was seen."""

    gain: float
    loss: float
    unknown: float
    residual: float
    distance: float

    @property
    def good(self) -> bool:
        """Whether it does."""
        return self.gain >= GAIN and self.loss <= LOSS and self.unknown < UNKNOWN


@dataclass(frozen=True)
class _Seen:
    """An observed buffer beside what should be there, at some places."""

    case: GemmCall
    at: Places
    observed: Array
    fine: npt.NDArray[np.bool_]
    moving: bool  # it differs from run to run

    def some(self, chosen: Places) -> _Seen:
        return _Seen(self.case, self.at[chosen], self.observed[chosen], self.fine[chosen], self.moving)

    def plausible(self, case: GemmCall) -> bool:
        """Whether `case` may explain half of these wrong elements."""
        found = simulate(case, self.at)
        return bool(np.mean(~found.known | explained(self.observed, found)) >= GAIN / 2)

    def fit(self, case: GemmCall) -> Fit:
        """`case` against what was seen here."""
        found = simulate(case, self.at)
        ok, told = explained(self.observed, found), ~self.fine & found.known
        lucky, unknown = self.fine & ~found.known, (~found.known).sum()
        ok |= lucky & (lucky.sum() < LUCK * unknown)  # garbage is right now and then, in types of few digits
        loss = float(np.mean(~ok[self.fine])) if self.fine.any() else 0.0
        share = 1 - float(told.sum() / max(1, (~self.fine).sum()))
        if told.any():
            gain, share = float(np.mean(ok[told])), min(share, 0.5) if told.sum() >= TOLD else share
        else:  # it left exactly the wrong elements as they were, or read them where nobody knows what lies
            unwritten = bool((~self.fine & found.kept).any())
            enough = unwritten or (self.fine & found.known).sum() >= TOLD  # right ones that it had to tell from them
            rare = RARE * unknown if unwritten else 0
            # What says nothing of any element would explain all results; those of runs that differ are garbage, though.
            right = self.moving or (self.fine & found.known).any()
            gain, share = float(enough and right and lucky.sum() <= rare), 0.5
        off = _off(self.observed, found)
        with np.errstate(all="ignore"):
            steps = off * found.bound / (found.noise + TINY)
        here = found.known & np.isfinite(off) & np.isfinite(steps)
        distance = float(np.sqrt(np.mean(steps[here] ** 2))) if here.any() else 0.0
        return Fit(gain, loss, share, float(off[here].max(initial=0.0)), distance)


def search(
    case: GemmCall, observed: Array, *, pairs: bool = True, moving: bool = False, tell: Tell | None = None
) -> Diagnosis:
    """The diagnosis of a buffer of C that a call left; `moving`: another run of it left other numbers."""
    tell = tell or (lambda done, total, text: None)
    at = case.c.positions().reshape(-1)
    if not at.size:
        return Diagnosis("right")
    seen = observed[at]
    right = simulate(case, at)
    fine = explained(seen, right)
    off = np.where(fine, 0.0, _off(seen, right))
    residual = float(np.nan_to_num(off, nan=np.inf, posinf=np.inf).max())
    correct = Diagnosis("right", elements=at.size, residual=residual, limits=_limits(case))
    if fine.all():
        return correct
    whole = _Seen(case, at, seen, fine, moving)
    found = _explaining(whole, variants_of(case), tell)
    loose = bool((off <= 1).all())
    causes = _causes(found)
    if not causes and not loose:
        causes = race(case, seen.astype(np.float64), right, fine)
    if not causes and pairs and not loose:
        found = _explaining(whole, _affordable(joined(case), case), tell)
        causes = _causes(found)
    causes = causes or _noise(whole, right)
    if not causes and loose:
        return correct
    tied = bool(causes) and len({name for name, _, _ in found}) > 1 and bool(correct.limits)
    first = _first(whole, right)
    verdict = "undiagnosable" if tied else "wrong"
    return replace(correct, verdict=verdict, causes=causes, wrong=int((~fine).sum()), first=first)


def _off(observed: Array, found: Simulated) -> npt.NDArray[np.float64]:
    """Errors in units of their bound."""
    with np.errstate(all="ignore"):
        wide = observed.astype(np.float64)
        off = np.abs(wide - found.value) / found.bound
        same = (wide == found.value) | (np.isnan(wide) & np.isnan(found.value))
    return np.asarray(np.where(same, 0.0, np.where(np.isnan(off), np.inf, off)))


def _sample(seen: _Seen, wrong: int, others: int) -> _Seen:
    """Places of either kind, spread over the output."""
    rng = np.random.default_rng(0)
    parts = []
    for mask, count in ((~seen.fine, wrong), (seen.fine, others)):
        places = np.flatnonzero(mask)
        if len(places) > count > 0:
            ends = places[[0, -1]]
            places = np.unique(np.concatenate([ends, rng.choice(places[1:-1], count - 2, replace=False)]))
        parts.append(places[:count])
    return seen.some(np.concatenate(parts))


def _early(whole: _Seen) -> _Seen | None:
    """Wrong places of the first lines: what is written over its own operands is computed line by line."""
    m, n, _ = whole.case.sizes
    early = whole.some(np.flatnonzero(whole.case.c.owner[whole.at] % (m * n) < EARLY * n))
    return None if early.fine.all() else _sample(early, COARSE, 0)


Found = list[tuple[str, Variant, Fit]]


def _verified(whole: _Seen, name: str, variant: Variant) -> Found:
    special = variant.case.sums or variant.case.alias
    fit = (_sample(whole, SPECIAL // 2, SPECIAL // 2) if special else whole).fit(variant.case)
    return [(name, variant, fit)] if fit.good else []


def _explaining(whole: _Seen, mistakes: Iterator[tuple[str, Variant]], tell: Tell) -> Found:
    """The mistakes that explain a few wrong places, then some hundred of either kind, then all."""
    coarse, sample = _sample(whole, COARSE, 0), _sample(whole, WRONG, OTHERS)
    first = _early(whole) if _large(whole.case) else None
    found = Found()
    for count, (name, variant) in enumerate(mistakes):
        if count % 64 == 0:
            tell(count, None, name)
        if variant.case.alias and first is not None and not first.plausible(variant.case):
            continue
        if coarse.plausible(variant.case) and sample.fit(variant.case).good:
            found += _verified(whole, name, variant)
    return found


def _changed(case: GemmCall, variant: Variant) -> frozenset[str]:
    return frozenset(f.name for f in fields(case) if getattr(case, f.name) is not getattr(variant.case, f.name))


def joined(case: GemmCall) -> Iterator[tuple[str, Variant]]:
    """Two mistakes at once: of different words, or the second made in what the first left."""
    singles = [(name, variant, _changed(case, variant)) for name, variant in variants_of(case)]
    for (one, first, left), (two, second, right) in itertools.combinations(singles, 2):
        if one != two and not left & right:
            both = replace(first.case, **{name: getattr(second.case, name) for name in right})
            yield f"{one} + {two}", Variant(f"{first.parameter}; {second.parameter}", both)
    for one, first, left in singles:
        for two, second in variants_of(first.case) if case.weights is None else ():
            if one < two and _changed(first.case, second) & left:
                yield f"{one} + {two}", Variant(f"{first.parameter}; {second.parameter}", second.case)


def _affordable(mistakes: Iterator[tuple[str, Variant]], case: GemmCall) -> Iterator[tuple[str, Variant]]:
    """As many mistakes as `WORK` pays for.

    Of large operands, sums that go step by step cost more, and what is written over its own operands is left out.
    """
    left, k, large = WORK, max(1, case.sizes[2]), _large(case)
    for name, variant in mistakes:
        if not (large and variant.case.alias):
            left -= COARSE * k * (1 + k // SLOW if large and variant.case.sums else 1)
            if left < 0:
                return
            yield name, variant


def _large(case: GemmCall) -> bool:
    _, n, k = case.sizes
    return n * k > LARGE


def _causes(found: Found) -> tuple[Cause, ...]:
    """One for each name, the best first; each with the names that explain as much."""
    best: dict[str, tuple[Variant, Fit]] = {}
    for name, variant, fit in sorted(found, key=lambda x: _rank(x[2])):
        best.setdefault(name, (variant, fit))
    causes = []
    for name, (variant, fit) in best.items():
        others = tuple(other for other in best if other != name and _rank(best[other][1]) <= _rank(fit))
        causes.append(caused(name, variant.parameter, fit.residual, fit.gain, others))
    return tuple(causes)


def _rank(fit: Fit) -> tuple[float, ...]:
    return (-round(fit.gain - fit.loss, 2), round(fit.unknown, 2), round(np.log2(1 + fit.distance)))


def _noise(whole: _Seen, right: Simulated) -> tuple[Cause, ...]:
    """Errors like those of a sum in a type of few digits, in an order that nobody simulated."""
    wide = whole.observed.astype(np.float64)
    error = wide - right.value
    if not np.isfinite(error).all() or not right.noise.all() or error.size < 16 or np.mean(~whole.fine) < SPREAD:
        return ()
    sums = right.noise / EPS  # sqrt(K) times what a sum passes through
    follows = abs(np.corrcoef(error, right.value)[0, 1]) if right.value.std() and error.std() else 1.0
    for name, eps in (("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
        units = error / (eps * sums)
        if np.sqrt(np.mean(units**2)) > 0.004 and np.abs(units).max() < 1 and follows < 0.5:
            words = f"errors of the size of sums kept in {name}, in an order that is not known"
            return (caused("half-accumulator", words, float(np.abs(units).max())),)
    return ()


def _first(whole: _Seen, right: Simulated) -> tuple[str, ...]:
    """The first wrong elements in words."""
    m, n, _ = whole.case.sizes
    lines = []
    for flat in np.flatnonzero(~whole.fine)[:3]:
        p, i, j = np.unravel_index(flat, (whole.case.items, m, n))
        where = f"[{i}, {j}]" if whole.case.items == 1 else f"[{p}, {i}, {j}]"
        lines.append(f"{where} is {float(whole.observed[flat]):.9g}, should be {right.value[flat]:.9g}")
    return tuple(lines)


def _limits(case: GemmCall) -> tuple[str, ...]:
    """What these operands cannot show."""
    m, n, k = case.sizes
    found = []
    if len({m, n, k}) < 3:
        found.append(f"m, n, k = {m}, {n}, {k} are not all different: layouts can agree; coprime extents would tell")
    for name, x in (("A", case.a), ("B", case.b)):
        some = x.values()[0][:256, :256] if x.rows * x.columns <= 2**22 else np.empty((0, 0))
        if some.size > 1 and (some == some.flat[0]).all():
            found.append(f"{name} is constant: no order of its elements can be seen; random numbers would tell")
        elif some.size > 1 and x.rows == x.columns and (some == some.T).all():
            found.append(f"{name} is symmetric: its transpose cannot be seen; random numbers would tell")
    return tuple(found)

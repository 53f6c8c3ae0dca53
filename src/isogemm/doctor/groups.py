"""Lists of products whose sizes may differ: each alone, and what only a list can get wrong.

A product of a list may read another one's matrix, begin at another line of the buffer that holds them all, take another
one's leading dimension, or be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from .bank import caused
from .case import Array, GemmCall
from .diagnosis import Cause, Diagnosis
from .simulate import explained, simulate

Product = tuple[GemmCall, list[Array]]
Named = dict[str, tuple[str, float]]
Alone = Callable[[GemmCall, list[Array], bool], Diagnosis]

FEW = 12  # wrong elements that are looked at first
LINES = 4096  # of a shared buffer that are tried as the first one of a product
SHOWN = 3  # products that are told of in words


def diagnosed(products: list[Product], alone: Alone, *, pairs: bool) -> Diagnosis:
    """One finding of all products, each with the buffers that its runs left.

    `alone` is the diagnosis of one product; its last argument is whether two mistakes at once are tried.
    """
    found = [alone(case, buffers, False) for case, buffers in products]
    whole = _together(found)
    off = [g for g, one in enumerate(found) if one.verdict != "right"]
    if not off:
        return whole
    causes = {g: _causes(products, g, found[g]) for g in off}
    if pairs and not any(causes.values()):
        least = min(off, key=lambda g: products[g][1][0].size)
        causes[least] = {x.name: (x.parameter, x.residual) for x in alone(*products[least], True).causes}
    return replace(whole, causes=_common(causes, found))


def _together(found: list[Diagnosis]) -> Diagnosis:
    """Counts and words of all."""
    wrong = [(g, one) for g, one in enumerate(found) if one.verdict != "right"]
    orders = {one.order for one in found if one.elements}
    by_chance = [cause for one in found for cause in one.causes] if not wrong else []
    return Diagnosis(
        "wrong" if any(one.verdict == "wrong" for _, one in wrong) else wrong[0][1].verdict if wrong else "right",
        tuple(by_chance[:1]),
        sum(one.elements for one in found),
        sum(one.wrong for one in found),
        max((one.residual for one in found), default=0.0),
        orders.pop() if len(orders) == 1 and not wrong else "",
        tuple(f"product {g}: {words}" for g, one in wrong[:SHOWN] for words in one.first[:1]),
        tuple(dict.fromkeys(text for one in found for text in one.limits))[:SHOWN],
    )


def _causes(products: list[Product], g: int, found: Diagnosis) -> Named:
    """Mistakes that explain product `g`, with parameter and residual: those of a list first."""
    case, buffers = products[g]
    names: Named = {}
    observed = buffers[0][case.c.positions().reshape(-1)]
    for name, words, mistaken in _listed([case for case, _ in products], g):
        residual = None if name in names else _residual(case, mistaken, observed)
        if residual is not None:
            names[name] = words, residual
    if not names and not _written(case, observed):
        names["m-tail"] = f"{case.sizes[0]} rows of it were never written: fewer than a tile", 0.0
    for cause in found.causes:
        names.setdefault(cause.name, (cause.parameter, cause.residual))
    return names


def _listed(cases: list[GemmCall], g: int) -> Iterator[tuple[str, str, GemmCall]]:
    """Product `g` with matrices, lines and leading dimensions of the others."""
    case = cases[g]
    others = [(h, other) for h, other in enumerate(cases) if h != g]
    for h, other in others:
        for name, mine, theirs in (("A", case.a, other.a), ("B", case.b, other.b)):
            if (mine.rows, mine.columns) == (theirs.rows, theirs.columns):
                yield "pointer-offset", f"reads {name} of product {h}", case.read(name.lower(), theirs)
        if case.sizes == other.sizes:
            both = case.read("a", other.a).read("b", other.b)
            yield "pointer-offset", f"holds what belongs to product {h}", both
    for name, mine in (("a", case.a), ("b", case.b), ("c", case.c)):
        for ld in {getattr(other, name).ld for _, other in others} - {mine.ld}:
            yield f"ld{name}", f"ld{name} is {ld}, another product's, not {mine.ld}", case.read(name, mine.with_ld(ld))
    for name, mine in (("A", case.a), ("B", case.b)):
        if any(np.shares_memory(mine.flat, getattr(other, name.lower()).flat) for _, other in others):
            first, ld = mine.offsets[0], max(1, mine.ld)
            for line in range(min(LINES, (mine.flat.size - first % ld) // ld)):
                if first % ld + line * ld != first:
                    moved = replace(mine, offsets=(first % ld + line * ld,))
                    words = f"{name} begins {line - first // ld:+d} lines from where it lies"
                    yield "pointer-offset", words, case.read(name.lower(), moved)


def _residual(case: GemmCall, mistaken: GemmCall, observed: Array) -> float | None:
    """Greatest remaining error in units of its bound; None where `mistaken` does not explain what was seen."""
    at = case.c.positions().reshape(-1)
    for some in (slice(None, None, 1 + at.size // FEW), slice(None)):
        found = simulate(mistaken, at[some])
        if found.known.mean() < 0.5 or not (explained(observed[some], found) | ~found.known).all():
            return None
    with np.errstate(all="ignore"):
        off = np.abs(observed.astype(np.float64) - found.value) / found.bound
    return float(np.where(found.known & np.isfinite(off), off, 0.0).max(initial=0))


def _written(case: GemmCall, observed: Array) -> bool:
    """Whether anything was: neither what was there before, nor zeros, nor what is no number."""
    if case.before is not None and np.array_equal(observed, case.before[case.c.positions().reshape(-1)]):
        return False
    wide = observed.astype(np.float64)
    return bool(np.isfinite(wide).any() and (wide != 0).any())


def _common(causes: dict[int, Named], found: list[Diagnosis]) -> tuple[Cause, ...]:
    """The causes that explain all wrong products, or else each by its share of the wrong elements."""
    names = dict.fromkeys(name for one in causes.values() for name in one)
    total = sum(found[g].wrong for g in causes)
    share = {name: sum(found[g].wrong for g, one in causes.items() if name in one) / max(1, total) for name in names}
    order = sorted(names, key=lambda name: -share[name])
    made = []
    for name in order:
        told = {g: one[name] for g, one in causes.items() if name in one}
        residual = max(residual for _, residual in told.values())
        alike = tuple(other for other in order if other != name and share[other] == share[name])
        made.append(caused(name, _words(told), residual, share[name], alike))
    return tuple(made)


def _words(told: dict[int, tuple[str, float]]) -> str:
    """The parameter of each product, or once where they agree."""
    if len({words for words, _ in told.values()}) == 1:
        which = ", ".join(map(str, told))
        return f"product{'s' if len(told) > 1 else ''} {which}: {next(iter(told.values()))[0]}"
    more = f"; {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return "; ".join(f"product {g}: {words}" for g, (words, _) in list(told.items())[:SHOWN]) + more

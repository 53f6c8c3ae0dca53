"""The doctor's own test: mistakes planted in drawn calls, and right results of many providers.

A planted result is computed in float32 by another code than the one that explains it: read with the mistake, multiplied
by NumPy's float32 product, rounded, written. Extents are coprime, buffers hold more than their matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..base.dtypes import DTYPES, NUMPY
from ..base.progress import Tell
from ..contract import reference
from ..contract.spec import ARITHMETICS
from ..errors import IsogemmError
from ..formats import reference as formats
from ..formats.blocks import FORMATS
from .bank import MISTAKES, variants_of
from .case import Array, Blocks, GemmCall, StoredMatrix, Variant
from .diagnosis import Diagnosis
from .probes import random_blocks
from .results import diagnose
from .search import joined, search
from .simulate import explained, round_to, simulate

PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
DEPTHS = (59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 131)
READ = 0.3  # share of the wrong elements that come of what the buffers hold
ORDERS = ("chain", "tree2", "tree4", "tree8", "leaf256")
CODED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K")


@dataclass
class Score:
    """How often a mistake was found."""

    # planted, first, listed: drawn; named first; named among those that explain as much as the first
    planted: int = 0
    first: int = 0
    listed: int = 0
    # pairs that were drawn and left the values of one mistake alone, at every place: nothing can tell them
    alike: int = 0

    def count(self, name: str, said: Diagnosis) -> None:
        """Count a finding where `name` was planted."""
        best = said.causes[0] if said.causes else None
        self.planted += 1
        self.first += best is not None and best.name == name
        self.listed += best is not None and name in best.indistinguishable_from

    @property
    def found(self) -> float:
        """Share that was named first, alone or among what cannot be told from it."""
        return (self.first + self.listed) / max(1, self.planted)


def drawn(rng: np.random.Generator, form: str, dtype: str) -> GemmCall:
    """A call of a form, with coprime extents and room around its matrices.

    Forms: single, bias, beta, strided, grouped heads, quantized.
    """
    m, n = (int(x) for x in rng.choice(PRIMES, 2, replace=False))
    k = int(rng.choice(DEPTHS))
    items = {"strided": int(rng.integers(2, 6)), "heads": 6}.get(form, 1)
    weights = _weights(rng, n) if form == "quantized" else None
    if weights:
        k = weights.k
    held = 3 if form == "heads" else items
    kind = NUMPY[dtype]
    a = _laid(rng, m, k, items, kind, items)
    b = (
        weights.matrix(formats.dequantize(weights.rows(weights.stride), weights.fmt))
        if weights
        else _laid(rng, k, n, held, kind, items)
    )
    c = _laid(rng, m, n, items, kind, items, by_rows=True)
    bias = rng.standard_normal(max(m, n)).astype(kind)[:n] if form == "bias" else None
    before = c.flat.copy()
    return GemmCall(a, b, c, before, beta=0.5 if form == "beta" else 0.0, bias=bias, weights=weights)


FORMS = ("single", "bias", "beta", "strided", "heads", "quantized")


def _laid(
    rng: np.random.Generator, rows: int, columns: int, held: int, kind: Any, items: int, by_rows: bool | None = None
) -> StoredMatrix:
    """Matrices with padding, gaps between them, and something before and behind."""
    by_rows = bool(rng.integers(2)) if by_rows is None else by_rows
    lines, line = (rows, columns) if by_rows else (columns, rows)
    ld, gap, start = line + int(rng.integers(0, 9)), int(rng.integers(0, 30)), int(rng.integers(1, 50))
    step = ld * lines + gap
    flat = rng.standard_normal(start + 3 * step * held + 512).astype(kind)
    offsets = tuple(start + step * (p * held // items) for p in range(items))
    return StoredMatrix(flat, rows, columns, ld if by_rows else 1, 1 if by_rows else ld, offsets)


def _weights(rng: np.random.Generator, n: int) -> Blocks:
    """Random blocks, and others behind them."""
    fmt = FORMATS[str(rng.choice(CODED))]
    blocks = 7 if fmt.block == 32 else 2
    rows = random_blocks(rng, fmt, n, blocks)
    k = blocks * fmt.block
    return Blocks(np.concatenate([rows.reshape(-1), rows.reshape(-1)[::-1]]), fmt, n, k, fmt.row_bytes(k))


def planted(case: GemmCall, garbage: np.random.Generator) -> Array:
    """The buffer that `case` leaves, in float32 arithmetic."""
    left = (garbage.standard_normal(case.c.flat.size).astype(case.out) if case.before is None else case.before).copy()
    at = case.c.positions()
    inside = (at >= 0) & (at < left.size)
    if case.alias or case.sums:
        values = simulate(case, np.flatnonzero(case.c.owner >= 0)).value
        left[case.c.owner >= 0] = values.astype(case.out)
        return left
    a, b = (round_to(np.nan_to_num(x.values()), case.rounded).astype(np.float32) for x in (case.a, case.b))
    if case.counts:
        times = np.ones(a.shape[2], np.int64)
        for start, stop, count in case.counts:
            times[start:stop] = count
        order = np.repeat(np.arange(len(times)), times)
        a, b = a[:, :, order], b[:, order]
    with np.errstate(all="ignore"):
        out: Any = np.float32(case.alpha) * (a @ b)
        if case.beta:
            held = np.where(inside, left[np.clip(at, 0, left.size - 1)], 0).astype(np.float32)
            out = out + np.float32(case.beta) * held
        if case.bias is not None:
            behind = garbage.standard_normal((at.shape[1 + case.bias_axis],)).astype(np.float32)
            bias = np.concatenate([case.bias.astype(np.float32), behind])[: len(behind)]
            shaped = bias if case.bias_axis else bias[:, None]
            out = np.add(out, case.bias_times * shaped)
        out = round_to(round_to(out.astype(np.float64), case.between), case.out.name)
    inside[:, case.written[0] :] = inside[:, :, case.written[1] :] = False
    left[at[inside]] = out[inside].astype(case.out)
    return left


def scores(count: int, *, pairs: bool = False, seed: int = 0, tell: Tell | None = None) -> dict[str, Score]:
    """Each mistake (or `count` pairs in all) in drawn calls of every form it applies to, in three types in turn."""
    rng = np.random.default_rng(seed)
    found: dict[str, Score] = {}
    source = _pairs(rng, count) if pairs else _singles(rng, count)
    for done, (name, case, variant) in enumerate(source):
        if tell:
            tell(done, None, name)
        observed = planted(variant.case, rng)
        at = case.c.positions().reshape(-1)
        wrong, mistaken = ~explained(observed[at], simulate(case, at)), simulate(variant.case, at)
        if not wrong.any() or mistaken.known[wrong].mean() < READ:
            continue  # these operands do not show it, or it would read nothing but other people's memory
        score = found.setdefault("pairs" if pairs else name, Score())
        if pairs and _like_one(case, at, mistaken.value):
            score.alike += 1
            continue
        score.count(name, search(case, observed))
    return found


def _like_one(case: GemmCall, at: Array, wanted: Array) -> bool:
    """Whether one mistake of the bank leaves these values, and the same memory unwritten."""
    few = slice(None, None, 1 + at.size // 64)
    return any(
        np.array_equal(simulate(one.case, at[few]).value, wanted[few], equal_nan=True)
        and np.array_equal(simulate(one.case, at).value, wanted, equal_nan=True)
        for _, one in variants_of(case)
    )


def chances(count: int, *, seed: int = 0, tell: Tell | None = None) -> dict[str, Score]:
    """What no call describes, in drawn calls: tiles of one run without their blocks of K; sums of other contracts."""
    rng = np.random.default_rng(seed)
    found = {"race": Score(), "other-order": Score()}
    for turn in range(count):
        if tell:
            tell(turn, count, "race")
        dtype = DTYPES[turn // len(FORMS) % 3].name
        case = drawn(rng, FORMS[turn % len(FORMS)], dtype)
        observed, at = raced(case, rng), case.c.positions().reshape(-1)
        if not explained(observed[at], simulate(case, at)).all():
            found["race"].count("race", search(case, observed, pairs=False))
        a, b = (rng.standard_normal(shape).astype(NUMPY[dtype]) for shape in ((12, 300), (300, 12)))
        asked, given = (f"fma/{order}" for order in rng.choice(ORDERS, 2, replace=False))
        want, have = (reference.evaluate(a, b, order).astype(a.dtype) for order in (asked, given))
        if want.tobytes() != have.tobytes():
            found["other-order"].count("other-order", diagnose(have, a, b, contract=asked))
    return found


def raced(case: GemmCall, rng: np.random.Generator) -> Array:
    """The right result, but for some tiles whose sums lack a block of K, each its own."""
    m, n, k = case.sizes
    left, at = planted(case, rng), case.c.positions()
    side, block = int(rng.choice([8, 16])), int(rng.choice([16, 32]))
    for _ in range(int(rng.integers(1, 5))):
        p, i, j = (
            int(rng.integers(case.items)),
            side * int(rng.integers(m // side)),
            side * int(rng.integers(n // side)),
        )
        start = block * int(rng.integers(-(-k // block)))
        late = planted(replace(case, counts=((start, min(k, start + block), 0),)), rng)
        places = at[p, i : i + side, j : j + side]
        left[places] = late[places]
    return left


Planted = tuple[str, GemmCall, Variant]


def _singles(rng: np.random.Generator, count: int) -> Iterator[Planted]:
    for name, mistake in MISTAKES.items():
        made = 0
        for turn in range(50 * count):
            case = drawn(rng, FORMS[turn % len(FORMS)], DTYPES[turn // len(FORMS) % 3].name)
            some = list(mistake.variants(case))
            if some:
                made += 1
                yield name, case, some[int(rng.integers(len(some)))]
            if made == count:
                break


def _pairs(rng: np.random.Generator, count: int) -> Iterator[Planted]:
    for turn in range(count):
        case = drawn(rng, FORMS[turn % len(FORMS)], DTYPES[turn // len(FORMS) % 3].name)
        both = list(joined(case))
        name, variant = both[int(rng.integers(len(both)))]
        yield name, case, variant


PROVIDERS: dict[str, Callable[[Array, Array], Array]] = {
    "numpy": lambda a, b: a @ b,
    "float64": lambda a, b: (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32),
    "split-K": lambda a, b: _in_parts(a, b, 4),
    "blocked": lambda a, b: _in_parts(a, b, -(-a.shape[1] // 16)),
    "reversed": lambda a, b: a[:, ::-1] @ b[::-1],
}


def _in_parts(a: Array, b: Array, count: int) -> Array:
    size = -(-a.shape[1] // count)
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for start in range(0, a.shape[1], size):
        total = total + a[:, start : start + size] @ b[start : start + size]
    return total


def alarms(count: int, *, seed: int = 0, tell: Tell | None = None) -> dict[str, tuple[int, int]]:
    """Right results by seven providers and more: how many were drawn of each, and how many were called wrong."""
    rng = np.random.default_rng(seed)
    floats = [arithmetic for arithmetic in ARITHMETICS if arithmetic != "exact"]
    contracts = [f"{arithmetic}/{order}" for arithmetic in floats for order in ("chain", "tree4", "leaf32")]
    ways: list[tuple[str, Callable[[Array, Array], Array]]] = [*PROVIDERS.items(), ("torch", _torch)]
    ways += [(f"isogemm {name}", partial(reference.evaluate, contract=name)) for name in contracts]
    found: dict[str, tuple[int, int]] = {}
    for turn in range(count):
        name, way = ways[turn % len(ways)]
        kind = NUMPY[DTYPES[turn // len(ways) % 3].name]
        m, n, k = (int(rng.integers(1, top)) for top in (40, 40, 300))
        scale = rng.choice([1.0, 1e-3, 100.0]) if turn % 2 else np.exp(2 * rng.standard_normal((1, k)))
        a = (rng.standard_normal((m, k)) * scale + rng.choice([0, 0, 3])).astype(kind)
        b = rng.standard_normal((k, n)).astype(kind)
        try:
            out = way(a, b) if name.startswith("isogemm") else way(a.astype(np.float32), b.astype(np.float32))
        except (IsogemmError, ImportError):
            continue
        asked = "tf32" if "tf32:" in name else ""
        drawn_case = GemmCall(_whole(a), _whole(b), _whole(np.asarray(out).astype(kind)), rounded=asked)
        wrong = search(drawn_case, drawn_case.c.flat).verdict != "right"
        seen, said = found.get(name, (0, 0))
        found[name] = seen + 1, said + wrong
        if tell:
            tell(turn, count, name)
    return found


def _torch(a: Array, b: Array) -> Array:
    import torch

    return np.asarray((torch.from_numpy(np.ascontiguousarray(a)) @ torch.from_numpy(np.ascontiguousarray(b))).numpy())


def _whole(x: Array) -> StoredMatrix:
    return StoredMatrix(np.ascontiguousarray(x).reshape(-1), len(x), x.shape[1], x.shape[1], 1)

"""The trial of attention's gradients: small operands, and every bit compared with the composition that defines them.

Contents show the order of each sum. A row of zeros in q and a key of zeros weigh every product alike; large numbers
that take turns with their negatives in other blocks of 16 then cancel exactly, and what was summed between them has few
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .....base.dtypes import NUMPY
from .....contract.attention import factor, gradient_steps
from .....contract.reference import epilogue, evaluate
from .....contract.rows import lane_sum
from .....planner.bench import Bench, beside, difference

Array = NDArray[Any]
LARGE, ACROSS_ROWS, ACROSS_KEYS, ALIKE = 32768.0, 9, 10, 11  # columns of q, of k, and of dy


class BackRun(NamedTuple):
    """Sizes and bounds of one run."""

    b: int
    heads: int
    group: int
    tq: int
    tk: int
    d: int
    dv: int
    offset: int | None
    start: tuple[int, ...] | None
    stop: tuple[int, ...] | None
    wild: bool


def posed(group: int, d: int, dv: int, causal: bool, starts: bool, stops: bool) -> Iterator[BackRun]:
    """Runs with several tiles of rows and of keys, the last ones ragged."""
    for tq, tk, offset in ((max(5, 330 // group), 309, -20), (max(3, 150 // group), 205, 130)):
        bounds = (0, 37) if starts else None, (tk, tk - 70) if stops else None
        wild = not (causal or starts or stops)
        yield BackRun(2, 2, group, tq, tk, d, dv, offset if causal else None, *bounds, wild)


def _turns(n: int) -> tuple[Array, Array]:
    """Where large numbers stand among n, and which: one in every other block of 16, their sum zero."""
    at = np.arange(ACROSS_ROWS, n, 32)
    at = at[: len(at) // 2 * 2]
    return at, np.where(np.arange(len(at)) % 2, -LARGE, LARGE)


def contents(case: BackRun, dtype: str) -> dict[str, Array]:
    """q, k, v, dy and y of [b, heads, ...]; heads of q that share keys stand together."""
    random = np.random.default_rng(list(case[:7]))
    kv, qs = (case.b, case.heads, case.tk), (case.b, case.heads, case.tq * case.group)
    q, k = random.standard_normal((*qs, case.d)), random.standard_normal((*kv, case.d))
    dy, y = random.standard_normal((*qs, case.dv)), random.standard_normal((*qs, case.dv))
    v = random.standard_normal((*kv, case.dv))
    k[..., ACROSS_ROWS], q[..., ACROSS_KEYS], v[..., ALIKE], y[..., ALIKE] = 0, 0, 0, 0
    for x, column in ((q, ACROSS_ROWS), (k, ACROSS_KEYS), (dy, ALIKE)):
        at, large = _turns(x.shape[2])
        x[..., column] = random.standard_normal(x.shape[:3]) / 64
        x[:, :, at, column] = large
    dy[..., 0] = v[..., 0] = 1
    alike = np.s_[:, :, 1::4]  # rows that weigh all keys alike
    q[alike][..., np.arange(case.d) != ACROSS_ROWS] = 0
    dy[alike][..., 1:ALIKE], dy[alike][..., ALIKE + 1 :], y[alike] = 0, 0, 0
    same = np.s_[:, :, 2::4]  # keys that all rows weigh alike, where a row's numbers are chosen so
    k[same][..., np.arange(case.d) != ACROSS_KEYS], v[same][..., 1:] = 0, 0
    if case.wild:
        q[1, 1, 6, 3], v[1, 1, 8, 2], dy[1, 1, 4, 5] = np.nan, np.inf, -np.inf
    return {name: x.astype(NUMPY[dtype]) for name, x in zip(("q", "k", "v", "dy", "y"), (q, k, v, dy, y), strict=True)}


def _hidden(case: BackRun, item: int) -> tuple[Array, slice]:
    """[rows, tk] of what rows do not see, and the keys that are read at all."""
    read = slice(case.start[item] if case.start else 0, case.stop[item] if case.stop else case.tk)
    key, row = np.arange(case.tk), np.arange(case.tq * case.group)[:, None]
    hidden = (key < read.start) | (key >= read.stop) | np.zeros_like(row, bool)
    if case.offset is not None:
        hidden = hidden | (key > row // case.group + case.offset)
    return hidden, read


def by_definition(case: BackRun, held: dict[str, Array], arithmetic: str) -> tuple[dict[str, Array], Array, Array]:
    """dq, dk and dv with rows as `contents` has them, and the m and l that the run gets."""
    chain, scale = f"{arithmetic}/chain", case.d**-0.5
    found = {f"d{x}": np.empty_like(held[x]) for x in "qkv"}
    stats = np.empty((2, case.b, case.heads, case.tq * case.group), np.float32)
    c, dtype = factor(None, case.d), held["q"].dtype
    for i, h in np.ndindex(case.b, case.heads):
        q, k, v, dy, y = (held[x][i, h] for x in ("q", "k", "v", "dy", "y"))
        hidden, read = _hidden(case, i)
        k, v = k.copy(), v.copy()
        for x in (k, v):
            x[: read.start], x[read.stop :] = 0, 0
        with np.errstate(all="ignore"):
            s = evaluate(q, k.T, chain)
            t = np.where(hidden | np.isnan(s), np.float32(-np.inf), s * c)
            m = np.ceil(t.max(1))
            total = np.where(m == -np.inf, 0, np.where(np.arange(len(m)) % 2, np.exp2(-m), 1 + np.arange(len(m)) % 7))
            delta = np.array([lane_sum(row) for row in dy.astype(np.float32) * y.astype(np.float32)])
        stats[:, i, h] = m, total.astype(np.float32)
        p, ds = gradient_steps(
            s[None], m[None], stats[1:, i, h], c=float(c), dtype=dtype, hidden=hidden,
            dp=evaluate(dy, v.T, chain)[None], delta=delta[None],
        )  # fmt: skip
        assert ds is not None
        found["dq"][i, h] = epilogue(evaluate(ds[0], k, chain), alpha=scale, out_dtype=dtype)
        found["dk"][i, h] = epilogue(evaluate(ds[0].T, q, chain), alpha=scale, out_dtype=dtype)
        found["dv"][i, h] = epilogue(evaluate(p[0].T, dy, chain), out_dtype=dtype)
    return found, stats[0], stats[1]


def _apart(x: Array, case: BackRun) -> Array:
    """[b, heads, tq * group, ...] as [b, heads * group, tq, ...]."""
    apart = x.reshape(case.b, case.heads, case.tq, case.group, *x.shape[3:])
    return np.ascontiguousarray(np.moveaxis(apart, 3, 2)).reshape(case.b, -1, case.tq, *x.shape[3:])


def differs(
    bench: Bench, run: Callable[..., None], case: BackRun, held: dict[str, Array],
    expected: tuple[dict[str, Array], Array, Array], kinds: tuple[str, str],
) -> str:  # fmt: skip
    """The first difference of a launch; empty where every bit was right and nothing was written beside.

    `kinds` are the dtypes in which dy and y come.
    """
    want, m, total = expected
    q, dy, y, m, total = (_apart(x, case) for x in (held["q"], held["dy"], held["y"], m, total))
    size, k, v = q.dtype.itemsize, held["k"], held["v"]
    for x in (k, v):
        for i in range(case.b if case.start or case.stop else 0):
            read = _hidden(case, i)[1]
            x[i, :, : read.start], x[i, :, read.stop :] = np.nan, np.nan
    wide = dy.astype(NUMPY[kinds[0]]), y.astype(NUMPY[kinds[1]])
    bounds = (None if x is None else np.array(x, np.int32) for x in (case.start, case.stop))
    places = [bench.put(x) for x in (q, k, v, dy, *wide, m, total, *bounds)]
    stats = bench.output((3, case.b, case.heads, -(-case.tq * case.group // 128) * 128), 4)
    outs = [bench.output(x.shape, size) for x in (q, k, v)]
    run(bench.stream(), *(0 if x is None else x.address for x in (*places, stats, *outs)))
    stray = stats.read()[1]
    for name, out, x in zip(("dq", "dk", "dv"), outs, (_apart(want["dq"], case), want["dk"], want["dv"]), strict=True):
        got, more = out.read()
        found, stray = difference(name, got, x), stray + more
        if found:
            return f"{case.tq} queries of {case.group} heads, {case.tk} keys: {found}"
    return beside("the results", stray)

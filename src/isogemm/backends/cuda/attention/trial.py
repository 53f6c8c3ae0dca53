"""Attention's kernels run on small operands and are compared with the definition, bit by bit.

Operands reach the edges of tiles, leaves, head sizes and masks: rows that see nothing, keys outside of `start` and
`stop` that hold NaNs, numbers without a finite result, several turns of a persistent block. A few contents repeat over
heads and batch entries with coprime periods, so that many heads cost the definition little and a wrong one still shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import NUMPY
from ....contract.attention import LEAF, attention, factor
from ....planner.bench import POISON, Bench, among_poison, beside, difference, words_of
from ....planner.family import Family
from .case import AttentionCase, Strided, steps_of

Array = NDArray[Any]
Run = Callable[..., None]  # (stream, q, k, v, mask, start, stop, y, stats)
Masks = Callable[[np.random.Generator, AttentionCase, tuple[int, ...]], Array]
COLUMNS = 13  # different columns of v: a result's column depends on its own of v alone
NATIVE = "tensor_core:native"


class TriedAttention(Family[AttentionCase, Run], Protocol):
    """A kernel, as its trial needs it."""

    def reaching(self, case: AttentionCase) -> Iterable[AttentionCase]:
        """Cases that every verdict on the code of `case` rests on."""
        ...


@dataclass(frozen=True)
class Contents:
    """Operands of a case as kernels get them: flat words, where each begins in them, and what they hold."""

    flats: tuple[Array, Array, Array, Array | None]
    begin: int
    q: Array
    k: Array
    v: Array
    mask: Array | None
    start: Array | None
    stop: Array | None


def try_kernel(bench: Bench, kernel: TriedAttention, case: AttentionCase, plain: TriedAttention | None) -> str:
    """Run a case's code on every posed case that has it: empty where all bits were right, else the first difference.

    The case's arithmetic says what the bits have to be. ``tensor_core:native`` has no definition: there kernels are
    compared with `plain`.
    """
    tried = 0
    for each in posed(kernel, case):
        held = contents(each, _mask)
        want: Sequence[Array | None] | None = None
        if case.arithmetic != NATIVE:
            want = by_definition(each, held)
        elif plain is not None:
            want, _ = outputs(bench, plain.bind(each, "", bench.device), each, held)
        found = compared(each, *outputs(bench, kernel.bind(each, "", bench.device), each, held), want)
        tried += 1
        if found:
            return found
    return "" if tried else "no operands of a trial have this code"


def compared(case: AttentionCase, got: Sequence[Array | None], stray: int, want: Sequence[Array | None] | None) -> str:
    """The first difference of (y, m, l) and what is wanted, or what was written beside; empty where there is none."""
    q, k, v = case.operands
    bounds = " start" * case.starts + " stop" * case.stops
    said = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}{bounds}"
    for name, x, y in zip("yml", got, want or (), strict=False):
        found = "" if x is None or y is None else difference(name, x, y)
        if found:
            return f"{said}: {found}"
    return f"{said}: {beside('the results', stray)}" if stray else ""


def posed(kernel: TriedAttention, case: AttentionCase) -> Iterator[AttentionCase]:
    """Cases with the code of `case`: the call itself made small, and others where layouts and sizes are no code."""
    wanted = kernel.configs(case)
    for each in (shrunk(case), *kernel.reaching(case)):
        if kernel.supports(each, "") and kernel.configs(each) == wanted:
            yield each


def shrunk(case: AttentionCase) -> AttentionCase:
    """The call with fewer tokens, heads and entries; what alignments and paddings follow from stays."""
    q, k, _ = case.operands
    tq = case.tq if case.tq <= 80 else 64 + case.tq % 16
    shared = k.shape[1]
    if shared > 1:
        shared = next(n for n in range(2, shared + 1) if (n - shared) * case.group % 16 == 0)
    b = 3 if shared * case.group < 3 else min(case.batch, 2)  # all sets of queries
    extents = (b, shared * case.group, tq), (b, shared, min(case.tk, case.alike_keys))
    shapes = [(*extents[i > 0], x.shape[3]) for i, x in enumerate(case.operands)]
    made = tuple(Strided(s, _like(x, s)) for x, s in zip(case.operands, shapes, strict=True))
    offset = None if case.offset is None else made[1].shape[2] - tq
    small = replace(case, operands=made, offset=offset, c=float(factor(None, case.d)))
    if case.mask is None:
        return small
    steps = _like(Strided((*q.shape[:3], case.tk), case.mask), (*extents[0], made[1].shape[2]), 1)
    return replace(small, mask=steps)


def _like(x: Strided, shape: tuple[int, ...], begin: int = 0) -> tuple[int, ...]:
    """Strides of a smaller tensor: the same order of dimensions, multiples of the same powers of two up to 16."""
    steps, room = [1] * 4, 1 if begin else shape[3]
    old = x.strides if begin else steps_of(x)
    for i in sorted(range(4 if begin else 3), key=lambda i: old[i]):
        step = abs(old[i])
        unit = gcd(step, 16)
        if step:
            step = -(-room // unit) * unit
            step += unit if unit < 16 and step % (2 * unit) == 0 else 0
            room = step * max(shape[i], 1)
        steps[i] = step
    return tuple(steps)


def contents(case: AttentionCase, masks: Masks) -> Contents:
    """Contents for a case, drawn anew for each shape, the same in every process."""
    q, k, v = case.operands
    b, heads, tq, _ = q.shape
    shared, tk = k.shape[1:3]
    random = np.random.default_rng([b, heads, tq, tk, case.d, case.dv])
    item, head, kv = np.arange(b)[:, None], np.arange(heads)[None], np.arange(shared)[None]
    sets_q = _queries(random, tq, case.d)[(head + 2 * item) % 3]
    sets_k, sets_v = _keys_and_values(random, tk, case)
    which = (item + kv) % 2
    begin = 0 if case.aligned else 1
    start, stop = _bounds(case, b, tk)
    flats, views = [], []
    for operand, x in zip(
        (q, k, v), (sets_q, sets_k[which], sets_v[which][..., np.arange(case.dv) % COLUMNS]), strict=True
    ):
        flat, view = among_poison(_words(x, case.dtype), operand.strides, begin)
        if operand is not q and (operand.strides[0] or b == 1):
            _poison(view, start, stop)
        flats.append(flat)
        views.append(view.copy().view(NUMPY[case.dtype]))
    mask = flat_mask = None
    if case.mask is not None:
        flat_mask, mask = among_poison(masks(random, case, (b, heads, tq, tk)), case.mask)
        mask = mask.copy().view(bool if case.masks == 1 else NUMPY[case.dtype_mask or ""])
    return Contents((flats[0], flats[1], flats[2], flat_mask), begin, views[0], views[1], views[2], mask, start, stop)


def _words(x: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return words_of(np.ascontiguousarray(x.astype(NUMPY[dtype])))


def _queries(random: np.random.Generator, tq: int, d: int) -> Array:
    """Three sets of rows: ordinary ones, and ones whose powers are far apart, are equal, vanish, or are no numbers.

    Every fourth has a large product with every key that its last element takes away again: what lies between is summed
    with few bits, so that another order of d moves scores by more than a rounding to 16 bits hides. Rows of zeros weigh
    all keys alike: large values cancel exactly there, and what was summed between them shows the order of keys. Where
    there are few rows, the third set begins with one. From row 48 on a third of all blocks of 16, a warp's, has no
    powers far apart in two of the sets: some kernels have a short way.
    """
    x = random.standard_normal((3, tq, d)).astype(np.float32)
    j = np.arange(tq)
    near = (j >= 48) & (j // 16 % 3 == 0)
    for i in range(3):
        x[i, (j % 8 == 3 + i) & ~(near & (i < 2))] *= 40
        x[i, 5 + i :: 11] = 0
        x[i, 7 + i :: 13, :: 1 + i] *= 1e-3
        if d > 2:
            x[i, i::4, 0], x[i, i::4, d - 1] = 32768, -32768
        if tq > 2:
            x[i, (9 + i) % tq, (5 * i) % d] = (np.inf, -np.inf, np.nan)[i]
    if tq < 7:
        x[2, 0] = 0
    return x


def _keys_and_values(random: np.random.Generator, tk: int, case: AttentionCase) -> tuple[Array, Array]:
    """Two sets. Large values take turns with their negatives, in one column by blocks of 16 keys, in one by leaves."""
    k = random.standard_normal((2, tk, case.d)).astype(np.float32)
    v = random.standard_normal((2, tk, COLUMNS)).astype(np.float32)
    j = np.arange(tk)
    k[:, :, 0] = np.where(j % 3 == 0, 1, 0.5)
    k[:, :, -1] = k[:, :, 0]
    if tk:
        k[:, 2::17] = k[:, :1]  # several keys tie for the largest
    v[:, 3::5] *= 1000
    v[:, 4::7, 5:] = -np.abs(v[:, 4::7, 5:]) * 1e-6
    v[:, :, 2] = 0
    for column, block in ((9, 16), (10, LEAF)):
        large = np.select([j // block % 4 == 0, j // block % 4 == 2], [32768.0, -32768.0], 0.0) * (
            j % block == block // 2
        )
        if large.sum():  # one is left over
            large[np.nonzero(large)[0][-1]] = 0
        v[:, :, column] = np.where(large != 0, large, random.standard_normal((2, tk)) / 64)
    if case.mask is None and case.offset is None and not (case.starts or case.stops) and tk > 1:
        v[0, tk // 2, 4], v[1, tk - 1, 7] = np.nan, np.inf  # a value that is hidden has to be finite
        k[1, tk // 3, 0] = -np.inf
    return k, v


def _bounds(case: AttentionCase, b: int, tk: int) -> tuple[Array | None, Array | None]:
    """One entry with padding on the left, one that ends early, one without any key."""
    start = np.array([min(37, tk // 3), 0, 5])[np.arange(b) % 3].astype(np.int32) if case.starts else None
    stop = np.array([tk, tk - tk // 4, 5])[np.arange(b) % 3].astype(np.int32) if case.stops else None
    return start, stop


def _poison(x: Array, start: Array | None, stop: Array | None) -> None:
    """What is not read is no number."""
    for i in range(len(x)):
        x[i, :, : 0 if start is None else int(start[i])] = POISON[x.itemsize]
        x[i, :, x.shape[2] if stop is None else int(stop[i]) :] = POISON[x.itemsize]


def _mask(random: np.random.Generator, case: AttentionCase, shape: tuple[int, ...]) -> Array:
    """Rows that see all, ranges, holes or nothing, in blocks as warps have them; another one for every other head."""
    b, heads, tq, tk = shape
    t, j = np.arange(tq)[:, None], np.arange(tk)[None]
    one = np.where(t // 16 % 3 == 0, True, np.where(t % 5 == 1, j < 3 * t + 1, random.random((tq, tk)) < 0.6))
    one[6::29] = False
    two = np.roll(one, 1, 1)
    seen = np.where((np.arange(heads) % 2 == 0)[None, :, None, None], one, two) & np.ones((b, 1, 1, 1), bool)
    return _as_mask(random, case, seen)


def windows(random: np.random.Generator, case: AttentionCase, shape: tuple[int, ...]) -> Array:
    """Runs of queries whose keys begin anywhere, with holes, and some that see none; other ones for other heads.

    Those of the second batch entry begin at the same place of their leaves.
    """
    tq, tk = shape[2:]
    item, head, t, j = (np.arange(n) for n in shape)
    run = (item[:, None, None] + head[:, None] + t // 12) % 6
    start = np.where(
        item[:, None, None] % 2, np.array([5, 133, 5, 5, 133, 5])[run], np.array([64, 0, 5, 37, 133, 200])[run]
    )
    start, stop = np.minimum(start, max(tk - 1, 0))[..., None], (tk - run * tk // 16)[..., None]
    seen = (j >= start) & (j < stop) & ((random.random((tq, tk)) < 0.8) | (j == start) | (j == stop - 1))
    seen[:, :, 6::29] = False
    return _as_mask(random, case, np.ascontiguousarray(seen))


def _as_mask(random: np.random.Generator, case: AttentionCase, seen: Array) -> Array:
    """A mask of the case's dtype that shows these keys."""
    if case.masks == 1:
        return seen.view(np.uint8)
    tq, tk = seen.shape[2:]
    rows = np.arange(tq)[:, None]
    added = np.where(seen, random.standard_normal((tq, tk)).astype(np.float32) * (rows % 3), np.float32(-np.inf))
    return _words(added, case.dtype_mask or "")


def by_definition(case: AttentionCase, held: Contents) -> tuple[Array, Array, Array]:
    """(y, m, l); heads with the same contents are computed once."""
    (b, heads, tq, _), columns = case.operands[0].shape, np.arange(case.dv) % COLUMNS
    out = NUMPY[case.dtype_out]
    y, stats = np.empty((b, heads, tq, case.dv), out), np.empty((2, b, heads, tq), np.float32)
    known: dict[Any, tuple[Array, ...]] = {}
    ends = held.start, held.stop
    for i, h in np.ndindex(b, heads):
        kv = h // case.group
        q, k, v = held.q[i, h], held.k[i, kv], held.v[i, kv, :, :COLUMNS]
        mask = None if held.mask is None else held.mask[i, h]
        start, stop = (None if x is None else x[i : i + 1, h : h + 1] if x.ndim == 3 else x[i : i + 1] for x in ends)
        key = tuple(x if x is None else x.tobytes() for x in (q, k, v, mask, start, stop))
        if key not in known:
            known[key] = attention(
                q[None, None], k[None, None], v[None, None], arithmetic=case.arithmetic, mask=mask,
                causal_offset=case.offset, start=start, stop=stop, out_dtype=out,
            )  # fmt: skip
        found = known[key]
        y[i, h], stats[0, i, h], stats[1, i, h] = found[0][0, 0][:, columns], found[1][0, 0], found[2][0, 0]
    return y, stats[0], stats[1]


def outputs(bench: Bench, run: Run, case: AttentionCase, held: Contents) -> tuple[list[Array | None], int]:
    """Bits of [y, m, l] of a launch, and how many words beside them were written."""
    b, heads, tq, _ = case.operands[0].shape
    flats = [bench.put(x) for x in (*held.flats, held.start, held.stop)]
    y = bench.output((b, heads, tq, case.dv), NUMPY[case.dtype_out].itemsize)
    stats = bench.output((2, b, heads, tq), 4) if case.stats else None
    at = [0 if x is None else x.address for x in flats]
    first = held.begin * held.flats[0].itemsize
    run(bench.stream(), *(a + first for a in at[:3]), *at[3:], y.address, 0 if stats is None else stats.address)
    found, stray = y.read()
    if stats is None:
        return [found, None, None], stray
    both, more = stats.read()
    return [found, *both], stray + more

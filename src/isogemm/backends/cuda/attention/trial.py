"""Attention's kernels run on small operands and are compared with the definition, bit by bit.

Operands reach the edges of tiles, leaves, head sizes and masks: rows that see nothing, keys outside of `start` and
`stop` that hold NaNs, numbers without a finite result, several turns of a persistent block. A few contents repeat over
heads and batch entries with coprime periods, so that many heads cost the definition little and a wrong one still shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....contract.attention import LEAF, factor, ranges
from ....planner.kernel_admission import difference
from ....planner.trials import POISON, Buffer, Machine
from .plans import Case, Operand, Run, bind, code_of, serves, steps_of
from .ranged import bind_ranged, code_of_ranged, together

__all__ = ["dtype_of", "posed", "try_kernel", "try_ranged"]

Array = NDArray[Any]
Masks = Callable[[np.random.Generator, Case, tuple[int, ...]], Array]
COLUMNS = 13  # different columns of v: a result's column depends on its own of v alone
MARGIN = 256  # elements around results that must stay as they are
NATIVE = "tensor_core:native"


@dataclass(frozen=True)
class Given:
    """Operands of a case as kernels get them: flat words, where each begins in them, and what they hold."""

    flats: tuple[Array, Array, Array, Array | None]
    begin: int
    q: Array
    k: Array
    v: Array
    mask: Array | None
    start: Array | None
    stop: Array | None


def try_kernel(machine: Machine, kernel: str, case: Case, arithmetic: str) -> str:
    """Run the code that `case` would run on every posed case that has it.

    Parameters
    ----------
    machine : Machine
    kernel : str
        One of `attention_plans.KERNELS`.
    case : Case
    arithmetic : str
        What its bits have to be. ``tensor_core:native`` has no definition: there kernels are compared with ``walk``.

    Returns
    -------
    str
        Empty where every bit was right, else the first difference.
    """
    tried = 0
    for each in posed(kernel, case, machine.device):
        given = _given(each, _mask)
        if arithmetic == NATIVE:
            want = _outputs(machine, bind(each, "walk", machine.device), each, given)[:3] if kernel != "walk" else None
        else:
            want = _defined(each, given, arithmetic)
        found = _compared(each, _outputs(machine, bind(each, kernel, machine.device), each, given), want)
        tried += 1
        if found:
            return found
    return "" if tried else "no operands of a trial have this code"


def try_ranged(machine: Machine, case: Case, arithmetic: str) -> str:
    """As `try_kernel`, of a call whose queries have the ranges that its mask shows them.

    Batch entries of one range are computed by the plainest kernel.
    """
    each = _alike(case)
    if code_of_ranged(each, machine.device) != code_of_ranged(case, machine.device):
        return "no operands of a trial have this code"
    given = _given(each, _windows)
    plain = "fma" if each.fma else "walk"
    if given.mask is None:
        return "a call without a mask has no ranges"
    start, stop = ranges(given.mask)
    if arithmetic == NATIVE:
        want = _by_range(machine, each, given, start, stop)
    else:
        want = _defined(each, replace(given, start=start, stop=stop), arithmetic)
    main = bind(together(each), plain, machine.device)
    return _compared(each, _outputs(machine, bind_ranged(each, machine.device, main), each, given), want)


def _by_range(machine: Machine, case: Case, given: Given, start: Array, stop: Array) -> tuple[Array | None, ...]:
    """(y, m, l) of queries with a range each, by the plainest kernel for one range after another."""
    found: tuple[Array | None, ...] = ()
    walk, ones = bind(together(case), "walk", machine.device), np.ones(case.batch, np.int32)
    for first, last in sorted({*zip(start.ravel().tolist(), stop.ravel().tolist(), strict=True)}):
        bounded = replace(given, start=first * ones, stop=last * ones)
        one = _outputs(machine, walk, case, bounded)[:3]
        found = found or one
        for whole, part in zip(found, one, strict=True):
            if whole is not None and part is not None:
                rows = (start == first) & (stop == last)
                whole[rows] = part[rows]
    return found


def _compared(case: Case, got: tuple[Any, ...], want: tuple[Any, ...] | None) -> str:
    """The first difference of (y, m, l, words written beside them) and what is wanted; empty where there is none."""
    *results, stray = got
    for name, x, y in zip("yml", results, want or (), strict=False):
        found = "" if x is None or y is None else difference(name, x, y)
        if found:
            return f"{_said(case)}: {found}"
    return f"{_said(case)}: {stray} words beside the results were written" if stray else ""


def _said(case: Case) -> str:
    q, k, v = case.operands
    bounds = " start" * case.starts + " stop" * case.stops
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}{bounds}"


def posed(kernel: str, case: Case, device: int) -> Iterator[Case]:
    """Cases with the code of `case`: the call itself made small, and others where layouts and sizes are no code."""
    wanted = code_of(case, kernel, device)
    for each in (_alike(case), *_fixed(kernel, case)):
        if serves(each, kernel) and code_of(each, kernel, device) == wanted:
            yield each


def _keys(case: Case) -> int:
    """A number of keys whose leaves meet by the same code."""
    return 300 if case.leaves <= 8 else 1100 if case.leaves <= 16 else 17 * LEAF + 20


def _alike(case: Case) -> Case:
    """The call with fewer tokens, heads and entries; what alignments and paddings follow from stays."""
    q, k, _ = case.operands
    tq = case.tq if case.tq <= 80 else 64 + case.tq % 16
    shared = k.shape[1]
    if shared > 1:
        shared = next(n for n in range(2, shared + 1) if (n - shared) * case.group % 16 == 0)
    b = 3 if shared * case.group < 3 else min(case.batch, 2)  # all sets of queries
    extents = (b, shared * case.group, tq), (b, shared, min(case.tk, _keys(case)))
    shapes = [(*extents[i > 0], x.shape[3]) for i, x in enumerate(case.operands)]
    made = tuple(Operand(s, _like(x, s)) for x, s in zip(case.operands, shapes, strict=True))
    offset = None if case.offset is None else made[1].shape[2] - tq
    small = replace(case, operands=made, offset=offset, c=float(factor(None, case.d)))
    if case.mask is None:
        return small
    steps = _like(Operand((*q.shape[:3], case.tk), case.mask), (*extents[0], made[1].shape[2]), 1)
    return replace(small, mask=steps)


def _like(x: Operand, shape: tuple[int, ...], begin: int = 0) -> tuple[int, ...]:
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


def _fixed(kernel: str, case: Case) -> Iterator[Case]:
    """Cases that every verdict of a kernel's code rests on, whatever call asked for it first."""
    if kernel in ("split", "leaf", "walk"):
        return
    wide = 64 if max(case.d, case.dv) <= 64 else 128
    d, dv = (case.d, case.dv) if kernel == "fma" else (wide, wide)
    rows = case.tq * case.group
    if kernel == "few":
        first, second = ((5, 3), (1, 16)) if rows <= 16 else ((15, 2), (32, 1)) if rows <= 32 else ((33, 2), (13, 5))
    else:
        first, second = (67, 2), (70, 3)
    tk = 100 if case.leaves == 1 and kernel == "few" else _keys(case) if kernel == "few" else 300
    ragged = (d, dv) if kernel == "fma" else (wide - 24, wide - 8)
    most = 33 * LEAF + 20 if kernel == "few" and case.leaves > 16 else tk  # more than meet in one turn
    yield _fix(case, (2, 2, *first, most, d, dv), False, True, most - first[0], 0)
    b = 3 if tk < 1000 else 2
    yield _fix(case, (b, 2, *second, tk + 28 * (tk <= 100), *ragged), True, case.masks == 2, 40, 8)
    yield _fix(case, (b, 2, *second, tk, *ragged), True, False, -3, 24)
    if kernel == "hopper" and case.mask is None:  # more tiles of 128 queries than multiprocessors
        yield _fix(case, (2, 34, 200, 2, 300, d, dv), False, False, 100, 0)


def _fix(case: Case, sizes: tuple[int, ...], bounds: bool, stats: bool, offset: int, pad: int) -> Case:
    """A case of contiguous operands, or with `pad` of tokens outside of heads, which are so much longer."""
    b, shared, tq, group, tk, d, dv = sizes
    made = []
    for heads, t, size in ((shared * group, tq, d), (shared, tk, d), (shared, tk, dv)):
        row = size + pad
        steps = (heads * t * row, row, heads * row, 1) if pad else (heads * t * row, t * row, row, 1)
        made.append(Operand((b, heads, t, size), steps))
    line = tk if pad else -(-tk // 16) * 16  # masks with and without aligned rows
    mask = None if case.mask is None else (shared * group * tq * line, tq * line, line, 1)
    return replace(
        case, operands=tuple(made), mask=mask, offset=None if case.offset is None else offset, starts=bounds,
        stops=bounds, stats=stats, c=float(factor(None, d)),
    )  # fmt: skip


def _given(case: Case, masks: Masks) -> Given:
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
        flat, view = _laid(_words(x, case.dtype), operand.strides, begin)
        if operand is not q and (operand.strides[0] or b == 1):
            _poison(view, start, stop)
        flats.append(flat)
        views.append(view.copy().view(dtype_of(case.dtype)))
    mask = flat_mask = None
    if case.mask is not None:
        flat_mask, mask = _laid(masks(random, case, (b, heads, tq, tk)), case.mask, 0)
        mask = mask.copy().view(bool if case.masks == 1 else dtype_of(case.dtype_mask or ""))
    return Given((flats[0], flats[1], flats[2], flat_mask), begin, views[0], views[1], views[2], mask, start, stop)


def dtype_of(dtype: str) -> np.dtype[Any]:
    """NumPy's, by name."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    return found


def _words(x: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        narrow = np.ascontiguousarray(x.astype(dtype_of(dtype)))
    return narrow.view(np.uint16 if narrow.itemsize == 2 else np.uint32)


def _queries(random: np.random.Generator, tq: int, d: int) -> Array:
    """Three sets of rows: ordinary ones, and ones whose powers are far apart, are equal, vanish, or are no numbers.

    Every fourth has a large product with every key that its last element takes away again: what lies between is summed
    with few bits, so that another order of d moves scores by more than a rounding to 16 bits hides. Rows of zeros weigh
    all keys alike: large values cancel exactly there, and what was summed between them shows the order of keys. Where
    there are few rows, the third set begins with one.
    """
    x = random.standard_normal((3, tq, d)).astype(np.float32)
    for i in range(3):
        x[i, 3 + i :: 8] *= 40
        x[i, 5 + i :: 11] = 0
        x[i, 7 + i :: 13, :: 1 + i] *= 1e-3
        if d > 2:
            x[i, i::4, 0], x[i, i::4, d - 1] = 32768, -32768
        if tq > 2:
            x[i, (9 + i) % tq, (5 * i) % d] = (np.inf, -np.inf, np.nan)[i]
    if tq < 7:
        x[2, 0] = 0
    return x


def _keys_and_values(random: np.random.Generator, tk: int, case: Case) -> tuple[Array, Array]:
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


def _bounds(case: Case, b: int, tk: int) -> tuple[Array | None, Array | None]:
    """One entry with padding on the left, one that ends early, one without any key."""
    start = np.array([min(37, tk // 3), 0, 5])[np.arange(b) % 3].astype(np.int32) if case.starts else None
    stop = np.array([tk, tk - tk // 4, 5])[np.arange(b) % 3].astype(np.int32) if case.stops else None
    return start, stop


def _poison(x: Array, start: Array | None, stop: Array | None) -> None:
    """What is not read is no number."""
    for i in range(len(x)):
        x[i, :, : 0 if start is None else int(start[i])] = POISON[x.itemsize]
        x[i, :, x.shape[2] if stop is None else int(stop[i]) :] = POISON[x.itemsize]


def _mask(random: np.random.Generator, case: Case, shape: tuple[int, ...]) -> Array:
    """Rows that see all, ranges, holes or nothing, in blocks as warps have them; another one for every other head."""
    b, heads, tq, tk = shape
    t, j = np.arange(tq)[:, None], np.arange(tk)[None]
    one = np.where(t // 16 % 3 == 0, True, np.where(t % 5 == 1, j < 3 * t + 1, random.random((tq, tk)) < 0.6))
    one[6::29] = False
    two = np.roll(one, 1, 1)
    seen = np.where((np.arange(heads) % 2 == 0)[None, :, None, None], one, two) & np.ones((b, 1, 1, 1), bool)
    return _as_mask(random, case, seen)


def _windows(random: np.random.Generator, case: Case, shape: tuple[int, ...]) -> Array:
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


def _as_mask(random: np.random.Generator, case: Case, seen: Array) -> Array:
    """A mask of the case's dtype that shows these keys."""
    if case.masks == 1:
        return seen.view(np.uint8)
    tq, tk = seen.shape[2:]
    rows = np.arange(tq)[:, None]
    added = np.where(seen, random.standard_normal((tq, tk)).astype(np.float32) * (rows % 3), np.float32(-np.inf))
    return _words(added, case.dtype_mask or "")


def _laid(x: Array, strides: tuple[int, ...], begin: int) -> tuple[Array, Array]:
    """(words among poison, the view of them that an operand is); where places coincide, the last one written stays."""
    total = begin + 1 + (0 not in x.shape) * sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + MARGIN
    flat = np.full(total, POISON.get(x.itemsize, 1), x.dtype)
    view = np.lib.stride_tricks.as_strided(flat[begin:], x.shape, [s * x.itemsize for s in strides])
    view[...] = x
    return flat, view


def _defined(case: Case, given: Given, arithmetic: str) -> tuple[Array, Array, Array]:
    """(y, m, l) by the definition; heads with the same contents are computed once."""
    from ....contract.attention import attention

    (b, heads, tq, _), columns = case.operands[0].shape, np.arange(case.dv) % COLUMNS
    out = dtype_of(case.dtype_out)
    y, stats = np.empty((b, heads, tq, case.dv), out), np.empty((2, b, heads, tq), np.float32)
    known: dict[Any, tuple[Array, ...]] = {}
    ends = given.start, given.stop
    for i, h in np.ndindex(b, heads):
        kv = h // case.group
        q, k, v = given.q[i, h], given.k[i, kv], given.v[i, kv, :, :COLUMNS]
        mask = None if given.mask is None else given.mask[i, h]
        start, stop = (None if x is None else x[i : i + 1, h : h + 1] if x.ndim == 3 else x[i : i + 1] for x in ends)
        parts = [x if x is None else x.tobytes() for x in (q, k, v, mask, start, stop)]
        key = tuple(parts)
        if key not in known:
            known[key] = attention(
                q[None, None], k[None, None], v[None, None], arithmetic=arithmetic, mask=mask,
                causal_offset=case.offset, start=start, stop=stop, out_dtype=out,
            )  # fmt: skip
        found = known[key]
        y[i, h], stats[0, i, h], stats[1, i, h] = found[0][0, 0][:, columns], found[1][0, 0], found[2][0, 0]
    return y, stats[0], stats[1]


def _outputs(machine: Machine, run: Run, case: Case, given: Given) -> tuple[Array, Array | None, Array | None, int]:
    """Bits of y, m and l of a launch, and how many words beside them were written."""
    (b, heads, tq, _), words = case.operands[0].shape, _words(np.zeros(1, np.float32), case.dtype_out).dtype
    held = [None if x is None else machine.put(x) for x in given.flats]
    bounds = [None if x is None else machine.put(x) for x in (given.start, given.stop)]
    target, count = _target(machine, b * heads * tq * case.dv, words)
    stats, lines = _target(machine, 2 * b * heads * tq, np.dtype(np.uint32)) if case.stats else (None, 0)
    first = given.begin * given.flats[0].itemsize
    q, k, v = (x.address + first for x in held[:3] if x is not None)
    rest = (*held[3:], *bounds)
    run(
        machine.stream(), q, k, v, *[0 if x is None else x.address for x in rest],
        target.address + MARGIN * words.itemsize, 0 if stats is None else stats.address + 4 * MARGIN,
    )  # fmt: skip
    y, stray = _inside(target, count)
    if stats is None:
        return y.reshape(b, heads, tq, case.dv), None, None, stray
    both, more = _inside(stats, lines)
    m, total = both.reshape(2, b, heads, tq)
    return y.reshape(b, heads, tq, case.dv), m, total, stray + more


def _target(machine: Machine, count: int, words: np.dtype[Any]) -> tuple[Buffer, int]:
    return machine.put(np.full(count + 2 * MARGIN, POISON[words.itemsize], words)), count


def _inside(buffer: Buffer, count: int) -> tuple[Array, int]:
    """What lies inside the margins, and how many words of them were written."""
    flat = buffer.read()
    around = np.concatenate([flat[:MARGIN], flat[MARGIN + count :]])
    return flat[MARGIN : MARGIN + count], int(np.count_nonzero(around != POISON[flat.itemsize]))

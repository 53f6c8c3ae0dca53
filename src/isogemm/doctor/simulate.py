"""What a call, right or mistaken, would have left at some places of its output.

Products and sums are float64. Around each value lies the interval in which any sensible order of float32 sums ends,
rounded as the call rounds: an observed element is explained when it lies in it.

    noise = eps32 * sqrt(K) * (sqrt(sum (a b)**2) + |sum a b|),    interval = round(value -+ 4 noise)

For operands of any sign that is far tighter than the sound bound ``eps32 * sqrt(K) * sum |a b|``, which is kept too: a
result inside of that is right, whatever else explains it less well.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..base.dtypes import NUMPY
from ..contract.reference import round_tf32
from .case import Array, GemmCall

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

EPS = 2.0**-23
WIDTH = 4.0
GATHERED = 2**22  # elements of K up to which single elements are computed, not whole matrices


@dataclass(frozen=True)
class Simulated:
    """Values at places of the output."""

    value: Floats  # float64 array
    # low, high: float64 array: ends of the interval of sensible orders
    low: Floats
    high: Floats
    bound: Floats  # float64 array: of the error of a right result
    noise: Floats  # float64 array: of the sum, before it is rounded to the output's type
    known: npt.NDArray[np.bool_]  # bool array: where it can be told
    kept: npt.NDArray[np.bool_]  # bool array: where nothing is written


def simulate(case: GemmCall, at: Places) -> Simulated:
    """What `case` leaves at places `at` of the buffer of C."""
    element = case.c.owner[at]
    m, n, k = case.sizes
    p, i, j = np.unravel_index(np.maximum(element, 0), (case.items, m, n))
    alone = at.size * max(1, k) <= GATHERED or case.alias or case.sums
    with np.errstate(all="ignore"):
        terms = _terms(case, p, i, j) if alone else tuple(x[p, i, j] for x in _products(case))
        return _finished(case, at, (element < 0) | (i >= case.written[0]) | (j >= case.written[1]), i, j, terms)


def explained(observed: Array, found: Simulated) -> npt.NDArray[np.bool_]:
    """Which observed elements lie in their interval; of unknown ones those that are no numbers either."""
    x = observed.astype(np.float64)
    with np.errstate(invalid="ignore"):
        inside = (x >= found.low) & (x <= found.high)
    return np.asarray(inside | (np.isnan(x) & np.isnan(found.value)), np.bool_)


def round_to(x: Floats, name: str) -> Floats:
    """Rounded to nearest even to a type by its name, ``tf32`` among them; unchanged for "" and float64."""
    if name in ("", "float64"):
        return x
    if name == "tf32":
        return round_tf32(x.astype(np.float32)).astype(np.float64)
    return x.astype(NUMPY[name]).astype(np.float64)


def _times(case: GemmCall) -> Floats:
    """How often each k is summed."""
    times = np.ones(case.sizes[2])
    for start, stop, count in case.counts:
        times[start:stop] = count
    return times


def _terms(case: GemmCall, p: Places, i: Places, j: Places) -> tuple[Floats, Floats, Floats]:
    """Sum, root of the sum of squares and sum of magnitudes of each element's products."""
    k = np.arange(case.sizes[2])
    a_at, b_at = (np.asarray(x.offsets, np.int64)[p][:, None] for x in (case.a, case.b))
    a = round_to(case.a.take(a_at + i[:, None] * case.a.row + k * case.a.column), case.rounded)
    b = round_to(case.b.take(b_at + k * case.b.row + j[:, None] * case.b.column), case.rounded)
    if case.alias:
        return _aliased(case, i, j)
    products = a * b * _times(case)
    squares, magnitudes = np.sqrt((products**2).sum(1)), np.abs(products).sum(1)
    return (_summed(products, case.sums) if case.sums else products.sum(1)), squares, magnitudes


def _summed(products: Floats, how: tuple[str, int]) -> Floats:
    """A chain whose accumulator has few digits, some products at a time."""
    name, step = how
    acc = np.zeros(len(products))
    if not step:
        products, step = round_to(products, name), 1
    for start in range(0, products.shape[1], step):
        acc = round_to(acc + products[:, start : start + step].sum(1), name)
    return acc


def _products(case: GemmCall) -> tuple[Floats, Floats, Floats]:
    """What `_terms` gives, of all elements."""
    a = round_to(case.a.values(), case.rounded) * _times(case)
    b = round_to(case.b.values(), case.rounded)
    return a @ b, np.sqrt(a**2 @ b**2), np.abs(a) @ np.abs(b)


def _aliased(case: GemmCall, i: Places, j: Places) -> tuple[Floats, Floats, Floats]:
    """C is the first columns of A, or the first rows of B: each element is written before later ones are read.

    Such a recursion multiplies roundings. How much is seen from another one, whose operand is off by a rounding; where
    the two part, nothing is known.
    """
    a, b = case.a.values()[0], case.b.values()[0]
    eps = float(ml_dtypes.finfo(case.out).eps)
    first = _overwritten(case, a.copy(), b.copy(), np.unique(i))[i, j]
    second = _overwritten(case, a * (1 + eps / 4), b.copy(), np.unique(i))[i, j]
    parted = np.abs(first - second)
    first[~(parted < 0.1 * np.abs(first))] = np.nan
    spread = (64 * parted + eps * np.abs(first)) / (EPS * np.sqrt(a.shape[1]))
    return first, spread, spread


def _overwritten(case: GemmCall, a: Floats, b: Floats, rows: Places) -> Floats:
    """The sums of some rows of C, of which each was rounded and stored over an operand."""
    m, n, _ = case.sizes
    value = np.full((m, n), np.nan)
    if case.alias == "a":
        now = a[rows]
        for column in range(n):
            value[rows, column] = now @ b[:, column]
            now[:, column] = round_to(case.alpha * value[rows, column], case.out.name)
    else:
        for row in range(int(rows.max()) + 1):
            value[row] = a[row] @ b
            b[row, :n] = round_to(case.alpha * value[row], case.out.name)
    return value


def _finished(case: GemmCall, at: Places, kept: Array, i: Places, j: Places, terms: tuple[Floats, ...]) -> Simulated:
    """The epilogue, in the call's own roundings."""
    acc, squares, magnitudes = terms
    k = max(1, case.sizes[2])
    unit = abs(case.alpha) * EPS * np.sqrt(k)
    noise, bound = unit * (squares + np.abs(acc)), unit * magnitudes
    before = np.full(at.shape, np.nan) if case.before is None else case.before[at].astype(np.float64)
    value = case.alpha * acc
    if case.beta != 0:
        value = value + case.beta * before
        noise, bound = (x + EPS * np.abs(case.beta * before) for x in (noise, bound))
    if case.bias is not None:
        where = j if case.bias_axis else i
        bias = np.where(
            where < case.bias.size, case.bias[np.minimum(where, case.bias.size - 1)].astype(np.float64), np.nan
        )
        value = value + case.bias_times * bias
        acc = acc + bias
    noise = noise + EPS * np.abs(value)
    known = np.where(kept | (case.beta != 0), case.before is not None, True) & (kept | ~np.isnan(acc))
    value, noise = np.where(kept, before, value), np.where(kept, 0.0, noise)
    low, high = (_rounded(case, value + sign * WIDTH * noise, kept) for sign in (-1, 1))
    value = _rounded(case, value, kept)
    eps = max(float(ml_dtypes.finfo(kind).eps) for kind in (case.out, NUMPY.get(case.between, case.out)))
    last = eps * np.abs(value) + float(ml_dtypes.finfo(case.out).smallest_subnormal)
    return Simulated(value, low, high, bound + noise + last, noise, known, kept)


def _rounded(case: GemmCall, x: Floats, kept: Array) -> Floats:
    """To the type in between and to the output's; what is kept is as it was."""
    return np.asarray(np.where(kept, x, round_to(round_to(x, case.between), case.out.name)))

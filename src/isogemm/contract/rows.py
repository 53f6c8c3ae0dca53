"""What is computed along one row: norms, softmax, sums, gates and rotations, written to be read as their definition.

A function here takes rows of float32 (to which bfloat16 and float16 convert exactly) and gives float32; `rounded`
rounds once to the output's dtype. Every step is one float32 operation of IEEE 754, to nearest even, subnormals kept;
``fma`` stands only where it is written. The order of every sum is that of `lane_sum`. So a result is a function of its
own row, and of nothing else, on any machine.

`OPERATIONS` is the one table of them: backends name their kernels by it, trials compare kernels with its formulas, and
torch's operators have their operands and results from it. Gradients are operations too, as kernels compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ..base.floating import ieee_defaults
from . import arithmetic
from .reference import canonical

Row = npt.NDArray[np.float32]
P = ParamSpec("P")
R = TypeVar("R")
f32 = np.float32

# Chains of a sum. One warp holds them as four numbers a thread, a CPU as 8 vectors of 16 or 16 vectors of 8; a row of
# 4096 is 32 steps long, and its error grows with 32 + 7 roundings instead of 4096.
LANES = 128

# exp: x = k * ln 2 + r. ln 2 in two parts; k is the nearest integer of x / ln 2, found by adding and subtracting SHIFT.
LOG2E, LN2_HIGH, LN2_LOW = (
    f32(float.fromhex("0x1.715476p+0")),
    f32(float.fromhex("0x1.62e430p-1")),
    f32(float.fromhex("-0x1.05c610p-29")),
)
SHIFT = f32(12582912.0)  # 1.5 * 2**23
# Outside, exp is 0 or infinite: below, less than half the smallest subnormal.
EXP_LEAST, EXP_MOST = f32(-104.0), f32(float.fromhex("0x1.62e42ep+6"))
# (exp(r) - 1 - r) / r**2 on |r| <= ln(2)/2, highest power first.
EXP_TERMS = tuple(f32(c) for c in (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
))  # fmt: skip

# log: s = 2**k * (1 + t), sqrt(1/2) <= 1 + t < sqrt(2). LOG_HIGH has trailing zeros, so that k * LOG_HIGH is exact.
SQRT_HALF = 0x3F3504F3
LOG_HIGH, LOG_LOW = f32(0.693359375), f32(-2.12194440e-4)
# (log(1 + t) - t + t**2 / 2) / t**3, highest power first.
LOG_TERMS = tuple(f32(c) for c in (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
))  # fmt: skip


def _fma(x: Any, y: Any, z: Any) -> Row:
    """x * y + z for each element, rounded once."""
    given = [np.asarray(a, np.float32) for a in (x, y, z)]
    shape = np.broadcast(*given).shape
    out = np.empty(shape, np.float32)
    arithmetic.fma_elements(*(_spread(a, shape).reshape(-1) for a in given), out.reshape(-1))
    return out


def _spread(x: Row, shape: tuple[int, ...]) -> Row:
    """x itself where it is such an array already, in order and of the kind that `arithmetic` is compiled for."""
    if x.shape == shape and x.flags.carray:
        return x
    full = np.empty(shape, np.float32)
    full[...] = x
    return full


def _horner(terms: Sequence[np.float32], x: Row) -> Row:
    """The polynomial with these coefficients, highest power first, by Horner's rule in fma."""
    y = np.full_like(x, terms[0])
    for term in terms[1:]:
        y = _fma(y, x, term)
    return y


def _pinned(function: Callable[P, R]) -> Callable[P, R]:
    """IEEE defaults inside, and no warnings about what IEEE defines."""

    @wraps(function)
    def inside(*args: P.args, **options: P.kwargs) -> R:
        with ieee_defaults(), np.errstate(all="ignore"):
            return function(*args, **options)

    return inside


@_pinned
def exp(x: Any) -> Row:
    """e**x for each element: at most 1 unit in the last place away, +0 below -104, infinite above 88.7228.

    1. ``k = fma(x, LOG2E, SHIFT) - SHIFT``
    2. ``r = fma(k, -LN2_HIGH, x)``, ``r = fma(k, -LN2_LOW, r)``
    3. ``p = EXP_TERMS`` by Horner's rule in fma, ``y = fma(p, r * r, r) + 1``
    4. ``y * 2**h * 2**(k - h)`` with ``h = floor(k / 2)``: the first product is exact, the second rounds once where
       the result is subnormal
    """
    x = np.asarray(x, np.float32)
    inside = np.where((x >= EXP_LEAST) & (x <= EXP_MOST), x, f32(0))
    k = _fma(inside, LOG2E, SHIFT) - SHIFT
    r = _fma(k, -LN2_HIGH, inside)
    r = _fma(k, -LN2_LOW, r)
    y = _fma(_horner(EXP_TERMS, r), r * r, r) + f32(1)
    half = np.floor(k * f32(0.5))
    y = np.ldexp(np.ldexp(y, half.astype(np.int32)), (k - half).astype(np.int32))
    y = np.where(x < EXP_LEAST, f32(0), np.where(x > EXP_MOST, f32(np.inf), y))
    return np.where(np.isnan(x), x, y).astype(np.float32)


@_pinned
def log(s: Any) -> Row:
    """log(s) for each element, normal and positive (elsewhere nothing is defined but NaN, which stays).

    1. ``s = 2**k * (1 + t)``, exactly
    2. ``z = t * t``, ``p = LOG_TERMS`` by Horner's rule in fma, ``y = (t * z) * p``
    3. ``y = fma(k, LOG_LOW, y)``, ``y = fma(-0.5, z, y)``, ``fma(k, LOG_HIGH, t + y)``
    """
    s = np.asarray(s, np.float32)
    offset = s.view(np.int32) - np.int32(SQRT_HALF)
    k = (offset >> 23).astype(np.float32)
    t = ((offset & 0x7FFFFF) + np.int32(SQRT_HALF)).astype(np.int32).view(np.float32) - f32(1)
    z = t * t
    y = _fma(k, LOG_LOW, (t * z) * _horner(LOG_TERMS, t))
    y = _fma(f32(-0.5), z, y)
    return np.where(np.isnan(s), s, _fma(k, LOG_HIGH, t + y)).astype(np.float32)


def _lanes(row: Row) -> Row:
    """[steps, LANES]: element i of the row in lane ``i % LANES``, +0 behind the end."""
    steps = -(-row.size // LANES)
    padded = np.zeros(steps * LANES, np.float32)
    padded[: row.size] = row
    return padded.reshape(steps, LANES)


def _meet(lanes: Row) -> np.float32:
    """Lanes l and l + 64 are added, then l and l + 32, and so on to the last two."""
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return np.float32(lanes[0])


@_pinned
def lane_sum(row: Row) -> np.float32:
    """The sum of a row: each lane is a chain of additions from +0, and lanes meet in a binary tree.

    Zeros behind the row change nothing: no lane is ever -0.
    """
    lanes = np.zeros(LANES, np.float32)
    for step in _lanes(row):
        lanes = lanes + step
    return _meet(lanes)


@_pinned
def _sum_of_squares(row: Row) -> np.float32:
    """As `lane_sum`, each lane ``fma(x, x, lane)``."""
    lanes = np.zeros(LANES, np.float32)
    for step in _lanes(row):
        lanes = _fma(step, step, lanes)
    return _meet(lanes)


@_pinned
def sum_row(row: Row) -> Row:
    """[lane_sum(row)]; +0 for an empty row."""
    return np.array([lane_sum(row)])


@_pinned
def mean(row: Row) -> Row:
    """[lane_sum(row) / n]; NaN for an empty row."""
    return np.array([lane_sum(row) / f32(row.size)])


@_pinned
def rms_norm(row: Row, weight: Row | None = None, eps: float = 1e-6) -> Row:
    """``v = sum_of_squares / n + eps``, ``r = 1 / sqrt(v)``, ``(x * r) * weight``; without a weight, ``x * r``."""
    r = f32(1) / np.sqrt(_sum_of_squares(row) / f32(row.size) + f32(eps))
    y: Row = row * r
    return y if weight is None else y * weight


@_pinned
def layer_norm(row: Row, weight: Row | None = None, bias: Row | None = None, eps: float = 1e-5) -> Row:
    """``d = x - lane_sum(x) / n``, ``v = sum_of_squares(d) / n + eps``, ``(d * (1 / sqrt(v))) * weight + bias``.

    The product and the sum with the bias round separately; what is absent is left out.
    """
    d = row - lane_sum(row) / f32(row.size)
    y: Row = d * (f32(1) / np.sqrt(_sum_of_squares(d) / f32(row.size) + f32(eps)))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _largest(row: Row) -> np.float32:
    """The largest element that is no NaN, -inf without one. Whether a zero is +0 or -0 reaches no result."""
    return np.float32(np.max(row[~np.isnan(row)], initial=-np.inf))


@_pinned
def softmax(row: Row) -> Row:
    """``e = exp(x - largest)``, ``e / lane_sum(e)``. Elements of -inf behind the row change nothing before them."""
    e = exp(row - _largest(row))
    return e / lane_sum(e)


@_pinned
def log_softmax(row: Row) -> Row:
    """``d = x - largest``, ``d - log(lane_sum(exp(d)))``."""
    d = row - _largest(row)
    return d - log(lane_sum(exp(d)))


@_pinned
def cross_entropy(row: Row, target: int, ignore_index: int = -100) -> tuple[Row, Row]:
    """([loss], [largest, s]): ``s = lane_sum(exp(x - largest))``, ``loss = log(s) - (x[target] - largest)``.

    The loss is +0 where the target is `ignore_index`, and a largest of 0 is +0.
    """
    largest = _largest(row) + f32(0)
    s = lane_sum(exp(row - largest))
    loss = f32(0) if target == ignore_index else log(s) - (row[target] - largest)
    return np.array([loss], f32), np.array([largest, s], f32)


@_pinned
def cross_entropy_back(row: Row, dy: Row, target: int, sums: Row, ignore_index: int = -100) -> Row:
    """The gradient of a row of `cross_entropy`, of which `sums` are: ``p * dy``, and less dy at the target.

    ``p = exp(x - largest) / s``. Where the target is `ignore_index`, dy is +0.
    """
    largest, s = sums
    slope = f32(0) if target == ignore_index else dy[0]
    dx: Row = exp(row - largest) / s * slope
    if target != ignore_index:
        dx[target] = dx[target] - slope
    return dx


@_pinned
def softmax_back(row: Row, dy: Row) -> Row:
    """The gradient of a row of `softmax`: ``p = softmax(x)``, ``p * (dy - lane_sum(p * dy))``."""
    p = softmax(row)
    return p * (dy - lane_sum(p * dy))


@_pinned
def log_softmax_back(row: Row, dy: Row) -> Row:
    """The gradient of a row of `log_softmax`: ``dy - softmax(x) * lane_sum(dy)``."""
    return dy - softmax(row) * lane_sum(dy)


@_pinned
def add_rms_norm(
    row: Row, residual: Row, weight: Row | None = None, eps: float = 1e-6, dtype: Any = np.float32
) -> tuple[Row, Row]:
    """``h = x + residual``, rounded to `dtype`, that of the residual: (``rms_norm(h, weight, eps)``, h)."""
    h = rounded(row + residual, dtype).astype(np.float32)
    return rms_norm(h, weight, eps), h


@_pinned
def rms_norm_back(row: Row, dy: Row, weight: Row | None = None, eps: float = 1e-6) -> tuple[Row, Row]:
    """(dx, (r, 0)): ``g = dy * weight``, ``r = 1 / sqrt(mean(x * x) + eps)``, ``h = x * r``,
    ``dx = (g - h * mean(g * h)) * r``."""
    return _norm_back(row, dy if weight is None else dy * weight, f32(0), eps, centered=False)


@_pinned
def layer_norm_back(row: Row, dy: Row, weight: Row | None = None, eps: float = 1e-5) -> tuple[Row, Row]:
    """(dx, (r, mean)): as `rms_norm_back` of ``x - mean(x)``, with ``g - mean(g)`` for the first g of dx."""
    return _norm_back(row, dy if weight is None else dy * weight, mean(row)[0], eps, centered=True)


def _norm_back(row: Row, g: Row, middle: Any, eps: float, *, centered: bool) -> tuple[Row, Row]:
    d = row - middle if centered else row
    r = f32(1) / np.sqrt(mean(d * d) + f32(eps))
    h = d * r
    left = g - mean(g) if centered else g
    return (left - h * mean(g * h)) * r, np.array([r[0], middle], np.float32)


@_pinned
def add(row: Row, other: Row) -> Row:
    """``x + y`` for each element."""
    return row + other


@_pinned
def sigmoid(row: Row) -> Row:
    """``1 / (1 + exp(-x))`` for each element."""
    return f32(1) / (f32(1) + exp(-row))


@_pinned
def silu(row: Row) -> Row:
    """``x / (1 + exp(-x))`` for each element."""
    return row / (f32(1) + exp(-row))


@_pinned
def silu_mul(row: Row, other: Row) -> Row:
    """``silu(x) * y`` for each element."""
    return silu(row) * other


@_pinned
def silu_mul_back(row: Row, other: Row, dy: Row) -> tuple[Row, Row]:
    """Gradients of `silu_mul`: ``s = sigmoid(x)``, ``(dy * y) * (s * (1 + x * (1 - s)))`` and ``dy * (x * s)``."""
    s = sigmoid(row)
    rest: Row = f32(1) - s
    slope: Row = s * (f32(1) + row * rest)
    return (dy * other) * slope, dy * (row * s)


@_pinned
def rope(row: Row, cos: Row, sin: Row, interleaved: bool = False) -> Row:
    """Pairs (a, b) of a row become ``(a * cos - b * sin, b * cos + a * sin)``, each product and sum rounded.

    Pair j is (x[j], x[j + n/2]), or (x[2j], x[2j + 1]) when `interleaved`.
    """
    half = row.size // 2
    first, second = (np.s_[0::2], np.s_[1::2]) if interleaved else (np.s_[:half], np.s_[half:])
    a, b = row[first], row[second]
    out = np.empty_like(row)
    out[first] = a * cos - b * sin
    out[second] = b * cos + a * sin
    return out


@_pinned
def norm_rope(
    row: Row, cos: Row, sin: Row, weight: Row | None = None, interleaved: bool = False, eps: float = 1e-6,
    dtype: Any = np.float32,
) -> Row:  # fmt: skip
    """`rope` of `rms_norm`, which is rounded to `dtype`, that of x, between them."""
    return rope(rounded(rms_norm(row, weight, eps), dtype).astype(np.float32), cos, sin, interleaved)


@_pinned
def chain(terms: Row, start: Row) -> Row:
    """``start + terms[0] + terms[1] + ...`` for each column, each sum rounded: what gradients of weights are."""
    total = start.astype(np.float32)
    for term in terms:  # order-critical: ascending
        total = total + term
    return total


@_pinned
def rounded(values: Row, dtype: Any) -> npt.NDArray[Any]:
    """Rounded once to `dtype`, to nearest even; every NaN is the canonical one."""
    return canonical(values.astype(np.dtype(dtype)))


class RowOperand(NamedTuple):
    """An operand: its name, and where it lies.

    ``rows``: as x; ``row``: one row that all share, or none; ``angles``: half a row, broadcast to the rows of x;
    ``number``: one of each row; ``class``: an int64 of each row; ``sums``: the two of each row that a loss gives.
    """

    name: str
    extent: Literal["rows", "row", "angles", "number", "sums", "class"] = "rows"


class Result(NamedTuple):
    """A result: numbers of each row (None: as many as x has), and the operand whose dtype it has; None for float32."""

    width: int | None = None
    like: str | None = "x"


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    # ``formula(*operands, **options)`` of one row of each operand; a tuple where results are several
    formula: Callable[..., Any]
    operands: tuple[RowOperand, ...] = (RowOperand("x"),)
    # which of a backend's kernels: ``reduce``, whose rows have sums; ``loss``, which have classes, too; ``each``, of
    # elements alone; or ``rope``
    kernels: Literal["reduce", "loss", "each", "rope"] = "reduce"
    # names: ``eps``, ``interleaved``, ``ignore_index``; ``dtype`` where something between is rounded to an operand's
    options: tuple[str, ...] = ()
    results: tuple[Result, ...] = (Result(),)  # a caller's out_dtype is the first one's

    @_pinned
    def results_of(self, *operands: Row | None, **options: Any) -> tuple[Any, ...]:
        """The results for one row, as a tuple in any case; options of other operations are left out."""
        found = self.formula(*operands, **{name: options[name] for name in self.options})
        return found if isinstance(found, tuple) else (found,)


_X, _Y, _DY, _RESIDUAL = (RowOperand(name) for name in ("x", "y", "dy", "residual"))
_WEIGHT, _BIAS = RowOperand("weight", "row"), RowOperand("bias", "row")
_COS, _SIN = RowOperand("cos", "angles"), RowOperand("sin", "angles")
_TARGET = RowOperand("target", "class")
_ONE, _STATS = Result(1), Result(2, None)  # STATS: 1 / root and mean, of which gradients of weights are made

OPERATIONS = {
    "rms_norm": Operation(rms_norm, (_X, _WEIGHT), options=("eps",)),
    "layer_norm": Operation(layer_norm, (_X, _WEIGHT, _BIAS), options=("eps",)),
    "softmax": Operation(softmax),
    "log_softmax": Operation(log_softmax),
    "sum": Operation(sum_row, results=(_ONE,)),
    "mean": Operation(mean, results=(_ONE,)),
    "cross_entropy": Operation(
        cross_entropy, (_X, _TARGET), "loss", options=("ignore_index",), results=(_ONE, Result(2, None))
    ),
    "cross_entropy_back": Operation(
        cross_entropy_back, (_X, RowOperand("dy", "number"), _TARGET, RowOperand("sums", "sums")), "loss",
        options=("ignore_index",),
    ),
    "add_rms_norm": Operation(
        add_rms_norm, (_X, _RESIDUAL, _WEIGHT), options=("eps", "dtype"),
        results=(Result(like="residual"), Result(like="residual")),
    ),
    "rms_norm_back": Operation(rms_norm_back, (_X, _DY, _WEIGHT), options=("eps",), results=(Result(), _STATS)),
    "layer_norm_back": Operation(layer_norm_back, (_X, _DY, _WEIGHT), options=("eps",), results=(Result(), _STATS)),
    "softmax_back": Operation(softmax_back, (_X, _DY)),
    "log_softmax_back": Operation(log_softmax_back, (_X, _DY)),
    "silu_mul": Operation(silu_mul, (_X, _Y), "each"),
    "silu": Operation(silu, kernels="each"),
    "sigmoid": Operation(sigmoid, kernels="each"),
    "exp": Operation(exp, kernels="each"),
    "add": Operation(add, (_X, _Y), "each", results=(Result(like="y"),)),
    "silu_mul_back": Operation(silu_mul_back, (_X, _Y, _DY), "each", results=(Result(), Result(like="y"))),
    "rope": Operation(rope, (_X, _COS, _SIN), "rope", ("interleaved",)),
    "norm_rope": Operation(norm_rope, (_X, _COS, _SIN, _WEIGHT), "rope", ("interleaved", "eps", "dtype")),
}  # fmt: skip

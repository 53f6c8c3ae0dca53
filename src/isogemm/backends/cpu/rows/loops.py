"""Operations along rows, fast: the bits of `isogemm.contract.rows`, in loops that vectorize over lanes.

A row is widened into float32 scratch, padded to a multiple of LANES, changed there by one of `KERNELS`, and rounded
once on its way out. Each kernel is compiled on its first use and called through its address. Additions and products
are plain float32 instructions, which nothing here allows the compiler to contract or to reorder.
"""

from __future__ import annotations

from functools import cache

from numba import carray
from numba.core import types
from numba.extending import intrinsic

from ....base.jit import njit
from ....contract import rows as define
from ....contract.arithmetic import fma
from ..emit.entries import address_of, call, of_words
from ..emit.pointers import pointer_to_floats, pointer_to_shorts
from ..emit.scalars import as_bits, as_float, divide, half_to_float_bits, load_element, peek32_at, peek64, round_row
from ..emit.vectors import BFLOAT16, F32, FLOAT16, FLOAT32, declare

# Words of a task array; the first eight are the pool's header. An operand has five: where its rows are, the step from
# row to row in bytes (0: one row for all), whether that place is a table of the rows' addresses instead, the step from
# column to column, and an element code. A place that is 0 is an operand that is absent. KERNEL is an address, EACH the
# length of a row of FIRST and SECOND, WIDTH that of the result.
KERNEL, ROWS, COLUMNS, PER_CHUNK, EPSILON, OUT, WIDTH, OUT_ELEMENT = range(8, 16)
X, FIRST, SECOND = 16, 21, 26
EACH = 31
WORDS = 32
PLACE, STEP, TABLED, STRIDE, ELEMENT = range(5)

LANES = define.LANES
LOG2E, LN2_HIGH, LN2_LOW, SHIFT = define.LOG2E, define.LN2_HIGH, define.LN2_LOW, define.SHIFT
EXP_LEAST, EXP_MOST = define.EXP_LEAST, define.EXP_MOST
E6, E5, E4, E3, E2, E1 = define.EXP_TERMS
SQRT_HALF, LOG_HIGH, LOG_LOW = define.SQRT_HALF, define.LOG_HIGH, define.LOG_LOW
L9, L8, L7, L6, L5, L4, L3, L2, L1 = define.LOG_TERMS
ZERO, ONE, HALF = types.float32(0), types.float32(1), types.float32(0.5)
INFINITY = types.float32(float("inf"))
# exp is normal from LEAST_NORMAL on, and rounds away beside 1 below BESIDE_ONE.
LEAST_NORMAL, BESIDE_ONE, TWO = types.float32(-87), types.float32(-80), types.float32(2)


@intrinsic
def square_root(typingctx, x):
    """Correctly rounded."""

    def codegen(context, builder, signature, args):
        return builder.call(declare(builder.module, "llvm.sqrt.f32", F32, [F32]), args)

    return types.float32(types.float32), codegen


def _chosen(relation):
    """x where ``x relation y``, else y, by a selection: a branch would be compiled to a store under a mask."""

    @intrinsic
    def chosen(typingctx, x, y):
        def codegen(context, builder, signature, args):
            return builder.select(builder.fcmp_ordered(relation, *args), *args)

        return types.float32(types.float32, types.float32), codegen

    return chosen


_larger, _smaller = _chosen(">"), _chosen("<")


@njit
def _parts(x):
    """exp(x) without its scale 2**k, and k + SHIFT, whose low bits are k; NaN stays."""
    t = fma(x, LOG2E, SHIFT)
    k = t - SHIFT
    r = fma(k, -LN2_HIGH, x)
    r = fma(k, -LN2_LOW, r)
    p = fma(fma(fma(fma(fma(E6, r, E5), r, E4), r, E3), r, E2), r, E1)
    return fma(p, r * r, r) + ONE, t


@njit
def _power_of_two(t, bias):
    return as_float(types.uint32((as_bits(t) << types.uint32(23)) + types.uint32(bias << 23)))


@njit
def _one_and_exp(x):
    """1 + exp(x). One product is left of the scale: of half of it, which is finite wherever the exponential is."""
    low = BESIDE_ONE if x < BESIDE_ONE else x
    y, t = _parts(EXP_MOST if low > EXP_MOST else low)
    y = y * _power_of_two(t, 126) * TWO
    return ONE + (INFINITY if x > EXP_MOST else y)


@njit
def _powers(row, n, top, lanes, powers):
    """exp(x - top) of a row, top being its largest; +0 behind it. A normal number's scale is one product."""
    for lane in range(LANES):
        lanes[lane] = ZERO
    for step in range(0, row.size, LANES):
        part, to = row[step : step + LANES], powers[step : step + LANES]
        for lane in range(LANES):
            d = part[lane] - top
            inside = ZERO if d < EXP_LEAST else d
            lanes[lane] = _smaller(inside, lanes[lane])
            y, t = _parts(inside)
            y = y * _power_of_two(t, 127)
            to[lane] = ZERO if d < EXP_LEAST else y
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            lanes[lane] = _smaller(lanes[lane], lanes[half + lane])
        half //= 2
    if lanes[0] < LEAST_NORMAL:
        for i in range(n):
            powers[i] = _exp(row[i] - top)
    _clear(powers, n)


@njit
def _exp(x):
    low = x if x >= EXP_LEAST else EXP_LEAST  # NaN too
    inside = low if low <= EXP_MOST else EXP_MOST
    y, t = _parts(inside)
    whole = types.int32(t - SHIFT)
    half = whole >> types.int32(1)
    y = y * as_float(types.uint32((half + types.int32(127)) << types.int32(23)))
    y = y * as_float(types.uint32((whole - half + types.int32(127)) << types.int32(23)))
    y = y if x >= EXP_LEAST else ZERO
    y = y if x <= EXP_MOST else INFINITY
    return x if x != x else y


@njit
def _log(s):
    if s != s:
        return s
    offset = types.int32(as_bits(s)) - types.int32(SQRT_HALF)
    k = types.float32(offset >> types.int32(23))
    t = as_float(types.uint32((offset & types.int32(0x7FFFFF)) + types.int32(SQRT_HALF))) - ONE
    z = t * t
    p = fma(fma(fma(fma(L9, t, L8), t, L7), t, L6), t, L5)
    p = fma(fma(fma(fma(p, t, L4), t, L3), t, L2), t, L1)
    y = fma(k, LOG_LOW, (t * z) * p)
    return fma(k, LOG_HIGH, t + fma(-HALF, z, y))


@njit
def _load(address, stride, element, row, n):
    """Widen a row into `row`, and write +0 from its end to that of the last step."""
    if element == FLOAT32 and stride == 4:
        for i in range(n):
            row[i] = as_float(peek32_at(address, i))
    elif element == BFLOAT16 and stride == 2:
        narrow = carray(pointer_to_shorts(address), (n,))
        for i in range(n):
            row[i] = as_float(types.uint32(narrow[i]) << types.uint32(16))
    elif element == FLOAT16 and stride == 2:
        narrow = carray(pointer_to_shorts(address), (n,))
        for i in range(n):
            row[i] = as_float(half_to_float_bits(types.uint32(narrow[i])))
    else:
        for i in range(n):
            row[i] = load_element(address + i * stride, element)
    _clear(row, n)


@njit
def _clear(row, n):
    for i in range(n, row.size):
        row[i] = ZERO


@njit
def _meet(lanes):
    half = LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] = lanes[i] + lanes[half + i]
        half //= 2
    return lanes[0]


def _folded(squares):
    """A function that sums a row, or its squares, in lanes."""

    @njit
    def folded(row, lanes):
        for lane in range(LANES):
            lanes[lane] = ZERO
        for step in range(0, row.size, LANES):
            part = row[step : step + LANES]
            for lane in range(LANES):
                lanes[lane] = fma(part[lane], part[lane], lanes[lane]) if squares else lanes[lane] + part[lane]
        return _meet(lanes)

    return folded


def largest_in(width):
    """A function that finds the largest number of a row, NaN left out, in so many lanes; -inf without one.

    The sign of a zero is anyone's, and reaches no result.
    """

    @njit
    def largest(row, n, lanes):
        for lane in range(width):
            lanes[lane] = -INFINITY
        whole = n // width * width
        for step in range(0, whole, width):
            part = row[step : step + width]
            for lane in range(width):
                lanes[lane] = _larger(part[lane], lanes[lane])
        for i in range(whole, n):
            lanes[i - whole] = _larger(row[i], lanes[i - whole])
        half = width // 2
        while half > 0:
            for lane in range(half):
                lanes[lane] = _larger(lanes[lane], lanes[half + lane])
            half //= 2
        return lanes[0]

    return largest


_lane_sum, _sum_of_squares, _largest = _folded(False), _folded(True), largest_in(LANES)


@njit
def _scratch(scratch, n):
    """Lanes, the row, the two operands beside it, and a row to spare."""
    padded = -(-n // LANES) * LANES
    lanes = carray(pointer_to_floats(scratch), (LANES,))
    row = carray(pointer_to_floats(scratch + 4 * LANES), (padded,))
    first = carray(pointer_to_floats(scratch + 4 * (LANES + padded)), (padded,))
    second = carray(pointer_to_floats(scratch + 4 * (LANES + 2 * padded)), (padded,))
    spare = carray(pointer_to_floats(scratch + 4 * (LANES + 3 * padded)), (padded,))
    return lanes, row, first, second, spare


@njit
def _norm(scratch, n, epsilon, weighted, biased):
    """A row times 1 / its root mean square, times the weight, plus the bias."""
    lanes, row, weight, bias, _ = _scratch(scratch, n)
    v = divide(_sum_of_squares(row, lanes), types.float32(n)) + as_float(types.uint32(epsilon))
    r = divide(ONE, square_root(v))
    if weighted and biased:
        for i in range(n):
            row[i] = row[i] * r * weight[i] + bias[i]
    elif weighted:
        for i in range(n):
            row[i] = row[i] * r * weight[i]
    elif biased:
        for i in range(n):
            row[i] = row[i] * r + bias[i]
    else:
        for i in range(n):
            row[i] = row[i] * r


def rms_norm(scratch, n, epsilon, weighted, biased):
    _norm(scratch, n, epsilon, weighted, biased)


def layer_norm(scratch, n, epsilon, weighted, biased):
    lanes, row, _, _, _ = _scratch(scratch, n)
    mean = divide(_lane_sum(row, lanes), types.float32(n))
    for i in range(n):
        row[i] = row[i] - mean
    _norm(scratch, n, epsilon, weighted, biased)


def softmax(scratch, n, epsilon, weighted, biased):
    lanes, row, _, _, powers = _scratch(scratch, n)
    _powers(row, n, _largest(row, n, lanes), lanes, powers)
    total = _lane_sum(powers, lanes)
    for i in range(n):
        row[i] = divide(powers[i], total)


def log_softmax(scratch, n, epsilon, weighted, biased):
    lanes, row, _, _, powers = _scratch(scratch, n)
    top = _largest(row, n, lanes)
    _powers(row, n, top, lanes, powers)
    total = _log(_lane_sum(powers, lanes))
    for i in range(n):
        row[i] = row[i] - top - total


def cross_entropy(scratch, n, epsilon, weighted, biased):
    """(loss, largest, sum) of a row with a class, -1 for none."""
    lanes, row, target, _, powers = _scratch(scratch, n)
    top = _largest(row, n, lanes) + ZERO
    _powers(row, n, top, lanes, powers)
    total, at = _lane_sum(powers, lanes), types.int64(target[0])
    loss = ZERO if at < 0 else _log(total) - (row[at] - top)
    row[0], row[1], row[2] = loss, top, total


def cross_entropy_back(scratch, n, epsilon, weighted, biased):
    """The gradient of cross_entropy, from a row and its (largest, sum, dy, class)."""
    lanes, row, sums, _, powers = _scratch(scratch, n)
    top, total, at = sums[0], sums[1], types.int64(sums[3])
    dy = ZERO if at < 0 else sums[2]
    _powers(row, n, top, lanes, powers)
    for i in range(n):
        row[i] = divide(powers[i], total) * dy
    if at >= 0:
        row[at] = row[at] - dy


def lane_sum(scratch, n, epsilon, weighted, biased):
    lanes, row, _, _, _ = _scratch(scratch, n)
    carray(pointer_to_floats(scratch + 4 * LANES), (1,))[0] = _lane_sum(row, lanes)


def mean(scratch, n, epsilon, weighted, biased):
    lanes, row, _, _, _ = _scratch(scratch, n)
    carray(pointer_to_floats(scratch + 4 * LANES), (1,))[0] = divide(_lane_sum(row, lanes), types.float32(n))


def silu_mul(scratch, n, epsilon, weighted, biased):
    _, row, other, _, _ = _scratch(scratch, n)
    for i in range(n):
        row[i] = divide(row[i], _one_and_exp(-row[i])) * other[i]


def silu(scratch, n, epsilon, weighted, biased):
    _, row, _, _, _ = _scratch(scratch, n)
    for i in range(n):
        row[i] = divide(row[i], _one_and_exp(-row[i]))


def sigmoid(scratch, n, epsilon, weighted, biased):
    _, row, _, _, _ = _scratch(scratch, n)
    for i in range(n):
        row[i] = divide(ONE, _one_and_exp(-row[i]))


def exp(scratch, n, epsilon, weighted, biased):
    _, row, _, _, _ = _scratch(scratch, n)
    for i in range(n):
        row[i] = _exp(row[i])


def _rope(interleaved):
    def rope(scratch, n, epsilon, weighted, biased):
        _, row, cos, sin, _ = _scratch(scratch, n)
        half = n // 2
        for j in range(half):
            first, second = (2 * j, 2 * j + 1) if interleaved else (j, half + j)
            a, b = row[first], row[second]
            row[first] = a * cos[j] - b * sin[j]
            row[second] = b * cos[j] + a * sin[j]

    return rope


# Each changes the row in scratch: ``void (scratch, n, bits of epsilon, whether FIRST and SECOND are given)``.
KERNELS = {
    "rms_norm": rms_norm, "layer_norm": layer_norm, "softmax": softmax, "log_softmax": log_softmax,
    "cross_entropy": cross_entropy, "cross_entropy_back": cross_entropy_back, "sum": lane_sum, "mean": mean,
    "silu_mul": silu_mul, "silu": silu, "sigmoid": sigmoid, "exp": exp, "rope": _rope(False),
    "rope_interleaved": _rope(True),
}  # fmt: skip


@njit
def _operand(task, base, i, row, n):
    """Row `i` of the operand whose words begin at `base`."""
    place = task[base + PLACE]
    address = peek64(place + 8 * i) if task[base + TABLED] != 0 else place + i * task[base + STEP]
    _load(address, task[base + STRIDE], task[base + ELEMENT], row, n)


def run_rows(task, chunk, scratch):
    """Rows of one chunk: an entry."""
    task = carray(task, (WORDS,))
    n, each, width, element = task[COLUMNS], task[EACH], task[WIDTH], task[OUT_ELEMENT]
    _, row, first, second, _ = _scratch(scratch, n)
    size = 4 if element == FLOAT32 else 2
    begin, end = chunk * task[PER_CHUNK], min(task[ROWS], (chunk + 1) * task[PER_CHUNK])
    for i in range(begin, end):
        _operand(task, X, i, row, n)
        if task[FIRST] != 0 and (i == begin or task[FIRST + STEP] != 0):
            _operand(task, FIRST, i, first, each)
        if task[SECOND] != 0 and (i == begin or task[SECOND + STEP] != 0):
            _operand(task, SECOND, i, second, each)
        call(task[KERNEL], scratch, n, task[EPSILON], task[FIRST] != 0, task[SECOND] != 0)
        round_row(scratch + 4 * LANES, width, task[OUT] + i * width * size, size, element)


@cache
def addresses(name: str) -> tuple[int, int]:
    """Addresses of the compiled entry, ``void (i64 *task, i64 chunk, i64 scratch)``, and of a kernel."""
    return address_of(run_rows), address_of(KERNELS[name], of_words(5))


def scratch_bytes(columns: int) -> int:
    """Scratch of one thread, for rows of `columns` elements; one of none has a sum."""
    return 4 * (LANES + 4 * max(1, -(-columns // LANES)) * LANES)

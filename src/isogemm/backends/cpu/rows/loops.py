"""Operations along rows, fast: the bits of `isogemm.contract.rows`, in loops that vectorize over lanes.

A row is widened into float32 scratch, padded to a multiple of LANES, and rounded once on its way out. Additions and
products are plain float32 instructions, which nothing here allows the compiler to contract or to reorder.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from ....base.jit import compile_entry, njit
from ....contract import rows as define
from ....contract.arithmetic import fma
from ..emit.scalars import as_bits, as_float, half_to_float_bits, load_element, peek32_at, peek64, round_row
from ..emit.vectors import BFLOAT16, FLOAT16, FLOAT32

# Words of a task array; the first eight are the pool's header. An operand has five: where its rows are, the step from
# row to row in bytes (0: one row for all), whether that place is a table of the rows' addresses instead, the step from
# column to column, and an element code. A place that is 0 is an operand that is absent.
OPERATION, ROWS, COLUMNS, PER_CHUNK, EPSILON, OUT, OUT_STEP, OUT_ELEMENT = range(8, 16)
X, FIRST, SECOND = 16, 21, 26
WORDS = 31
PLACE, STEP, TABLED, STRIDE, ELEMENT = range(5)

RMS_NORM, LAYER_NORM, SOFTMAX, LOG_SOFTMAX, SUM, MEAN, SILU_MUL, SILU, SIGMOID, EXP, ROPE, ROPE_INTERLEAVED = range(12)

LANES = define.LANES
LOG2E, LN2_HIGH, LN2_LOW, SHIFT = define.LOG2E, define.LN2_HIGH, define.LN2_LOW, define.SHIFT
EXP_LEAST, EXP_MOST = define.EXP_LEAST, define.EXP_MOST
E6, E5, E4, E3, E2, E1 = define.EXP_TERMS
SQRT_HALF, LOG_HIGH, LOG_LOW = define.SQRT_HALF, define.LOG_HIGH, define.LOG_LOW
L9, L8, L7, L6, L5, L4, L3, L2, L1 = define.LOG_TERMS
ZERO, ONE, HALF = types.float32(0), types.float32(1), types.float32(0.5)
INFINITY = types.float32(float("inf"))


@intrinsic
def divide(typingctx, x, y):
    """x / y, without Python's exception."""

    def codegen(context, builder, signature, args):
        return builder.fdiv(*args)

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def square_root(typingctx, x):
    """Correctly rounded."""

    def codegen(context, builder, signature, args):
        f32 = ir.FloatType()
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(f32, [f32]), "llvm.sqrt.f32")
        return builder.call(function, args)

    return types.float32(types.float32), codegen


@intrinsic
def pointer_to_floats(typingctx, address):
    """A pointer to float32."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.PointerType(ir.FloatType()))

    return types.CPointer(types.float32)(types.int64), codegen


@njit(inline="always")
def _exp(x):
    low = x if x >= EXP_LEAST else EXP_LEAST  # NaN too
    inside = low if low <= EXP_MOST else EXP_MOST
    k = fma(inside, LOG2E, SHIFT) - SHIFT
    r = fma(k, -LN2_HIGH, inside)
    r = fma(k, -LN2_LOW, r)
    p = fma(fma(fma(fma(fma(E6, r, E5), r, E4), r, E3), r, E2), r, E1)
    y = fma(p, r * r, r) + ONE
    whole = types.int32(k)
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
        narrow = carray(_shorts(address), (n,))
        for i in range(n):
            row[i] = as_float(types.uint32(narrow[i]) << types.uint32(16))
    elif element == FLOAT16 and stride == 2:
        narrow = carray(_shorts(address), (n,))
        for i in range(n):
            row[i] = as_float(half_to_float_bits(types.uint32(narrow[i])))
    else:
        for i in range(n):
            row[i] = load_element(address + i * stride, element)
    _clear(row, n)


@intrinsic
def _shorts(typingctx, address):
    """A pointer to 16-bit numbers."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.PointerType(ir.IntType(16)))

    return types.CPointer(types.uint16)(types.int64), codegen


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


@njit
def _lane_sum(row, lanes):
    for lane in range(LANES):
        lanes[lane] = ZERO
    for step in range(0, row.size, LANES):
        part = row[step : step + LANES]
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + part[lane]
    return _meet(lanes)


@njit
def _sum_of_squares(row, lanes):
    for lane in range(LANES):
        lanes[lane] = ZERO
    for step in range(0, row.size, LANES):
        part = row[step : step + LANES]
        for lane in range(LANES):
            lanes[lane] = fma(part[lane], part[lane], lanes[lane])
    return _meet(lanes)


@njit
def _largest(row, n, lanes):
    """The largest number, NaN left out; the sign of a zero is anyone's, and reaches no result."""
    for lane in range(LANES):
        lanes[lane] = -INFINITY
    whole = n // LANES * LANES
    for step in range(0, whole, LANES):
        part = row[step : step + LANES]
        for lane in range(LANES):
            lanes[lane] = part[lane] if part[lane] > lanes[lane] else lanes[lane]
    for i in range(whole, n):
        lanes[i - whole] = row[i] if row[i] > lanes[i - whole] else lanes[i - whole]
    found = lanes[0]
    for lane in range(LANES):
        found = lanes[lane] if lanes[lane] > found else found
    return found


@njit
def _norm(row, n, lanes, weight, weighted, bias, biased, epsilon):
    """A row times 1 / its root mean square, times the weight, plus the bias."""
    v = divide(_sum_of_squares(row, lanes), types.float32(n)) + epsilon
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


@njit
def _center(row, n, lanes):
    mean = divide(_lane_sum(row, lanes), types.float32(n))
    for i in range(n):
        row[i] = row[i] - mean


@njit
def _softmax(row, n, lanes):
    top = _largest(row, n, lanes)
    for i in range(n):
        row[i] = _exp(row[i] - top)
    total = _lane_sum(row, lanes)
    for i in range(n):
        row[i] = divide(row[i], total)


@njit
def _log_softmax(row, n, lanes, terms):
    top = _largest(row, n, lanes)
    for i in range(n):
        row[i] = row[i] - top
        terms[i] = _exp(row[i])
    _clear(terms, n)
    total = _log(_lane_sum(terms, lanes))
    for i in range(n):
        row[i] = row[i] - total


@njit
def _silu_mul(row, other, n):
    for i in range(n):
        row[i] = divide(row[i], ONE + _exp(-row[i])) * other[i]


@njit
def _silu(row, n):
    for i in range(n):
        row[i] = divide(row[i], ONE + _exp(-row[i]))


@njit
def _each_exp(row, n):
    for i in range(n):
        row[i] = _exp(row[i])


@njit
def _sigmoid(row, n):
    for i in range(n):
        row[i] = divide(ONE, ONE + _exp(-row[i]))


@njit
def _rope(row, n, cos, sin, out, interleaved):
    half = n // 2
    if interleaved:
        for j in range(half):
            a, b = row[2 * j], row[2 * j + 1]
            out[2 * j] = a * cos[j] - b * sin[j]
            out[2 * j + 1] = b * cos[j] + a * sin[j]
        return
    for j in range(half):
        a, b = row[j], row[half + j]
        out[j] = a * cos[j] - b * sin[j]
        out[half + j] = b * cos[j] + a * sin[j]


@njit
def _operand(task, base, i, row, n):
    """Row `i` of the operand whose words begin at `base`."""
    place = task[base + PLACE]
    address = peek64(place + 8 * i) if task[base + TABLED] != 0 else place + i * task[base + STEP]
    _load(address, task[base + STRIDE], task[base + ELEMENT], row, n)


@njit
def run_rows(task, chunk, scratch):
    """Rows of one chunk."""
    n, operation = task[COLUMNS], task[OPERATION]
    padded = -(-n // LANES) * LANES
    lanes = carray(pointer_to_floats(scratch), (LANES,))
    row = carray(pointer_to_floats(scratch + 4 * LANES), (padded,))
    first = carray(pointer_to_floats(scratch + 4 * (LANES + padded)), (padded,))
    second = carray(pointer_to_floats(scratch + 4 * (LANES + 2 * padded)), (padded,))
    spare = carray(pointer_to_floats(scratch + 4 * (LANES + 3 * padded)), (padded,))
    epsilon = as_float(types.uint32(task[EPSILON]))
    each = n // 2 if operation >= ROPE else n
    begin, end = chunk * task[PER_CHUNK], min(task[ROWS], (chunk + 1) * task[PER_CHUNK])
    for i in range(begin, end):
        _operand(task, X, i, row, n)
        if task[FIRST] != 0 and (i == begin or task[FIRST + STEP] != 0):
            _operand(task, FIRST, i, first, each)
        if task[SECOND] != 0 and (i == begin or task[SECOND + STEP] != 0):
            _operand(task, SECOND, i, second, each)
        result, width = scratch + 4 * LANES, n
        if operation <= LAYER_NORM:
            if operation == LAYER_NORM:
                _center(row, n, lanes)
            _norm(row, n, lanes, first, task[FIRST] != 0, second, task[SECOND] != 0, epsilon)
        elif operation == SOFTMAX:
            _softmax(row, n, lanes)
        elif operation == LOG_SOFTMAX:
            _log_softmax(row, n, lanes, spare)
        elif operation == SILU_MUL:
            _silu_mul(row, first, n)
        elif operation == SILU:
            _silu(row, n)
        elif operation == SIGMOID:
            _sigmoid(row, n)
        elif operation == EXP:
            _each_exp(row, n)
        elif operation >= ROPE:
            _rope(row, n, first, second, spare, operation == ROPE_INTERLEAVED)
            result = scratch + 4 * (LANES + 3 * padded)
        else:
            total = _lane_sum(row, lanes)
            lanes[0] = divide(total, types.float32(n)) if operation == MEAN else total
            result, width = scratch, 1
        element = task[OUT_ELEMENT]
        round_row(result, width, task[OUT] + i * task[OUT_STEP], 4 if element == FLOAT32 else 2, element)


def run_chunk(task, chunk, scratch):
    """`run_rows` from a bare pointer."""
    run_rows(carray(task, (WORDS,)), chunk, scratch)


@cache
def address() -> int:
    """Address of the compiled entry, ``void (i64 *task, i64 chunk, i64 scratch)``."""
    return int(_entry().address)


@cache
def _entry():
    return compile_entry(types.void(types.CPointer(types.int64), types.int64, types.int64), run_chunk)


def scratch_bytes(columns: int) -> int:
    """Scratch of one thread, for rows of `columns` elements."""
    return 4 * (LANES + 4 * -(-columns // LANES) * LANES)

"""Kernels of a training step besides those that the CPU's columns have, one chunk of a task array at a time.

Bits are those of `isogemm.torch`'s gradients: every product, sum and quotient is rounded by itself, rows are summed in
lanes, and sums over rows go up from the first row. A chunk is a range of rows, of columns or of elements, so how a plan
cuts them reaches no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray
from numba.core import types
from numpy.typing import NDArray

from ...base.jit import njit
from ...contract.attention import EXP2_LEAST, EXP2_SHIFT, EXP2_TERMS
from .emit.pointers import pointer_to_bytes, pointer_to_floats, pointer_to_words
from .emit.scalars import as_bits, as_float, divide
from .gemm.tasks import float32_bits
from .rows.loops import LANES, _lane_sum, _one_and_exp, square_root

# Words of a task array behind the pool's eight: what is cut, how much of it a chunk has, the other extent, a number as
# bits, two whole numbers, and addresses.
TOTAL, PER_CHUNK, WIDTH, NUMBER, FIRST, SECOND, ADDRESSES = 8, 9, 10, 11, 12, 13, 14
WORDS = ADDRESSES + 10
ZERO, ONE, INFINITY = types.float32(0), types.float32(1), types.float32(float("inf"))
LEAST, SHIFT = EXP2_LEAST, EXP2_SHIFT
F6, F5, F4, F3, F2, F1, F0 = EXP2_TERMS["float32"]
# Of GELU by tanh: 2 * sqrt(2 / pi), 0.044715, and three times their product.
GELU_SCALE, GELU_CUBE = types.float32(1.5957691216057308), types.float32(0.044715)
GELU_SLOPE = types.float32(0.21406444881780073)


@njit
def _floats(task, place, count):
    return carray(pointer_to_floats(task[ADDRESSES + place]), (count,))


@njit(inline="always")
def _row(task, place, i, n):
    return carray(pointer_to_floats(task[ADDRESSES + place] + 4 * n * i), (n,))


@njit
def _part(task, place, begin, end):
    return carray(pointer_to_floats(task[ADDRESSES + place] + 4 * begin), (end - begin,))


@njit
def _row_part(task, place, row, begin, end):
    """Columns of a row as an array of their own, from 0 on: loops over it are in vectors."""
    at = task[ADDRESSES + place] + 4 * (task[TOTAL] * row + begin)
    return carray(pointer_to_floats(at), (end - begin,))


@njit
def _range(task, chunk):
    begin = chunk * task[PER_CHUNK]
    return begin, min(task[TOTAL], begin + task[PER_CHUNK])


@njit
def _copy(task, row, place, to):
    """Row `row` of the first array into row `to` of array `place`."""
    n = task[WIDTH]
    x, out = _row(task, 0, row, n), _row(task, place, to, n)
    for j in range(n):
        out[j] = x[j]


def zero(task, chunk, scratch):
    """out = 0, by elements."""
    task = carray(task, (WORDS,))
    out = _floats(task, 0, task[TOTAL])
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        out[i] = ZERO


def add(task, chunk, scratch):
    """out = a + b, by elements."""
    task = carray(task, (WORDS,))
    a, b, out = _floats(task, 0, task[TOTAL]), _floats(task, 1, task[TOTAL]), _floats(task, 2, task[TOTAL])
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        out[i] = a[i] + b[i]


def take(task, chunk, scratch):
    """out[i] = x[index[i]], by rows."""
    task = carray(task, (WORDS,))
    index = carray(pointer_to_words(task[ADDRESSES + 1]), (task[TOTAL],))
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        _copy(task, index[i], 2, i)


def spread(task, chunk, scratch):
    """out[index[i]] = x[i], by rows."""
    task = carray(task, (WORDS,))
    index = carray(pointer_to_words(task[ADDRESSES + 1]), (task[TOTAL],))
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        _copy(task, i, 2, index[i])


def put(task, chunk, scratch):
    """out[i, index[i // FIRST]] = x[i], by rows; out has SECOND places for each."""
    task = carray(task, (WORDS,))
    index = carray(pointer_to_words(task[ADDRESSES + 1]), (task[TOTAL] // task[FIRST],))
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        _copy(task, i, 3, i * task[SECOND] + index[i // task[FIRST]])


def visible(task, chunk, scratch):
    """out[i, j] = 1 where j <= index[i], else 0, by rows of bytes."""
    task = carray(task, (WORDS,))
    n = task[WIDTH]
    index = carray(pointer_to_words(task[ADDRESSES]), (task[TOTAL],))
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        out = carray(pointer_to_bytes(task[ADDRESSES + 1] + n * i), (n,))
        for j in range(n):
            out[j] = 1 if j <= index[i] else 0


def scatter(task, chunk, scratch):
    """out[index[i]] += dy[i], rows in order, by columns."""
    task = carray(task, (WORDS,))
    index = carray(pointer_to_words(task[ADDRESSES + 1]), (task[FIRST],))
    begin, end = _range(task, chunk)
    for i in range(task[FIRST]):  # order-critical: ascending
        dy, out = _row_part(task, 0, i, begin, end), _row_part(task, 2, index[i], begin, end)
        for j in range(end - begin):
            out[j] = out[j] + dy[j]


def columns(task, chunk, scratch):
    """out += x[0] + x[1] + ..., rows in order, by columns; a leaf of a gradient is a row too."""
    task = carray(task, (WORDS,))
    begin, end = _range(task, chunk)
    out = _part(task, 1, begin, end)
    for i in range(task[FIRST]):  # order-critical: ascending
        x = _row_part(task, 0, i, begin, end)
        for j in range(end - begin):
            out[j] = out[j] + x[j]


def leaf_columns(task, chunk, scratch):
    """out[l] = +0 + x[l * SECOND] + x[l * SECOND + 1] + ..., the FIRST rows in leaves of SECOND, by columns."""
    task = carray(task, (WORDS,))
    leaf = task[SECOND]
    begin, end = _range(task, chunk)
    for i in range(task[FIRST]):  # order-critical: ascending
        x, out = _row_part(task, 0, i, begin, end), _row_part(task, 1, i // leaf, begin, end)
        if i % leaf == 0:
            for j in range(end - begin):
                out[j] = ZERO
        for j in range(end - begin):
            out[j] = out[j] + x[j]


@njit
def _gate(x):
    """sigmoid(2 * u) with GELU's u = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    return divide(ONE, _one_and_exp(-((x + ((x * x) * x) * GELU_CUBE) * GELU_SCALE)))


def gelu(task, chunk, scratch):
    """x * sigmoid(2 * u), which is 0.5 * x * (1 + tanh(u)), by elements."""
    task = carray(task, (WORDS,))
    x, out = _floats(task, 0, task[TOTAL]), _floats(task, 1, task[TOTAL])
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        out[i] = x[i] * _gate(x[i])


def gelu_back(task, chunk, scratch):
    """dy * (s + (x * (s * (1 - s))) * (x**2 * GELU_SLOPE + GELU_SCALE)) with s = sigmoid(2 * u), by elements."""
    task = carray(task, (WORDS,))
    n = task[TOTAL]
    dy, x, dx = _floats(task, 0, n), _floats(task, 1, n), _floats(task, 2, n)
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        s = _gate(x[i])
        dx[i] = dy[i] * (s + (x[i] * (s * (ONE - s))) * ((x[i] * x[i]) * GELU_SLOPE + GELU_SCALE))


def silu_mul_back(task, chunk, scratch):
    """Gradients of silu(x) * y, by elements."""
    task = carray(task, (WORDS,))
    n = task[TOTAL]
    dy, x, y = _floats(task, 0, n), _floats(task, 1, n), _floats(task, 2, n)
    dx, other = _floats(task, 3, n), _floats(task, 4, n)
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        s = divide(ONE, _one_and_exp(-x[i]))
        dx[i] = (dy[i] * y[i]) * (s * (ONE + x[i] * (ONE - s)))
        other[i] = dy[i] * (x[i] * s)


@njit
def _padded(scratch, n):
    lanes = carray(pointer_to_floats(scratch), (LANES,))
    row = carray(pointer_to_floats(scratch + 4 * LANES), (-(-n // LANES) * LANES,))
    for i in range(n, row.size):
        row[i] = ZERO
    return lanes, row


def _norm_back(centered):
    def norm_back(task, chunk, scratch):
        """dx, and dy * h whose sum over the rows is dw, by rows; layer_norm's of x - mean(x), and dx centered."""
        task = carray(task, (WORDS,))
        n, eps = task[WIDTH], as_float(types.uint32(task[NUMBER]))
        lanes, row = _padded(scratch, n)
        w, count = _floats(task, 2, n), types.float32(n)
        begin, end = _range(task, chunk)
        for i in range(begin, end):
            dy, x = _row(task, 0, i, n), _row(task, 1, i, n)
            dx, terms = _row(task, 3, i, n), _row(task, 4, i, n)
            middle = centre = ZERO
            if centered:
                for j in range(n):
                    row[j] = x[j]
                middle = divide(_lane_sum(row, lanes), count)
            for j in range(n):
                row[j] = (x[j] - middle) * (x[j] - middle)
            r = divide(ONE, square_root(divide(_lane_sum(row, lanes), count) + eps))
            if centered:
                for j in range(n):
                    row[j] = dy[j] * w[j]
                centre = divide(_lane_sum(row, lanes), count)
            for j in range(n):
                h = (x[j] - middle) * r
                row[j] = (dy[j] * w[j]) * h
                terms[j] = dy[j] * h
            mean = divide(_lane_sum(row, lanes), count)
            for j in range(n):
                dx[j] = ((dy[j] * w[j] - centre) - ((x[j] - middle) * r) * mean) * r

    return norm_back


def row_dot(task, chunk, scratch):
    """out[i] = sum of x[i] * y[i] in lanes, by rows."""
    task = carray(task, (WORDS,))
    n = task[WIDTH]
    lanes, row = _padded(scratch, n)
    out = _floats(task, 2, task[TOTAL])
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        x, y = _row(task, 0, i, n), _row(task, 1, i, n)
        for j in range(n):
            row[j] = x[j] * y[j]
        out[i] = _lane_sum(row, lanes)


@njit
def _exp2(x):
    x = LEAST if x < LEAST else x
    k = x + SHIFT
    r = x - (k - SHIFT)
    y = (((((r * F6 + F5) * r + F4) * r + F3) * r + F2) * r + F1) * r + F0
    return y * as_float((as_bits(k) & types.uint32(0xFF)) << types.uint32(23))


def attention_steps(task, chunk, scratch):
    """p = exp2(s * c - m) / l over s, ds = p * (dp - delta) over dp; row i is of token (i % FIRST) // SECOND."""
    task = carray(task, (WORDS,))
    n, c = task[WIDTH], as_float(types.uint32(task[NUMBER]))
    m, total, delta = _floats(task, 2, task[TOTAL]), _floats(task, 3, task[TOTAL]), _floats(task, 4, task[TOTAL])
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        seen = (i % task[FIRST]) // task[SECOND] + 1
        s, dp = _row(task, 0, i, n), _row(task, 1, i, n)
        inverse = ZERO if total[i] == ZERO else divide(ONE, total[i])
        u = ZERO if m[i] == -INFINITY else m[i]
        for j in range(seen):
            p = _exp2(s[j] * c - u) * inverse
            s[j] = p
            dp[j] = (dp[j] - delta[i]) * p
        for j in range(seen, n):
            s[j] = ZERO
            dp[j] = (dp[j] - delta[i]) * ZERO


def loss(task, chunk, scratch):
    """out[0] += -(x[i, target[i]]) / count in order, one chunk."""
    task = carray(task, (WORDS,))
    n, count = task[WIDTH], as_float(types.uint32(task[NUMBER]))
    target = carray(pointer_to_words(task[ADDRESSES + 1]), (task[TOTAL],))
    out = _floats(task, 2, 1)
    for i in range(task[TOTAL]):  # order-critical: ascending
        x = carray(pointer_to_floats(task[ADDRESSES] + 4 * n * i), (n,))
        out[0] = out[0] + divide(-x[target[i]], count)


def loss_back(task, chunk, scratch):
    """In place of p: dy - p * sum(dy), dy being -1 / count at the target and 0 elsewhere; by rows."""
    task = carray(task, (WORDS,))
    n, count = task[WIDTH], as_float(types.uint32(task[NUMBER]))
    target = carray(pointer_to_words(task[ADDRESSES + 1]), (task[TOTAL],))
    dy = -divide(ONE, count)
    begin, end = _range(task, chunk)
    for i in range(begin, end):
        p = carray(pointer_to_floats(task[ADDRESSES] + 4 * n * i), (n,))
        at = dy - p[target[i]] * dy
        for j in range(n):
            p[j] = ZERO - p[j] * dy
        p[target[i]] = at


def adamw(task, chunk, scratch):
    """w, m and v after one step of AdamW, by elements; the scalars are those of `isogemm.program.executor.scalars`."""
    task = carray(task, (WORDS,))
    begin, end = _range(task, chunk)
    g, s, w = _part(task, 0, begin, end), _floats(task, 1, 8), _part(task, 2, begin, end)
    m, v = _part(task, 3, begin, end), _part(task, 4, begin, end)
    decay, b1, c1, b2, c2, root, eps, rate = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    for i in range(end - begin):  # from 0, or the compiler would not see that no index is negative
        mean, square = m[i] * b1 + g[i] * c1, v[i] * b2 + (g[i] * g[i]) * c2
        m[i], v[i] = mean, square
        w[i] = w[i] * decay - rate * divide(mean, divide(square_root(square), root) + eps)


@njit
def arm(spans, which, pattern):
    """Write the canaries of some tensors; `spans` has the first and last address of each, before and after it."""
    for w in which:
        for side in range(2):
            begin, end = spans[w, 2 * side], spans[w, 2 * side + 1]
            bytes_ = carray(pointer_to_bytes(begin), (end - begin,))
            for i in range(end - begin):
                bytes_[i] = pattern


@njit
def _changed(begin, end, pattern):
    """Whether a byte of a canary is not the pattern: words, behind bytes up to the first."""
    whole = min(end, (begin + 7) // 8 * 8)
    found = types.uint8(0)
    head = carray(pointer_to_bytes(begin), (whole - begin,))
    for i in range(whole - begin):
        found |= head[i] ^ types.uint8(pattern)
    wanted = types.int64(types.uint64(pattern) * types.uint64(0x0101010101010101))
    words, some = carray(pointer_to_words(whole), ((end - whole) // 8,)), types.int64(0)
    for i in range((end - whole) // 8):
        some |= words[i] ^ wanted
    return found != 0 or some != 0


@njit
def broken(spans, which, pattern):
    """(tensor, address) of the first changed byte of some tensors' canaries, or (-1, 0)."""
    for w in which:
        for side in range(2):
            begin, end = spans[w, 2 * side], spans[w, 2 * side + 1]
            if _changed(begin, end, pattern):
                bytes_ = carray(pointer_to_bytes(begin), (end - begin,))
                for i in range(end - begin):
                    if bytes_[i] != pattern:
                        return w, begin + i
    return -1, 0


KERNELS = {
    "zero": zero, "add": add, "take": take, "put": put, "visible": visible, "scatter": scatter, "columns": columns,
    "spread": spread, "leaf_columns": leaf_columns, "gelu": gelu, "gelu_back": gelu_back,
    "silu_mul_back": silu_mul_back, "rms_norm_back": _norm_back(False), "layer_norm_back": _norm_back(True),
    "row_dot": row_dot, "attention_steps": attention_steps, "loss": loss, "loss_back": loss_back, "adamw": adamw,
}  # fmt: skip


def task_of(
    total: int, per_chunk: int, width: int, number: float, arrays: Sequence[NDArray[Any]], first: int = 0,
    second: int = 0,
) -> NDArray[np.int64]:  # fmt: skip
    """A kernel's task; arrays are float32 and dense, and have to last as long as it."""
    task = np.zeros(WORDS, np.int64)
    task[TOTAL:ADDRESSES] = total, per_chunk, width, float32_bits(number), first, second
    task[ADDRESSES : ADDRESSES + len(arrays)] = [x.ctypes.data for x in arrays]
    return task


def scratch_bytes(columns: int) -> int:
    """Scratch of one thread, for rows of `columns` elements."""
    return 4 * (LANES + -(-max(columns, 1) // LANES) * LANES)

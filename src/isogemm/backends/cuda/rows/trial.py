"""Kernels along rows run on small operands and are compared with their formulas, bit by bit.

Rows hold all kinds of numbers, lie at steps of one and of four dimensions, and are as long as the code's registers and
chunks allow, and just longer than what they would waste; what lies between them is no number. A few rows repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....contract.reference import canonical
from ....planner.kernel_admission import difference
from ....planner.trials import POISON, Buffer, Machine
from . import code as row_codes
from . import formulas as row_formulas
from .code import EACH, REDUCE, Code
from .sides import collapse, packed

__all__ = ["try_code"]

Array = NDArray[Any]
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = {1: (31,), 4: (2, 3, 2, 3)}
EPS = 1e-5
KINDS = 24  # of rows
MARGIN = 256


def try_code(machine: Machine, code: Code) -> str:
    """Run compiled code on operands of its kind: empty where every bit was right, else the first difference."""
    tries: dict[str, Callable[[Machine, Code], Iterator[tuple[str, str]]]] = {
        "rows": _reductions, "each": _elements, "rope": _rotations, "columns": _columns, "table": _tables,
    }  # fmt: skip
    for where, found in tries[code.function](machine, code):
        if found:
            return f"{where}: {found}"
    return ""


def dtype_of(kind: int) -> np.dtype[Any]:
    """NumPy's, by a code of `row_place.Side.kind`."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if kind == 1 else DTYPES[kind])
    return found


class Rows(NamedTuple):
    """An operand: float32 values [rows, n], its buffer, address, and steps of the leading dimensions and along rows."""

    values: Array
    buffer: Buffer | None
    address: int
    steps: tuple[int, ...]
    column: int


def _kinds(n: int) -> int:
    """How many rows differ: the more, the shorter they are. No multiple of 7."""
    return KINDS + 8 * min(13, 1 + 2**15 // max(n, 1))


def _drawn(seed: int, rows: int, n: int, special: bool = True) -> Array:
    """Rows of float32 whose sums depend on their order, and some with numbers that are tiny, infinite or none.

    A root or a rounding to 16 bits hides the last bits of a sum, so its order has to show in more than those: large
    elements swallow small ones that come later in their lane (squares, and the powers of softmax, which have no sign),
    or leave again halfway through the lane. Row i of seed 4 meets a row of seed 1 that lets its sums be seen.
    """
    random, count = np.random.default_rng([seed, n]), _kinds(n)
    x = random.standard_normal((count, n)).astype(np.float32)
    step = np.arange(n) // 128
    last = int(step[-1])
    for i in [*range(7, 11), *range(KINDS, count, 2)]:  # 4096**2 swallows what is below 1
        at = (0, last, last // 2, min(1, last))[i // 2 % 4]
        scale = 0.5 + (0.618 * i) % 0.5
        x[i] = scale * np.where(step == at, 4096, np.copysign(random.uniform(0.6, 0.99, n), x[i]))
    for i in [11, 12, 16, 23, *range(KINDS + 1, count, 2)]:  # exp: 1 swallows 2**-25
        at = (0, last, last // 2, min(1, last))[i // 2 % 4]
        if i < KINDS:  # the logarithm of 1 and little more
            x[i] = x[i] / 16 - 17.4
            x[i, (128 * at + 5 * i) % n] = 0
        else:
            x[i] = np.where(step == at, 17.4, x[i] / 16)
    x[15], x[17] = 1, -0.5
    for i in (18, 19, 20):
        large = 32768 * (np.sign(x[i]) if i == 20 else np.ones(n, np.float32))
        x[i] = np.where(step == 0, large, x[i] / 64) if last > 1 else x[i]
        if last > 1:
            half = step == (last + 1) // 2
            x[i, half] = -x[i, :128][: int(half.sum())]
    x[22] *= np.float32(2.0) ** random.integers(-20, 12, n).astype(np.float32)
    if special:
        x[0], x[1] = x[0] * np.float32(1e-40), x[1] * np.float32(1e25)
        x[2] = np.where(random.random(n) < 0.5, np.float32(-0.0), np.float32(0))
        x[3, n // 2], x[4, n - 1], x[5, n // 3], x[6] = np.nan, -np.inf, np.inf, -np.inf
    return x[(np.arange(rows) * 7 + seed) % count]


def _put(machine: Machine, kind: int, values: Array, shape: Sequence[int], *, pad: int, column: int = 1) -> Rows:
    """Lay rows out among poison: the dimensions of `shape` in another order, `pad` more elements to each row."""
    if kind < 0:
        return Rows(values, None, 0, (0,) * len(shape), 1)
    n, size = values.shape[-1], dtype_of(kind).itemsize
    with np.errstate(all="ignore"):
        narrow = values.astype(dtype_of(kind))
    words = narrow.view(np.uint16 if size == 2 else np.uint32)
    order = (1, 0, 3, 2) if len(shape) == 4 else tuple(range(len(shape)))
    steps, room = [0] * len(shape), n * column + pad
    for i in reversed(order):
        steps[i], room = room, room * shape[i]
    begin = 0 if pad % 8 == 0 and column == 1 else 1
    flat = np.full(begin + room + MARGIN, POISON[size], words.dtype)
    every = [s * size for s in (*steps, column)]
    np.lib.stride_tricks.as_strided(flat[begin:], (*shape, n), every)[...] = words.reshape(*shape, n)
    buffer = machine.put(flat)
    return Rows(narrow.astype(np.float32), buffer, buffer.address + begin * size, tuple(steps), column)


class Result:
    """Poisoned memory of `count` elements that a kernel writes, and margins that it must not."""

    def __init__(self, machine: Machine, kind: int, count: int, held: Array | None = None) -> None:
        self.kind = kind
        size = dtype_of(kind).itemsize
        flat = np.full(count + 2 * MARGIN, POISON[size], np.uint16 if size == 2 else np.uint32)
        if held is not None:
            flat[MARGIN : MARGIN + count] = held.view(flat.dtype)
        self.count, self.buffer = count, machine.put(flat)
        self.address = self.buffer.address + MARGIN * size

    def compare(self, name: str, want: Array, *, any_nan: bool = False) -> str:
        """The first difference from values of float32, rounded here once."""
        with np.errstate(all="ignore"):
            rounded = canonical(want.astype(dtype_of(self.kind)))
        flat = self.buffer.read()
        inside = flat[MARGIN : MARGIN + self.count]
        if any_nan:  # but not what was there before
            written = canonical(inside.view(rounded.dtype)).view(inside.dtype)
            inside = np.where(inside == POISON[inside.itemsize], inside, written)
        found = difference(name, inside, rounded)
        around = np.concatenate([flat[:MARGIN], flat[MARGIN + self.count :]])
        stray = int(np.count_nonzero(around != POISON[flat.itemsize]))
        return found or (f"{stray} words beside {name} were written" if stray else "")


def _place(shape: Sequence[int], operands: Sequence[Rows]) -> bytes:
    extents, steps = collapse(shape, [x.steps for x in operands])
    rows = int(np.prod(shape, dtype=np.int64))
    if len(shape) == 1 and len(extents) != 1:
        extents, steps = list(shape), [list(x.steps) for x in operands]
    return packed(rows, extents, steps)


def _layouts(code: Code) -> Iterator[tuple[int, int]]:
    """(elements between rows, step along a row) that the code takes."""
    yield 8, 1
    if not code.vec:
        yield 3, 2


def _run(machine: Machine, launch: Callable[..., None], *at: Rows | Result | None) -> None:
    launch(machine.stream(), *[x.address for x in at if x is not None and x.address])


def _lengths(code: Code) -> tuple[int, ...]:
    """Lengths of rows: what fills the code, and what just needs it."""
    if code.file == "held":
        full, least = 128 * code.w * code.h, 128 * code.w * (code.h - 1)
        if code.full:
            return (full,)
        return (full - 4, least + 4) if code.vec else (full - 1, least + 1)
    return (16388, 33028) if code.vec else (130, 33027)


def _reductions(machine: Machine, code: Code) -> Iterator[tuple[str, str]]:
    kind = next(name for name, number in REDUCE.items() if number == code.op)
    shape: tuple[int, ...] = (135,) if code.dims == 1 else (3, 5, 3, 3)
    if code.file == "long":
        shape = (33,) if code.dims == 1 else (2, 3, 2, 3)
    elif code.file == "cluster":
        shape = (16,) if code.dims == 1 else (2, 2, 2, 2)
    known: dict[int, list[Any]] = {}
    for n in _lengths(code):
        for pad, column in _layouts(code):
            yield f"{list(shape)} rows of {n}", _reduction(machine, code, kind, shape, n, pad, column, known)


def _reduction(
    machine: Machine, code: Code, kind: str, shape: tuple[int, ...], n: int, pad: int, column: int,
    known: dict[int, list[Any]],
) -> str:  # fmt: skip
    """Of one layout; `known` keeps what rows of a length have to give."""
    count, eps = int(np.prod(shape)), EPS if "norm" in kind else 0.0
    x = _put(machine, code.tx, _drawn(1, count, n), shape, pad=pad, column=column)
    g = _put(machine, code.tg, _drawn(4, count, n), shape, pad=pad + 8, column=column)
    w = _put(machine, code.tw, _drawn(2, 1, n, False), (1,), pad=pad, column=column)
    b = _put(machine, code.tb, _drawn(3, 1, n, False), (1,), pad=pad, column=column)
    second = -1
    if kind == "add_rms_norm":
        second = code.tg
    elif kind in ("rms_norm_back", "layer_norm_back"):
        second = 0
    width = 1 if kind in ("sum", "mean") else n
    out = Result(machine, code.to, count * width)
    more = Result(machine, second, count * (n if kind == "add_rms_norm" else 2)) if second >= 0 else None
    kinds = (code.tx, code.tg, code.tw, code.tb, code.to, second)
    places = [x, g] if code.tg >= 0 else [x]
    columns = [t.column for t in (x, g, w, b)]
    launch = row_codes.bind_reduce(code, kinds, count, _place(shape, places), columns, n, eps, machine.device)
    _run(machine, launch, x, g, w, b, out, more)
    found = known.get(n) or known.setdefault(n, _distinct(
        lambda i: row_formulas.reduced(
            kind, x.values[i], g.values[i] if code.tg >= 0 else None, w.values[0] if code.tw >= 0 else None,
            b.values[0] if code.tb >= 0 else None, eps, dtype_of(max(code.tg, 0)),
        ), count, _kinds(n),
    ))  # fmt: skip
    wrong = out.compare("out", np.concatenate([y for y, _ in found]))
    if wrong or more is None:
        return wrong
    values = np.concatenate([np.asarray(s, np.float32) for _, s in found])
    return more.compare("second", values, any_nan=kind != "add_rms_norm")


def _distinct(of: Callable[[int], Any], count: int, kinds: int) -> list[Any]:
    """`of` each row; rows that repeat are computed once."""
    first = [of(i) for i in range(min(count, kinds))]
    return [first[i % kinds] for i in range(count)]


def _elements(machine: Machine, code: Code) -> Iterator[tuple[str, str]]:
    kind = next(name for name, number in EACH.items() if number == code.op)
    shapes = [SHAPES[code.dims]] + ([()] if code.dims == 1 else [])
    for shape in shapes:
        for pad, column in _layouts(code):
            n = (8 * 37 if shape else 8 * 1001) if code.vec else (131 if shape else 4003)
            count = int(np.prod(shape))
            x, y, dy = (
                _put(machine, k, _drawn(seed, count, n), shape, pad=pad + 8 * seed, column=column)
                for seed, k in ((1, code.tx), (4, code.tg), (6, code.td))
            )
            twice = kind == "silu_mul_back"
            outs = (code.tx, code.tg) if twice else (code.to,)
            made = [Result(machine, k, count * n) for k in outs]
            place = _place(shape, [x, y, dy]) if shape else packed(1, [], [[], [], []])
            launch = row_codes.bind_each(
                code, outs, count, place, [t.column for t in (x, y, dy)], n, lambda threads: threads, machine.device
            )
            _run(machine, launch, x, y, dy, *made)
            want = row_formulas.elements(kind, x.values, y.values, dy.values)
            for name, got, values in zip(("out", "second"), made, want, strict=False):
                wrong = got.compare(name, np.asarray(values).reshape(-1))
                yield f"{list(shape)} rows of {n}", wrong


def _rotations(machine: Machine, code: Code) -> Iterator[tuple[str, str]]:
    if code.norm:
        top = 128 * code.h
        lengths = (
            [top, top - 8] if code.vec and (code.angles or code.interleaved) else [top - 4] if code.vec else [top - 2]
        )
    else:
        lengths = [128, 48] if code.vec else [2, 46]
    for n in lengths:
        for pad, column in _layouts(code):
            yield f"rows of {n}", _rotation(machine, code, n, pad, column)


def _rotation(machine: Machine, code: Code, n: int, pad: int, column: int) -> str:
    """Two tensors, the second with fewer heads; tables that heads and entries share."""
    many = 2 * code.r * code.teams + 27 if code.norm else 31
    shapes = [(many,), (many - 2,)] if code.dims == 1 else [(2, 3, 1, 7), (2, 1, 1, 7)]
    tokens = shapes[0][-1]
    half = n // 2
    tables = [_put(machine, k, _drawn(seed, tokens, half, False), (tokens,), pad=pad, column=column)
              for seed, k in ((2, code.tc), (3, code.ts))]  # fmt: skip
    xs, ws, outs, places = [], [], [], []
    for i, shape in enumerate(shapes):
        count = int(np.prod(shape))
        xs.append(_put(machine, code.tx, _drawn(1 + 4 * i, count, n), shape, pad=pad, column=column))
        ws.append(_put(machine, code.tw, _drawn(5 + i, 1, n, False), (1,), pad=pad, column=column))
        outs.append(Result(machine, code.to, count * n))
        spread = [t._replace(steps=(*(0,) * (len(shape) - 1), t.steps[0])) for t in tables]
        places.append(_place(shape, [xs[i], *spread]))
    rows = max(len(x.values) for x in xs)
    columns = [t.column for t in (*xs, *tables, *ws)]
    eps = EPS if code.norm else 0.0
    launch = row_codes.bind_rope(code, 2, rows, places, columns, half, eps, machine.device)
    _run(machine, launch, *xs, *tables, *ws, *outs)
    for name, x, w, out in zip(("out 0", "out 1"), xs, ws, outs, strict=True):
        want = [
            row_formulas.turned(
                x.values[i], tables[0].values[i % tokens], tables[1].values[i % tokens],
                w.values[0] if code.tw >= 0 else None, norm=bool(code.norm), interleaved=bool(code.interleaved),
                eps=eps, mid=dtype_of(code.tx),
            )
            for i in range(len(x.values))
        ]  # fmt: skip
        wrong = out.compare(name, np.concatenate(want))
        if wrong:
            return wrong
    return ""


def _columns(machine: Machine, code: Code) -> Iterator[tuple[str, str]]:
    shapes = [(600,), (3,)] if code.dims == 1 else [(4, 5, 6, 5)]
    for shape in shapes:
        for pad, column in _layouts(code):
            for start in (False, True) if code.to == 0 else (False,):
                yield f"{list(shape)} rows", _column(machine, code, shape, pad, column, start)


def _column(machine: Machine, code: Code, shape: tuple[int, ...], pad: int, column: int, start: bool) -> str:
    n, count = 72 if code.vec else 71, int(np.prod(shape))
    random = np.random.default_rng(count)
    x = _put(machine, code.tx, _drawn(1, count, n, False), shape, pad=pad, column=column)
    d = _put(machine, code.td, _drawn(4, count, n, False), shape, pad=pad, column=column)
    stats = random.standard_normal((count, 2)).astype(np.float32)
    held = random.standard_normal(n).astype(np.float32) if start else None
    out, rows = Result(machine, code.to, n, held), machine.put(stats.reshape(-1).view(np.uint32))
    places = [x if code.tx >= 0 else d._replace(steps=(0,) * len(shape)), d]
    launch = row_codes.bind_columns(code, _place(shape, places), (x.column, d.column, 1), n, start, machine.device)
    launch(machine.stream(), x.address if code.term else 0, d.address, rows.address, out.address)
    terms = d.values
    if code.term:
        moved = x.values - stats[:, 1:] if code.term == 2 else x.values
        terms = d.values * (moved * stats[:, :1])
    want = row_formulas.chain(terms, np.zeros(n, np.float32) if held is None else held)
    return out.compare("out", want)


def _tables(machine: Machine, code: Code) -> Iterator[tuple[str, str]]:
    shape: tuple[int, ...] = (37,) if code.dims == 1 else SHAPES[4]
    count, height = int(np.prod(shape)), 9
    random = np.random.default_rng(count)
    ids = np.where(random.random(count) < 0.5, 4, random.integers(0, height - 1, count))
    order = np.argsort(ids, kind="stable")
    named, places = (machine.put(a.astype(np.int64).view(np.uint64)) for a in (ids[order], order))
    for n in (136, 5):
        for start in (False, True) if code.to == 0 else (False,):
            d = _put(machine, code.td, _drawn(1, count, n, False), shape, pad=3)
            held = random.standard_normal(height * n).astype(np.float32)
            begun = held if start else np.zeros_like(held)
            out = Result(machine, code.to, height * n, canonical(held.astype(dtype_of(code.to))))
            launch = row_codes.bind_table(code, count, _place(shape, [d]), (d.column, n, 1), n, start, machine.device)
            launch(machine.stream(), named.address, places.address, d.address, out.address)
            want = canonical(held.astype(dtype_of(code.to))).astype(np.float32).reshape(height, n)
            for i in set(ids.tolist()):
                want[i] = row_formulas.chain(d.values[ids == i], begun.reshape(height, n)[i])
            yield f"{list(shape)} rows of {n}", out.compare("out", want.reshape(-1))

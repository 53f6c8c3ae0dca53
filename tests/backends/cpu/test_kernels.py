"""Every kernel against the executable definition, bit for bit, in poisoned memory with canaries around it."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.products import BF16, DTYPES, F16, F32, assert_same, laid, poisoned, product, values

import isogemm
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.emit.vectors import BFLOAT16, FLOAT32
from isogemm.backends.cpu.gemm import execute
from isogemm.backends.cpu.gemm.facts import SKINNY_ROWS, facts
from isogemm.backends.cpu.gemm.gemv import GROUP
from isogemm.backends.cpu.gemm.schedule import FEW_ROWS
from isogemm.contract import reference
from isogemm.problem.settings import PLAIN, Settings

from .guards import CHAIN, MIXES, Guarded, Record, as_asked, check_gemm, chosen

__all__ = ["chosen"]

IN_PLACE = ("in place", "in place")


@dataclass(frozen=True)
class Walk:
    """A product, how its B is stored (lines [n, k], rows [k, n] or packed), and the walk that it must get."""

    name: str
    m: int
    n: int
    k: int
    stored: str
    walk: tuple[str, str, str]
    mixes: tuple[str, ...] = tuple(MIXES)
    out: str = "c"

    def operands(self, mix: str, special: bool = True) -> tuple[Any, Any, Any]:
        da, db, dtype = MIXES[mix]
        a = values((self.m, self.k), da, seed=1, special=special)
        w = values((self.n, self.k), db, seed=2, special=special)
        b = {"lines": w.T, "rows": np.ascontiguousarray(w.T), "any": laid(w.T, "stepped")}
        return a, isogemm.pack(w) if self.stored == "packed" else b[self.stored], dtype


GEMV = facts().gemv_rows
WIDE_A = ("f32", "f32 x bf16", "f32 x f16")
WIDE_B = ("f32", "f16 x f32")
NARROW_A = ("bf16", "f16", "bf16 x f16", "f16 x f32")
WALKS = (
    Walk("gemv", 1, 67, 131, "lines", ("gemv", *IN_PLACE)),
    Walk("gemv, weight rows in one cache set", 3, 41, 1024, "lines", ("gemv", *IN_PLACE), ("f32",)),
    Walk("gemv, long weight rows", 2, 43, 12500, "lines", ("gemv", *IN_PLACE), ("f32",)),
    Walk("gemv in registers", GROUP - 1, 67, 131, "lines", ("gemv", *IN_PLACE)),
    Walk("gemv in turns", GROUP + 1, 45, 83, "lines", ("gemv", *IN_PLACE)),
    Walk("gemv, last row", GEMV, 45, 83, "lines", ("gemv", *IN_PLACE)),
    Walk("gemv, several chunks", 5, 260, 700, "lines", ("gemv", *IN_PLACE)),
    Walk("stream, one row", 1, 67, 131, "rows", ("stream", *IN_PLACE)),
    Walk("stream", FEW_ROWS, 83, 45, "rows", ("stream", *IN_PLACE)),
    Walk("small, rows in place", 19, 45, 83, "rows", ("small", *IN_PLACE), ("f32",)),
    Walk("small, rows packed", 19, 45, 83, "rows", ("small", "in place", "block"), WIDE_A[1:]),
    Walk("small, lines packed", GEMV + 3, 45, 83, "lines", ("small", "in place", "block"), WIDE_A),
    Walk("small, any strides", 3, 45, 83, "any", ("small", "in place", "block"), WIDE_A),
    Walk("skinny, lines", GEMV + 3, 45, 431, "lines", ("skinny", "all", "block"), NARROW_A),
    Walk("skinny, rows", 19, 545, 431, "rows", ("skinny", "all", "block"), NARROW_A),
    Walk("skinny, fp32", 70, 57, 431, "lines", ("skinny", "all", "block"), WIDE_A),
    Walk("tiled", SKINNY_ROWS + 7, 57, 830, "rows", ("tiled", "block", "block")),
    Walk("prepared, one row", 1, 67, 131, "packed", ("gemv", "in place", "prepared"), WIDE_A),
    Walk("prepared, far weights", 2, 43, 12500, "packed", ("gemv", "in place", "prepared"), ("f32",)),
    Walk("prepared, one narrow row", 1, 67, 131, "packed", ("gemv", "all", "prepared"), NARROW_A),
    Walk("prepared, few", 4, 67, 531, "packed", ("gemv", "in place", "prepared"), WIDE_A),
    Walk("prepared, some", 13, 67, 831, "packed", ("skinny", "all", "prepared")),
    Walk("prepared, many", SKINNY_ROWS + 7, 57, 830, "packed", ("tiled", "block", "prepared")),
    Walk("swapped, few columns", 70, 3, 131, "lines", ("stream", *IN_PLACE), NARROW_A, "swapped"),
    Walk("swapped, column-major", 21, GEMV + 3, 83, "rows", ("small", "in place", "block"), WIDE_B, "f"),
)
CASES = [(walk, mix) for walk in WALKS for mix in walk.mixes]


@pytest.mark.parametrize(("walk", "mix"), CASES, ids=[f"{w.name}-{x}" for w, x in CASES])
def test_strategy(walk: Walk, mix: str, chosen: Record) -> None:
    a, b, dtype = walk.operands(mix)
    if walk.out == "swapped":
        a = np.asfortranarray(a)
    check_gemm(a, b, dtype, "f" if walk.out == "f" else "c")
    assert chosen.walks == {walk.walk}
    in_blocks = walk.walk[0] in ("skinny", "tiled")
    assert all((s.kc < walk.k) == in_blocks for s in chosen)


def test_every_walk_is_covered() -> None:
    """Strategies and modes of `Schedule` itself, so that a new one cannot stay untested."""
    from typing import get_args, get_type_hints

    from isogemm.backends.cpu.gemm.schedule import Schedule

    hints = get_type_hints(Schedule)
    for place, name in enumerate(("strategy", "a_mode", "b_mode")):
        assert {walk.walk[place] for walk in WALKS} == set(get_args(hints[name]))


@pytest.mark.parametrize("stored", ["lines", "rows", "packed"])
@pytest.mark.parametrize("mix", ["f32", "bf16", "f32 x f16"])
def test_every_m_to_beyond_the_last_few(stored: str, mix: str, chosen: Record) -> None:
    n, k = 37, 45
    da, db, dtype = MIXES[mix]
    most = 40 if stored != "lines" else GEMV + 24
    a, w = values((most, k), da, seed=3), values((n, k), db, seed=4)
    b: Any = isogemm.pack(w) if stored == "packed" else w.T if stored == "lines" else np.ascontiguousarray(w.T)
    want = product(a, w.T, out_dtype=dtype)
    for m in range(1, most + 1):
        check_gemm(a[:m], b, dtype, want=want[:m])
    few = {"lines": GEMV, "rows": FEW_ROWS, "packed": FEW_ROWS}[stored]
    assert [s.strategy == chosen[0].strategy for s in chosen] == [m <= few for m in range(1, most + 1)]


@pytest.mark.parametrize("stored", ["lines", "rows", "packed"])
@pytest.mark.parametrize("k", [0, 1, 2, 7, 8, 9, 31, 33])
def test_short_sums(k: int, stored: str) -> None:
    for m in (1, 3, GROUP + 2, 20):
        for n in (1, 9, 33):
            walk = Walk("", m, n, k, stored, ("", "", ""))
            for mix in ("f32", "bf16"):
                a, b, dtype = walk.operands(mix)
                check_gemm(a, b, dtype)


@pytest.mark.parametrize("stored", ["lines", "packed"])
@pytest.mark.parametrize("mix", ["f32", "bf16", "f32 x f16"])
def test_few_rows_end_anywhere(mix: str, stored: str) -> None:
    """Strips of columns and turns of k that are whole, cut and missing, from zero and from C."""
    da, db, dtype = MIXES[mix]
    one_row = ((1, 24, 16), (1, 32, 64), (1, 71, 43), (1, 49, 37), (1, 73, 6), (1, 25, 257))
    more = (2, 130, 37), (3, 16, 129), (4, 15, 71), (4, 97, 16), (5, 70, 50), (6, 31, 16), (7, 16, 33), (8, 40, 257)
    for m, n, k in (*one_row, *more):
        a, w, c = values((m, k), da, seed=1, special=True), values((n, k), db, seed=2), values((m, n), seed=3)
        b = isogemm.pack(w) if stored == "packed" else w.T
        check_gemm(a, b, dtype)
        check_gemm(a, b, F32, c=c, accumulate=True)


def test_what_is_asked_for_goes_on_in_the_next_strip() -> None:
    from numba import njit, types
    from numba.extending import intrinsic

    from isogemm.backends.cpu.emit.vectors import Emitter

    @intrinsic
    def ahead(typingctx, at, row, strip, near):
        return types.int64(*[types.int64] * 4), lambda context, b, signature, args: Emitter(b, 4).ahead(*args)

    @njit
    def asked(at, row, strip, near):
        return at + ahead(at, row, strip, near)

    row, strip, near = 1000, 16 * 1200, 256  # a row is sixteen lines, the last one cut
    lines = [asked(at, row, strip, near) for at in range(0, row, 64)]
    inside = [at + near for at in range(0, row, 64) if at + near < row]
    assert lines == inside + [strip + 64 * i for i in range(16 - len(inside))]


def test_which_walk_takes_few_rows_in_place() -> None:
    from isogemm.backends.cpu.gemm import quads, turn

    def fits(line: int, row: int = 1000, element: int = FLOAT32, rows: int = 1) -> bool:
        return quads.fits(rows, line, row, element)

    assert fits(1500)
    one_set, turns, alone = 2 * quads.SET_BYTES, quads.GOES_ON, quads.WIDE and turn.WAY.alone
    assert fits(one_set) == (alone or (not quads.WIDE and quads.FROM_MEMORY * quads.WIDTH <= quads.CACHE_WAYS))
    assert fits(one_set, rows=3) == (not quads.WIDE and quads.BLOCKS[3] * quads.WIDTH <= quads.CACHE_WAYS)
    assert fits(one_set - 4, rows=3) or not alone
    room = 2 * (turn.WAY.in_a_set if quads.WIDE else quads.CACHE_WAYS)
    at_once = 32 if quads.WIDE else quads.FROM_MEMORY * quads.WIDTH
    assert fits(one_set + quads.SET_BYTES // 2) == (alone or at_once <= room)
    assert fits(one_set, one_set, BFLOAT16) == (quads.BLOCKS[1] * quads.WIDTH <= quads.CACHE_WAYS)
    assert fits(one_set, one_set) == fits(one_set) or turns  # beside one another
    assert fits(8 * one_set, 8 * one_set) == fits(8 * one_set)  # eight such rows have no room
    wide = quads.NEXT_BYTES + 1500  # over as many sets of the cache
    assert fits(wide) == fits(-wide) == (target().width < 16 or quads.WIDE)
    through, narrow = (quads.THROUGH, quads.THROUGH | quads.NARROW) if turns else (0, quads.NARROW if alone else 0)
    flags = {(800, 800): through, (800, 750): through, (860, 750): 0, (3000, 3000): 0, (4096, 4096): narrow}
    for (line, row), flag in flags.items():
        assert quads.from_memory(1, line, row, FLOAT32) == flag
        assert quads.from_memory(1, line, row, BFLOAT16) == 0
        assert quads.from_memory(2, line, row, FLOAT32) == (flag if alone else 0)


@pytest.mark.parametrize("between", [0, 3, 16, -5])
def test_walks_of_one_row_have_the_same_bits(between: int) -> None:
    """Weights that lie in a cache, may come from memory, and are taken one vector at a time: what is around is NaN."""
    from isogemm.backends.cpu.gemm import quads
    from isogemm.backends.cpu.gemm.routines import routine

    walk = CFUNCTYPE(None, *[c_int64] * 10)(routine("quads", FLOAT32))
    few = ((1, 5), (7, 16), (8, 17), (15, 64), (16, 66), (17, 31), (24, 48), (25, 79), (41, 3), (49, 129))
    for n, k in (*few, (32, 9), (48, 31), (80, 24), (97, 45)):
        line = k + abs(between)
        room = np.full(16 + n * line, np.nan, F32)
        w = np.lib.stride_tricks.as_strided(room[8:], (n, k), (4 * line, 4))[:: -1 if between < 0 else 1]
        x, w[...], c = values((1, k), seed=1, special=True), values((n, k), seed=2), values((1, n), seed=3)
        x = np.concatenate([x[0], np.full(16, np.nan, F32)])
        for start in (None, c):
            want = product(x[None, :k], w.T, c=start, accumulate=start is not None)
            for flags in (0, quads.IN_CACHE, quads.THROUGH, quads.THROUGH | quads.NARROW):
                out = Guarded((1, n), F32)
                out.view[...] = np.nan if start is None else start
                places = out.view.ctypes.data, 0, x.ctypes.data, 0, w.ctypes.data
                walk(1, *places, w.strides[0], k, n, flags | (start is not None))
                out.check(want)


@pytest.mark.parametrize("k", [1, 7, 16, 17, 24, 25, 31])
def test_negative_zeros_stay_so_to_the_end_of_a_row(k: int) -> None:
    """Where a turn has room for more than is left of a row, what stands there changes no sum."""
    c = np.full((1, 49), -0.0, F32)
    check_gemm(np.full((1, k), -0.0, F32), np.ones((49, k), F32).T, F32, c=c, accumulate=True)


@pytest.mark.parametrize("line", [75, 96, -75, 600])
def test_turns_begin_anywhere_and_go_either_way(line: int) -> None:
    """Weight rows with room between them, last to first too, from an address that is no multiple of a vector."""
    n, k = 53, 71
    room = values((n * abs(line) + 3,), seed=6, special=True)
    w = np.lib.stride_tricks.as_strided(room[3:], (n, k), (4 * abs(line), 4))[:: 1 if line > 0 else -1]
    assert w.strides[0] == 4 * line
    check_gemm(values((1, k), seed=5), w.T, F32)


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (0, 0, 0)])
def test_no_outputs(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for layout in ("c", "f"):
        check_gemm(values((m, k)), values((k, n)), F32, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("m", [1, GROUP + 1, 20])
def test_heads_and_tails_of_lines(m: int, dtype: np.dtype[Any]) -> None:
    """Weights that start anywhere against a cache line, with line strides that share that place and that do not."""
    n, k = 19, 70
    a = values((m, k), dtype, seed=5)
    for line in (k, 96, 97):
        buffer = values((n * line + 64,), dtype, seed=6)
        first = -buffer.ctypes.data % 64 // buffer.itemsize
        for offset in range(0, 34, 3):
            w = buffer[first + offset :][: (n - 1) * line + k]
            w = np.lib.stride_tricks.as_strided(w, (n, k), (line * w.itemsize, w.itemsize))
            check_gemm(a, w.T, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize("m", [1, 3, 20])
def test_outputs_and_rows_at_any_offset(m: int, dtype: np.dtype[Any]) -> None:
    n, k = 41, 26
    a, b = values((m, k), dtype, seed=7), values((k, n), dtype, seed=8)
    want = product(a, b, out_dtype=F32)
    for offset in range(1, 18):
        room = np.zeros((k, n + 18), dtype)
        room[:, offset : offset + n] = b
        out = Guarded((m, n), F32, margin=offset)
        execute.gemm(a, room[:, offset : offset + n], out.view, PLAIN)
        out.check(want)


LAID = ("c", "f", "padded", "stepped", "reversed")


@pytest.mark.parametrize("mix", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(2, 37, 21), (12, 37, 21), (40, 37, 21), (37, 3, 21)])
def test_layouts(shape: tuple[int, int, int], mix: str) -> None:
    m, n, k = shape
    da, db, dtype = MIXES[mix]
    a, b = values((m, k), da, seed=9, special=True), values((k, n), db, seed=10, special=True)
    want = product(a, b, out_dtype=dtype)
    for layout_a in LAID:
        for layout_b in LAID:
            for layout_out in ("c", "f", "stepped", "reversed"):
                check_gemm(laid(a, layout_a), laid(b, layout_b), dtype, layout_out, want=want)


EPILOGUES = (
    {"alpha": 1.5},
    {"alpha": 0.0, "bias": True},
    {"beta": 1.0, "c": True},
    {"alpha": -0.3, "beta": 0.7, "c": True, "bias": True},
    {"bias": True},
    {"beta": 0.0, "c": True},
)


def edges(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Normal values with every kind of special one at the edges of `dtype`'s range."""
    rng = np.random.default_rng(seed)
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65504.0, 65520.0, -7e4, 3.38953e38, 1e-45, 2**-24.0, 2**-25.0, 3e-8]
    with np.errstate(over="ignore"):
        x = np.where(rng.random(shape) < 0.3, rng.choice(np.array(odd), shape), rng.standard_normal(shape))
        return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("out", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("options", EPILOGUES, ids=lambda o: ",".join(o))
def test_epilogue(options: dict[str, Any], out: np.dtype[Any]) -> None:
    """One product for each place that applies it: few rows, tiles of one K panel and of several, swapped ones."""
    shapes = ((3, 37, 9, "lines"), (2, 37, 9, "rows"), (33, 37, 9, "rows"), (20, 37, 9, "packed"), (33, 3, 9, "lines"))
    for m, n, k, stored in (*shapes, (70, 37, 530, "lines")):
        a, b, _ = Walk("", m, n, k, stored, ("", "", "")).operands("f32", special=False)
        scale = values((m, 1), seed=11) * np.exp2(np.arange(m, dtype=np.float32) % 40 - 26)[:, None]
        a = a * scale  # products over the whole range of fp16, underflow and overflow included
        for c_type in {F32, out}:
            given = dict(options)
            if "c" in options:
                given["c"] = laid(edges((m, n), c_type, 12), "stepped")
            if "bias" in options:
                given["bias"] = laid(edges((n,), c_type, 13), "reversed")
            for layout in ("c", "f"):
                check_gemm(a, b, out, layout, **given)


@pytest.mark.parametrize("out", [BF16, F16], ids=lambda d: d.name)
def test_rounding_to_narrow_outputs(out: np.dtype[Any]) -> None:
    """Bit patterns of fp32 spread over its whole range, and the ties of the narrow type, each rounded once."""
    ties = np.arange(0, 2**16, 7, np.uint32) << np.uint32(16 if out == BF16 else 13)
    half = np.uint32(0x8000 if out == BF16 else 0x1000)
    patterns = np.concatenate([np.arange(0, 2**32, 300007, np.uint64).astype(np.uint32), ties + half, ties + half + 1])
    a = patterns.view(np.float32)[:, None]
    for columns in (1, 37):
        b = np.ones((1, columns), np.float32)
        b[0, 1:] = -1.0
        check_gemm(a, b, out)


def test_beta_0_reads_no_c() -> None:
    a, b, c = values((5, 9)), values((9, 33), seed=1), np.full((5, 33), np.nan, np.float32)
    out = Guarded((5, 33), F32)
    execute.gemm(a, b, out.view, Settings(CHAIN, alpha=2.0, beta=0.0), c=c)
    out.check(product(a, b, alpha=2.0))


def test_the_sign_of_an_alpha_of_zero() -> None:
    """Calls that differ in nothing else are no calls of one kind: 0.0 equals -0.0, and their products do not."""
    a, b = np.ones((5, 9), F32), np.ones((9, 33), F32)
    for alpha in (0.0, -0.0, 0.0):
        check_gemm(a, b, alpha=alpha)


CONTINUED = [
    (1, 37, 33, "lines"),
    (GROUP + 3, 37, 33, "lines"),
    (3, 37, 33, "rows"),
    (20, 37, 33, "rows"),
    (20, 37, 33, "lines"),
    (33, 3, 33, "lines"),
    (70, 37, 600, "rows"),
]


@pytest.mark.parametrize(("m", "n", "k", "stored"), CONTINUED)
def test_accumulate_continues_the_chain_at_any_cut(m: int, n: int, k: int, stored: str) -> None:
    a, b, _ = Walk("", m, n, k, stored, ("", "", "")).operands("f32")
    want = product(a, b)
    for cut in range(k + 1) if k < 100 else (1, 250, 511, 512, 513):
        for layout in ("c", "f"):
            first = Guarded((m, n), F32, layout)
            execute.gemm(a[:, :cut], b[:cut], first.view, PLAIN)
            elsewhere = Guarded((m, n), F32, layout)
            c = first.view.copy()
            for out in (first, elsewhere):  # C is the output itself, or another array
                start = c if out is elsewhere else out.view
                execute.gemm(a[:, cut:], b[cut:], out.view, Settings(CHAIN, accumulate=True), c=start)
                out.check(want)


@pytest.mark.parametrize(("m", "n", "k", "stored"), [*CONTINUED, (3, 37, 33, "packed"), (70, 37, 830, "packed")])
def test_accumulate_with_an_epilogue(m: int, n: int, k: int, stored: str) -> None:
    a, b, _ = Walk("", m, n, k, stored, ("", "", "")).operands("f32", special=False)
    c, bias = edges((m, n), F32, 14), edges((n,), F32, 15)
    for dtype in DTYPES:
        check_gemm(a, b, dtype, alpha=0.5, c=laid(c, "padded"), bias=bias, accumulate=True)


BATCHES = [
    (7, 1, 37, 20),
    (7, 3, 37, 20),
    (5, 20, 37, 20),
    (3, 33, 3, 20),
    (40, 9, 9, 9),
    (6, 50, 60, 70),
    (1, 5, 6, 7),
]


@pytest.mark.parametrize(("count", "m", "n", "k"), BATCHES)
@pytest.mark.parametrize("mix", ["f32", "bf16"])
def test_batched_steps(count: int, m: int, n: int, k: int, mix: str) -> None:
    """Items apart, items shared (a step of 0), items in reverse, and outputs with room between them."""
    da, db, dtype = MIXES[mix]
    a, b = values((count, m, k), da, seed=16, special=True), values((count, k, n), db, seed=17, special=True)
    c, bias = edges((count, m, n), dtype, 18), edges((n,), F32, 19)
    lines = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
    shared_a, shared_b = np.broadcast_to(a[:1], a.shape), np.broadcast_to(lines[:1], lines.shape)
    pairs = ((a, b), (a, lines), (shared_a, b), (a, shared_b), (a[::-1], lines))
    for x, y in pairs:
        for options in ({}, {"alpha": 0.5, "beta": 2.0, "c": c, "bias": bias}):
            room = Guarded((count * (m + 1), n), dtype)
            out = _items(room.view, count, m)
            before = room.view.copy()
            asked, read = as_asked(**options)
            execute.gemm_batched(x, y, out[:, :m], asked, **read)
            want = before.reshape(count, m + 1, n)
            for i in range(count):
                each = {name: v[i] if name == "c" else v for name, v in options.items()}
                want[i, :m] = product(x[i], y[i], out_dtype=dtype, **each)
            room.check(want.reshape(room.view.shape))


def _items(view: np.ndarray, count: int, m: int) -> np.ndarray:
    rows, columns = view.strides
    return np.lib.stride_tricks.as_strided(view, (count, m + 1, view.shape[1]), ((m + 1) * rows, rows, columns))


def test_batched_accumulates() -> None:
    count, m, n, k = 9, 5, 37, 20
    a, b, c = values((count, m, k), seed=20), values((count, k, n), seed=21), values((count, m, n), seed=22)
    out = np.full((count, m, n), np.nan, np.float32)
    execute.gemm_batched(a, b, out, Settings(CHAIN, accumulate=True), c=c)
    for i in range(count):
        assert_same(out[i], product(a[i], b[i], c=c[i], accumulate=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("copies", [1, 5])
def test_items_of_any_size(copies: int, threads: int) -> None:
    """Few large ones, each with a grid of its own, and many small ones to a chunk."""
    sizes = [(1, 37, 20), (0, 4, 5), (20, 37, 33), (3, 0, 5), (70, 100, 40), (33, 3, 20), (4, 4, 0), (9, 50, 60)]
    items, wanted, rooms = [], [], []
    for i, (m, n, k) in enumerate(sizes * copies):
        mix = list(MIXES)[i % len(MIXES)]
        stored = ("lines", "rows", "packed")[i % 3]
        a, b, dtype = Walk("", m, n, k, stored, ("", "", "")).operands(mix)
        plain = b.unpack().T if stored == "packed" else b
        c = edges((m, n), F32, i)
        rooms.append(Guarded((m, n), dtype, ("c", "f")[i % 2]))
        items.append((a, b, rooms[-1].view, c))
        acc = reference.evaluate(a.astype(F32), plain.astype(F32), CHAIN)
        wanted.append(reference.epilogue(acc, alpha=2.0, beta=0.5, c=c, out_dtype=dtype))
    isogemm.set_num_threads(threads)
    execute.gemm_items(items, Settings(CHAIN, alpha=2.0, beta=0.5))
    for room, want in zip(rooms, wanted, strict=True):
        room.check(want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 5, 33), (5, 4, 31), (9, 67, 100), (2, 3, 4097), (3, 2, 0)])
def test_lanes(dtype, m, n, k):
    a, b = values((m, k), dtype, seed=k, special=k == 100), values((k, n), dtype, seed=m, special=k == 100)
    want = product(a, b, "fma/lanes32", out_dtype=np.float32)
    assert_same(isogemm.matmul(a, b, contract="fma/lanes32", out_dtype="float32"), want)
    assert_same(isogemm.linear(a, np.ascontiguousarray(b.T), contract="fma/lanes32", out_dtype="float32"), want)


@pytest.mark.parametrize("contract", ["fma/leaf8", "fma/leaf1000", "fma/tree4", "fma/tree16"])
@pytest.mark.parametrize("stored", ["lines", "rows", "packed"])
def test_orders_of_leaves(contract: str, stored: str) -> None:
    for m, n, k in ((1, 37, 45), (20, 37, 45), (3, 5, 0), (2, 9, 3)):
        a, b, dtype = Walk("", m, n, k, stored, ("", "", "")).operands("f32 x bf16")
        plain = b.unpack().T if stored == "packed" else b
        out = Guarded((m, n), dtype)
        execute.gemm(a, b, out.view, Settings(isogemm.Contract.parse(contract), alpha=0.5))
        out.check(product(a, plain, contract, alpha=0.5, out_dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 1, 16, 33, 100])
def test_leaves_meet_where_their_sums_go(k, dtype):
    """Into new memory, into C itself, by columns, from C and with an epilogue behind; a leaf of -0 after +0 is +0."""
    a, b = values((37, k), dtype, seed=1, special=True), values((k, 29), dtype, seed=2, special=True)
    a[3] = 0
    if k:
        a[3, -1], b[-1] = -1e-30, 1e-30  # products that fma rounds to -0 where the type is float32
    start = values((37, 29), seed=3, special=True)
    for contract in ("fma/leaf16", "fma/leaf40"):
        for out in (poisoned((37, 29)), poisoned((29, 37)).T, poisoned((37, 40))[:, 5:34]):
            isogemm.matmul(a, b, out=out, contract=contract, out_dtype="float32")
            assert_same(out, product(a, b, contract, out_dtype="float32"))
        for more in ({"accumulate": True}, {"beta": 1.0}, {"beta": -0.5, "alpha": 2.0}):
            want = product(a, b, contract, c=start, out_dtype="float32", **more)
            into = start.copy()
            assert isogemm.gemm(a, b, into, contract=contract, out=into, out_dtype="float32", **more) is into
            assert_same(into, want)
            assert_same(isogemm.gemm(a, b, start, contract=contract, out_dtype="float32", **more), want)
        narrow = isogemm.matmul(a, b, contract=contract, out_dtype="bfloat16")
        assert_same(narrow, product(a, b, contract, out_dtype="bfloat16"))

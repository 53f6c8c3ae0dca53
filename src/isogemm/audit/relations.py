"""The relations of an audit: pairs of outputs that must have equal bits, and how each pair is made.

A relation lists its cases (each a few named integers and words, which is all that a replay needs) and evaluates one of
them on a `ProviderBench` to a `Pair`. Add a relation by writing one function with a row above it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from .bench import NotApplicable, ProviderBench, sampled_columns
from .data import ActivationSource, Array, arrange
from .providers import FORMS, Function

Params = Mapping[str, int | str]
Evaluate = Callable[[ProviderBench, Params], "Pair"]

FULL_SWEEP = (
    *(1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129),
    *(255, 256, 257, 511, 512, 1000, 1024, 2048, 4096),
)
QUICK_SWEEP = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128, 129, 256)
_ALONE_ROWS = 33  # so many first rows of a batch, its middle and its last are compared with themselves alone
_GRADIENT_ROWS = 256  # rows of a weight whose gradients are summed
_LAYOUTS = ("F/C", "C/F", "F/F", "padded/padded", "rows/rows", "columns/columns", "unaligned/unaligned")
_CONTENTS = ("other", "zero", "large", "nan", "inf")


@dataclass(frozen=True)
class Scope:
    """What the cases range over: the batch sizes, and the machine's thread counts."""

    sweep: tuple[int, ...]
    thread_counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, sweep: Iterable[int]) -> Scope:
        """The sweep with thread counts 1, 2, 3 and all CPUs."""
        return cls(tuple(sorted(set(sweep))), tuple(sorted({1, 2, 3, os.cpu_count() or 1})))


@dataclass(frozen=True)
class Pair:
    """Two arrays that must have equal bits."""

    # expected, got: array [rows, columns]
    expected: Array
    got: Array
    rows: Array  # int array: row numbers in the batch of `x`
    columns: Array  # int array: output column numbers


@dataclass(frozen=True)
class Relation:
    """A way in which a call may differ without a right to other bits.

    Attributes
    ----------
    name, meaning : str
    cases : callable
        ``cases(scope)``: the parameters of each case.
    evaluate : callable
        ``evaluate(bench, params)``: the pair of one case.
    of_devices : bool
        It is about what a CPU does not have, so there it is evaluated only when it is asked for.
    """

    name: str
    meaning: str
    cases: Callable[[Scope], list[Params]]
    evaluate: Evaluate
    of_devices: bool = False


_listed: dict[str, Relation] = {}
RELATIONS: Mapping[str, Relation] = MappingProxyType(_listed)
"""Every relation, by name, in the order of the report."""


def _relation(
    name: str, meaning: str, cases: Callable[[Scope], list[Params]], *, of_devices: bool = False
) -> Callable[[Evaluate], Evaluate]:
    """List the function that evaluates a relation's cases."""

    def listed(evaluate: Evaluate) -> Evaluate:
        _listed[name] = Relation(name, meaning, cases, evaluate, of_devices)
        return evaluate

    return listed


def _int(params: Params, name: str) -> int:
    return int(params[name])


def _whole(bench: ProviderBench, expected: Array, got: Array) -> Pair:
    return Pair(expected, got, np.arange(len(expected)), bench.operands.columns)


def _population_cases(scope: Scope) -> list[Params]:
    alone: list[Params] = [{"m": m, "against": 1} for m in scope.sweep if m > 1]
    batches = [m for m in scope.sweep if m > 1]
    return alone + [{"m": m, "against": less} for less, m in itertools.pairwise(batches)]


@_relation("population", "a row alone and in a batch of M", _population_cases)
def _population(bench: ProviderBench, params: Params) -> Pair:
    """A row in a batch of m against the same row alone, or in a batch of another size."""
    m, against = _int(params, "m"), _int(params, "against")
    got = bench.product(m)
    if against > 1:
        common = min(m, against)
        return _whole(bench, bench.product(against)[:common], got[:common])
    rows = np.unique(np.concatenate([np.arange(min(m, _ALONE_ROWS)), [m // 2, m - 1]]))
    return Pair(np.concatenate([bench.alone(int(r)) for r in rows]), got[rows], rows, bench.operands.columns)


@_relation(
    "position",
    "a row at another index of the batch",
    lambda _: [{"m": m, "shift": s} for m in (2, 4, 9, 16, 33, 128) for s in sorted({1, m // 2})],
)
def _position(bench: ProviderBench, params: Params) -> Pair:
    """The batch with its rows moved round by `shift`, against the batch as it was."""
    m, shift = _int(params, "m"), _int(params, "shift")
    moved = bench.keep(bench.call(arrange(np.roll(bench.x(m), shift, axis=0), "C")))
    return _whole(bench, bench.product(m), np.roll(moved, -shift, axis=0))


@_relation(
    "neighbours",
    "a row beside rows of other contents",
    lambda _: [{"m": m, "contents": c} for m in (2, 7, 16, 64, 129) for c in _CONTENTS],
)
def _neighbours(bench: ProviderBench, params: Params) -> Pair:
    """Three rows of a batch whose other rows hold something else, against the batch as it was."""
    m, contents = _int(params, "m"), str(params["contents"])
    rows = np.unique([0, m // 2, m - 1]) if m > 2 else np.array([0])
    x = bench.x(m)
    others = np.setdiff1d(np.arange(m), rows)
    if contents == "other":
        x[others] = bench.operands.draw(m, stream=4)[others]
    else:
        x[others] = {"zero": 0.0, "large": 1e4, "nan": np.nan, "inf": np.inf}[contents]
    return Pair(bench.product(m)[rows], bench.keep(bench.call(x))[rows], rows, bench.operands.columns)


@_relation(
    "padding",
    "rows followed by rows of zeros",
    lambda _: [{"m": m, "padded": p} for m, p in ((1, 8), (5, 8), (17, 32), (100, 128), (250, 256))],
)
def _padding(bench: ProviderBench, params: Params) -> Pair:
    """m rows followed by rows of zeros, against the m rows."""
    m, padded = _int(params, "m"), _int(params, "padded")
    x = bench.x(padded)
    x[m:] = 0
    return _whole(bench, bench.product(m), bench.keep(bench.call(x))[:m])


def chunk_lengths(text: str) -> list[int]:
    """Rows of each chunk; ``64+1x24`` is 64 rows and then 24 times one."""
    parts = (part.partition("x") for part in text.split("+"))
    return [rows for length, _, times in parts for rows in [int(length)] * int(times or 1)]


@_relation(
    "schedule",
    "a prefill in chunks or token by token",
    lambda _: [{"chunks": c} for c in ("100+156", "128+128", "64+64+64+64", "1x24", "28+1+1+1+1")],
)
def _schedule(bench: ProviderBench, params: Params) -> Pair:
    """Rows fed in chunks (a chunked prefill, or token by token), against all rows at once."""
    lengths = chunk_lengths(str(params["chunks"]))
    ends = np.cumsum(lengths)
    x = bench.x(int(ends[-1]))
    parts = [
        bench.keep(bench.call(arrange(x[end - length : end], "C"))) for end, length in zip(ends, lengths, strict=True)
    ]
    return _whole(bench, bench.product(int(ends[-1])), np.concatenate(parts))


@_relation("packing", "a weight prepared first", lambda _: [{"m": m} for m in (1, 2, 5, 16, 64, 128)])
def _packing(bench: ProviderBench, params: Params) -> Pair:
    """The product with a weight prepared first, against the weight as it lies."""
    m = _int(params, "m")
    if bench.provider.packed is None:
        raise NotApplicable(f"{bench.provider.name} prepares no weights")
    expected, columns = bench.part_product(m)
    got = bench.keep(bench.call(bench.x(m), bench.part(), bench.provider.packed), columns)
    return Pair(expected, got, np.arange(m), columns)


@_relation("rerun", "the same call again", lambda _: [{"m": m, "times": 3} for m in (1, 5, 64, 256)])
def _rerun(bench: ProviderBench, params: Params) -> Pair:
    """The same call again and again, against the first."""
    m, times = _int(params, "m"), _int(params, "times")
    first = bench.product(m)
    again = [bench.keep(bench.call(bench.x(m))) for _ in range(times)]
    rows = np.tile(np.arange(m), times)
    return Pair(np.concatenate([first] * times), np.concatenate(again), rows, bench.operands.columns)


@_relation(
    "threads",
    "another number of threads",
    lambda scope: [{"m": m, "threads": t} for m in (1, 5, 64, 256) for t in scope.thread_counts],
)
def _threads(bench: ProviderBench, params: Params) -> Pair:
    """The same call with a thread count, against the count in force."""
    m = _int(params, "m")
    expected = bench.product(m)
    with bench.provider.threads(_int(params, "threads")):
        got = bench.keep(bench.call(bench.x(m)))
    return _whole(bench, expected, got)


def _blocks(form: str) -> tuple[int, ...]:
    return (1,) if form == "shared" else (2, 5)


@_relation(
    "form",
    "loop, batched and strided forms",
    lambda _: [{"m": m, "form": f, "blocks": b} for m in (1, 4, 17, 128) for f in FORMS for b in _blocks(f)],
)
def _form(bench: ProviderBench, params: Params) -> Pair:
    """Another form of the product over column blocks, against one wide GEMM."""
    m, blocks = _int(params, "m"), _int(params, "blocks")
    n = len(bench.operands.w) // blocks * blocks
    if not n:
        raise NotApplicable(f"fewer than {blocks} columns")
    columns = bench.operands.columns[bench.operands.columns < n]
    y = bench.call_form(str(params["form"]), bench.x(m), bench.operands.w[:n], blocks)
    expected = bench.product(m)[:, : len(columns)]
    return Pair(expected, bench.keep(y, columns), np.arange(m), columns)


@_relation(
    "layout",
    "orders, strides and alignments of x and w",
    lambda _: [{"m": m, "layout": layout} for m in (1, 5, 64) for layout in _LAYOUTS],
)
def _layout(bench: ProviderBench, params: Params) -> Pair:
    """x and w with the same values in another memory layout, against both dense and row-major."""
    m = _int(params, "m")
    layout_x, _, layout_w = str(params["layout"]).partition("/")
    expected, columns = bench.part_product(m)
    x = arrange(bench.x(m), layout_x)
    got = bench.keep(bench.call(x, arrange(bench.part(), layout_w)), columns)
    return Pair(expected, got, np.arange(m), columns)


def _gradients(bench: ProviderBench, m: int, width: int) -> Array:
    """Gradients [m, width] that come from the layer behind."""
    operands = bench.operands
    return ActivationSource().rows(m, width, operands.dtype, operands.seed, stream=5)


@_relation(
    "backward",
    "gradients of x, whole and in micro-batches",
    lambda _: [{"m": m, "rows": r} for m, r in ((64, 1), (64, 32), (256, 64), (257, 100))],
)
def _backward(bench: ProviderBench, params: Params) -> Pair:
    """dx = dy @ w of micro-batches of so many rows, against all rows at once."""
    m, rows = _int(params, "m"), _int(params, "rows")
    bench.x(m)  # within the memory limit
    turned = bench.operands.w.T
    columns = sampled_columns(len(turned), len(bench.operands.columns))
    dy = arrange(_gradients(bench, m, turned.shape[1]), "C")
    parts = [bench.keep(bench.call(arrange(dy[i : i + rows], "C"), turned), columns) for i in range(0, m, rows)]
    return Pair(bench.keep(bench.call(dy, turned), columns), np.concatenate(parts), np.arange(m), columns)


@_relation(
    "accumulation",
    "gradients of w, whole and summed over micro-batches",
    lambda _: [{"m": m, "parts": p} for m, p in ((64, 2), (256, 2), (256, 8), (512, 4))],
)
def _accumulation(bench: ProviderBench, params: Params) -> Pair:
    """dw = dy.T @ x summed over equal micro-batches, multiples of 32 rows, against all rows at once."""
    m, parts = _int(params, "m"), _int(params, "parts")
    x, dy = bench.x(m), _gradients(bench, m, min(len(bench.operands.w), _GRADIENT_ROWS))
    dy = arrange(dy, "C")
    whole, summed = (_summed(bench, dy, x, count) for count in (1, parts))
    return Pair(whole, summed, np.arange(len(whole)), np.arange(whole.shape[1]))


def _summed(bench: ProviderBench, dy: Array, x: Array, count: int) -> Array:
    """The gradients of w summed over `count` micro-batches."""
    accumulate = bench.provider.accumulate
    if accumulate is None:
        raise NotApplicable(f"{bench.provider.name} sums no gradients")
    bounds = [len(x) * i // count for i in range(count + 1)]

    def run(left: Array, right: Array) -> Array:
        total = None
        for here in itertools.starmap(slice, itertools.pairwise(bounds)):
            total = accumulate(total, left.T[here], right.T[here])
        return total  # type: ignore[return-value]  # of one part at least

    return np.array(bench.call(dy.T, x.T, run, sums=True))


@_relation(
    "stream", "the call on another stream of the device", lambda _: [{"m": m} for m in (1, 16, 256)], of_devices=True
)
def _stream(bench: ProviderBench, params: Params) -> Pair:
    """The product on a stream of its own, against the current stream."""
    return _elsewhere(bench, _int(params, "m"), bench.provider.streamed, "has no streams here")


@_relation("graph", "the call captured and replayed", lambda _: [{"m": m} for m in (1, 16, 256)], of_devices=True)
def _graph(bench: ProviderBench, params: Params) -> Pair:
    """The product replayed from a graph that was captured over other values, against the call itself."""
    return _elsewhere(bench, _int(params, "m"), bench.provider.captured, "captures no graphs here")


def _elsewhere(bench: ProviderBench, m: int, run: Function | None, lacks: str) -> Pair:
    if run is None:
        raise NotApplicable(f"{bench.provider.name} {lacks}")
    return _whole(bench, bench.product(m), bench.keep(bench.call(bench.x(m), run=run)))

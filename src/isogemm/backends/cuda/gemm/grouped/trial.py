"""Grouped kernels run on drawn groups among poison, and compared with the definition, bit by bit.

Groups have none, one, sixteen and one more, and more rows than a tile; rows behind the last one are NaNs, and one group
holds numbers without a finite sum, so that a row read for a neighbour shows. Lines of operands and of results have
poison between them. A launch of few blocks walks many tiles with each. Features repeat with a period that no tile has,
so that many cost the definition little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .....base.dtypes import ITEMSIZE, NUMPY
from .....contract.reference import epilogue, evaluate
from .....contract.spec import Contract, Order
from .....planner.bench import Bench, among_poison, words_of
from .....planner.family import Family
from ...driver.kernel import Bound
from ..hopper.config import HopperConfig, HopperSide
from .case import ENDS, GroupedCase

Array = NDArray[Any]
PERIOD, TIMES = 41, 8  # features: more than a tile has
COUNTS, OUTER_COUNTS = (0, 1, 17, 300, 0, 16, 70, 5), (0, 1, 17, 700, 0, 16, 129, 5)
BEHIND, DEPTH, LEAF, FEW = 9, 552, 256, 3


class TriedGroups(Family[GroupedCase, Bound], Protocol):
    """A family, as its trial needs it."""

    def bind(self, case: GroupedCase, config: str, device: int, blocks: int = ...) -> Bound:
        """The launch of so many blocks at most."""
        ...


@dataclass(frozen=True)
class Drawn:
    """A case of a trial: rows of all groups, weights (or the other rows), biases and sums to start from."""

    case: GroupedCase
    counts: tuple[int, ...]
    x: Array  # [groups, n, k], or rows [rows, n]
    y: Array  # [rows, k], or [rows, m]
    bias: Array | None
    start: Array | None


def try_grouped(bench: Bench, family: TriedGroups, case: GroupedCase, config: str) -> str:
    """Empty where every bit was right, else the first difference."""
    parsed = HopperConfig.parse(config)
    assert parsed is not None
    each = _drawn(case, parsed)
    if not family.supports(each.case, config) or family.code(each.case, config) != family.code(case, config):
        return "no operands of a trial have this code"
    want = _wanted(each)
    for blocks in (FEW, 2**30):
        found = _differs(bench, family, each, config, blocks, want)
        if found:
            return f"groups of {list(each.counts)}, {blocks} blocks: {found}"
    return ""


def _drawn(case: GroupedCase, c: HopperConfig) -> Drawn:
    counts = OUTER_COUNTS if case.outer else COUNTS
    rows, n, size = sum(counts) + BEHIND, PERIOD * TIMES, ITEMSIZE[case.dtype_out]
    rng = np.random.default_rng(7)
    vector = case.out_step * size % 16 == 0 and case.out_batch * size % 16 == 0
    step = n + (8 if vector else 3)
    order = Order("leaf", max(LEAF, c.depth)) if case.contract.order.kind == "leaf" else Order()
    depth = 0 if case.outer else DEPTH
    x = HopperSide(n, n + 8, 0, True)
    y = HopperSide(n, n + 16, 0, True) if case.outer else HopperSide(rows, DEPTH + 16, 0, False)
    if not case.outer:
        across = case.x.across
        high, wide = (DEPTH, n) if across else (n, DEPTH)
        x = HopperSide(n, wide + 8, (wide + 8) * (high + 1), across)
    made = replace(
        case, groups=len(counts), rows=rows, depth=depth, x=x, y=y, contract=Contract(case.contract.arithmetic, order),
        bias_step=1, bias_batch=n if case.dtype_bias else 0, out_step=step,
        out_batch=step * (n + 8) if case.outer else 0,
    )  # fmt: skip
    dtype = NUMPY[case.dtype]
    with np.errstate(all="ignore"):
        values = _values(rng, (rows, PERIOD if case.outer else DEPTH), counts, 128.0).astype(dtype)
        shape = (rows, PERIOD) if case.outer else (len(counts), PERIOD, DEPTH)
        weights = _values(rng, shape, counts if case.outer else (), -128.0).astype(dtype)
    bias = rng.standard_normal((len(counts), PERIOD)).astype(NUMPY[case.dtype_bias]) if case.dtype_bias else None
    start = rng.standard_normal((len(counts), PERIOD, PERIOD)).astype(np.float32) if case.accumulate else None
    return Drawn(made, counts, weights, values, bias, start)


def _values(rng: np.random.Generator, shape: tuple[int, ...], counts: tuple[int, ...], last: float) -> Array:
    """Numbers far apart; products at K's ends cancel, so that what lies between is summed with few bits."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-5, 5, shape)
    rows = shape[-1] == PERIOD  # they are K
    if not rows:
        x[..., ::2, 0], x[..., ::2, -1] = 128.0, last
    begin = 0
    for i, n in enumerate(counts):
        if rows and n > 1:
            x[begin, ::2], x[begin + n - 1, ::2] = 128.0, last
        if i == 2:
            x[begin + 1], x[begin + 2], x[begin + 3] = np.inf, np.nan, 3e38
        begin += n
    if counts:
        x[begin:] = np.nan
    return x


def _wanted(each: Drawn) -> Array:
    case, begin, found = each.case, 0, []
    for g, n in enumerate(each.counts):
        rows = each.y[begin : begin + n]
        a, b = (each.x[begin : begin + n].T, rows) if case.outer else (rows, each.x[g].T)
        start = None if each.start is None else each.start[g]
        walked = evaluate(np.ascontiguousarray(a), np.ascontiguousarray(b), case.contract, start) if n else None
        if walked is None:
            walked = np.zeros((a.shape[0], b.shape[1]), np.float32) if start is None else start
        bias = None if each.bias is None else each.bias[g]
        found.append(epilogue(walked, bias=bias, out_dtype=NUMPY[case.dtype_out]))
        begin += n
    if case.outer:
        return np.tile(np.stack(found), (1, TIMES, TIMES))
    found.append(np.zeros((BEHIND, PERIOD), NUMPY[case.dtype_out]))
    return np.tile(np.concatenate(found), (1, TIMES))


def _differs(bench: Bench, family: TriedGroups, each: Drawn, config: str, blocks: int, want: Array) -> str:
    case, kind = each.case, np.int64 if each.case.lengths == 1 else np.int32
    x = np.tile(each.x, (1, TIMES)) if case.outer else np.tile(each.x, (1, TIMES, 1))
    y = np.tile(each.y, (1, TIMES)) if case.outer else each.y
    steps_x = (
        (case.x.step, 1) if case.outer else (case.x.batch, *((1, case.x.step) if case.x.across else (case.x.step, 1)))
    )
    at_x, at_y = (
        bench.put(among_poison(words_of(np.ascontiguousarray(v)), steps)[0])
        for v, steps in ((x, steps_x), (y, (case.y.step, 1)))
    )
    lengths = bench.put(np.array(np.cumsum(each.counts) if case.lengths == ENDS else each.counts, kind))
    bias = bench.put(None if each.bias is None else np.tile(each.bias, (1, TIMES)))
    inner = (1, case.out_step) if case.columns and case.outer else (case.out_step, 1)
    held = None if each.start is None else words_of(np.ascontiguousarray(np.tile(each.start, (1, TIMES, TIMES))))
    out = bench.output(
        want.shape, want.itemsize, strides=(case.out_batch, *inner) if case.outer else inner, held=held
    )  # fmt: skip
    launch = family.bind(case, config, bench.device, blocks)
    launch(bench.stream(), *(x.address if x else 0 for x in (at_x, at_y, lengths, out, bias)))
    return out.compare("out", want)

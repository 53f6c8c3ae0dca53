"""Attention whose queries have ranges of keys of their own, as a mask shows them: kernels/attention_ranged.py.

Ranges are found on the device, and nothing waits for them. Where all queries of a batch entry share their leaves
(causal masks, padding) the kernels of `attention_plans` compute it; entries where they do not (sliding windows, heads
whose masks begin elsewhere) are left to `attention_ranged`, which leaves the others alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ....contract.attention import LEAF
from ..driver.workspace import workspace
from .plans import (  # fmt: skip
    FMA_ROWS,
    KINDS,
    Case,
    Run,
    bind_fma,
    blocks_of,
    compiled,
    fma_defines,
    ints,
    longs,
    mask_defines,
    triton_facts,
)

__all__ = ["Lines", "bind_ranged", "code_of_ranged", "lines_of", "one_range", "together"]


class Lines(NamedTuple):
    """Lines of a mask that are different: [batch entries, heads, tokens], 1 where one serves all."""

    entries: int
    heads: int
    tokens: int

    @property
    def number(self) -> int:
        return self.entries * self.heads * self.tokens

    @property
    def steps(self) -> tuple[int, int, int]:
        """Strides of what has one number a line, over entries, heads and tokens."""
        sizes = (self.heads * self.tokens, self.tokens, 1)
        return tuple(step if n > 1 else 0 for step, n in zip(sizes, self, strict=True))  # type: ignore[return-value]


def lines_of(case: Case) -> Lines:
    """Those of a mask of every batch entry: an entry's range is found for each, whatever it shares."""
    _, head, token, _ = case.mask or (0, 0, 0, 0)
    return Lines(case.batch, case.heads if head else 1, case.tq if token else 1)


def one_range(case: Case) -> bool:
    """Whether all queries of a batch entry have one line of the mask."""
    return lines_of(case).number == case.batch


def together(case: Case) -> Case:
    """What the other kernels compute: batch entries with a range each."""
    return replace(case, starts=True, stops=True)


def code_of_ranged(case: Case, device: int) -> str:
    """The text of all that selects the code of the three kernels."""
    if case.fma:
        parts = fma_defines(case)
    else:
        _, constants, hints, options, _ = _facts(case, device)
        kinds = {"KIND": KINDS[case.dtype], "OUT": KINDS[case.dtype_out], "HINTS": ",".join(hints)}
        parts = {name: value for name, value in constants.items() if name != "TERMS"} | options | kinds
    return " ".join(f"{key}={value}" for key, value in {**parts, **_defines(case)}.items())


def _defines(case: Case) -> dict[str, object]:
    chosen = {key: value for key, value in mask_defines(case).items() if key in ("MASK", "MASK_KIND")}
    return chosen | {"TILE": _tile(case)}


def _pack(case: Case) -> int:
    """Query heads of a program, which share keys and ranges."""
    return case.group if lines_of(case).heads == 1 and case.group <= 64 else 1


def _rows(case: Case) -> int:
    """Rows of a tile of the Triton kernel."""
    return 16 if case.tq * _pack(case) <= 16 else 64


def _tile(case: Case) -> int:
    """Tokens of a tile."""
    return FMA_ROWS if case.fma else _rows(case) // _pack(case)


def _tiles(case: Case) -> int:
    """The most tiles that tokens can need, each of one place of a leaf."""
    return min(case.tq, case.tq // _tile(case) + LEAF)


def _bind_prelude(case: Case, device: int) -> tuple[Run, Run]:
    """Launches ``(stream, mask, start, stop)`` and ``(stream, start, stop, first, last, apart, order)``."""
    from ..driver.kernel import load

    cubin, lines = compiled(("attention/ranges.cu",), device, _defines(case), case.dtype), lines_of(case)
    find = load(cubin, "attention_ranges", device).bind(
        [*["ptr"] * 3, *longs(*(case.mask or (0, 0, 0, 0))), *ints(lines.heads, lines.tokens, lines.number, case.tk)],
        grid=(-(-lines.number // 8),), block=(256,), pdl=True,
    )  # fmt: skip
    sizes = ints(lines.heads, lines.tokens, case.tq, _tiles(case) * _tile(case))
    put_in_order = load(cubin, "attention_order", device).bind(
        [*["ptr"] * 6, *sizes], grid=(lines.heads, case.batch), block=(256,), pdl=True
    )
    return find, put_in_order


def _steps(case: Case) -> dict[str, int]:
    """Strides of ranges, and of the order in which tokens are taken."""
    heads, slots = lines_of(case).heads, _tiles(case) * _tile(case)
    steps = dict(zip(("range_b", "range_h", "range_t"), lines_of(case).steps, strict=True))
    return steps | {"order_b": heads * slots, "order_h": slots if heads > 1 else 0}


def _facts(case: Case, device: int) -> tuple[Any, ...]:
    """As `triton_facts`, of the kernel for ranges."""
    types, constants, hints, options, values = triton_facts(together(case), "walk", _rows(case), device)
    for name in ("CAUSAL", "STARTS", "STOPS", "WALK"):
        del constants[name]
    for name in ("offset", "tk"):
        del types[name], values[name]
    del types["sums"]
    types |= {"apart": "*i32", "order": "*i32", "tiles": "i32"} | dict.fromkeys(_steps(case), "i64")
    values |= _steps(case) | {"pack": _pack(case), "tiles": _tiles(case)}
    return types, constants, tuple(x for x in hints if x != "sums"), options, values


def _walk(case: Case, device: int) -> Callable[..., None]:
    """``(stream, q, k, v, mask, start, stop, y, stats, apart, order)``."""
    if case.fma:
        return bind_fma(case, device, (*_steps(case).values(), _tiles(case)))
    return _triton_walk(case, device)


@functools.lru_cache(maxsize=256)
def _triton_walk(case: Case, device: int) -> Callable[..., None]:
    from ..driver.triton_build import build
    from ..gemm.tile.family import arch
    from .ranged_tile import attention_ranged

    types, constants, hints, options, values = _facts(case, device)
    built = build(
        attention_ranged,
        types,
        constants,
        aligned=hints,
        capability=arch(device),
        launch_pdl=constants["PDL"],
        **options,
    )
    bundles = case.heads // _pack(case)
    grid = (min(_tiles(case), blocks_of(bundles * case.batch, device)), bundles, case.batch)
    return built.bind(device, grid, values, pdl=True)


def bind_ranged(case: Case, device: int, main: Run | None) -> Run:
    """The launch of a call whose ranges are those of its mask; `start` and `stop` of the launch are not read.

    Parameters
    ----------
    case : Case
        With a mask, without `offset`, `starts` and `stops`.
    device : int
    main : callable or None
        What computes batch entries of one range: a launch of `together`. None leaves them as they are, for a trial.
    """
    lines, b = lines_of(case), case.batch
    find, put_in_order = _bind_prelude(case, device)
    if one_range(case):

        def run_one(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
            memory = workspace(8 * b, device)
            first = memory.data_ptr()
            find(stream, mask, first, first + 4 * b)
            if main is not None:
                main(stream, q, k, v, mask, first, first + 4 * b, y, stats)

        return run_one
    walk = _walk(case, device)
    sizes = (lines.number, lines.number, b, b, b, b * lines.heads * _tiles(case) * _tile(case))
    begin = [4 * sum(sizes[:i]) for i in range(7)]

    def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
        memory = workspace(begin[6], device)
        base = memory.data_ptr()
        starts, stops, first, last, apart, order = (base + at for at in begin[:6])
        find(stream, mask, starts, stops)
        put_in_order(stream, starts, stops, first, last, apart, order)
        if main is not None:
            main(stream, q, k, v, mask, first, last, y, stats)
        walk(stream, q, k, v, mask, starts, stops, y, stats, apart, order)

    return run

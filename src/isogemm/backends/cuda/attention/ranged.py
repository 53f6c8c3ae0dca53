"""Attention whose queries have ranges of keys of their own, as a mask shows them: attention/windows.py, ranges.cu.

Ranges are found on the device, and nothing waits for them. Where all queries of a batch entry share their leaves
(causal masks, padding) the other kernels compute it; entries where they do not (sliding windows, heads whose masks
begin elsewhere) are left to `attention_ranged`, which leaves the others alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....contract.attention import LEAF, ranges
from ....planner.bench import Bench
from ..driver.kernel import ints, longs
from ..driver.workspace import workspace
from .case import AttentionCase
from .family import Attention, blocks_of, loaded, mask_defines
from .fma import ROWS, FmaAttention
from .trial import NATIVE, Contents, Run, by_definition, compared, contents, outputs, shrunk, windows
from .walk import TypesAndValues, WalkAttention, compiled_by_triton, triton_facts, triton_text


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


def lines_of(case: AttentionCase) -> Lines:
    """The lines of a mask, of every batch entry: an entry's range is found for each, whatever it shares."""
    _, head, token, _ = case.mask or (0, 0, 0, 0)
    return Lines(case.batch, case.heads if head else 1, case.tq if token else 1)


def one_range(case: AttentionCase) -> bool:
    """Whether all queries of a batch entry have one line of the mask."""
    return lines_of(case).number == case.batch


def together(case: AttentionCase) -> AttentionCase:
    """What the other kernels compute: batch entries with a range each."""
    return replace(case, starts=True, stops=True)


@dataclass(frozen=True)
class RangedAttention(Attention):
    """A family of the three kernels: `main` computes batch entries of one range, a launch of `together`.

    Without it those are left as they are, for a trial.
    """

    main: Run | None = None
    name = "attention ranged"

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        parts = FmaAttention().defines(case) if case.fma else triton_text(case, _facts(case))
        return parts | _defines(case)

    def supports(self, case: AttentionCase, config: str = "") -> bool:
        return case.mask is not None and (case.fma or case.tensor_cores)

    def trial(self, bench: Bench, case: AttentionCase, config: str) -> str:
        """On masks of windows; batch entries of one range are computed by the plainest kernel."""
        each = shrunk(case)
        if self.configs(each) != self.configs(case):
            return "no operands of a trial have this code"
        held = contents(each, windows)
        plain = (FmaAttention() if each.fma else WalkAttention()).bind(together(each), "", bench.device)
        assert held.mask is not None
        start, stop = ranges(held.mask)
        if case.arithmetic == NATIVE:
            want: Any = _by_range(bench, plain, each, held, start, stop)
        else:
            want = by_definition(each, replace(held, start=start, stop=stop))
        return compared(each, *outputs(bench, RangedAttention(plain).launch(each), each, held), want)

    def launch(self, case: AttentionCase) -> Run:
        """Run a case with a mask, without `offset`, `starts` and `stops`; the launch reads no `start` and `stop`."""
        lines, b, device, main = lines_of(case), case.batch, case.device, self.main
        find, put_in_order = _bind_prelude(case)
        if one_range(case):

            def run_one(
                stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int
            ) -> None:
                memory = workspace(8 * b, device)
                first = memory.data_ptr()
                find(stream, mask, first, first + 4 * b)
                if main is not None:
                    main(stream, q, k, v, mask, first, first + 4 * b, y, stats)

            return run_one
        walk = FmaAttention().launch(case, (*_steps(case).values(), _tiles(case))) if case.fma else _triton_walk(case)
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


def _by_range(
    bench: Bench, plain: Run, case: AttentionCase, held: Contents, start: NDArray[Any], stop: NDArray[Any]
) -> list[NDArray[Any] | None]:
    """[y, m, l] of queries with a range each, by the plainest kernel for one range after another."""
    found: list[NDArray[Any] | None] = []
    ones = np.ones(case.batch, np.int32)
    for first, last in sorted({*zip(start.ravel().tolist(), stop.ravel().tolist(), strict=True)}):
        one, _ = outputs(bench, plain, case, replace(held, start=first * ones, stop=last * ones))
        found = found or one
        for whole, part in zip(found, one, strict=True):
            if whole is not None and part is not None:
                rows = (start == first) & (stop == last)
                whole[rows] = part[rows]
    return found


def _defines(case: AttentionCase) -> dict[str, Any]:
    chosen = {key: value for key, value in mask_defines(case).items() if key in ("MASK", "MASK_KIND")}
    return chosen | {"TILE": _tile(case)}


def _pack(case: AttentionCase) -> int:
    """Query heads of a program, which share keys and ranges."""
    return case.group if lines_of(case).heads == 1 and case.group <= 64 else 1


def _rows(case: AttentionCase) -> int:
    """Rows of a tile of the Triton kernel."""
    return 16 if case.tq * _pack(case) <= 16 else 64


def _tile(case: AttentionCase) -> int:
    """Tokens of a tile."""
    return ROWS if case.fma else _rows(case) // _pack(case)


def _tiles(case: AttentionCase) -> int:
    """The most tiles that tokens can need, each of one place of a leaf."""
    return min(case.tq, case.tq // _tile(case) + LEAF)


def _bind_prelude(case: AttentionCase) -> tuple[Run, Run]:
    """Launches ``(stream, mask, start, stop)`` and ``(stream, start, stop, first, last, apart, order)``."""
    lines, defines = lines_of(case), _defines(case)
    find = loaded("ranges", case, defines).bind(
        [*["ptr"] * 3, *longs(*(case.mask or (0, 0, 0, 0))), *ints(lines.heads, lines.tokens, lines.number, case.tk)],
        grid=(-(-lines.number // 8),), block=(256,), pdl=True,
    )  # fmt: skip
    sizes = ints(lines.heads, lines.tokens, case.tq, _tiles(case) * _tile(case))
    put_in_order = loaded("ranges", case, defines, function="attention_order").bind(
        [*["ptr"] * 6, *sizes], grid=(lines.heads, case.batch), block=(256,), pdl=True
    )
    return find, put_in_order


def _steps(case: AttentionCase) -> dict[str, int]:
    """Strides of ranges, and of the order in which tokens are taken."""
    heads, slots = lines_of(case).heads, _tiles(case) * _tile(case)
    steps = dict(zip(("range_b", "range_h", "range_t"), lines_of(case).steps, strict=True))
    return steps | {"order_b": heads * slots, "order_h": slots if heads > 1 else 0}


def _facts(case: AttentionCase) -> TypesAndValues:
    """What `triton_facts` is, of the kernel for ranges."""
    types, constants, hints, options, values = triton_facts(together(case), WalkAttention.index, _rows(case))
    for name in ("CAUSAL", "STARTS", "STOPS", "WALK"):
        del constants[name]
    for name in ("offset", "tk"):
        del types[name], values[name]
    del types["sums"]
    types |= {"apart": "*i32", "order": "*i32", "tiles": "i32"} | dict.fromkeys(_steps(case), "i64")
    values |= _steps(case) | {"pack": _pack(case), "tiles": _tiles(case)}
    return types, constants, tuple(x for x in hints if x != "sums"), options, values


@functools.lru_cache(maxsize=256)
def _triton_walk(case: AttentionCase) -> Callable[..., None]:
    """``(stream, q, k, v, mask, start, stop, y, stats, apart, order)``."""
    from .windows import attention_ranged

    found, bundles = _facts(case), case.heads // _pack(case)
    grid = (min(_tiles(case), blocks_of(bundles * case.batch, case.device)), bundles, case.batch)
    return compiled_by_triton(attention_ranged, case, found).bind(case.device, grid, found[-1])

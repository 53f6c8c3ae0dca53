"""Sums through memory that ranks map: what kernels write there travels by gloo."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from tests.distributed.worlds.layers import by_columns, by_rows, by_sequence
from tests.distributed.worlds.parts import BF16, F32, ORDER, random, whole

import isogemm.torch as iso
from isogemm.torch.distributed import Ranks, mapped, sums
from isogemm.torch.distributed.tree import finished, fixed_sum


class Mapped:
    """Memory that the ranks map, as far as sums see it: what kernels write there travels by gloo."""

    def __init__(self, of, right=True):
        self.of, self.right, self.box, self.sent, self.gathers = of, right, self, {}, False

    def send(self, to, partial):
        self.sent[to] = partial.clone()

    def wait(self):
        pass

    def _total(self, parts, bias, dtype):
        first, *rest = parts
        return finished(fixed_sum([first, *rest] if self.right else [*rest, first]), bias, dtype)

    def one_shot(self, partial, out, bias):
        out.copy_(self._total(self.of.gather(partial, "one shot"), bias, out.dtype))

    def two_shot(self, partial, out, bias, rows, *, there, scatter):
        size, share = self.of.size, -(-rows // self.of.size)
        parts = dict(enumerate(partial.split(share))) if not there else {**self.sent, self.of.rank: partial}
        room = partial.new_zeros(size, share, partial.shape[1])
        for to, part in parts.items():
            room[to, : len(part)] = part
        self.sent = {}
        own = self._total(list(self.of.exchange(room, "two shot")), bias, out.dtype)
        out.copy_(own if scatter else torch.cat(self.of.gather(own, "results"))[:rows])


def _noted(way, call, calls):
    """The call, of which the list hears."""

    def noted(*operands, there=None, **options):
        calls.append({None: way, False: f"{way}, sent", True: f"{way}, copied"}[there])
        return call(*operands, **options, **({} if there is None else {"there": there}))

    return noted


def through_memory(rank):
    """Sums through memory that ranks map: every way, and a kernel whose tree is another one, which is not taken."""
    dist.barrier()
    sums.OVERLAP_ROWS, maps = 8, Ranks.maps
    mapped.SHAPES = ((1, 8), (37, 264), (96, 1024))  # no GPU is to be filled: enough that bfloat16 shows a wrong tree
    kernels = SimpleNamespace(ONE_SHOT_BYTES=3 * 4 * 48 * 4, TWO_SHOT_BYTES=4 * 5 * 48 * 4)  # of 4 and of 20 rows
    mapped.column, Ranks.maps = (lambda *_: kernels), lambda self, *_: self.size > 1
    four, calls = Ranks(dist.group.WORLD, ORDER), []
    for right in (True, False):
        made = Mapped(four, right)
        for way in ("one_shot", "two_shot"):
            call = getattr(made, way)
            setattr(made, way, _noted(way, call, calls))
        Ranks.shared = lambda self, *_, made=made: made
        mapped._wrong.clear()
        for dtype in (F32, BF16):
            for rows in (1, 4, 17, 24, 40):
                x, dy = random(rows, 32, seed=3, dtype=dtype), random(rows, 48, seed=4, dtype=dtype)
                want = iso.linear(x, *whole(dtype), contract=f"fma/{ORDER}")
                del calls[:]
                differ = by_rows(x, dy, four, dtype, want) + by_columns(x, dy, four, dtype)
                if rows % 4 == 0:
                    differ += by_sequence(x, dy, four, dtype, want)
                said = {"ways": sorted(set(calls)), "tried": list(mapped._wrong.values())}
                yield {"what": f"through memory {right} {dtype} {rows} rows", "differ": differ, **said}
    Ranks.maps = maps

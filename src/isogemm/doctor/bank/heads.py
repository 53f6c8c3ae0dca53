"""Mistakes about which key-value head a query head reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..case import GemmCall, Variant


def mapping(case: GemmCall) -> Iterator[Variant]:
    """Heads tiled where they should be repeated, or groups of another size."""
    held = sorted(set(case.b.offsets))
    heads, kv = case.items, len(held)
    if kv < 2 or heads <= kv or heads % kv:
        return
    maps = {f"head % {kv}": [h % kv for h in range(heads)]}
    for group in (1, 2, 4, 8, kv):
        if group != heads // kv:
            maps[f"min(head // {group}, {kv - 1})"] = [min(h // group, kv - 1) for h in range(heads)]
    maps["0"] = [0] * heads
    seen = {case.b.offsets}
    for words, which in maps.items():
        offsets = tuple(held[h] for h in which)
        if offsets not in seen:
            seen.add(offsets)
            said = f"head h reads key-value head {words.replace('head', 'h')}, not h // {heads // kv}"
            yield Variant(said, case.read("b", replace(case.b, offsets=offsets)))

"""Lines and a table of what ranks measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ..common import ratio_text, seconds_text

__all__ = ["lines", "table"]


def lines(done: Mapping[str, Any]) -> list[str]:
    """One row as it comes: bits, or a time of each candidate and what it launched."""
    if "timings" not in done:
        found = f"{done['differing']:,} of {done['compared']:,} differ"
        found = f"relative difference {done['relative']:.2g}" if "relative" in done else found
        return [f"{done['name']}: {found}. {done['error'] or ''}"]
    found = [done["name"]]
    for name, timing in done["timings"].items():
        seen = done["launches"].get(name)
        launched = f"{seen['launches']:5d} launches, {seen['busy_us']:8.1f} us busy, " if seen else ""
        took = f"first call {done['first_call_seconds'][name]:.1f} s"
        found.append(f"{name:45} {timing['median'] * 1e6:9.1f} us; {launched}{took}")
    return [*found, *(f"absent: {name}: {why}" for name, why in done["absent"].items())]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every candidate beside torch's fastest way."""
    found = Table(title="speed against torch's fastest way, with 95 % intervals", title_justify="left", pad_edge=False)
    for name in ("case", "candidate", "time", "tokens/s", "/ torch", "torch's fastest"):
        found.add_column(name, no_wrap=True)
    for done in rows:
        for v in done.get("verdicts", ()):
            median, rate = done["timings"][v["ours"]]["median"], f"{done['tokens_per_second'][v['ours']]:,.0f}"
            found.add_row(done["name"], v["ours"], seconds_text(median), rate, ratio_text(v, 3), v["peer"])
    return found

"""The table of whole models and training steps."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..common import Row, bars_text, judged_text, ratio_text, seconds_text
from .cases import TORCH
from .measure import OURS

__all__ = ["line", "summary", "table"]


def table(rows: Sequence[Row]) -> Table:
    """One line a variant: its time and rate, its speed relative to plain torch, its bar, and the bits that differ."""
    result = Table(title="medians; speed against plain torch with 95 % intervals", title_justify="left", pad_edge=False)
    for name in ("case", "variant", "time", "tokens/s", "/ torch", "bar", "differing"):
        result.add_column(name, justify="right" if name in ("time", "tokens/s", "/ torch") else "left", no_wrap=True)
    for row in rows:
        result.add_section()
        if not row["timings"]:
            result.add_row(row["name"], Text(row["error"] or "skipped", style="red" if row["error"] else "yellow"))
        name = row["name"]
        for variant, timing in row["timings"].items():
            rate = f"{row['tokens_per_second'][variant]:,.0f}"
            result.add_row(name, variant, seconds_text(timing["median"]), rate, *_judged(row, variant))
            name = ""
    return result


def _judged(row: Row, variant: str) -> tuple[Text | str, Text, Text | str]:
    ratio: Text | str = ""
    for v in row["verdicts"]:
        if (v["ours"], v["peer"]) == (variant, TORCH):
            ratio = ratio_text(v, 3)
    bars = [b for b in row["bars"] if b["bar"].startswith(f"{variant} ")]
    judged = judged_text(bars, variant)
    bits = (row["correctness"] or {}).get(variant)
    if bits is None:
        return ratio, judged, ""
    style = "red" if bits["differing"] and variant in OURS else ""
    return ratio, judged, Text(f"{bits['differing']:,} of {bits['checked']:,}", style=style)


def line(row: Row) -> str:
    """One row as it is measured: speed against plain torch, and how long first calls took."""
    if TORCH not in row["timings"]:
        return f"{row['name']}: {row['error'] or row['absent'].get(TORCH, '')}"
    ratios = ", ".join(
        f"{v['ours']} {v['ratio']:.3f}" + f" of {v['peer']}" * (v["peer"] != TORCH) for v in row["verdicts"]
    )
    plain = seconds_text(row["timings"][TORCH]["median"])
    first = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["first_call_seconds"].items() if seconds > 1)
    return f"{row['name']}: torch {plain}; {ratios or 'no other variant'}" + (f"; first calls {first} s" * bool(first))


def summary(rows: Sequence[Row]) -> Text:
    """What is not in the table: failures, absences, and what torch's own bits do."""
    text = bars_text(rows)
    changed = sum((row["correctness"] or {}).get(TORCH, {}).get("differing", 0) for row in rows)
    text += Text(f"; elements of plain torch that change with the batch: {changed:,}")
    absent: dict[str, list[str]] = {}
    for row in rows:
        for variant, why in row["absent"].items():
            absent.setdefault(f"{variant}: {why}", []).append(row["name"])
    for what, names in absent.items():
        text += Text(f"\nabsent from {len(names)} cases ({names[0]}): {what}", style="yellow")
    return text

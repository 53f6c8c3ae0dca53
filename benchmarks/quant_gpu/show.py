"""The table of quantized weights on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..common import Row, bars_text, judged_text, missing_text, ratio_text, seconds_text
from .cases import FP32, OURS, PLAIN, PLAIN_FP32, Q8
from .measure import checks, wrong
from .operands import LLAMA, TORCH
from .peers import GEMLITE

__all__ = ["line", "summary", "table"]

AGAINST = ((OURS, PLAIN), (OURS, TORCH), (OURS, GEMLITE), (OURS, LLAMA), (Q8, PLAIN), (Q8, LLAMA), (FP32, PLAIN_FP32))


def table(rows: Sequence[Row]) -> Table:
    """One line a case: our times, speed relative to everybody, the bar, the bits that differ."""
    result = Table(title="medians; ratios of speeds with 95 % intervals", title_justify="left", pad_edge=False)
    names = ["case", "same", "roofline", *(f"/ {peer}" for ours, peer in AGAINST if ours == OURS), "bar", "q8"]
    names += [*(f"q8 / {peer}" for ours, peer in AGAINST if ours == Q8), "fp32", f"fp32 / {PLAIN_FP32}"]
    names += ["differing", "kernel"]
    for name in names:
        result.add_column(name, justify="left" if name in ("case", "bar", "kernel") else "right", no_wrap=True)
    for row in rows:
        times = row["timings"]
        if not {OURS, Q8, FP32} & times.keys():
            result.add_row(row["name"], Text(row["error"] or "not measured", style="red"))
            continue
        share = f"{times[OURS]['roofline']:.0%}" if OURS in times else ""
        ours = [_ratio(row, a, b) for a, b in AGAINST if a == OURS]
        integer = [_ratio(row, a, b) for a, b in AGAINST if a == Q8]
        floats = (_time(row, FP32), _ratio(row, FP32, PLAIN_FP32))
        ends = (judged_text(row["bars"]), _time(row, Q8), *integer, *floats, _bits(row), row["kernel"] or "")
        result.add_row(row["name"], _time(row, OURS), share, *ours, *ends)
    return result


def _time(row: Row, name: str) -> str:
    return seconds_text(row["timings"][name]["median"]) if name in row["timings"] else "–"


def _ratio(row: Row, ours: str, peer: str) -> str:
    for v in row["verdicts"]:
        if (v["ours"], v["peer"]) == (ours, peer):
            return ratio_text(v)
    return "–"


def _bits(row: Row) -> Text:
    seen = sum(p.get(key, 0) for p in checks(row) for key in ("checked", "batch_checked", "plain_checked"))
    return Text(f"{wrong(row):,} of {seen:,}", style="red" if wrong(row) else "")


def line(row: Row) -> str:
    """One row as it is measured."""
    times = ", ".join(f"{name} {seconds_text(timing['median'])}" for name, timing in row["timings"].items())
    bars = "".join(f"; {b['bar']}: {b['result'].lower()}" for b in row["bars"])
    pairs = [v for v in row["verdicts"] if v["peer"] in (PLAIN, PLAIN_FP32)]
    ratios = ", ".join(f"{v['ours']} / {v['peer']} {v['ratio']:.2f}" for v in pairs)
    words = f"{row['name']}: {times}; {ratios}{bars}; bits differing {wrong(row)}"
    return words + (f"; failed: {row['error']}" if row["error"] else "")


def summary(rows: Sequence[Row]) -> Text:
    """How many bars are met, how many bits differ, what failed or was absent."""
    text = bars_text(rows)
    count = sum(wrong(row) for row in rows)
    if any(FP32 in row["timings"] for row in rows):
        text += Text(f"; {FP32} has none")
    text += Text(f"; bits: {count:,} differ", style="red" if count else "")
    return text + missing_text(rows)

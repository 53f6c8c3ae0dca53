"""The table of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..common import Row, bars_text, bits_text, judged_text, ratio_text, seconds_text
from .operands import PEERS

__all__ = ["summary", "table"]

WORDS = {"FASTER": "green", "SLOWER": "red", "EQUAL": "", "AMBIGUOUS": "yellow"}


def table(rows: Sequence[Row]) -> Table:
    """One line a row: our time, the share of the roofline, speed against each peer, the bars, the bits."""
    result = Table(title="isogemm against its peers: medians, 95 % intervals", title_justify="left", pad_edge=False)
    for name, justify in (("case", "left"), ("threads", "right"), ("isogemm", "right"), ("rate", "right")):
        result.add_column(name, justify=justify, no_wrap=True)
    for name in ("roofline", *(f"/ {p}" for p in (*PEERS, "read"))):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("bar", no_wrap=True)
    result.add_column("differing", justify="right", no_wrap=True)
    result.add_column("kernel")
    suite = None
    for row in rows:
        if suite not in (None, row["suite"]):
            result.add_section()
        suite = row["suite"]
        result.add_row(*_cells(row))
    return result


def _cells(row: Row) -> list[Text | str]:
    ours = row["timings"].get("isogemm")
    name = " ".join(word for word in row["name"].split() if word != row["dtype"])
    ratios = [_ratio(row, peer) for peer in (*PEERS, "read")]
    threads = str(row["threads"] or "")
    if ours is None:
        error = Text(row["error"] or "not measured", style="red", overflow="fold")
        return [name, threads, "", "", "", *ratios, "", "", error]
    share = f"{ours['roofline']:.0%}" if "roofline" in ours else ""
    return [name, threads, seconds_text(ours["median"]), _rate(row, ours), share, *ratios, *_judged(row)]


def _judged(row: Row) -> list[Text | str]:
    return [judged_text(row["bars"]), bits_text(row["correctness"]), row["kernel"] or ""]


def _ratio(row: Row, peer: str) -> Text | str:
    for v in row["verdicts"]:
        if v["peer"] == peer:
            return Text(ratio_text(v), style=WORDS[v["word"]])
    return seconds_text(row["timings"][peer]["median"]) if peer in row["timings"] else "–"


def _rate(row: Row, ours: Mapping[str, Any]) -> str:
    if "gflop_per_second" not in ours:
        return ""
    if row["rotated"] and row["m"] == 1:
        return f"{ours['gb_per_second']:.1f} GB/s"
    return f"{ours['gflop_per_second']:.1f} GFLOP/s"


def summary(rows: Sequence[Row]) -> Text:
    """How many bars are met, how many bits differ, what failed."""
    text = bars_text(rows)
    checks = [row["correctness"] for row in rows if row["correctness"]]
    differing, checked = (sum(c[key] for c in checks) for key in ("differing", "checked"))
    text += Text(f"; bits: {differing} of {checked} sampled elements differ", style="red" if differing else "")
    errors = sum(1 for row in rows if row["error"])
    return text + Text(f"; {errors} cases failed", style="red") if errors else text

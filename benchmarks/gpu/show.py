"""The tables of GPU results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..common import Row, bits_text, geometric_mean, judged_text, least_speed, missing_text, seconds_text
from .cases import PEER
from .measure import OURS, SPACED, against

__all__ = ["cells", "grid", "summary", "tables"]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Everything that a run measured, as tables."""
    llm = [row for row in rows if row["suite"] == "llm" and OURS in row["timings"]]
    found = []
    if llm:
        views = (
            ("torch.mm", "torch", OURS),
            ("torch set to cuBLASLt, split-K off", "cublaslt", OURS),
            (PEER, PEER, OURS),
            ("torch.mm, both with an elementwise kernel between the products", "torch.mm" + SPACED, OURS + SPACED),
        )
        found = [
            grid(llm, f"time of {title} / time of isogemm", lambda row, p=peer, o=ours: against(row, p, o))
            for title, peer, ours in views
            if any(peer == "torch" or peer in row["timings"] for row in llm)
        ]
        found.append(grid(llm, "share of the roofline", lambda row: row["timings"][OURS].get("roofline")))
    others = [row for row in rows if row not in llm]
    return [*found, cells(others)] if others else found


def grid(rows: Sequence[Row], title: str, value: Any) -> Table:
    """One line a shape, one column an M, geometric means at both ends."""
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    ms = sorted({row["m"] for row in rows})
    at = {(row["n"], row["k"], row["m"]): value(row) for row in rows}
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in ("(N, K) / M", *map(str, ms), "mean"):
        table.add_column(name, justify="left" if name.startswith("(") else "right", no_wrap=True)
    for n, k in shapes:
        found = [at.get((n, k, m)) for m in ms]
        table.add_row(f"({n}, {k})", *map(_number, found), _number(_mean(found)))
    table.add_section()
    columns = [_mean([at.get((n, k, m)) for n, k in shapes]) for m in ms]
    table.add_row("mean", *map(_number, columns), _number(_mean(list(at.values()))))
    return table


def _mean(values: Sequence[float | None]) -> float | None:
    return geometric_mean(v for v in values if v is not None)


def _number(value: float | None) -> Text | str:
    if value is None:
        return "–"
    return Text(f"{value:.2f}", style="red" if value < 0.95 else "yellow" if value < 1 else "")


def cells(rows: Sequence[Row]) -> Table:
    """One line a case: our time, the share of the roofline, every peer, the bars, the bits, the kernel."""
    table = Table(title="medians; ratios with 95 % intervals", title_justify="left", pad_edge=False)
    for name in ("case", OURS, "roofline", "others: time / ours", "bars", "differing", "errors", "kernel"):
        table.add_column(name, justify="right" if name in (OURS, "roofline", "differing") else "left")
    for row in rows:
        ours = row["timings"].get(OURS)
        if ours is None:
            table.add_row(row["name"], "", "", Text(row["error"] or "not measured", style="red"), "", "", "", "")
            continue
        share = f"{ours['roofline']:.0%}" if "roofline" in ours else ""
        others = "\n".join(_peer(row, name) for name in row["timings"] if name != OURS)
        bits = bits_text(row["correctness"]) if (row["correctness"] or {}).get("checked") else ""
        table.add_row(
            row["name"],
            seconds_text(ours["median"]),
            share,
            others,
            judged_text(row["bars"]),
            bits,
            _errors(row),
            row["kernel"] or "",
        )
    return table


def _peer(row: Row, name: str) -> str:
    speed = least_speed(row, OURS, [name])
    spread = next((f" [{v['low']:.2f}–{v['high']:.2f}]" for v in row["verdicts"] if v["peer"] == name), "")
    return f"{name} {seconds_text(row['timings'][name]['median'])}: {speed:.2f}{spread}"


def _errors(row: Row) -> str:
    errors = (row["correctness"] or {}).get("errors", {})
    return "\n".join(f"{name} {value:.1e}" for name, value in errors.items())


def summary(rows: Sequence[Row]) -> Text:
    """Cells under 1 and 0.95, bits that differ, and what failed or was absent."""
    llm = [x for row in rows if row["suite"] == "llm" and (x := against(row, "torch")) is not None]
    checks = [row["correctness"] for row in rows if row["correctness"] and row["correctness"].get("checked")]
    wrong = sum(c["differing"] + c.get("batch_differing", 0) for c in checks)
    seen = sum(c["checked"] + c.get("batch_checked", 0) for c in checks)
    text = Text(f"{len(llm)} cells against torch.mm, {sum(x < 1 for x in llm)} under 1, {sum(x < 0.95 for x in llm)} ")
    text += Text("under 0.95; ")
    text += Text(f"bits: {wrong} of {seen:,} compared differ", style="red" if wrong else "")
    return text + missing_text(rows)

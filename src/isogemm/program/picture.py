"""A program as a page that opens offline: memory over time, and the threads that work."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import accumulate
from typing import Any

from .explain import explain
from .graph import SECTIONS
from .program import Program

WIDTH, MAP, LINES = 1000, 420, 160  # of the pictures
HUES = dict(zip(SECTIONS, (210, 140, 30, 350, 270, 60), strict=True))
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em }}
svg {{ width: 100%; border: 1px solid gray }} rect:hover {{ stroke: currentColor }} pre {{ overflow: auto }}
b {{ padding: 0 .5em; color: black }}
</style>
<h1>{title}</h1>
<h2>Memory over time</h2>
<p>Left to right the operations, as long as they are expected to take ({us:,.0f} us in all, a micro-batch once); from
the top {bytes:,} bytes of one allocation. Point at a tensor for its name.</p>
<p>{legend}</p>
<svg viewBox="0 0 {width} {map}" preserveAspectRatio="none" style="height: {map}px">{memory}</svg>
<h2>Threads over time</h2>
<p>Of {threads} threads those that have work, by operation; dark and light are phases.</p>
<svg viewBox="0 0 {width} {lines}" preserveAspectRatio="none" style="height: {lines}px">{timeline}</svg>
<pre>{words}</pre>
</html>
"""


def page(program: Program) -> str:
    """The page, as text."""
    plan, layout = program.plan, program.layout
    us = [op["isogemm"]["expected_us"] for op in plan["ops"]]
    ends = [0.0, *accumulate(us)]
    threads, total = plan["runtime"]["threads"], ends[-1] or 1.0
    memory = []
    for entry in layout["tensors"]:
        begin, end = ends[entry["first_op"]] / total, ends[entry["last_op"] + 1] / total
        top, high = entry["offset"] / layout["bytes"], entry["bytes"] / layout["bytes"]
        words = f"{entry['name']} {entry['shape']}, {entry['bytes']} bytes from {entry['offset']}"
        memory.append(_rectangle(begin, end, top * MAP, high * MAP, f"hsl({HUES[entry['section']]} 60% 55%)", words))
    timeline = []
    for i, op in enumerate(plan["ops"]):
        high = LINES * working(op) / threads
        shade = 40 + 25 * (plan["phases"].index(op["phase"]) % 2)
        words = f"{op['name']} ({op['kernel_id']}), {op['phase']}: {working(op)} threads, {us[i]:.1f} us expected"
        timeline.append(
            _rectangle(ends[i] / total, ends[i + 1] / total, LINES - high, high, f"hsl(210 50% {shade}%)", words)
        )
    legend = "".join(f'<b style="background: hsl({hue} 60% 55%)">{name}</b> ' for name, hue in HUES.items())
    return PAGE.format(
        title=f"{plan['schema']}: {plan['isogemm']['phase']}", us=ends[-1], bytes=layout["bytes"], legend=legend,
        width=WIDTH, map=MAP, lines=LINES, memory="\n".join(memory), timeline="\n".join(timeline), threads=threads,
        words=escape(explain(program)),
    )  # fmt: skip


def working(op: Mapping[str, Any]) -> int:
    """Threads of an operation."""
    return 1 if op["dispatch"]["schedule"] == "serial" else int(op["dispatch"]["threads"])


def _rectangle(begin: float, end: float, top: float, high: float, color: str, words: str) -> str:
    x, wide = WIDTH * begin, max(WIDTH * (end - begin), 0.2)
    size = f'x="{x:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{max(high, 0.2):.2f}"'
    return f'<rect {size} fill="{color}"><title>{escape(words)}</title></rect>'

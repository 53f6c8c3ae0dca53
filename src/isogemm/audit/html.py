"""The report as one page that opens offline: everything it needs is inside the file."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..lab.page import chart_spec, definitions, machine_facts, require_packages, whole_page
from .cases import FirstDifference, median_ulps, ulps_text
from .results import ProviderResult, RelationResult, Results
from .words import examination, measured, not_measured, not_required, not_run, provider_text, speed_by_m, status_word

__all__ = ["page", "require_packages"]


def page(report: Results) -> str:
    """The whole page: HTML, styles, scripts, data and figures.

    Raises
    ------
    OptionError
        The extra ``isogemm[report]`` is not installed.
    """
    require_packages()
    from .figures import agreement_map, drift_histogram, speed_bars

    specs = {"agreement": agreement_map, "drift": drift_histogram, "speed": speed_bars}
    charts = {name: _spec(make, report) for name, make in specs.items()}
    shown = {name: spec for name, spec in charts.items() if spec is not None}
    body = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(report.title),
        verdict=_verdict(report),
        measured=escape(measured(report)),
        cards="".join(_card(report, p) for p in report.providers.values()),
        matrix=_matrix(report),
        figures="".join(_figure(name, charts[name] is not None) for name in charts),
        drifts=_drifts(report),
        limits="".join(f"<li>{escape(line)}</li>" for line in not_measured(report)),
        machine=_machine(report),
    )
    return whole_page(report.title, body, shown)


_FIGURES = {
    "agreement": (
        "Which batch sizes agree",
        "Each cell compares the rows that two batches have in common. Teal: every output has the same bits. Warmer: "
        "the share of outputs that differ.",
        "No batches were compared.",
    ),
    "drift": (
        "How far the bits moved",
        "Changed outputs over all relations, by distance in units in the last place.",
        "No output changed, so there is no distance to show.",
    ),
    "speed": (
        "Speed",
        "Median of interleaved blocks, weights rotated past the cache; longer is faster. The number is the median in "
        "milliseconds, the thin line the 5th to 95th percentile. A ? marks an interval too wide to tell it from the "
        "fastest.",
        "Speed was not measured.",
    ),
}


def _figure(name: str, present: bool) -> str:
    title, caption, empty = _FIGURES[name]
    body = f'<div class="scroll"><div id="{name}" class="chart"></div></div>' if present else ""
    return f"<section><h2>{title}</h2><p class=quiet>{caption if present else empty}</p>{body}</section>"


def _spec(make: Callable[[Results], Any], report: Results) -> Any:
    chart = make(report)
    return None if chart is None else chart_spec(chart)


def _verdict(report: Results) -> str:
    warning = "".join(
        f'<p class="quiet">{escape(text)}</p>' for text in (not_required(report), not_run(report)) if text
    )
    if not report.required:
        return f'<p class="verdict">No provider was required to hold.</p>{warning}'
    names = ", ".join(map(escape, report.required))
    word, kind = (
        ("kept every bit", "held") if all(map(report.held, report.required)) else ("did not keep every bit", "failed")
    )
    return f'<p class="verdict {kind}">{names} {word}.</p>{warning}'


def _card(report: Results, result: ProviderResult) -> str:
    speeds = speed_by_m(report, result.name)
    times = " · ".join(f"M={m}: {ratio}" for m, ratio in speeds.items())
    times = f'<p class="quiet">Time over the fastest: {times}</p>' if times else ""
    return (
        f'<article class="card {result.status}"><h3>{escape(result.name)}</h3>'
        f'<span class="badge {result.status}">{status_word(result.status)}</span>'
        f"<p>{escape(provider_text(result))}</p>{times}</article>"
    )


def _matrix(report: Results) -> str:
    shown = [p for p in report.providers.values() if p.cases or not p.reason]
    head = "".join(f"<th colspan=2>{escape(p.name)}</th>" for p in shown)
    sub = "<th>cases</th><th>outputs changed</th>" * len(shown)
    body = ""
    meanings = {r.relation: r.meaning for p in report.providers.values() for r in p.relations.values()}
    for name in report.options["relations"]:
        cells = "".join(_cells(p.relations[name]) for p in shown)
        body += f"<tr><th scope=row>{name}<small>{escape(meanings[name])}</small></th>{cells}</tr>"
    return (
        f"<table><thead><tr><th rowspan=2>relation</th>{head}</tr><tr>{sub}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cells(r: RelationResult) -> str:
    cases = f"{r.cases:,}" + (f"<small>{r.not_applicable:,} n/a</small>" if r.cases and r.not_applicable else "")
    if r.failed:
        cases += f"<small>{r.failed:,} failed</small>"
    changed = f"{r.changed_outputs:,} of {r.outputs:,}" if r.outputs else status_word(r.status)
    far = f"<small>median {median_ulps(r.histogram)}, at most {ulps_text(r.max_ulp)}</small>" if r.changed else ""
    title = f' title="{escape(r.reason)}"' if r.reason else ""
    return f'<td>{cases if r.cases else ""}</td><td class="s {r.status.replace("/", "")}"{title}>{changed}{far}</td>'


def _drifts(report: Results) -> str:
    parts = []
    for result in report.providers.values():
        if firsts := result.first_drifts:
            items = "".join(map(_drift, firsts))
            if command := examination(result.name):
                items += f"<p>Whether a mistake is behind it:</p><pre><code>{escape(command)}</code></pre>"
            parts.append(f"<details open><summary>{escape(result.name)}</summary>{items}</details>")
    return "".join(parts) or '<p class="quiet">No output changed.</p>'


def _drift(drift: FirstDifference) -> str:
    return f'<p class="drift">{escape(str(drift))}</p><pre><code>{escape(drift.case.command())}</code></pre>'


def _machine(report: Results) -> str:
    if not report.environment:
        return ""
    facts = machine_facts(report.environment)
    shapes = "; ".join(f"{s['name']} [{s['n']}, {s['k']}]" for s in report.shapes)
    return definitions({**facts, **({"linears [n, k]": shapes} if shapes else {})})

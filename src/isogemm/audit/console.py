"""The report on a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cases import Case, Outcome, median_ulps, ulps_text
from .results import ProviderResult, Results
from .words import (
    answered,
    asked,
    examination,
    inapplicable,
    measured,
    not_measured,
    not_required,
    not_run,
    provider_text,
    relation_cases,
    speed_by_m,
    status_word,
)

_STYLES = {"held": "green", "changed": "yellow", "failed": "red", "absent": "red", "n/a": "dim"}
_DRIFTS_SHOWN = 3


def print_report(report: Results, console: Console) -> None:
    """Print what was asked and what came of it, a table per provider, the first drifts with the commands that replay
    them, and the summary."""
    console.print()
    _line(console, Text(asked(report), "bold"))
    _line(console, Text(answered(report), "bold"))
    for result in report.providers.values():
        console.print()
        if result.cases or not result.reason:
            console.print(_table(result))
            if note := inapplicable(result):
                _line(console, Text(f"  {note}", "dim"))
            _print_speeds(report, result, console)
            _print_drifts(result, console)
        else:
            why = f"{status_word(result.status)}: {result.reason}"
            console.print(Text.assemble((result.name, "bold"), " ", (why, "red")))
    console.print()
    _line(console, Text.assemble(("Measured: ", "bold"), measured(report)))
    for result in report.providers.values():
        style = _STYLES[result.status]
        _line(console, Text.assemble((f"{result.name}: ", f"bold {style}"), provider_text(result)))
    for note in not_measured(report):
        _line(console, Text(note, "dim"))
    if report.required:
        names = ", ".join(report.required)
        held = all(map(report.held, report.required))
        verdict = ("held", "green") if held else ("did not hold" if report.broken else "did not run", "red")
        _line(console, Text.assemble("Required: ", names, " ", verdict))
    if warning := not_required(report):
        _line(console, Text(warning, "yellow"))
    if warning := not_run(report):
        _line(console, Text(warning, "red"))


def print_outcome(case: Case, outcome: Outcome, console: Console) -> None:
    """Print what came of a replayed case."""
    if outcome.drift is not None:
        _line(console, Text(str(outcome.drift)))
        _line(console, Text(f"{outcome.changed:,} of {outcome.outputs:,} outputs changed", "yellow"))
    else:
        linear = case.source.linear
        text = f"{case.provider} {case.relation} on {linear.n}x{linear.k}: {status_word(outcome.status)}"
        text += f", {outcome.outputs:,} outputs compared" if outcome.outputs else f" ({outcome.reason})"
        _line(console, Text(text, _STYLES[outcome.status]))


def _table(result: ProviderResult) -> Table:
    title = Text.assemble((result.name, "bold"), "  ", (status_word(result.status), _STYLES[result.status]))
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("relation", no_wrap=True)
    table.add_column("cases", justify="right")
    table.add_column("outputs\nchanged", justify="right")
    table.add_column("median\nULP", justify="right")
    table.add_column("largest", justify="right")
    table.add_column("", no_wrap=True)
    for r in result.relations.values():
        style = _STYLES[r.status]
        changed = f"{r.changed_outputs:,} of {r.outputs:,}" if r.outputs else "-"
        largest = ulps_text(r.max_ulp).removesuffix(" ULP") if r.outputs else "-"
        median = median_ulps(r.histogram) or ("0" if r.outputs else "-")
        word = f"{r.status}, not promised" if r.status == "changed" and r.demanded != "changed" else r.status
        table.add_row(r.relation, relation_cases(r), changed, median, largest, Text(word, style))
    return table


def _print_speeds(report: Results, result: ProviderResult, console: Console) -> None:
    speeds = speed_by_m(report, result.name)
    if speeds:
        times = "   ".join(f"M={m} {ratio}" for m, ratio in speeds.items())
        _line(console, Text(f"  time over the fastest provider's: {times}"))


def _print_drifts(result: ProviderResult, console: Console) -> None:
    for r in result.relations.values():
        if r.status == "failed":
            _line(console, Text(f"  {r.relation} failed: {r.reason}", "red"))
    firsts = result.first_drifts
    for drift in firsts[:_DRIFTS_SHOWN]:
        _line(console, Text(f"  {drift}"))
        _line(console, Text(f"    {drift.case.command()}", "cyan"))
    if len(firsts) > _DRIFTS_SHOWN:
        more = ", ".join(d.case.relation for d in firsts[_DRIFTS_SHOWN:])
        _line(console, Text(f"  likewise: {more} (--json and --html have them all)", "dim"))
    if firsts and (command := examination(result.name)):
        _line(console, Text("  whether a mistake is behind it:"))
        _line(console, Text(f"    {command}", "cyan"))


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)  # commands must survive being copied

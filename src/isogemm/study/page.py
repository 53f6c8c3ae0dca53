"""A run, or several of several machines, as one page: each figure with its finding, and the commands that repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..lab import read_json
from ..lab.page import chart_spec, definitions, machine_facts, require_packages, whole_page
from .catalog import study
from .charts import measured
from .declare import Figure
from .engine import LATER, SCHEMA, RunOptions, StudyRun
from .journal import ROW, ROWS, lacking, read_rows

RUN = {"study": str, "site": dict, "rows": list, "options": dict, "left_out": dict, "environment": dict}
LONG = 32  # characters of a cell that is a sentence
LEFT = " class=left"  # a column that has one
FEW = 3  # cases that are named
BUSY = 0.1  # of a machine's CPUs: a thread that waits for another, whose CPU another program has, takes milliseconds


def read_runs(folders: Sequence[Path]) -> list[StudyRun]:
    """The runs in some folders and the folders right below them; of one that was stopped, the rows that it left.

    Raises OptionError: a folder has none, or a file is of another schema.
    """
    found = []
    for folder in folders:
        files = sorted({*folder.glob("*.json"), *folder.glob("*/*.json")})
        stopped = [x for x in (folder, *sorted(folder.glob("*/"))) if (x / ROWS).exists() and not [*x.glob("*.json")]]
        if not files and not stopped:
            raise OptionError(
                "study report", limit="folders of finished studies", value=str(folder), nearest="the --out of a study"
            )
        for path in files:
            found.append(_whole(path, read_json(path, schema=SCHEMA)))
        found += [_unfinished(each) for each in stopped]
    return found


def _unfinished(folder: Path) -> StudyRun:
    stamp, rows = read_rows(folder)
    left = {"the cases after these": f"the run was stopped; its command {LATER}"}
    return _whole(folder / ROWS, {"environment": {}, **stamp, "site": stamp["machine"], "rows": rows, "left_out": left})


def _whole(path: Path, content: dict[str, Any]) -> StudyRun:
    """The run that a file has. Raises OptionError: it lacks a field, or has one of another kind."""
    why = lacking(content, RUN) or next(_inside(content), "")
    if why:
        value = f"{path}, {why}"
        raise OptionError("study report", limit="whole files of results", value=value, nearest="measure again")
    return StudyRun(**{name: content[name] for name in RUN})


def _inside(content: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong within the fields of a run, in words."""
    parts: list[tuple[Any, Mapping[str, Any], str]] = [
        (content["site"], {"device": str, "name": str}, "site, the machine")
    ]
    parts += [(row, ROW, f"rows[{i}]") for i, row in enumerate(content["rows"])]
    yield from (f"{why}, in {where}" for found, kinds, where in parts if (why := lacking(found, kinds)))
    known = {option.name for option in fields(RunOptions)}
    yield from (f"no such option in options: {name}" for name in content["options"] if name not in known)


def page(runs: Sequence[StudyRun]) -> str:
    """The page of some runs, by study and then by machine.

    Raises
    ------
    OptionError
        The extra ``isogemm[report]`` is not installed.
    """
    require_packages()
    specs: dict[str, Any] = {}
    parts = []
    for name in dict.fromkeys(run.study for run in runs):
        declared = study(name)
        parts.append(f'<section id="{escape(name)}"><h2>{escape(name)}: {escape(declared.question)}</h2>')
        parts += [_run(run, specs) for run in runs if run.study == name]
        parts.append("</section>")
    names = list(dict.fromkeys(run.study for run in runs))
    title = f"Study {names[0]}" if len(names) == 1 else "Studies of matrix products"
    where = ", ".join(dict.fromkeys(run.site["name"] for run in runs))
    links = " · ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names) if len(names) > 1 else ""
    head = f"<h1>{escape(title)}</h1><p class=quiet>Measured on {escape(where)}.</p><p>{links}</p>"
    return whole_page(title, head + "".join(parts), specs)


def _run(run: StudyRun, specs: dict[str, Any]) -> str:
    """The figures of one machine; their charts are added to `specs`."""
    words = ["isogemm", "study", run.study, "--device", run.site["device"], *RunOptions(**run.options).words]
    command = " ".join(words)
    parts = [f"<h3>{escape(run.site['name'])}</h3><pre><code>{escape(command)}</code></pre>"]
    rows, unreached = measured(run.rows), [key for key, why in run.left_out.items() if LATER in why]
    if disturbed(run):
        parts.append(f"<p><strong>{escape(disturbed(run))}.</strong></p>")
    if unreached:
        parts.append(f"<p><strong>{escape(_not_whole(len(run.rows), unreached))}</strong></p>")
    for figure in study(run.study).figures(rows) if len(rows) > bool(unreached) else ():
        parts.append(_figure(figure, f"figure{len(specs)}"))
        if figure.chart is not None:
            specs[f"figure{len(specs)}"] = chart_spec(figure.chart)
    commands = _details("The command behind each row", [row["command"] for row in run.rows], code=True)
    return "".join([*parts, _missing(run), commands, _machine(run)])


def disturbed(run: StudyRun) -> str:
    """That other programs ran while a CPU was measured, and what to do; empty where none are known of."""
    others = run.environment.get("others")
    if run.site["device"] != "cpu" or others is None or others < BUSY * run.environment["cpu"]["usable"]:
        return ""
    said = f"Other programs kept {others:.2g} of {run.environment['cpu']['usable']} CPUs busy meanwhile"
    advice = "" if run.options.get("threads") == 1 else "; with --threads 1 they suffer least"
    return f"{said}: times are rough, bits are not{advice}"


def _not_whole(count: int, unreached: Sequence[str]) -> str:
    """What a run that ended early has, and that one row of many shows nothing."""
    more = f" and {len(unreached) - FEW} more" if len(unreached) > FEW else ""
    shown = "What is found is of these rows alone." if count > 1 else "One row finds nothing."
    return f"Not whole. Rows: {count}; not reached: {', '.join(unreached[:FEW])}{more}. {shown}"


def _figure(figure: Figure, name: str) -> str:
    chart = f'<div id="{name}" class="chart"></div>' if figure.chart is not None else ""
    table = f'<div class="scroll">{_table(figure.table)}</div>' if figure.table else ""
    title = f"<figcaption><strong>{escape(figure.title)}</strong></figcaption>"
    return f'<figure>{title}{chart}{table}<p class="quiet">{escape(figure.sentence)}</p></figure>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    long = {name for row in rows for name, value in row.items() if _kind(str(value))}
    head = "".join(f"<th{LEFT * (name in long)}>{escape(str(name))}</th>" for name in rows[0])
    lines = []
    for row in rows:
        first, *others = ((str(value), _kind(str(value)) or LEFT * (name in long)) for name, value in row.items())
        cells = "".join(f"<td{kind}>{escape(text)}</td>" for text, kind in others)
        lines.append(f"<tr><th scope=row{first[1]}>{escape(first[0])}</th>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _kind(text: str) -> str:
    """Sentences in a table are broken into lines, numbers are not."""
    return " class=long" if len(text) > LONG else ""


def _missing(run: StudyRun) -> str:
    """Cases without times, and why."""
    words = [f"{key}: {why}" for key, why in run.left_out.items()]
    words += [f"{row['name']}: {row['error']}" for row in run.rows if row["error"]]
    words += list(dict.fromkeys(f"{way}: {why}" for row in run.rows for way, why in row["absent"].items()))
    return _details("What was not measured, and why", words)


def _details(title: str, lines: Sequence[str], *, code: bool = False) -> str:
    if not lines:
        return ""
    text = "\n".join(map(escape, lines))
    body = f"<pre><code>{text}</code></pre>" if code else "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"<details><summary>{escape(title)} ({len(lines)})</summary>{body}</details>"


def _machine(run: StudyRun) -> str:
    ceilings = run.site.get("ceilings", {})
    limits = {
        f"ceiling of {name}": f"{c['fp32_gflop_per_second']:,.0f} GFLOP/s, {c['read_gb_per_second']:,.0f} GB/s"
        for name, c in ceilings.items()
    }
    driver = {"driver": run.site["driver"]} if "driver" in run.site else {}
    facts = {
        "device": run.site["name"],
        **driver,
        **limits,
        **(machine_facts(run.environment) if run.environment else {}),
    }
    return f"<details><summary>The machine</summary><dl>{definitions(facts)}</dl></details>"

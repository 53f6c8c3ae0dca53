"""``isogemm study``: how products behave on this machine, as rows and a page of figures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.progress import progress_bar
from ..errors import OptionError
from .options import check_out, refuse_given

if TYPE_CHECKING:
    from ..study.engine import RunOptions, StudyRun

INTERRUPTED = 130
PAGE = "index.html"


def study_command(
    here: typer.Context,
    name: Annotated[str, typer.Argument(help="A study's name, or 'report'.")] = "",
    folders: Annotated[list[Path] | None, typer.Argument(help="With report: folders of finished studies.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[
        str,
        typer.Option(help="The folder for rows and page.", show_default="studies/NAME-DEVICE; of a report, studies"),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and rounds.")] = False,
    case: Annotated[str, typer.Option(help="Only this row, by its key; written only with --out.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the operands.")] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="Of every library on a CPU; 0 leaves each its own. On a busy machine, 1.")
    ] = 0,
    time_limit: Annotated[
        float, typer.Option(min=1.0, help="Seconds, within which a row has to end to be begun.", show_default="none")
    ] = float("inf"),
    listed: Annotated[bool, typer.Option("--list", help="Name the studies.")] = False,
) -> None:
    """Measure how products behave on this machine: rows that repeat, and a page of figures that opens offline.

    A run that was stopped, or that ended at its time limit, goes on with the same command. ``isogemm study report
    DIR...`` joins runs on one page.
    """
    from ..study.catalog import STUDIES, study
    from ..study.engine import RunOptions

    of_a_run = ("device", "quick", "case", "seed", "threads", "time_limit")
    beside = "--list" if listed else name if name == "report" else ""
    unread = {"--list": ("name", "folders", "out", *of_a_run), "report": of_a_run}.get(beside, ())
    refuse_given(here, unread, limit=f"without {beside}", value=beside, nearest="one of both")
    if listed:
        for each in STUDIES:
            typer.echo(f"{each:<16}  {study(each).question}")
    elif name == "report":
        _report(folders or [], Path(out or "studies"))
    elif folders:
        raise OptionError("study", limit="one name", value=[name, *map(str, folders)], nearest=name)
    elif name:
        _run(name, device, out, RunOptions(quick, seed, case, threads), time_limit)
    else:
        raise OptionError("study", limit="a name, report or --list", value="none", nearest="--list")


def _run(name: str, device: str, out: str, options: RunOptions, limit: float) -> None:
    from ..study.catalog import study
    from ..study.engine import run
    from ..study.journal import ROWS, whole_lines
    from ..study.page import disturbed
    from ..study.site import limited, open_site

    started, chosen, case = time.monotonic(), study(name), options.case
    folder = Path(out) if out else None if case else Path("studies") / f"{name}-{device}"
    if folder:
        for file in (ROWS, f"{name}.json", PAGE):
            check_out(folder / file)
        whole_lines(folder / ROWS)  # to go on with
    try:
        with progress_bar() as tell, limited(options.threads):
            tell(0, None, "measuring the machine's ceilings")
            site = open_site(device)
            left = limit - (time.monotonic() - started)
            found = run(chosen, site, options, folder, tell, limit=left)
    except KeyboardInterrupt:
        typer.echo("isogemm: stopped; the same command goes on from here" if folder else "isogemm: stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if case:
        _show(found)
    if folder:
        typer.echo(f"Rows: {folder / name}.json{_slowest(found)}")
        _write_page([found], folder)
    said = disturbed(found)
    if said:
        typer.echo(f"isogemm: {said}", err=True)


def _slowest(found: StudyRun) -> str:
    """How many rows there are, what was left out, and which row took the longest and for what."""
    seconds = {row["name"]: row["seconds"] for row in found.rows if row.get("seconds")}
    if not seconds:
        return ""
    name = max(seconds, key=lambda row: sum(seconds[row].values()))
    parts = ", ".join(f"{part} {s:.1f}" for part, s in seconds[name].items() if s >= 0.1)
    whole = f"{len(found.rows)} in {sum(sum(parts.values()) for parts in seconds.values()):.0f} s"
    left = f", {len(found.left_out)} left out" if found.left_out else ""
    return f" ({whole}{left}; the longest, {name}, {sum(seconds[name].values()):.1f} s{': ' * bool(parts)}{parts})"


def _show(found: StudyRun) -> None:
    """The one row, in words."""
    for row in found.rows:
        typer.echo(f"{row['name']}: {row['error'] or row['clock'] + ' time, median [5 %, 95 %]'}")
        for way, timing in row["timings"].items():
            times = ", ".join(f"{1e6 * timing[part]:.1f}" for part in ("median", "p5", "p95"))
            bits = row["correctness"][way]
            typer.echo(f"  {way:<20} {times} us  {bits['from_first']} elements differ from the first way's")


def _report(folders: list[Path], out: Path) -> None:
    from ..study.catalog.claims import claims_of
    from ..study.page import read_runs

    if not folders:
        raise OptionError("study report", limit="one folder or more", value="none", nearest="the --out of a study")
    check_out(out / PAGE)
    runs = read_runs(folders)
    _write_page([*runs, *claims_of(runs)], out)


def _write_page(runs: list[StudyRun], folder: Path) -> None:
    """The page, or one line that says how to get it."""
    from ..base.disk import write_whole
    from ..study.page import page

    try:
        text = page(runs)
    except OptionError as error:
        typer.echo(f"No page yet: {error}; then the same command writes it from these rows")
        return
    typer.echo(f"Page: {write_whole(folder / PAGE, text)}")

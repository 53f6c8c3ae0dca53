"""isogemm on this CPU against NumPy's BLAS and torch: ``python -m benchmarks.cpu``."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isogemm.lab import environment, write_json

from .cases import SUITES, Case, cases, select
from .measure import Machine, Settings, measure
from .operands import PEERS, have_torch
from .show import summary, table

RESULTS = Path(__file__).parents[1] / "results"
WIDTH = 200  # of the table, where the output is a file or a pipe


def main(
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)} or all; several with commas.")] = "all",
    threads: Annotated[str, typer.Option(help="Thread counts, with commas; set for every library.")] = "1,2",
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'm=1 n=4096', 'NT'.")] = "",
    peers: Annotated[str, typer.Option(help="Peers, with commas.")] = ",".join(PEERS),
    json: Annotated[Path | None, typer.Option(help="Where the rows go; benchmarks/results by default.")] = None,
    quick: Annotated[bool, typer.Option(help="Few short blocks: shows that all runs, decides little.")] = False,
    seed: Annotated[int, typer.Option(help="Of the operands.", min=0)] = 0,
) -> None:
    """Time isogemm against its peers in interleaved blocks, check its bits, and hold both against the bars.

    Exits with 1 when a case failed or a bit differed. A bar that was not met is a result, not a failure.
    """
    chosen = select(cases(_suites(suite)), only)
    if not chosen:
        raise typer.BadParameter(f"no case has all the words {only!r}", param_hint="--only")
    names = _peers(peers)
    counts = _threads(threads)
    settings = Settings.quickly(names, counts, seed) if quick else Settings(names, counts, seed=seed)
    rows, path = _run(chosen, settings, json)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table(rows))
    console.print(summary(rows))
    console.print(f"rows: {path}", soft_wrap=True)
    if any(row["error"] or (row["correctness"] or {}).get("differing") for row in rows):
        raise typer.Exit(1)


def _run(chosen: list[Case], settings: Settings, path: Path | None) -> tuple[list[dict[str, Any]], Path]:
    """Measure and write after every case, so that an interrupted run keeps what it had."""
    machine, rows, stamp = Machine(), list[dict[str, Any]](), _stamp(settings.peers)
    _warn_if_busy(stamp)
    target = path or _default_path(stamp)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        overall = progress.add_task("cases", total=len(chosen))
        blocks = progress.add_task("", total=1)
        for case in chosen:

            def report(done: int, total: int, name: str, case: Case = case) -> None:
                progress.update(blocks, completed=done, total=total, description=f"{case.name}: {name}")

            for row in measure(case, settings, machine, report):
                rows.append(row)
                write_json(target, rows, environment=stamp, benchmark="cpu", ceilings=machine.to_dict())
            progress.advance(overall)
    return rows, target


def _warn_if_busy(stamp: dict[str, Any]) -> None:
    """Other programs do not make verdicts wrong, they make them AMBIGUOUS."""
    load = stamp["load"] or 0
    if load > stamp["cpu"]["usable"] / 4:
        Console(stderr=True).print(f"this machine is busy (load {load:g}): expect wide intervals", style="yellow")


def _stamp(peers: tuple[str, ...]) -> dict[str, Any]:
    if "torch" in peers:
        import torch  # noqa: F401  # so that the stamp sees the libraries it brings
    return environment()


def _default_path(stamp: dict[str, Any]) -> Path:
    cpu = re.sub(r"[^a-z0-9]+", "-", f"{stamp['cpu']['model']} {stamp['cpu']['core']}".lower()).strip("-")
    return RESULTS / f"cpu-{cpu}-{datetime.now(UTC):%Y-%m-%dT%H%MZ}.json"


def _suites(text: str) -> list[str]:
    names = list(SUITES) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(SUITES)}, all", param_hint="--suite")
    return names


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PEERS)}", param_hint="--peers")
    return tuple(name for name in names if name != "torch" or have_torch())


def _threads(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise typer.BadParameter(f"{text!r} is not a list such as 1,2", param_hint="--threads")
    return tuple(dict.fromkeys(int(count) for count in text.split(",")))


if __name__ == "__main__":
    typer.run(main)

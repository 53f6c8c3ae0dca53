"""isogemm on this CPU against NumPy's BLAS and torch: ``python -m benchmarks.cpu``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isogemm.backends.cpu.device import HostDevice
from isogemm.lab import environment, write_json

from ..common import (
    Out,
    Quick,
    check_peers,
    counts_of,
    cpu_name,
    groups_text,
    line_console,
    listed,
    named_of,
    results_path,
    selected,
)  # fmt: skip
from .cases import DRAWN, RANDOM, SUITES, Case, cases
from .measure import CLOCKS, Machine, Settings, measure, of_threads
from .operands import PEERS, have_torch
from .show import summary, table

QUIET_SECONDS = 0.004  # of a block that nothing may hold up
WIDTH = 200  # of the table, where the output is a file or a pipe


def main(
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)}, all of these, or {RANDOM}.")] = "all",
    threads: Annotated[str, typer.Option(help="Thread counts, with commas; set for every library.")] = "1,2",
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'm=1 n=4096', 'NT'.")] = "",
    peers: Annotated[str, typer.Option(help="Peers, with commas.")] = ",".join(PEERS),
    json: Out = None,
    quick: Quick = False,
    seed: Annotated[int, typer.Option(help="Of the operands, and of the layers that are drawn.", min=0)] = 0,
    clock: Annotated[str, typer.Option(help="wall; on a busy machine cpu for 1 thread, quiet for more.")] = "wall",
    count: Annotated[int, typer.Option(help="Layers to draw.", min=1)] = DRAWN,
) -> None:
    """Time isogemm against its peers in interleaved blocks, check its bits, and hold both against the bars.

    Exits with 1 when a case failed or a bit differed. A bar that was not met is a result, not a failure.
    """
    wanted = list(SUITES) if suite == "all" else named_of(suite, [*SUITES, RANDOM], "--suite")
    chosen = selected(cases(wanted, seed=seed, count=count), only)
    names = tuple(name for name in named_of(peers, PEERS, "--peers") if name != "torch" or have_torch())
    counts = counts_of(threads, "--threads")
    named_of(clock, CLOCKS, "--clock")
    check_peers()
    if clock == "cpu" and counts != (1,):
        raise typer.BadParameter("cpu is for --threads 1: threads' times would be added", param_hint="--clock")
    settings = Settings.quickly(names, counts, seed) if quick else Settings(names, counts, seed=seed)
    settings = replace(settings, clock=clock, count=count)
    if clock == "quiet":
        settings = replace(settings, block_seconds=min(settings.block_seconds, QUIET_SECONDS))
    rows, path = _run(chosen, settings, json)
    console = line_console(WIDTH)
    console.print(table(rows))
    for several in counts:
        console.print(groups_text(of_threads(rows, several)), soft_wrap=True)
    console.print(summary(rows))
    console.print(f"rows: {path}", soft_wrap=True)
    if any(row["error"] or (row["correctness"] or {}).get("differing") for row in rows):
        raise typer.Exit(1)


def _run(chosen: list[Case], settings: Settings, path: Path | None) -> tuple[list[dict[str, Any]], Path]:
    """Measure and write after every case, so that an interrupted run keeps what it had."""
    machine, rows, stamp = Machine(), list[dict[str, Any]](), _stamp(settings.peers)
    _warn_if_busy(stamp)
    target = path or results_path("cpu", cpu_name(stamp))
    # As `isogemm warm` does: else the first cases would go by other thresholds than the last.
    thresholds = str(HostDevice.learn_facts())
    for case, report in listed(chosen):
        for row in measure(case, settings, machine, report):
            rows.append(row)
            extra = {"clock": settings.clock, "thresholds": thresholds, "ceilings": machine.to_dict()}
            write_json(target, rows, environment=stamp, benchmark="cpu", **extra)
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


if __name__ == "__main__":
    typer.run(main)

"""A whole language model and a training step, with isogemm and with plain torch: ``python -m benchmarks.model``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isogemm.lab import environment, write_json

from ..common import Out, Quick, has_words, line_console, named_of, results_path, selected
from ..gpu.engine import HostEngine, open_engine
from .build import Shelf
from .cases import SUITES, Case, Sizes, cases, tiny
from .measure import Settings, measure, wrong
from .profile import host, kernels
from .show import line, summary, table

WIDTH = 210  # of the table, where the output is a file or a pipe


def main(
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)} or all; several with commas.")] = "all",
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'decode graph batch=8'.")] = "",
    out: Out = None,
    quick: Quick = False,
    profile: Annotated[
        str, typer.Option(help="Words of cases to list kernels and host functions of; sets with commas.")
    ] = "",
    compile_until: Annotated[float, typer.Option(help="Seconds into the run; later nothing is compiled.")] = 90.0,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and cache.", min=0)] = 0,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
    small: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,
) -> None:
    """Time decode steps, a prefill and training steps, interleaved; hold them against the bars, and compare bits.

    Exits with 1 when a case failed, or bits changed that must not. A bar that was not met is a result, not a failure.
    """
    chosen, sizes = selected(cases(named_of(suite, SUITES, "--suite", every=True)), only), Sizes()
    if small:
        chosen, sizes = [tiny(case) for case in chosen], Sizes.of_tests()
    console = line_console(WIDTH)
    settings = Settings(seed=seed, compile_until=compile_until)
    if quick:
        settings = Settings(rounds=5, block_seconds=2e-3, seed=seed, quick=True, compile_until=compile_until)
    engine = open_engine() if device == "cuda" else HostEngine()
    listed = {case.name for words in profile.split(",") if words for case in chosen if has_words(case, words)}
    rows, path = run(chosen, settings, engine, Shelf(sizes, device, seed), out, console, listed)
    console.print(table(rows))
    console.print(summary(rows), soft_wrap=True)
    console.print(f"{settings.elapsed():.0f} s; rows: {path}", soft_wrap=True)
    if any(row["error"] or wrong(row) for row in rows):
        raise typer.Exit(1)


def run(
    chosen: Sequence[Case],
    settings: Settings,
    engine: Any,
    shelf: Shelf,
    out: Path | None,
    console: Console,
    listed: Collection[str] = (),
) -> tuple[list[dict[str, Any]], Path]:
    """Measure and write after every case, so that an interrupted run keeps what it had.

    Cases whose names are in `listed` are profiled on the way.
    """
    before = engine.facts()
    rows: list[dict[str, Any]] = []
    stamp, progress = environment(), Console(stderr=True)
    target = out or results_path("model", str(before["name"]))
    for case in chosen:
        measured, runs = measure(case, settings, engine, shelf)
        rows.append(measured)
        if case.name in listed:
            console.print(case.name, style="bold", highlight=False)
            _profile(case, runs, engine, console)
        facts: Mapping[str, Any] = {
            "benchmark": "model",
            "device": {"before": before, "after": engine.facts() if case is chosen[-1] else None},
            "models": {"model": shelf.sizes.model, "train": shelf.sizes.train, "dtype": shelf.sizes.dtype},
        }
        write_json(target, rows, environment=stamp, **facts)
        progress.print(f"{settings.elapsed():5.0f} s {line(measured)}", highlight=False, soft_wrap=True)
    return rows, target


def _profile(case: Case, runs: Mapping[str, Any], engine: Any, console: Console) -> None:
    """Print the kernels of graphs, and the host's functions of other steps."""
    for name, one in runs.items():
        with getattr(one, "scope", nullcontext)():
            if case.mode.endswith("graph"):
                lines = [f"{us:9.1f} us {n:5d}  {kernel[:110]}" for kernel, n, us in kernels(one, engine.synchronize)]
            else:
                lines = host(one, engine.synchronize)
        console.print(f"  {name}", *lines, sep="\n    ", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

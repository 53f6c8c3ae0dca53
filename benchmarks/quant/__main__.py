"""Quantized weights against llama.cpp's CPU kernels: ``python -m benchmarks.quant --llama BUILD``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from isogemm.base.progress import progress_bar
from isogemm.lab import environment, write_json

from ..common import Out, Row, counts_of, cpu_name, line_console, ratio_text, results_path, selected
from ..cpu.show import summary
from ..llama.cpu import Llama
from .measure import IN_PLACE, PEERS, ROWS, Case, Settings, cases, measure

WIDTH = 200  # of the table, where the output is a file or a pipe


def main(
    llama: Annotated[Path, typer.Option(help="A build of ggml; benchmarks/llama/cpu.py says how to make one.")],
    threads: Annotated[str, typer.Option(help="Thread counts, with commas; set for both.")] = "1,2",
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'Q4_K m=1', 'n=4096'.")] = "",
    json: Out = None,
    cpu_time: Annotated[bool, typer.Option(help="Count CPU time: for 1 thread, on a machine that is busy.")] = False,
    blocks: Annotated[int, typer.Option(help="Rounds; fewer than 5 decide nothing.", min=1)] = 9,
    seed: Annotated[int, typer.Option(help="Of the operands.", min=0)] = 0,
) -> None:
    """Time isogemm and llama.cpp in interleaved blocks, check isogemm's bits, and hold it against the bars.

    The bars are set for 2 threads, against the faster of llama.cpp's kernels for files' blocks and for repacked ones.
    Exits with 1 when a bit differed. A bar that was not met is a result, not a failure.
    """
    chosen, counts = selected(cases(), only), counts_of(threads, "--threads")
    if cpu_time and threads != "1":
        raise typer.BadParameter("waiting threads spin, so CPU time says nothing of several", param_hint="--cpu-time")
    try:
        library = Llama(llama)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--llama") from error
    settings = Settings(counts, blocks, seed=seed, cpu_time=cpu_time)
    rows, path = _run(chosen, library, settings, json)
    console = line_console(WIDTH)
    console.print(table(rows))
    console.print(summary(rows))
    console.print(f"rows: {path}", soft_wrap=True)
    if any(row["correctness"]["differing"] for row in rows):
        raise typer.Exit(1)


def _run(
    chosen: Sequence[Case], library: Llama, settings: Settings, path: Path | None
) -> tuple[list[dict[str, Any]], Path]:
    """Measure and write after every row, so that an interrupted run keeps what it had."""
    stamp, rows = environment(), list[dict[str, Any]]()
    target, total = path or results_path("quant", cpu_name(stamp)), len(chosen) * len(settings.threads)
    with progress_bar() as tell:

        def report(done: int, steps: int, name: str) -> None:
            tell(len(rows), total, f"{name} ({done} of {steps})")

        for row in measure(chosen, library, settings, report):
            rows.append(row)
            write_json(target, rows, environment=stamp, benchmark="quant", llama={"ggml": library.version})
    return rows, target


def table(rows: Sequence[Row]) -> Table:
    """One line a row: our time and rate, speed against each kernel of llama.cpp, the bar, the bits."""
    result = Table(title="isogemm against llama.cpp: medians, 95 % intervals", title_justify="left", pad_edge=False)
    names = ("case", "threads", "isogemm", "rate", *(f"/ {p}" for p in (*PEERS, IN_PLACE, "read")), "bar", "differing")
    for name in names:
        result.add_column(name, justify="left" if name in ("case", "bar") else "right", no_wrap=True)
    for row in rows:
        ours, correct = row["timings"]["isogemm"], row["correctness"]
        rate = f"{ours['gb_per_second']:.1f} GB/s" if row["m"] == ROWS[0] else f"{ours['gflop_per_second']:.0f} GOP/s"
        ratios = [_ratio(row, peer) for peer in (*PEERS, IN_PLACE, "read")]
        bars = ", ".join(f"{b['bar']}: {b['result'].lower()}" for b in row["bars"])
        bits = f"{correct['differing']} of {correct['checked']}"
        time = f"{1e3 * ours['median']:.3f} ms"
        result.add_row(row["name"], str(row["threads"]), time, rate, *ratios, bars, bits)
    return result


def _ratio(row: Row, peer: str) -> str:
    return next((ratio_text(v) for v in row["verdicts"] if v["peer"] == peer), "–")


if __name__ == "__main__":
    typer.run(main)

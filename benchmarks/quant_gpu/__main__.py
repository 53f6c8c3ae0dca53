"""Quantized weights on this GPU against bfloat16 ones, GemLite and llama.cpp: ``python -m benchmarks.quant_gpu``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from isogemm.lab import environment, write_json

from ..common import Out, Quick, counts_of, groups_text, line_console, named_of, results_path, selected, told
from ..gpu.engine import CudaEngine, open_engine
from ..llama.cuda import LlamaCuda
from .cases import FORMATS, LAYERS, RANDOM, ROWS, SHAPES, Case, cases, drawn
from .kernels import prepare
from .measure import Settings, groups, measure, wrong
from .operands import LLAMA, Peers, Shelf
from .peers import load_gemlite
from .show import line, summary, table

MANY = 60  # products that are drawn
WIDTH = 360  # of the table, where the output is a file or a pipe
SHAPE_WORDS = ",".join(f"{n}x{k}" for n, k in SHAPES)


def main(
    suite: Annotated[str, typer.Option(help=f"{LAYERS}, or {RANDOM}: products drawn from --seed.")] = LAYERS,
    formats: Annotated[str, typer.Option(help="With commas.")] = ",".join(FORMATS),
    m: Annotated[str, typer.Option(help="Numbers of rows, with commas.")] = ",".join(map(str, ROWS)),
    shapes: Annotated[str, typer.Option(help="NxK, with commas.")] = SHAPE_WORDS,
    llama: Annotated[Path | None, typer.Option(help="What benchmarks.llama.build made.")] = None,
    gemlite: Annotated[bool, typer.Option(help="Time GemLite too, where it is installed.")] = True,
    configs: Annotated[Path | None, typer.Option(help="GemLite's configurations: used, and added to.")] = None,
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'Q4_K m=1', 'n=4096'.")] = "",
    out: Out = None,
    seconds: Annotated[float, typer.Option(help="Begin no case after so long; 0 for no limit.", min=0)] = 0.0,
    quick: Quick = False,
    seed: Annotated[int, typer.Option(help="Of the operands, and of the products that are drawn.", min=0)] = 0,
    count: Annotated[int, typer.Option(help="Products to draw.", min=1)] = MANY,
) -> None:
    """Time isogemm and the others in interleaved CUDA graphs, check isogemm's bits, and hold it against the bars.

    Float32 activations (fp32) are timed up to 16 rows, beside the product with float32 weights. No bar is for them.
    Exits with 1 when a case failed or a bit differed. A bar that was not met is a result, not a failure.
    """
    random, start = named_of(suite, [LAYERS, RANDOM], "--suite") == [RANDOM], time.monotonic()
    chosen = selected(drawn(seed, count) if random else _chosen(formats, m, shapes), only)
    console = line_console(WIDTH)
    engine = open_engine()
    if random:
        prepare(chosen, seconds=seconds / 2 if seconds else 240.0)
    peers, facts = _peers(llama, configs if gemlite else None, gemlite and not random)
    for words in facts.values():
        console.print(words, soft_wrap=True)
    options = told(llama=llama, configs=configs, count=count if random and count != MANY else 0, quick=quick)
    settings = Settings(5, 3e-4, seed, options) if quick else Settings(seed=seed, options=options)
    rows, path = run(chosen, settings, engine, peers, out, facts, start + seconds if seconds else None)
    console.print(table(rows))
    console.print(groups_text(groups(rows)), soft_wrap=True)
    console.print(summary(rows), soft_wrap=True)
    console.print(
        f"{len(rows)} of {len(chosen)} cases in {time.monotonic() - start:.0f} s; rows: {path}", soft_wrap=True
    )
    if any(row["error"] or wrong(row) for row in rows):
        raise typer.Exit(1)


def run(
    chosen: list[Case],
    settings: Settings,
    engine: CudaEngine,
    peers: Peers,
    out: Path | None,
    facts: Mapping[str, Any],
    end: float | None = None,
) -> tuple[list[dict[str, Any]], Path]:
    """Measure, print a line and write after every case, so that an interrupted run keeps what it had."""
    before, ceilings = engine.facts(), engine.ceilings()
    stamp, rows = environment(), list[dict[str, Any]]()
    shelf = Shelf(engine.device, settings.seed, peers, tuple(sorted({case.m for case in chosen})))
    target = out or results_path("quant-gpu", str(before["name"]))
    for case in chosen:
        if end is not None and time.monotonic() > end:
            break
        rows.append(measure(case, settings, engine, shelf, ceilings))
        typer.echo(line(rows[-1]))
        device = {"before": before, "after": engine.facts()}
        write_json(
            target, rows, environment=stamp, benchmark="quant_gpu", device=device, ceilings=ceilings,
            peers=dict(facts), groups=groups(rows),
        )  # fmt: skip
    shelf.drop()
    return rows, target


def _peers(folder: Path | None, configs: Path | None, gemlite: bool) -> tuple[Peers, dict[str, str]]:
    """Those that are there, and words about each."""
    found, words = load_gemlite(configs) if gemlite else (None, "gemlite: absent (--no-gemlite)")
    if folder is None:
        return Peers(found), {"gemlite": words, LLAMA: f"{LLAMA}: absent (no --llama)"}
    try:
        library = LlamaCuda(folder)
    except (OSError, RuntimeError, AttributeError) as error:
        raise typer.BadParameter(str(error), param_hint="--llama") from error
    return Peers(found, library), {"gemlite": words, LLAMA: f"{LLAMA}: ggml {library.version}"}


def _chosen(formats: str, m: str, shapes: str) -> list[Case]:
    """The cases that three lists name, or an exit that says what is wrong with them."""
    names, counts = named_of(formats, FORMATS, "--formats"), counts_of(m, "--m")
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", shapes):
        raise typer.BadParameter(f"{shapes!r} is not a list such as 28672x4096", param_hint="--shapes")
    pairs = [(int(n), int(k)) for n, k in (word.split("x") for word in shapes.split(","))]
    return cases(names, counts, pairs)


if __name__ == "__main__":
    typer.run(main)

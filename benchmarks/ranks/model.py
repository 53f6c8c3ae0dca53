"""A whole model on several GPUs, with isogemm and with plain torch at its best: times, bits and kernels of a step.

``python -m benchmarks.ranks model``: decode steps and a prefill in CUDA graphs, interleaved, and the logits of all
ranks against those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isogemm.lab import environment, write_json

from ..common import Out, Quick, named_of, results_path, selected, words_of
from ..model.cases import Case, Sizes, tiny
from .bench import Bench, Settings
from .launch import World, launch
from .show import lines, table

TRANSPORTS = ("collective", "symmetric")
CASES = (*(Case("ranks", "decode", "graph", batch, 1, 1024) for batch in (1, 8, 64)),
         Case("ranks", "prefill", "graph", 1, 4096, 4096))  # fmt: skip
EQUAL = (Case("ranks", "decode", "graph", 64, 1, 1024), Case("ranks", "prefill", "graph", 2, 350, 350))


def main(
    only: Annotated[
        str, typer.Option(help="Words that timed cases have to have; sets with commas: 'batch=8,prefill'.")
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks, each with a GPU of its own.", min=2)] = 2,
    transports: Annotated[str, typer.Option(help="What carries isogemm's sums, with commas.")] = "collective,symmetric",
    out: Out = None,
    quick: Quick = False,
    equality: Annotated[bool, typer.Option(help="Compare logits with one process' first.")] = True,
    profile: Annotated[str, typer.Option(help="Words of candidates to list kernels of; sets with commas.")] = "",
    compile_until: Annotated[float, typer.Option(help="Seconds into the run; later nothing is compiled.")] = 120.0,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
    small: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,
) -> None:
    """Compare logits, and time decode steps and a prefill. Exits with 1 when a bit differs or a case failed."""
    timed, equal, sizes = [c for words in only.split(",") for c in selected(CASES, words)], EQUAL * equality, Sizes()
    if small:
        sizes, timed = Sizes.of_tests(), [tiny(case) for case in timed]
        equal = tuple(replace(tiny(case), batch=min(case.batch, 3)) for case in equal)
    settings = Settings(
        tp, device, tuple(named_of(transports, TRANSPORTS, "--transports")), sizes, equal, tuple(timed),
        tuple(frozenset(words.split()) for words in profile.split(",") if words),
        compile_until=compile_until, quick=quick, **({"rounds": 5, "block_seconds": 2e-3} if quick else {}),
    )  # fmt: skip
    if not launch(tp, device, measure, settings, out, environment()):
        raise typer.Exit(1)


def measure(world: World, settings: Settings, out: Path | None, stamp: dict[str, Any]) -> bool:
    """What each rank does, and whether all was well; the first prints and writes."""
    import torch

    bench = Bench(world, settings)
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ") if world.device == "cuda" else "cpu"
    target = out or results_path("ranks-model", name)
    facts = {"benchmark": "ranks model", "device": f"{world.size} x {name}", "model": settings.sizes.model}
    rows, console = [], Console(width=200)
    for done in _rows(bench, settings):
        rows.append(done)
        if world.rank == 0:
            write_json(target, rows, environment=stamp, **facts)
            said = "\n      ".join(lines(done))
            console.print(f"{settings.elapsed():4.0f} s {said}", highlight=False, markup=False, soft_wrap=True)
    if world.rank == 0:
        console.print(table(rows))
        console.print(f"{settings.elapsed():.0f} s; rows: {target}", soft_wrap=True)
    bench.engine.synchronize()
    return not any(done["error"] or done["differing"] for done in rows)


def _rows(bench: Bench, settings: Settings) -> Iterator[dict[str, Any]]:
    for case in settings.equal:
        yield from bench.compared(case)
    for case in settings.timed:
        try:
            yield bench.timed(case)
        except Exception as error:  # the next case is another one
            yield {"name": case.name, "compared": 0, "differing": 0, "error": words_of(error)}

"""isogemm on this GPU against torch, cuBLASLt and batch_invariant_ops: ``python -m benchmarks.gpu``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isogemm.lab import environment, write_json

from .cases import SUITES, Case, cases, select
from .engine import CudaEngine, Engine
from .measure import Settings, measure, summarize
from .operands import Peer, Shelf
from .peers import load_peer
from .show import groups, summary, tables

RESULTS = Path(__file__).parents[1] / "results"
WIDTH = 200  # of the tables, where the output is a file or a pipe


def main(
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)} or all; several with commas.")] = "all",
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'm=1 n=4096'.")] = "",
    peer: Annotated[Path | None, typer.Option(help="A checkout of batch_invariant_ops.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the rows go; benchmarks/results by default.")] = None,
    quick: Annotated[bool, typer.Option(help="Few short rounds: shows that all runs, decides little.")] = False,
    seed: Annotated[int, typer.Option(help="Of the operands.", min=0)] = 0,
) -> None:
    """Time isogemm against its peers in interleaved CUDA graphs, check its bits, and hold both against the bars.

    Exits with 1 when a case failed or a bit differed. A bar that was not met is a result, not a failure.
    """
    chosen = select(cases(_suites(suite)), only)
    if not chosen:
        raise typer.BadParameter(f"no case has all the words {only!r}", param_hint="--only")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    engine = _engine()
    called, words = load_peer(peer)
    console.print(words, soft_wrap=True)
    settings = Settings(seed=seed, peer=str(peer or ""))
    if quick:
        settings = Settings(rounds=5, replay_seconds=3e-4, seed=seed, peer=str(peer or ""), quick=True)
    content, path = run(chosen, settings, engine, called, out, {"peer": words})
    rows = content["rows"]
    for table in tables(rows):
        console.print(table)
    console.print(groups(content["groups"]), soft_wrap=True)
    console.print(summary(rows), soft_wrap=True)
    console.print(f"rows: {path}", soft_wrap=True)
    if any(row["error"] or _wrong(row["correctness"] or {}) for row in rows):
        raise typer.Exit(1)


def _wrong(correctness: Mapping[str, Any]) -> int:
    return int(correctness.get("differing", 0) + correctness.get("batch_differing", 0))


def run(
    chosen: list[Case],
    settings: Settings,
    engine: Engine,
    peer: Peer,
    out: Path | None,
    facts: Mapping[str, Any],
) -> tuple[dict[str, Any], Path]:
    """Measure and write after every case, so that an interrupted run keeps what it had."""
    before, ceilings = engine.facts(), engine.ceilings()
    rows: list[dict[str, Any]] = []
    stamp, shelf = environment(), Shelf(engine.device, settings.seed)
    target = out or RESULTS / f"gpu-{_slug(str(before['name']))}-{datetime.now(UTC):%Y-%m-%dT%H%MZ}.json"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    extra: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        overall = progress.add_task("cases", total=len(chosen))
        for case in chosen:
            progress.update(overall, description=case.name)
            rows.append(measure(case, settings, engine, shelf, ceilings, peer))
            after = engine.facts() if case is chosen[-1] else None
            extra = {"benchmark": "gpu", "device": {"before": before, "after": after}, **facts}
            extra |= {"ceilings": ceilings, "groups": summarize(rows)}
            write_json(target, rows, environment=stamp, **extra)
            progress.advance(overall)
    return {"rows": rows, **extra}, target


def _engine() -> Engine:
    """The CUDA device, or an exit that says what is missing."""
    try:
        import torch
    except ImportError as error:
        raise typer.BadParameter("this benchmark needs torch with CUDA: pip install 'isogemm[cuda]'") from error
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs an NVIDIA GPU; torch sees none")
    return CudaEngine()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _suites(text: str) -> list[str]:
    names = list(SUITES) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(SUITES)}, all", param_hint="--suite")
    return names


if __name__ == "__main__":
    typer.run(main)

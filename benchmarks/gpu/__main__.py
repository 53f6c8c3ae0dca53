"""isogemm on this GPU against torch, cuBLASLt and batch_invariant_ops: ``python -m benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from isogemm import set_tuning
from isogemm.lab import environment, write_json

from ..common import Out, Quick, groups_text, line_console, listed, named_of, results_path, selected, summarize, told
from .cases import DRAWN, GROUPS, RANDOM, SUITES, TUNED_GROUPS, Case, cases
from .engine import CudaEngine, open_engine
from .measure import Settings, against, measure
from .operands import Peers, Shelf
from .peers import PEERS, load_peers
from .show import summary, tables

WIDTH = 200  # of the tables, where the output is a file or a pipe


def main(
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)}, all of these, or {RANDOM}.")] = "all",
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'm=1 n=4096'.")] = "",
    peers: Annotated[Path | None, typer.Option(help=f"A folder that holds {', '.join(PEERS)}, or some.")] = None,
    out: Out = None,
    quick: Quick = False,
    seed: Annotated[int, typer.Option(help="Of the operands, and of the products that are drawn.", min=0)] = 0,
    count: Annotated[int, typer.Option(help="Products to draw.", min=1)] = DRAWN,
    tuned: Annotated[bool, typer.Option(help="Time kernels of drawn products ahead; else models choose.")] = False,
    bare: Annotated[bool, typer.Option(help="Without tables' rows: linears are chosen as drawn products are.")] = False,
) -> None:
    """Time isogemm against its peers in interleaved CUDA graphs, check its bits, and hold both against the bars.

    Exits with 1 when a case failed or a bit differed. A bar that was not met is a result, not a failure.
    """
    names = list(SUITES) if suite == "all" else named_of(suite, [*SUITES, RANDOM], "--suite")
    chosen, console = selected(cases(names, seed=seed, count=count), only), line_console(WIDTH)
    engine = open_engine()
    called, words = load_peers(peers)
    console.print(words, soft_wrap=True)
    options = told(peers=peers, tuned=tuned, bare=bare, count=count if count != DRAWN else 0)
    settings = Settings(seed=seed, options=options)
    if quick:
        settings = Settings(rounds=5, replay_seconds=3e-4, seed=seed, options=options, quick=True)
    set_tuning("off")  # what is measured does not change meanwhile
    if bare:
        engine.forget_tables()
    drawn = [case for case in chosen if case.suite == RANDOM or (bare and case.form == "linear")]
    if drawn:
        engine.prepare(drawn)
    if drawn and tuned:
        engine.tune(drawn)
    content, path = run(chosen, settings, engine, called, out, {"peers": words, "tuned": tuned, "bare": bare})
    rows = content["rows"]
    for table in tables(rows):
        console.print(table)
    console.print(groups_text(content["groups"]), soft_wrap=True)
    console.print(summary(rows), soft_wrap=True)
    console.print(f"rows: {path}", soft_wrap=True)
    if any(row["error"] or _wrong(row["correctness"] or {}) for row in rows):
        raise typer.Exit(1)


def _wrong(correctness: Mapping[str, Any]) -> int:
    return int(correctness.get("differing", 0) + correctness.get("batch_differing", 0))


def run(
    chosen: list[Case], settings: Settings, engine: CudaEngine, peers: Peers, out: Path | None, facts: Mapping[str, Any]
) -> tuple[dict[str, Any], Path]:
    """Measure and write after every case, so that an interrupted run keeps what it had."""
    before, ceilings = engine.facts(), engine.ceilings()
    rows: list[dict[str, Any]] = []
    stamp, shelf = environment(), Shelf(engine.device, settings.seed)
    target, extra = out or results_path("gpu", str(before["name"])), dict[str, Any]()
    for case, report in listed(chosen):
        rows.append(measure(case, settings, engine, shelf, ceilings, peers, report))
        after = engine.facts() if case is chosen[-1] else None
        extra = {"benchmark": "gpu", "device": {"before": before, "after": after}, **facts}
        extra |= {"ceilings": ceilings, "groups": summarize(rows, TUNED_GROUPS if facts["tuned"] else GROUPS, against)}
        write_json(target, rows, environment=stamp, **extra)
    return {"rows": rows, **extra}, target


if __name__ == "__main__":
    typer.run(main)

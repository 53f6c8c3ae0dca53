"""Whole models on one device, isogemm beside plain torch, in parts: ``python -m benchmarks.models``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from ..common import Out, geometric_mean, named_of, results_path
from .ledger import Case, Ledger, Sizes

PARTS = {"serving": 130.0, "train": 100.0, "grouped": 60.0, "backward": 40.0, "bits": 240.0, "prefill": 60.0}
"""Seconds that a part may take."""
BARS = {"grouped": 0.95, "backward": 0.8}


def main(
    parts: Annotated[str, typer.Option(help=f"{', '.join(PARTS)}; several with commas, or all.")] = "all",
    seconds: Annotated[float, typer.Option(help="For each part, instead of its own limit.")] = 0.0,
    out: Out = None,
    only: Annotated[list[str] | None, typer.Option(help="Cases whose names have these words, in this order.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, tokens, counts and requests.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes that show that everything runs.")] = False,
) -> None:
    """Compare bits and times, and write every row as it is made. Exits with 1 when a bit differed that must not."""
    chosen, sizes = named_of(parts, list(PARTS), "--parts", every=True), Sizes(device, tiny, seed)
    facts = _facts(device)
    ledger = Ledger(out or results_path("models", str(facts["device"])), sizes, facts)
    ledger.say(f"rows: {ledger.path}")
    for name in chosen:
        module = importlib.import_module(f".{name}", __package__)
        ledger.part(name, _named(module.cases(sizes), only), seconds or PARTS[name])
    for name, bar in BARS.items():
        ratios = _ratios(ledger.rows, name)
        for what, values in ratios.items():
            ledger.say(f"{name}, {what}: {geometric_mean(values):.3f} over {len(values)} (bar {bar:g})")
    wrong = [row["name"] for row in ledger.rows if row.get("differing") and not _plain(row)]
    failed = [row["name"] for row in ledger.rows if row["error"] or "failed" in (row.get("status") or "")]
    ledger.say(
        f"{len(ledger.rows)} rows, {len(failed)} with errors: {failed}, {len(wrong)} with bits that changed: {wrong}"
    )
    if wrong or failed:
        raise typer.Exit(1)


def _named(cases: Iterator[Case], only: Sequence[str] | None) -> Iterator[Case]:
    """All cases, or those that are asked for."""
    if not only:
        return cases
    known = list(cases)
    return iter(dict.fromkeys(case for words in only for case in known if words in case[0]))


def _plain(row: dict[str, Any]) -> bool:
    """Whether a row is plain torch's."""
    return row.get("mode") == "plain" or row["name"].startswith("torch, ")


def _ratios(rows: list[dict[str, Any]], part: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for v in row.get("verdicts") or () if row["part"] == part else ():
            kind = row["name"].split()[0] if part == "grouped" else "backward"
            found.setdefault(f"{kind}, {v['ours']}", []).append(v["ratio"])
    return found


def _facts(device: str) -> dict[str, Any]:
    from importlib import metadata

    import torch

    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    if device != "cuda":
        return {"device": device, "versions": versions}
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no NVIDIA GPU", param_hint="--device")
    return {"device": torch.cuda.get_device_name(), "versions": versions | {"cuda": torch.version.cuda}}


if __name__ == "__main__":
    typer.run(main)

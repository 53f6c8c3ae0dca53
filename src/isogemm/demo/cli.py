"""The demo's command line: reads, embeds, compares, times, audits, and says what it saw."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import typer
from rich.console import Console

from .. import lab
from ..base.disk import write_whole
from ..base.progress import progress_bar
from . import minilm, show
from .minilm import MissingModelError
from .sentences import SENTENCES

if TYPE_CHECKING:
    from .speed import Timings
    from .trials import EmbeddingDrift, RowDrift

__all__ = ["main"]

T = TypeVar("T")
STEPS = 5
MAX_SENTENCES = 512


@dataclass(frozen=True)
class Findings:
    """All that the demo measured."""

    drifts: list[EmbeddingDrift]
    row_drifts: list[RowDrift]
    speeds: list[Timings]
    errors: dict[str, float]
    tokens: int

    @property
    def held(self) -> bool:
        """Whether isogemm kept every bit."""
        rows: list[EmbeddingDrift | RowDrift] = [*self.drifts, *self.row_drifts]
        return not any(row.outputs_changed for row in rows if row.provider == "isogemm")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": "isogemm.demo.v1",
            "tokens": self.tokens,
            "embeddings": list(map(asdict, self.drifts)),
            "linears": list(map(asdict, self.row_drifts)),
            "speed": [row.to_dict() for row in self.speeds],
            "largest_difference_from_float64": self.errors,
            "isogemm_held": self.held,
        }


def run(
    model_dir: Annotated[
        Path | None, typer.Option(help="Folder with config.json, model.safetensors and tokenizer.json.")
    ] = None,
    sentences: Annotated[Path | None, typer.Option(help="Text file with a sentence on each line.")] = None,
    report_dir: Annotated[Path, typer.Option(help="Where the reports go.")] = Path("demo-report"),
) -> None:
    """Embed real sentences with a real model, and show which bits change with the batch.

    Exit status: 0 when isogemm kept every bit, 1 when it did not, 2 when something needed is missing.
    """
    console = Console()
    try:
        folder = minilm.find(model_dir)
        chosen = _read(sentences)
        held = _demo(console, folder, chosen, report_dir)
    except MissingModelError as error:
        print(f"isogemm.demo: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if held else 1)


def main() -> None:
    """Entry point of ``python -m isogemm.demo``."""
    app = typer.Typer(add_completion=False)
    app.command()(run)
    app(prog_name="python -m isogemm.demo")


def _read(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return SENTENCES
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read sentences from {path}: {error}") from None
    found = tuple(line for line in lines if line)
    if not 1 <= len(found) <= MAX_SENTENCES:
        raise typer.BadParameter(f"{path} has {len(found)} sentences; 1 to {MAX_SENTENCES} are needed, one on a line")
    return found


def _demo(console: Console, folder: Path, sentences: Sequence[str], report_dir: Path) -> bool:
    started = time.perf_counter()
    _step(console, 1, "reading the model")
    model = minilm.load(folder)
    batch = minilm.tokenize(minilm.tokenizer(folder), sentences)
    parameters = sum(linear.weight.size for linear in model.linears)
    console.print(
        f"      {len(model.layers)} layers, {len(model.linears)} linears of {parameters:,} weights; "
        f"{len(batch)} sentences of {min(map(len, batch))} to {max(map(len, batch))} tokens"
    )
    findings = _compare(console, folder, model, batch, sentences)
    from . import audit_model

    _step(console, 5, "auditing the model's linears")
    audited, files = audit_model.run(folder, report_dir, console)
    console.print(audit_model.table(audited))
    stamped = findings.to_dict() | {"environment": lab.environment()}
    summary = write_whole(report_dir / "demo.json", json.dumps(stamped, indent=1) + "\n")
    console.print()
    for line in show.conclusions(findings.drifts, findings.row_drifts):
        console.print(line, style="bold", highlight=False)
    console.print()
    for line in audit_model.replay_lines(audited):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{_took(started)}", highlight=False)
    console.print("Reports:", *(str(path) for path in (*files, summary)), highlight=False, soft_wrap=True)
    return findings.held and audited.ok


def _compare(
    console: Console, folder: Path, model: minilm.MiniLM, batch: list[Any], sentences: Sequence[str]
) -> Findings:
    from . import speed, trials
    from .forward import ISOGEMM, NUMPY, embed

    _step(console, 2, "embedding the sentences under different schedules")
    exact = embed(minilm.load(folder, np.float64), batch, NUMPY)
    errors: dict[str, float] = {}
    drifts = []
    schedules = trials.trials(len(batch))
    providers = (NUMPY, ISOGEMM)
    for provider in providers:
        expected = trials.alone(model, batch, provider)
        errors[provider.name] = float(np.abs(expected - exact).max())
        for trial in _progress(console, schedules, provider.name):
            drifts.append(trials.drift(provider, trial.name, expected, trial.embed(model, batch, provider)))
    console.print("     ", show.meaning(expected, sentences, pairs=sentences is SENTENCES), highlight=False)
    console.print(
        "      Largest difference from a float64 pass:",
        ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
        highlight=False,
    )
    console.print(show.drift_table(drifts))
    whole = next(row for row in drifts if row.provider == NUMPY.name and row.trial == trials.one_batch(len(batch)).name)
    if whole.sentences_changed:
        share = trials.attention_share(model, batch, NUMPY, ISOGEMM)
        console.print(show.attention(whole, share), highlight=False)

    _step(console, 3, "running the model's linears at different M")
    inputs = trials.activations(model, batch, NUMPY)
    tokens = len(inputs[0][1])
    cases = [(provider, m) for provider in providers for m in trials.ROWS if m < tokens]
    row_drifts = [trials.row_drift(provider, inputs, m) for provider, m in _progress(console, cases, "linears")]
    console.print(show.row_table(row_drifts, tokens))

    _step(console, 4, "timing")
    work = speed.workloads(model, batch, inputs)
    speeds = [speed.measure(workload, ISOGEMM, NUMPY) for workload in _progress(console, work, "timing")]
    console.print(show.speed_table(speeds, speed.conditions()))
    return Findings(drifts, row_drifts, speeds, errors, tokens)


def _took(started: float) -> str:
    from ..base.jit import compile_seconds

    text = f"Took {time.perf_counter() - started:.0f} s"
    return f"{text}, {compile_seconds():.0f} s of it compiling kernels, once." if compile_seconds() >= 1 else f"{text}."


def _step(console: Console, number: int, title: str) -> None:
    console.print(f"[{number}/{STEPS}] {title}", style="bold cyan", markup=False, highlight=False)


def _progress(console: Console, items: Iterable[T], title: str) -> Iterator[T]:
    listed = list(items)
    with progress_bar(console=console, shown=console.is_terminal) as tell:
        for done, item in enumerate(listed):
            tell(done, len(listed), title)
            yield item

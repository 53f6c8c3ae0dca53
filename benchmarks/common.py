"""What the benchmarks share: options in words, where results go, the loop that writes them, and figures in text."""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from isogemm.base.progress import Tell, progress_bar
from isogemm.contract import compare
from isogemm.lab import Progress, Timing, read_json, relative_speed, verdict

RESULTS = Path(__file__).parent / "results"
STYLES = {"MET": "green", "NOT MET": "red", "AMBIGUOUS": "yellow", "NOT MEASURED": "dim"}

# What chooses the code of OpenBLAS, MKL and torch, or the size of their blocks.
HELD_BY = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")

# Options that every command has: a JSON file, and a run that only shows that all runs.
Out = Annotated[Path | None, typer.Option(help="Where the rows go; benchmarks/results by default.")]
Quick = Annotated[bool, typer.Option(help="Few short rounds: shows that all runs, decides little.")]

Row = Mapping[str, Any]
T = TypeVar("T", bound="Worded")


@dataclass(frozen=True, slots=True)
class Bar:
    """A target.

    Attributes
    ----------
    against : str
        A peer's name, ``fastest`` of the peers, ``read`` (a streaming read of the same bytes), or ``seconds``.
    value : float
        Least ratio of speeds; with ``seconds``, most time.
    threads : tuple of int
        Thread counts that it is set for; empty for all.
    """

    against: str
    value: float
    threads: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"≤ {self.value:g} s" if self.against == "seconds" else f"≥ {self.value:g} {self.against}"


@dataclass(frozen=True, slots=True)
class Group:
    """Cells whose geometric mean, 5th percentile and least have to reach bars; 0 where there is none."""

    name: str
    peer: str
    holds: Callable[[Row], bool]
    bar: float
    low: float = 0.0
    least: float = 0.0


def summarize(
    rows: Sequence[Row], groups: Sequence[Group], against: Callable[[Row, str], float | None]
) -> list[dict[str, Any]]:
    """Groups of cells: geometric mean, 5th percentile, least cell, how many, and whether their bars are met."""
    found = []
    for group in groups:
        ratios = sorted(x for row in rows if group.holds(row) and (x := against(row, group.peer)) is not None)
        mean = geometric_mean(ratios)
        low, least = (ratios[len(ratios) // 20], ratios[0]) if ratios else (None, None)
        word = "NOT MEASURED"
        if mean is not None and low is not None and least is not None:
            word = "MET" if mean >= group.bar and low >= group.low and least >= group.least else "NOT MET"
        facts = {"group": group.name, "peer": group.peer, "bars": [group.bar, group.low, group.least], "mean": mean}
        found.append(facts | {"low": low, "least": least, "cells": len(ratios), "result": word})
    return found


def groups_text(found: Sequence[Row]) -> Text:
    """A line for each group that has cells."""
    lines = []
    for g in found:
        if g["mean"] is None:
            continue
        words = f"{g['group']} against {g['peer']}: {g['mean']:.3f} over {g['cells']} cells, 5th percentile "
        bars = ", ".join(f"{bar:g}" for bar in g["bars"] if bar)
        words += f"{g['low']:.3f}, least {g['least']:.3f} (bars {bars}: {g['result'].lower()})"
        lines.append(Text(words, style=STYLES[g["result"]]))
    return Text("\n").join(lines)


def bars_text(rows: Sequence[Row]) -> Text:
    """How many bars of the rows have each result."""
    bars = Counter(bar["result"] for row in rows for bar in row["bars"])
    words = [Text(f"{bars[name]} {name.lower()}", style=STYLES[name]) for name in STYLES if bars[name]]
    return Text("bars: ") + Text(", ").join(words or [Text("none")])


def judged_text(bars: Sequence[Row], without: str = "") -> Text:
    """Bars and whether they are met, a line each; they are named without a prefix that all have."""
    lines = (Text(f"{b['bar'].removeprefix(without)}: {b['result'].lower()}", style=STYLES[b["result"]]) for b in bars)
    return Text("\n").join(lines)


def missing_text(rows: Sequence[Row]) -> Text:
    """What failed, and which peers were absent, a line each."""
    failed = "".join(f"\nfailed: {row['name']}: {row['error']}" for row in rows if row["error"])
    absent = {f"\nabsent: {name}: {words}" for row in rows for name, words in row["absent"].items()}
    return Text(failed, style="red") + Text("".join(sorted(absent)), style="yellow")


class Worded:
    """A case; its words, unique among all cases, are what ``--only`` selects by."""

    __slots__ = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The case in words."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """`words` as one line."""
        return " ".join(self.words)

    @property
    def facts(self) -> dict[str, Any]:
        """What a row keeps of it: all fields but the bars, which the row has judged."""
        return {key: value for key, value in asdict(self).items() if key != "bars"}


def has_words(case: Worded, words: str) -> bool:
    """Whether a case's name has all of these words: ``"m=1 n=4096"`` leaves m=16 out."""
    return set(words.split()) <= set(case.name.split())


def selected(all_cases: Sequence[T], only: str) -> list[T]:
    """The cases that have every word of `only`. An exit where there is none."""
    found = [case for case in all_cases if has_words(case, only)]
    if not found:
        raise typer.BadParameter(f"no case has all the words {only!r}", param_hint="--only")
    return found


def named_of(text: str, known: Collection[str], option: str, *, every: bool = False) -> list[str]:
    """The names in a list with commas, each once; ``all`` for all of them, where that is allowed."""
    names = list(known) if every and text == "all" else list(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in known]
    if unknown:
        listed_ = ", ".join([*known, *["all"] * every])
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {listed_}", param_hint=option)
    return names


def counts_of(text: str, option: str) -> tuple[int, ...]:
    """The whole numbers in a list with commas, each once."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise typer.BadParameter(f"{text!r} is not a list such as 1,2", param_hint=option)
    return tuple(dict.fromkeys(int(count) for count in text.split(",")))


def told(**options: Any) -> tuple[str, ...]:
    """Options as words: those that were given, True as a flag alone."""
    found = ((f"--{name}", value) for name, value in options.items() if value)
    return tuple(word for name, value in found for word in ([name] if value is True else [name, str(value)]))


def repeated(benchmark: str, words: Sequence[str], *, seed: int = 0, quick: bool = False) -> str:
    """The line that measures one row again."""
    import shlex

    options = [*words, *told(seed=seed, quick=quick)]
    return f"python -m benchmarks.{benchmark} " + shlex.join(options)


def line_console(width: int) -> Console:
    """A console; of this width where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def results_path(kind: str, machine: str) -> Path:
    """A new file in benchmarks/results."""
    return RESULTS / f"{kind}-{slug(machine.removeprefix('NVIDIA '))}-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"


def cpu_name(stamp: Mapping[str, Any]) -> str:
    """The processor of an environment's stamp."""
    return f"{stamp['cpu']['model']} {stamp['cpu']['core']}"


def check_peers() -> None:
    """Raise where the environment gives NumPy or torch other code than this processor's, and isogemm not.

    Containers and images set some of these for everybody: with ``OPENBLAS_CORETYPE=Haswell`` NumPy's large products
    take twice as long on a processor with AVX-512.
    """
    held = [name for name in HELD_BY if name in os.environ]
    if held and "NUMBA_CPU_NAME" not in os.environ:
        found, without = (" ".join(form.format(name) for name in held) for form in ("{}", "-u {}"))
        raise typer.BadParameter(
            f"{found} in the environment: peers would have other code than isogemm. Run env {without} python ..., or "
            "set NUMBA_CPU_NAME and NUMBA_CPU_FEATURES as well"
        )


def measured(path: Path) -> dict[str, Any]:
    """What a results file holds; its ratios are of the samples, as today's are.

    Older files have ratios of medians beside the same samples.
    """
    run = read_json(path)
    for row in run["rows"]:
        for v in row.get("verdicts") or ():
            ours, peer = (Timing.of(v[x], row["timings"][v[x]]["samples"], 1) for x in ("ours", "peer"))
            v |= asdict(verdict(ours, peer))
    return run


def listed(cases: Sequence[T]) -> Iterator[tuple[T, Progress]]:
    """The cases one by one under a bar of progress, each with a function that tells its own."""
    with progress_bar() as tell:
        for done, case in enumerate(cases):
            tell(done, len(cases), case.name)
            yield case, _within(tell, done, len(cases), case.name)


def _within(tell: Tell, done: int, total: int, name: str) -> Progress:
    return lambda step, steps, what: tell(done, total, f"{name}: {what} ({step} of {steps})")


def graph_calls(copies: int, seconds: float, bound: float, most: int) -> int:
    """Whole passes over the copies that take about `seconds`, at most `most` calls (and at least one pass)."""
    passes = max(1, round(seconds / (copies * (1.25 * bound + 2e-6))))
    return max(copies, min(passes * copies, most // copies * copies))


def words_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".rstrip(": ").split("\n", 1)[0][:300]


def least_speed(row: Row, ours: str, peers: Iterable[str]) -> float | None:
    """Speed relative to the fastest of those peers that a row has, by its samples; None without any, or ours."""
    times = row["timings"]
    if ours not in times:
        return None
    mine = times[ours]["samples"]
    return min((relative_speed(mine, times[peer]["samples"]) for peer in peers if peer in times), default=None)


def geometric_mean(values: Iterable[float]) -> float | None:
    """exp of the mean logarithm; None of nothing."""
    found = list(values)
    return exp(sum(map(log, found)) / len(found)) if found else None


def cell(values: Sequence[float]) -> str:
    """Geometric mean and range, as docs/performance.md has them."""
    mean = geometric_mean(values)
    if mean is None:
        return "not measured"
    return f"{mean:.2f} ({min(values):.2f} to {max(values):.2f})"


def sources_text(sources: Sequence[str]) -> list[str]:
    """The files behind a section of docs/performance.md, a line each."""
    return [f"`{source}`{',' if source != sources[-1] else '.'}" for source in sources]


def wrapped(text: str) -> list[str]:
    """Lines of a page."""
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def seconds_text(seconds: float) -> str:
    """A time with its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds:.0f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def compare_bits(contract: str, found: Any, want: Any) -> dict[str, Any]:
    """Two arrays by their bits: ``contract``, ``checked`` and ``differing`` elements, ``first`` mismatch in words."""
    first = compare.first_mismatch(found, want)
    return {
        "contract": contract,
        "checked": found.size,
        "differing": compare.differing(found, want),
        "first": None if first is None else str(first),
    }


def definition_text(rows: Iterable[Row]) -> str:
    """How many elements of the rows were compared with the definition, before the files that they are from."""
    checks = [row["correctness"] for row in rows if row.get("correctness")]
    differing, checked = (sum(check[key] for check in checks) for key in ("differing", "checked"))
    return f"Of {checked:,} output elements compared with the definition in these runs, {differing} differed. From"


def bits_text(correctness: Mapping[str, Any] | None) -> Text | str:
    """How many elements differ, in red where there are any."""
    if correctness is None:
        return ""
    count = correctness["differing"]
    return Text(f"{count} of {correctness['checked']}", style="red" if count else "")


def ratio_text(v: Mapping[str, Any], digits: int = 2) -> str:
    """A verdict's ratio with its interval."""
    return f"{v['ratio']:.{digits}f} [{v['low']:.{digits}f}–{v['high']:.{digits}f}]"

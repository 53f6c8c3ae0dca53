"""What the demo found, as tables and sentences. Every statement is computed from what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.table import Table

    from .speed import Timings
    from .trials import EmbeddingDrift, RowDrift

Array = NDArray[Any]


def meaning(embeddings: Array, sentences: Sequence[str], *, pairs: bool) -> str:
    """Whether the embeddings mean something: neighbours among the demo's paraphrases, or the closest two sentences."""
    similarity = embeddings.astype(np.float64) @ embeddings.astype(np.float64).T
    np.fill_diagonal(similarity, -np.inf)
    nearest = similarity.argmax(axis=1)
    if pairs:
        found = int((nearest == (np.arange(len(sentences)) ^ 1)).sum())
        return f"{found} of {len(sentences)} sentences have their paraphrase as nearest neighbour."
    if len(sentences) < 2:
        return "One sentence only: nothing to be near to."
    first = int(similarity.max(axis=1).argmax())
    second = int(nearest[first])
    return f"Closest two (cosine {similarity[first, second]:.2f}): {sentences[first]!r} and {sentences[second]!r}."


def drift_table(rows: Sequence[EmbeddingDrift]) -> Table:
    """Sentences whose embedding changed, by schedule and provider."""
    found = table("Embeddings against those of the sentences alone", "schedule")
    names = _providers(rows)
    for name in names:
        found.add_column(f"{name}\nchanged", justify="right")
        found.add_column("largest\nchange", justify="right")
    for trial in dict.fromkeys(row.trial for row in rows):
        cells = [trial]
        for row in (row for name in names for row in rows if (row.trial, row.provider) == (trial, name)):
            changed = loud(f"{row.sentences_changed} of {row.sentences}", row.sentences_changed)
            cells += [changed, _small(row.largest_difference)]
        found.add_row(*cells)
    return found


def attention(whole: EmbeddingDrift, share: EmbeddingDrift) -> str:
    """Where the changes of one batch come from: the linears, attention's products, or both."""
    return (
        f"In one batch {whole.sentences_changed} of {whole.sentences} change with {whole.provider}'s products; "
        f"with {whole.provider}'s linears and isogemm for attention, {share.sentences_changed}."
    )


def row_table(rows: Sequence[RowDrift], tokens: int) -> Table:
    """Outputs of the linears by M."""
    found = table(f"The model's own linears, M rows at a time, against all {tokens} rows at once", "M")
    names = _providers(rows)
    for name in names:
        found.add_column(f"{name}\noutputs changed", justify="right")
        found.add_column("in linears", justify="right")
        found.add_column("median\nULPs", justify="right")
    for m in dict.fromkeys(row.m for row in rows):
        cells = [str(m)]
        for row in (row for name in names for row in rows if (row.m, row.provider) == (m, name)):
            share = f"{100 * row.outputs_changed / max(row.outputs, 1):.1f}%"
            linears = f"{row.linears_changed}/{row.linears}"
            cells += [loud(share if row.outputs_changed else "0", row.outputs_changed), linears, f"{row.median_ulps:g}"]
        found.add_row(*cells)
    return found


def speed_table(rows: Sequence[Timings], conditions: str) -> Table:
    """Median milliseconds, and the verdict with its range."""
    found = table("Time, median of interleaved blocks", "work")
    found.caption, found.caption_justify = conditions, "left"
    names = list(rows[0].timings)
    for name in names:
        found.add_column(name.replace(", ", "\n") + ("" if ", " in name else "\n") + " ms", justify="right")
    found.add_column("isogemm's speed\nagainst the faster", justify="right")
    found.add_column("verdict")
    for row in rows:
        verdict = row.verdict
        found.add_row(
            row.workload,
            *(f"{1e3 * timing.median:.1f}" for timing in row.timings.values()),
            f"{verdict.ratio:.2f} ({verdict.low:.2f} to {verdict.high:.2f})",
            str(verdict.word).lower(),
        )
    return found


def speed_words(rows: Sequence[Timings]) -> str:
    """What it costs, in one sentence, with the cases that could not be told apart."""
    ratios = [row.verdict.ratio for row in rows]
    count = Counter(str(row.verdict.word) for row in rows)
    told = ", ".join(f"{n} {word.lower()}" for word, n in count.most_common())
    return (
        f"Speed here: {min(ratios):.2f} to {max(ratios):.2f} times that of NumPy, which counts at its best number of "
        f"threads ({told}). On a busy machine the spread is the machine's."
    )


def conclusions(drifts: Sequence[EmbeddingDrift], rows: Sequence[RowDrift]) -> list[str]:
    """One line for each provider: where its bits changed here, or that they did not."""
    lines = []
    for name in _providers(drifts):
        mine = [row for row in drifts if row.provider == name]
        changed = [row for row in mine if row.outputs_changed]
        linears = [row for row in rows if row.provider == name]
        moved = [str(row.m) for row in linears if row.outputs_changed]
        where = f"its linears alone changed at M = {', '.join(moved)}" if moved else "its linears changed at no M tried"
        if changed:
            far, turned = max(r.largest_difference for r in changed), max(r.largest_cosine_distance for r in changed)
            text = (
                f"embeddings changed bits in {len(changed)} of {len(mine)} schedules, a number by {far:.1e} at most, "
                f"a sentence by 1 - cosine = {turned:.1e}; {where}."
            )
        elif moved:
            text = f"no embedding changed a bit, but {where}."
        else:
            text = f"no bit changed on this CPU: not in {len(mine)} schedules, not in the linears at any M tried."
        lines.append(f"{name}: {text}")
    return lines


def _providers(rows: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(row.provider for row in rows))


def table(title: str, first: str) -> Table:
    """An empty table whose first column is named `first`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    found.add_column(first)
    return found


def loud(text: str, changed: int) -> str:
    """`text` in red when something changed, in green when nothing did."""
    return f"[bold red]{text}[/]" if changed else f"[green]{text}[/]"


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"

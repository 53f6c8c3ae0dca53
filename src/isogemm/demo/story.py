"""Questions to a language model, each alone and all in one batch: which answers are other words, and by how little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import show, smollm
from .decode import Answer, Decoder, Linears

if TYPE_CHECKING:
    from rich.table import Table
    from tokenizers import Tokenizer

QUESTIONS = (
    "Why is the sky blue?",
    "What is a good name for a grey cat?",
    "Explain what a matrix is.",
    "How do I keep bread fresh?",
    "Write a sentence about a lighthouse.",
    "Tell me a short story about a robot.",
)
STEPS = 36
SHOWN = 40  # characters of the common words before two answers part


@dataclass(frozen=True, slots=True)
class Compared:
    """An answer given alone and the same one given in a batch."""

    provider: str
    question: str
    # alone, together: the words
    alone: str
    together: str
    # tokens, shared: how many there are, and how many are the same before the first that is not
    tokens: int
    shared: int
    leads: tuple[float, ...]  # by how much the logit of each shared word was ahead of the next best's, alone
    moved: tuple[float, ...]  # by how much that lead was another one in the batch

    @property
    def changed(self) -> bool:
        """Whether the words differ."""
        return self.shared < self.tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def read(path: Path) -> tuple[smollm.SmolLM, Tokenizer]:
    """The model and its words, from its file."""
    from ..quant import load

    file = load(path)
    return smollm.load(file), smollm.tokenizer(file)


def tell(
    model: smollm.SmolLM, words: Tokenizer, provider: Linears, questions: Sequence[str] = QUESTIONS, steps: int = STEPS
) -> list[Compared]:
    """Ask every question alone and all of them together; a BLAS with one thread, which small products want."""
    import threadpoolctl

    prompts = [smollm.with_question(words, question) for question in questions]
    decoder = Decoder(model, provider)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        together = decoder.answers(prompts, steps)
        alone = [decoder.answers([prompt], steps)[0] for prompt in prompts]
    end = model.end
    return [
        compare(provider.name, question, words, one, other, end)
        for question, one, other in zip(questions, alone, together, strict=True)
    ]


def compare(provider: str, question: str, words: Any, alone: Answer, together: Answer, end: int) -> Compared:
    """The answers up to their end, and the leads of the words that they share."""
    one, other = _ended(alone.tokens, end), _ended(together.tokens, end)
    tokens = max(len(one), len(other))
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    # The word at which they part was chosen after the same words too: its lead counts.
    leads, moved = [], []
    for i in range(min(shared + 1, len(one), len(other))):
        second, first = np.argpartition(alone.logits[i], -2)[-2:]
        if alone.logits[i][second] > alone.logits[i][first]:
            second, first = first, second
        lead, then = (float(row[first]) - float(row[second]) for row in (alone.logits[i], together.logits[i]))
        leads.append(lead)
        moved.append(abs(then - lead))
    return Compared(
        provider, question, words.decode(one), words.decode(other), tokens, shared, tuple(leads), tuple(moved)
    )


def table(rows: Sequence[Compared]) -> Table:
    """How far each answer kept its words, by provider."""
    found = show.table(
        f"Answers in a batch of {len({r.question for r in rows})}, against those given alone", "question"
    )
    names = list(dict.fromkeys(row.provider for row in rows))
    for name in names:
        found.add_column(name, justify="right")
    for question in dict.fromkeys(row.question for row in rows):
        mine = [next(r for r in rows if (r.provider, r.question) == (name, question)) for name in names]
        found.add_row(question, *(show.loud(_kept(row), row.changed) for row in mine))
    return found


def lines(rows: Sequence[Compared]) -> list[str]:
    """The first answer that changed, and of each provider by how little its other words were chosen."""
    out = []
    changed = next((row for row in rows if row.changed), None)
    if changed is not None:
        others = len({row.question for row in rows}) - 1
        out += [f"{changed.question} {changed.provider}, alone:", f"  {_parted(changed.alone, changed)}"]
        out += [f"{changed.provider}, while {others} other questions are in the batch:"]
        out += [f"  {_parted(changed.together, changed)}"]
    return [*out, *(f"{name}: {_margins(mine)}" for name, mine in _by_provider(rows))]


def counts(rows: Sequence[Compared]) -> list[str]:
    """How many answers changed, a line for each provider."""
    return [
        f"{name}: {sum(row.changed for row in mine)} of {len(mine)} answers of the language model are other words in a "
        "batch than alone."
        for name, mine in _by_provider(rows)
    ]


def _by_provider(rows: Sequence[Compared]) -> list[tuple[str, list[Compared]]]:
    return [(name, [row for row in rows if row.provider == name]) for name in dict.fromkeys(r.provider for r in rows)]


def _margins(rows: Sequence[Compared]) -> str:
    """The distribution that says how often a word can turn."""
    leads, moved = (np.array([x for row in rows for x in getattr(row, name)]) for name in ("leads", "moved"))
    if not moved.any():
        return f"over {len(moved)} tokens the lead of the chosen one over the next never moved by a bit."
    close = int((leads <= moved.max()).sum())
    share = f"{close} of them ({100 * close / len(moved):.0f}%)"
    return (
        f"over {len(moved)} tokens the lead of the chosen one over the next moved by {np.median(moved):.2g} in the "
        f"median, {moved.max():.2g} at most; {share} were chosen by a lead as small as that."
    )


def _kept(row: Compared) -> str:
    return f"parts at token {row.shared + 1} of {row.tokens}" if row.changed else f"all {row.tokens} tokens the same"


def _parted(text: str, row: Compared) -> str:
    """The end of the common words, and what follows."""
    common = next((i for i, (a, b) in enumerate(zip(row.alone, row.together, strict=False)) if a != b), 0)
    start = max(0, common - SHOWN)
    return " ".join(f"{'...' if start else ''}{text[start:common]}[{text[common:]}]".split())


def _ended(tokens: Sequence[int], end: int) -> list[int]:
    return list(tokens[: tokens.index(end)] if end in tokens else tokens)

"""What a model is run on: calls that share tokens, so that two runs of one prompt can be compared token by token.

A run is a list of calls (steps) of the model, with or without a cache between them. Each position of a step's batch
carries the number of its token, ``sequence * 2**20 + position in the prompt``, or -1 where it is not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..data import Array

STRIDE = 1 << 20
"""Tokens of one sequence are numbered from its number times this."""


@dataclass(frozen=True)
class Step:
    """One call of the model."""

    ids: Array  # int array [batch, tokens]
    tokens: Array  # int array [batch, tokens]: numbers of the tokens, -1 for those that are not compared
    keys: Array  # int array [batch, past + tokens]: the same for everything that attention can see, earlier steps first
    mask: Array | None = None  # int array [batch, past + tokens], optional: 1 for tokens, 0 for padding
    positions: Array | None = None  # int array [batch, tokens], optional: position ids, where the default is wrong


@dataclass(frozen=True)
class ModelRun:
    """Calls of the model, one after the other."""

    text: str  # what it is; equal texts are equal runs
    steps: tuple[Step, ...] = field(compare=False)
    cache: str = ""  # {"", "dynamic", "static"}: what carries keys and values from step to step
    # {"", "compiled", "captured", "served"}: Eager; by torch.compile; steps behind the first by replaying a CUDA graph;
    # the rows of the one step as requests of continuous batching. With a cache, the first step is eager in any case.
    how: str = ""

    def by(self, how: str) -> ModelRun:
        """The same calls, made in another way."""
        return replace(self, text=f"{self.text}, {how}", how=how)


@dataclass(frozen=True)
class Prompts:
    """Token ids, and the runs that are made of them."""

    # int array [sequences, at least 2 * length + 1]: prompts are the first `length` of each; the rest is for longer
    # neighbours and for labels
    ids: Array
    length: int
    pad: int = 0  # id of padding

    @classmethod
    def draw(cls, sequences: int, length: int, vocabulary: int, seed: int, pad: int = 0) -> Prompts:
        """Random ids, none of them `pad`."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, max(2, vocabulary) - 1, (sequences, 2 * length + 1), dtype=np.int64)
        return cls(ids + (ids >= pad), length, pad)

    def batch(self, sequences: Sequence[int], keep: Sequence[int] = (0,)) -> ModelRun:
        """One call without a cache; the tokens of `keep` are compared."""
        step = self._step(sequences, [0] * len(sequences), self.length, keep)
        return ModelRun(f"batch {list(sequences)} of {self.length}", (step,))

    def padded(self, side: str, pad: int, batch: int) -> ModelRun:
        """Sequence 0 with `pad` of padding on a side, beside longer ones with less."""
        step = self._padded(side, pad, batch)
        return ModelRun(f"{side}-padded by {pad}, batch {batch}", (step,))

    def chunks(self, sizes: Sequence[int], cache: str, batch: int = 1, pad: int = 0) -> ModelRun:
        """A batch in steps of `sizes` tokens with a cache; padding goes into the first."""
        whole = self._padded("left", pad, batch) if pad else self._step(range(batch), [0] * batch, self.length, (0,))
        sizes = [sizes[0] + pad, *sizes[1:]]
        ends = np.cumsum(sizes)
        steps = tuple(_part(whole, int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True))
        text = ", ".join(f"{len([*same])} of {size}" for size, same in itertools.groupby(sizes))
        return ModelRun(f"{cache} cache, batch {batch}, padding {pad}, steps {text}", steps, cache)

    def micro_batches(self, size: int, total: int) -> ModelRun:
        """`total` sequences in calls of `size`, none of them with a cache; all tokens are compared."""
        groups = [range(i, min(i + size, total)) for i in range(0, total, size)]
        steps = tuple(self._step(group, [0] * len(group), self.length, group) for group in groups)
        return ModelRun(f"{total} sequences in micro-batches of {size}", steps)

    def labels(self, step: Step) -> Array:
        """The next token of each token of a step: ids as the model's loss takes them."""
        labels: Array = self.ids[step.tokens // STRIDE, step.tokens % STRIDE + 1]
        return labels

    def _padded(self, side: str, pad: int, batch: int) -> Step:
        pads = [(pad * (batch - i)) // batch for i in range(batch)]
        return self._step(range(batch), pads, self.length + pad, (0,), side)

    def _step(
        self, sequences: Sequence[int], pads: Sequence[int], width: int, keep: Sequence[int], side: str = "left"
    ) -> Step:
        ids = np.full((len(sequences), width), self.pad, np.int64)
        tokens, mask, positions = np.full_like(ids, -1), np.zeros_like(ids), np.zeros_like(ids)
        for row, (sequence, pad) in enumerate(zip(sequences, pads, strict=True)):
            n = width - pad
            here = slice(pad, width) if side == "left" else slice(0, n)
            ids[row, here] = self.ids[sequence, :n]
            mask[row, here], positions[row, here] = 1, np.arange(n)
            if sequence in keep and sequence not in sequences[:row]:
                numbers = sequence * STRIDE + np.arange(n)
                tokens[row, here] = np.where(np.arange(n) < self.length, numbers, -1)
        if not any(pads):
            return Step(ids, tokens, tokens)
        return Step(ids, tokens, tokens, mask, positions)


def _part(whole: Step, start: int, end: int) -> Step:
    """Tokens `start` to `end` of a call, as a step whose cache holds those before."""
    return Step(
        whole.ids[:, start:end],
        whole.tokens[:, start:end],
        whole.keys[:, :end],
        None if whole.mask is None else whole.mask[:, :end],
        None if whole.positions is None else whole.positions[:, start:end],
    )


def prompt_length(wanted: int, config: Any) -> int:
    """The first number from `wanted` on that is no size of the model.

    An operator's output is aligned with tokens by its shape, so a prompt as long as a head is wide would be ambiguous.
    """
    values = config.to_dict().values() if hasattr(config, "to_dict") else ()
    taken = {value for value in values if isinstance(value, int)}
    hidden, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 0)
    taken |= {hidden // heads} if heads else set()
    while wanted in taken:
        wanted += 1
    return wanted

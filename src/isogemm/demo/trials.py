"""What the demo compares: the same sentences under different schedules, and the same linears at different M."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import compare
from .forward import Multiplier, embed, row_by_row
from .minilm import Dense, MiniLM

Array = NDArray[Any]
Embedder = Callable[[MiniLM, Sequence[Array], Multiplier], Array]

# Rows given to a linear at once. Small ones are where a BLAS changes kernels.
ROWS = (1, 2, 3, 4, 8, 16, 64)
LONG_PADDING = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """A way to embed the sentences that must not change their embeddings."""

    name: str
    embed: Embedder


@dataclass(frozen=True, slots=True)
class EmbeddingDrift:
    """How far embeddings moved from those of the sentences alone."""

    provider: str
    trial: str
    # sentences, sentences_changed: embeddings compared, and those with at least one changed bit
    sentences: int
    sentences_changed: int
    # outputs, outputs_changed: the same for single numbers
    outputs: int
    outputs_changed: int
    largest_ulps: int  # largest distance of two numbers in representable fp32 values between them
    largest_difference: float  # largest absolute difference of two numbers of unit-length embeddings
    largest_cosine_distance: float  # largest 1 - cosine of an embedding with itself, in float64


@dataclass(frozen=True, slots=True)
class RowDrift:
    """Outputs of the model's linears that changed when they were given `m` rows at a time instead of all at once.

    `median_ulps` and `largest_ulps` are over the outputs that changed. A number near zero that changes sign is very
    many ULPs from where it was, so the median says more.
    """

    provider: str
    m: int
    linears: int
    linears_changed: int
    outputs: int
    outputs_changed: int
    median_ulps: float
    largest_ulps: int


def alone(model: MiniLM, batch: Sequence[Array], provider: Multiplier) -> Array:
    """Each sentence by itself, without padding: what the trials are compared with."""
    return np.concatenate([embed(model, [ids], provider) for ids in batch])


def trials(count: int) -> tuple[Trial, ...]:
    """The schedules for `count` sentences: batches, another order, more padding, one token at a time."""
    sizes = [size for size in (2, 4, 8) if size < count]
    return (
        *(Trial(f"in batches of {size}", _batches(size)) for size in sizes),
        one_batch(count),
        Trial(f"all {count}, in reverse order", _reversed),
        Trial(f"alone, padded to {LONG_PADDING} tokens", _padded),
        Trial("alone, linears token by token", _tokens),
    )


def attention_share(model: MiniLM, batch: Sequence[Array], provider: Multiplier, other: Multiplier) -> EmbeddingDrift:
    """`drift` of all sentences in one batch, with `provider` for the linears and `other` for attention's products.

    Where `provider` alone changes more than this, its attention did: padding changes the shapes of those products.
    """
    mixed = Multiplier(provider.name, provider.linear, other.matmul)
    got = embed(model, batch, mixed)
    return drift(mixed, f"one batch, attention by {other.name}", alone(model, batch, mixed), got)


def one_batch(count: int) -> Trial:
    """All sentences together, padded to the longest."""
    return Trial(f"all {count} in one batch", embed)


def drift(provider: Multiplier, trial: str, expected: Array, got: Array) -> EmbeddingDrift:
    """Compare embeddings [sentences, n] bit for bit."""
    changed = compare.bits(expected) != compare.bits(got)
    a, b = expected.astype(np.float64), got.astype(np.float64)
    cosine = np.sum(a * b, axis=1) / np.sqrt(np.sum(a * a, axis=1) * np.sum(b * b, axis=1))
    return EmbeddingDrift(
        provider=provider.name,
        trial=trial,
        sentences=len(expected),
        sentences_changed=int(changed.any(axis=1).sum()),
        outputs=expected.size,
        outputs_changed=int(changed.sum()),
        largest_ulps=int(compare.ulp_distance(expected, got).max(initial=0)),
        largest_difference=float(np.abs(a - b).max(initial=0.0)),
        largest_cosine_distance=max(0.0, float((1.0 - cosine).max(initial=0.0))) if changed.any() else 0.0,
    )


def activations(model: MiniLM, batch: Sequence[Array], provider: Multiplier) -> list[tuple[Dense, Array]]:
    """Each linear of the encoder with the rows that reach it, the tokens of all sentences stacked [tokens, k]."""
    calls: list[tuple[Dense, Array]] = []

    def linear(x: Array, linear: Dense) -> Array:
        calls.append((linear, x))
        return provider.linear(x, linear)

    recording = Multiplier(provider.name, linear, provider.matmul)
    for ids in batch:
        embed(model, [ids], recording)
    per_pass = len(model.linears)
    return [
        (linear, np.concatenate([x for _, x in calls[i::per_pass]])) for i, (linear, _) in enumerate(calls[:per_pass])
    ]


def row_drift(provider: Multiplier, inputs: Sequence[tuple[Dense, Array]], m: int) -> RowDrift:
    """Run every linear on all of its rows at once and on `m` at a time, and count the outputs that changed."""
    outputs = linears_changed = 0
    ulps = [np.zeros(0, np.int64)]
    for linear, x in inputs:
        whole = provider.linear(x, linear)
        cut = np.full_like(whole, np.nan)
        for start in range(0, len(x), m):
            # The last piece reaches back over rows already done: a shorter one would be another M.
            rows = slice(min(start, len(x) - m), min(start + m, len(x)))
            cut[rows] = provider.linear(x[rows], linear)
        changed = compare.bits(whole) != compare.bits(cut)
        ulps.append(compare.ulp_distance(whole, cut)[changed])
        outputs, linears_changed = outputs + whole.size, linears_changed + bool(changed.any())
    all_ulps = np.concatenate(ulps)
    return RowDrift(
        provider=provider.name,
        m=m,
        linears=len(inputs),
        linears_changed=linears_changed,
        outputs=outputs,
        outputs_changed=all_ulps.size,
        median_ulps=float(np.median(all_ulps)) if all_ulps.size else 0.0,
        largest_ulps=int(all_ulps.max(initial=0)),
    )


def _batches(size: int) -> Embedder:
    def run(model: MiniLM, batch: Sequence[Array], provider: Multiplier) -> Array:
        return np.concatenate([embed(model, batch[i : i + size], provider) for i in range(0, len(batch), size)])

    return run


def _reversed(model: MiniLM, batch: Sequence[Array], provider: Multiplier) -> Array:
    return embed(model, batch[::-1], provider)[::-1]


def _padded(model: MiniLM, batch: Sequence[Array], provider: Multiplier) -> Array:
    return np.concatenate([embed(model, [ids], provider, tokens=LONG_PADDING) for ids in batch])


def _tokens(model: MiniLM, batch: Sequence[Array], provider: Multiplier) -> Array:
    return alone(model, batch, row_by_row(provider))

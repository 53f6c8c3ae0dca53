"""Greedy decoding of several conversations at once, with the matrix products left to a provider.

Every prompt is prefilled by itself, and every conversation attends to its own keys: what they share are the linears of
a step, one row each. So an answer that changes with its company was changed by a matrix product of other M. Numbers are
bfloat16 between operations and sums are float32, as models are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import products
from . import rows
from .smollm import BFLOAT16, SmolLM

Array = NDArray[Any]


@dataclass(frozen=True)
class Linears:
    """Who computes ``x @ w.T`` of bfloat16, summed in float32 and not yet rounded; `weight` prepares one of them."""

    name: str
    weight: Callable[[Array], Any]
    linear: Callable[[Array, Any], Array]


def _numpy_linear(x: Array, weight: Array) -> Array:
    return np.asarray(x.astype(np.float32) @ weight.T)


def _isogemm_linear(x: Array, weight: Any) -> Array:
    return np.asarray(products.linear(x, weight, out_dtype=np.float32))


# NumPy has no products of bfloat16: the same numbers as float32, whose products are exact.
NUMPY = Linears("numpy", lambda weight: weight.astype(np.float32), _numpy_linear)
ISOGEMM = Linears("isogemm", lambda weight: weight, _isogemm_linear)


@dataclass
class Answer:
    """One conversation's tokens, and the logits that each was the largest of."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)


class _Conversation:
    """Keys and values of one conversation, [layers, groups, tokens, width]."""

    def __init__(self, model: SmolLM, capacity: int) -> None:
        shape = (len(model.blocks), model.groups, capacity, model.width)
        self.keys, self.values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.length = 0


class Decoder:
    """The model with its weights prepared by a provider."""

    def __init__(self, model: SmolLM, provider: Linears) -> None:
        self.model, self.provider = model, provider
        prepared: dict[int, Any] = {}
        for block in model.blocks:
            for weight in (block.query, block.key, block.value, block.output, block.gate, block.up, block.down):
                prepared[id(weight)] = provider.weight(weight)
        prepared[id(model.words)] = provider.weight(model.words)
        self._prepared = prepared

    def answers(self, prompts: Sequence[Sequence[int]], steps: int) -> list[Answer]:
        """`steps` tokens for each prompt, the likeliest every time; all of them in one batch."""
        found = [Answer() for _ in prompts]
        talks = [_Conversation(self.model, len(prompt) + steps) for prompt in prompts]
        last = np.concatenate([self._run(list(p), [t] * len(p))[-1:] for p, t in zip(prompts, talks, strict=True)])
        for step in range(steps):
            logits = self._product(self._norm(last, self.model.norm), self.model.words)
            for answer, row in zip(found, logits, strict=True):
                answer.tokens.append(int(row.argmax()))
                answer.logits.append(row)
            if step + 1 < steps:
                last = self._run([answer.tokens[-1] for answer in found], talks)
        return found

    def _run(self, tokens: Sequence[int], talks: Sequence[_Conversation]) -> Array:
        """One row for each token; tokens of the same conversation follow one another."""
        places = np.array([talk.length + list(talks[:i]).count(talk) for i, talk in enumerate(talks)])
        x = self.model.words[np.asarray(tokens)]
        for layer, block in enumerate(self.model.blocks):
            normed = self._norm(x, block.norm_attention)
            query, key, value = (self._linear(normed, w) for w in (block.query, block.key, block.value))
            mixed = self._attention(layer, query, key, value, places, talks)
            x = _add(x, self._linear(mixed, block.output))
            normed = self._norm(x, block.norm_mlp)
            gated = rows.silu_mul(self._product(normed, block.gate), self._product(normed, block.up)).astype(BFLOAT16)
            x = _add(x, self._linear(gated, block.down))
        for talk in set(talks):
            talk.length += list(talks).count(talk)
        return np.asarray(x)

    def _attention(
        self, layer: int, query: Array, key: Array, value: Array, places: Array, talks: Sequence[_Conversation]
    ) -> Array:
        """softmax(q K^T / sqrt(d)) V for each row over the keys of its own conversation, up to its own place."""
        model, out = self.model, np.empty(query.shape, BFLOAT16)
        turned = _turned(_heads(query, model), places, model.theta)
        keys, values = _turned(_heads(key, model), places, model.theta), _heads(value, model)
        for i, (talk, place) in enumerate(zip(talks, places, strict=True)):
            talk.keys[layer, :, place], talk.values[layer, :, place] = keys[i], values[i]
            known = slice(0, int(place) + 1)
            own = turned[i].reshape(model.groups, -1, model.width)
            attended = rows.attend(own, talk.keys[layer, :, known], talk.values[layer, :, known])
            out[i] = attended.reshape(-1).astype(BFLOAT16)
        return out

    def _norm(self, x: Array, gamma: Array) -> Array:
        return np.asarray(rows.rms_norm(x.astype(np.float32), gamma, self.model.epsilon).astype(BFLOAT16))

    def _product(self, x: Array, weight: Array) -> Array:
        return self.provider.linear(x, self._prepared[id(weight)])

    def _linear(self, x: Array, weight: Array) -> Array:
        return np.asarray(self._product(x, weight).astype(BFLOAT16))


def _heads(x: Array, model: SmolLM) -> Array:
    return np.asarray(x.astype(np.float32).reshape(len(x), -1, model.width))


def _turned(x: Array, places: Array, theta: float) -> Array:
    """Rotary positions on pairs of neighbours, as GGUF files order them; `x` is [rows, heads, width]."""
    width = x.shape[-1]
    angles = places[:, None] * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    even, odd, out = x[..., 0::2], x[..., 1::2], np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return out.astype(BFLOAT16).astype(np.float32)


def _add(x: Array, y: Array) -> Array:
    return np.asarray((x.astype(np.float32) + y.astype(np.float32)).astype(BFLOAT16))

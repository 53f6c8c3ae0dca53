"""The encoder's forward pass, with the matrix products left to a provider."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import products
from . import rows
from .minilm import Dense, Layer, MiniLM

Array = NDArray[Any]


@dataclass(frozen=True)
class Multiplier:
    """Who computes the matrix products."""

    name: str
    # ``linear(x [m, k], linear) -> [m, n]``: ``x @ linear.weight.T + linear.bias``
    linear: Callable[[Array, Dense], Array]
    matmul: Callable[[Array, Array], Array]  # ``matmul(a, b)`` on stacks of matrices, as `numpy.matmul`


def _numpy_linear(x: Array, linear: Dense) -> Array:
    return np.asarray(x @ linear.weight.T + linear.bias)


def _isogemm_linear(x: Array, linear: Dense) -> Array:
    return np.asarray(products.linear(x, linear.weight, linear.bias))


NUMPY = Multiplier("numpy", _numpy_linear, np.matmul)
ISOGEMM = Multiplier("isogemm", _isogemm_linear, products.matmul)


def row_by_row(provider: Multiplier) -> Multiplier:
    """`provider` with its linears given one row (one token) at a time, as a decoding model does: M = 1."""

    def linear(x: Array, linear: Dense) -> Array:
        out = np.full((len(x), len(linear.weight)), np.nan, x.dtype)
        for i in range(len(x)):
            out[i] = provider.linear(x[i : i + 1], linear)[0]
        return out

    return Multiplier(provider.name, linear, provider.matmul)


def embed(model: MiniLM, batch: Sequence[Array], provider: Multiplier, *, tokens: int = 0) -> Array:
    """Unit-length sentence embeddings [len(batch), hidden]: the encoder, the mean over the tokens, L2 normalisation.

    The batch has the token ids of each sentence. Shorter sentences are padded on the right and masked: to the longest,
    or to `tokens` where that is more.
    """
    lengths = np.array([len(ids) for ids in batch], np.int64)
    tokens = max(tokens, int(lengths.max()))
    padded = np.zeros((len(batch), tokens), np.int64)
    for i, ids in enumerate(batch):
        padded[i, : len(ids)] = ids
    hidden = model.words.shape[1]
    x = model.words[padded] + model.positions[:tokens] + model.token_type
    x = rows.layer_norm(x.reshape(-1, hidden), model.norm.gamma, model.norm.beta, model.epsilon)
    for layer in model.layers:
        x = _layer(model, layer, x, lengths, provider)
    return np.asarray(rows.unit(rows.mean_pool(x.reshape(len(batch), tokens, hidden), lengths)))


def _layer(model: MiniLM, layer: Layer, x: Array, lengths: Array, provider: Multiplier) -> Array:
    attended = provider.linear(_attention(model, layer, x, lengths, provider), layer.output)
    x = rows.layer_norm(x + attended, layer.norm_attention.gamma, layer.norm_attention.beta, model.epsilon)
    inner = rows.gelu(provider.linear(x, layer.up))
    out = x + provider.linear(inner, layer.down)
    return np.asarray(rows.layer_norm(out, layer.norm_output.gamma, layer.norm_output.beta, model.epsilon))


def _attention(model: MiniLM, layer: Layer, x: Array, lengths: Array, provider: Multiplier) -> Array:
    """softmax(Q K^T / sqrt(d)) V for each head, on `x` [sentences * tokens, hidden]."""
    sentences, width = len(lengths), x.shape[1] // model.heads
    tokens = len(x) // sentences

    def heads(linear: Dense) -> Array:
        return provider.linear(x, linear).reshape(sentences, tokens, model.heads, width).transpose(0, 2, 1, 3)

    q, k, v = heads(layer.query), heads(layer.key), heads(layer.value)
    scores = provider.matmul(q, k.transpose(0, 1, 3, 2))
    weights = rows.softmax(scores, lengths, 1.0 / math.sqrt(width))
    mixed = provider.matmul(weights, v)
    return np.ascontiguousarray(mixed.transpose(0, 2, 1, 3)).reshape(len(x), -1)

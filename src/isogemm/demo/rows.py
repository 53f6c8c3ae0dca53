"""Everything in the models that is not a matrix product, one row at a time.

Each function walks the rows of a contiguous array and treats a row as if it were alone: a fixed order over its
elements, float64 inside, one rounding at the end. So a row's result cannot see how many rows there are, where it
stands or what the others hold, and a bit that changes in an embedding was changed by a matrix product.
NumPy's own reductions are not used because their order is a detail of the array's layout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.jit import njit

Array = NDArray[Any]


@njit
def layer_norm(x: Array, gamma: Array, beta: Array, epsilon: float) -> Array:
    """(x - mean(x)) / sqrt(var(x) + epsilon) * gamma + beta for each row of `x` [rows, n]; biased variance."""
    rows, n = x.shape
    out = np.empty_like(x)
    for i in range(rows):
        total = 0.0
        for j in range(n):
            total += np.float64(x[i, j])
        mean = total / n
        squares = 0.0
        for j in range(n):
            d = np.float64(x[i, j]) - mean
            squares += d * d
        scale = 1.0 / math.sqrt(squares / n + epsilon)
        for j in range(n):
            out[i, j] = (np.float64(x[i, j]) - mean) * scale * np.float64(gamma[j]) + np.float64(beta[j])
    return out


@njit
def gelu(x: Array) -> Array:
    """x * (1 + erf(x / sqrt(2))) / 2 for each element of `x` [rows, n]."""
    rows, n = x.shape
    out = np.empty_like(x)
    for i in range(rows):
        for j in range(n):
            v = np.float64(x[i, j])
            out[i, j] = 0.5 * v * (1.0 + math.erf(v * 0.7071067811865476))
    return out


@njit
def softmax(scores: Array, lengths: Array, scale: float) -> Array:
    """softmax(scale * scores) over the first ``lengths[i]`` keys of sentence i, 0 on the padding.

    `scores` is [sentences, heads, queries, keys]; padded keys are neither read nor counted.
    """
    sentences, heads, queries, keys = scores.shape
    out = np.zeros_like(scores)
    terms = np.empty(keys, np.float64)
    for i in range(sentences):
        length = lengths[i]
        for h in range(heads):
            for q in range(queries):
                top = -math.inf
                for k in range(length):
                    top = max(top, np.float64(scores[i, h, q, k]) * scale)
                total = 0.0
                for k in range(length):
                    terms[k] = math.exp(np.float64(scores[i, h, q, k]) * scale - top)
                    total += terms[k]
                for k in range(length):
                    out[i, h, q, k] = terms[k] / total
    return out


@njit
def mean_pool(x: Array, lengths: Array) -> Array:
    """Mean over the first ``lengths[i]`` tokens of sentence i; `x` is [sentences, tokens, n]."""
    sentences, _, n = x.shape
    out = np.empty((sentences, n), x.dtype)
    for i in range(sentences):
        for j in range(n):
            total = 0.0
            for t in range(lengths[i]):
                total += np.float64(x[i, t, j])
            out[i, j] = total / lengths[i]
    return out


@njit
def unit(x: Array) -> Array:
    """x / |x| for each row of `x` [rows, n]; a zero row stays zero."""
    rows, n = x.shape
    out = np.empty_like(x)
    for i in range(rows):
        squares = 0.0
        for j in range(n):
            squares += np.float64(x[i, j]) * np.float64(x[i, j])
        length = max(math.sqrt(squares), 1e-12)
        for j in range(n):
            out[i, j] = np.float64(x[i, j]) / length
    return out


@njit
def rms_norm(x: Array, gamma: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * gamma for each row of `x` [rows, n]."""
    rows, n = x.shape
    out = np.empty_like(x)
    for i in range(rows):
        squares = 0.0
        for j in range(n):
            squares += np.float64(x[i, j]) * np.float64(x[i, j])
        scale = 1.0 / math.sqrt(squares / n + epsilon)
        for j in range(n):
            out[i, j] = np.float64(x[i, j]) * scale * np.float64(gamma[j])
    return out


@njit
def silu_mul(gate: Array, up: Array) -> Array:
    """gate / (1 + exp(-gate)) * up for each element of [rows, n]."""
    rows, n = gate.shape
    out = np.empty_like(gate)
    for i in range(rows):
        for j in range(n):
            v = np.float64(gate[i, j])
            out[i, j] = v / (1.0 + math.exp(-v)) * np.float64(up[i, j])
    return out


@njit
def attend(query: Array, keys: Array, values: Array) -> Array:
    """softmax(q K^T / sqrt(d)) V: `query` [groups, heads, d], `keys` and `values` [groups, tokens, d]."""
    groups, heads, d = query.shape
    tokens = keys.shape[1]
    out = np.empty_like(query)
    terms, mixed = np.empty(tokens, np.float64), np.empty(d, np.float64)
    for g in range(groups):
        for h in range(heads):
            top = -math.inf
            for t in range(tokens):
                terms[t] = 0.0
                for j in range(d):
                    terms[t] += np.float64(query[g, h, j]) * np.float64(keys[g, t, j])
                terms[t] /= math.sqrt(d)
                top = max(top, terms[t])
            total = 0.0
            mixed[:] = 0.0
            for t in range(tokens):
                weight = math.exp(terms[t] - top)
                total += weight
                for j in range(d):
                    mixed[j] += weight * np.float64(values[g, t, j])
            for j in range(d):
                out[g, h, j] = mixed[j] / total
    return out

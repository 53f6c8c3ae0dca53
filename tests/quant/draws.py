"""Weights, activations and blocks of every kind that separates formulas."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import quants

from isogemm.formats.blocks import FORMATS, BlockFormat
from isogemm.quant import QuantizedMatrix

QUANTIZED = tuple(f for f in FORMATS.values() if f.quantized)
WEIGHTS = tuple(f for f in QUANTIZED if f.activations)
SHORT = tuple(f for f in WEIGHTS if f.block == 32)
LONG = tuple(f for f in WEIGHTS if f.block == 256)
KINDS = ("normal", "heavy", "rows", "zeros", "ties", "shifted", "subnormal", "large")


def values(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """float32 [n, k]."""
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    x = rng.standard_normal((n, k))
    if kind == "heavy":
        x = x * np.exp2(rng.integers(-20, 12, (n, k)))
    elif kind == "rows":
        x = x * np.exp2(rng.integers(-60, 15, (n, 1)))
    elif kind == "zeros":
        x = np.where(rng.random((n, k)) < 0.7, 0, x)
        x[:4] = np.array([0.0, -0.0, 1.0, -1.0])[: len(x), None]
    elif kind == "ties":
        x = rng.integers(-8, 9, (n, k)) / 2
    elif kind == "shifted":
        x = np.abs(x) + 3
    elif kind == "subnormal":
        x = x * 2.0**-130
    elif kind == "large":
        x = np.clip(x, -2, 2) * 2.0**14
    return x.astype(np.float32)


def encoded(x: np.ndarray, name: str) -> QuantizedMatrix:
    """What `isogemm.quantize` gives, by another package: nothing is compiled while tests are collected."""
    rows = quants.quantize(x, gguf.GGMLQuantizationType[name])
    return QuantizedMatrix.from_bytes(rows, shape=x.shape, format=name)


def blocks(fmt: BlockFormat, n: int, count: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite scales: rows [n, count * nbytes]."""
    rng = np.random.default_rng((seed, len(fmt.name), fmt.nbytes))
    rows = rng.integers(0, 256, (n, count * fmt.nbytes), dtype=np.uint8)
    rows[0] = 0
    rows[1 % n] = 255
    held = rows.reshape(n, count, fmt.nbytes).view(fmt.dtype)[..., 0]
    for field in fmt.scales:
        scale = rng.standard_normal(held.shape) * np.exp2(rng.integers(-24, 15, held.shape))
        held[field.name] = np.clip(scale, -65504, 65504)
    return rows

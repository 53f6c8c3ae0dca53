"""Mistakes about quantized weights: how bytes become numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...contract.int32 import Codes
from ...formats import reference
from ..case import Array, GemmCall, Variant

NIBBLES = ("Q4_0", "Q4_1", "Q4_K")


def multiplied(c: Codes) -> Array:
    """The weights [n, k] of codes: d * s * q + o * t."""
    n, k = c.q.shape
    blocks, subs = (n, k // c.block), c.block // c.sub
    with np.errstate(all="ignore"):
        scale = c.d.reshape(*blocks, 1) * c.scales.reshape(*blocks, subs).astype(np.float32)
        x = scale[..., None] * c.q.reshape(*blocks, subs, c.sub).astype(np.float32)
        if c.offset is not None and c.mins is not None:
            x = x + (c.offset.reshape(*blocks, 1) * c.mins.reshape(*blocks, subs).astype(np.float32))[..., None]
    return np.asarray(x.reshape(n, k))


def _with(case: GemmCall, words: str, codes: Codes) -> Variant:
    assert case.weights is not None
    return Variant(words, case.read("b", case.weights.matrix(multiplied(codes))))


def _codes(case: GemmCall) -> tuple[Any, Codes] | None:
    return (case.weights.fmt, case.weights.codes()) if case.weights else None


def nibbles(case: GemmCall) -> Iterator[Variant]:
    """Nibbles of a byte exchanged, or taken for neighbours."""
    held = _codes(case)
    if held is None or held[0].name not in NIBBLES:
        return
    _, codes = held
    half = 16 if codes.block == 32 else 32  # of Q4_K a byte serves two chunks of 32
    pairs = codes.q.reshape(len(codes.q), -1, 2, half)
    yield _with(case, "high and low nibbles exchanged", replace(codes, q=pairs[:, :, ::-1].reshape(codes.q.shape)))
    neighbours = pairs.swapaxes(2, 3).reshape(codes.q.shape)
    yield _with(case, "a byte's nibbles taken for neighbours", replace(codes, q=neighbours))


def stride(case: GemmCall) -> Iterator[Variant]:
    """Rows too far apart or too near, by a block: alignment to blocks cannot show it."""
    w = case.weights
    if w is None:
        return
    for step in (w.stride + w.fmt.nbytes, w.stride - w.fmt.nbytes):
        if step > 0:
            weights = reference.dequantize(w.rows(step), w.fmt)
            yield Variant(f"rows {step} bytes apart, the format says {w.stride}", case.read("b", w.matrix(weights)))


def neighbour(case: GemmCall) -> Iterator[Variant]:
    """The scale of the block before or behind."""
    held = _codes(case)
    if held is None or held[1].d.size < 2:
        return
    _, codes = held
    for by, words in ((-1, "behind"), (1, "before")):
        d = np.roll(codes.d.reshape(-1), by).reshape(codes.d.shape)
        yield _with(case, f"each block with the scale of the one {words}", replace(codes, d=d))
        if codes.offset is not None:
            offset = np.roll(codes.offset.reshape(-1), by).reshape(codes.d.shape)
            yield _with(case, f"scale and minimum of the block {words}", replace(codes, d=d, offset=offset))


def zero(case: GemmCall) -> Iterator[Variant]:
    """What makes codes signed, or shifts them, left out."""
    held = _codes(case)
    if held is None:
        return
    fmt, codes = held
    if fmt.zero:
        yield _with(case, f"the zero point {fmt.zero} not subtracted", replace(codes, q=codes.q + fmt.zero))
    if codes.offset is not None:
        yield _with(case, "minima not added", replace(codes, offset=np.zeros_like(codes.offset)))
        yield _with(case, "minima with the other sign", replace(codes, offset=-codes.offset))


def sign(case: GemmCall) -> Iterator[Variant]:
    """Signed codes read as unsigned ones, or the other way round."""
    held = _codes(case)
    if held is None:
        return
    fmt, codes = held
    if fmt.name == "Q8_0":
        yield _with(case, "signed bytes read as unsigned", replace(codes, q=codes.q & 255))
        return
    bits = int(fmt.high - fmt.low).bit_length()
    stored = codes.q + fmt.zero
    signed = np.where(stored >> (bits - 1), stored - (1 << bits), stored).astype(np.int32)
    if (signed != codes.q).any():
        yield _with(case, f"codes of {bits} bits read as signed", replace(codes, q=signed))


def sub_block(case: GemmCall) -> Iterator[Variant]:
    """Scales of sub-blocks: a neighbour's, the first one's, or without their upper bits."""
    held = _codes(case)
    if held is None or held[1].sub == held[1].block:
        return
    _, codes = held
    n, subs = len(codes.q), codes.block // codes.sub
    scales = codes.scales.reshape(n, -1, subs)
    changed = {
        "the scale of the sub-block behind": np.roll(scales, -1, 2),
        "the scale of the sub-block before": np.roll(scales, 1, 2),
        "the first sub-block's scale for all": np.broadcast_to(scales[:, :, :1], scales.shape),
        "scales without their upper two bits": np.sign(scales) * (np.abs(scales) & 15),
    }
    for words, new in changed.items():
        yield _with(case, words, replace(codes, scales=np.ascontiguousarray(new).reshape(codes.scales.shape)))

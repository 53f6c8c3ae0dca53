"""Products with quantized weights against results recorded on an NVIDIA H200: tools/golden_int32.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.quant.draws import KINDS, WEIGHTS
from tests.recorded import facts, vectors

import isogemm
from isogemm.contract import int32, reference
from isogemm.contract.compare import first_mismatch
from isogemm.contract.rows import _fma
from isogemm.formats.reference import decode, dequantize
from isogemm.quant import QuantizedMatrix

F32 = np.float32


def load(fmt: Any, kind: str) -> tuple[Any, Any, Any, Any]:
    """x, the rows of w, and results as int32 and as fma."""
    held, name = vectors("int32"), f"{fmt.name}-{kind}"
    return held[f"{kind}-{fmt.block}.x"], held[f"{fmt.name}.w"], held[f"{name}.int32"], held[f"{name}.fma"]


def matrix(rows: Any, fmt: Any, k: int) -> QuantizedMatrix:
    return QuantizedMatrix.from_bytes(rows, shape=(len(rows), k), format=fmt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_the_cpu_has_the_gpus_bits(fmt: Any, kind: str) -> None:
    x, rows, integers, floats = load(fmt, kind)
    w = matrix(rows, fmt, x.shape[1])
    assert first_mismatch(isogemm.linear(x, w, activations="q8"), integers.view(F32)) is None
    assert first_mismatch(isogemm.linear(x, w, activations="fp32"), floats.view(F32)) is None


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_the_definitions_have_the_gpus_bits(fmt: Any) -> None:
    for kind in KINDS:
        x, rows, integers, floats = load(fmt, kind)
        assert first_mismatch(int32.evaluate(x, decode(rows, fmt)), integers.view(F32)) is None
        defined = reference.evaluate(x, np.ascontiguousarray(dequantize(rows, fmt).T), "fma/chain")
        assert first_mismatch(defined, floats.view(F32)) is None


def test_the_vectors_tell_mistakes_apart() -> None:
    """Scales before their rounding to float16, T before S, and codes of the other rounding of halves: other bits."""
    seen = dict.fromkeys(("halves", "scale", "order"), 0)
    for fmt in WEIGHTS:
        codes = decode(vectors("int32")[f"{fmt.name}.w"], fmt)
        for kind in KINDS:
            x, _, integers, _ = load(fmt, kind)
            for what in seen:
                seen[what] += int((mistaken(x, codes, what).view(np.uint32) != integers).sum())
    assert all(seen.values()), seen


def mistaken(x: Any, codes: int32.Codes, what: str) -> Any:
    """The product with one step of its definition done otherwise."""
    block = 32 if codes.block == 32 else 256
    a = int32.quantize_activations(x, block)
    q, d = a.q, a.d
    with np.errstate(all="ignore"):
        blocks = x.reshape(len(x), -1, block)
        largest = np.abs(blocks).max(-1)
        if what == "halves":
            exact = np.float32(1) / (largest / F32(127)) if block == 32 else F32(127) / largest
            y = blocks * np.where(np.isfinite(exact), exact, 0)[..., None]
            other = np.rint(y) if block == 32 else np.copysign(np.floor(np.abs(y) + F32(0.5)), y)
            q = np.where(np.isfinite(largest)[..., None], other, 0).astype(np.int8).reshape(x.shape)
        elif what == "scale" and block == 32:
            d = np.where(np.isfinite(d), largest / F32(127), d)
        acc = np.zeros((len(x), len(codes.q)), F32)
        for b in range(x.shape[1] // block):
            terms = [(codes.scales, codes.q, codes.d)]
            if codes.offset is not None and codes.mins is not None:
                terms.append((codes.mins, np.ones_like(codes.q), codes.offset))
            for s, w, scale in reversed(terms) if what == "order" else terms:
                span, subs = slice(b * block, (b + 1) * block), block // codes.sub
                weights = w[:, span] * np.repeat(s[:, b * subs : (b + 1) * subs], codes.sub, axis=1)
                exact = q[:, span].astype(np.int64) @ weights.T.astype(np.int64)
                acc = _fma(exact.astype(F32), d[:, b, None] * scale[None, :, b], acc)
    return reference.canonical(acc)


def test_what_was_recorded() -> None:
    said = facts("int32")
    assert said["tiles that differ"] == {}
    assert said["cases"] == [f"{fmt.name}-{kind}" for fmt in WEIGHTS for kind in KINDS]
    assert set(said["tiles"]) >= {"few alone", "few in turns", "many 128x32", "floats, few", "floats, many"}
    for name in said["cases"]:
        for bits in (vectors("int32")[f"{name}.int32"], vectors("int32")[f"{name}.fma"]):
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            assert (bits[nan] == 0x7FFFFFFF).all(), "the GPU's NaN is the canonical one"

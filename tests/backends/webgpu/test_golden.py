"""Bits that an NVIDIA GPU computed by CUDA: `fma/lanes32` by tools/golden_lanes.py, `int32` by golden_int32.py."""

from __future__ import annotations

import numpy as np
import pytest
from tests.products import F32, assert_same
from tests.quant.draws import KINDS
from tests.recorded import facts, vectors

import isogemm
from isogemm.backends.webgpu.kernels import FORMATS
from isogemm.backends.webgpu.public import array
from isogemm.base.dtypes import NUMPY
from isogemm.contract import reference
from isogemm.formats.blocks import format_of
from isogemm.quant import QuantizedMatrix

LANES = facts("lanes32")
CASES = LANES["cases"]


def of_case(name):
    """a, b stored [n, k], and the GPU's bits."""
    lanes = vectors("lanes32")
    dtype = NUMPY[name.split("-")[0]]
    a, b = lanes[f"{name}.a"].view(dtype), lanes[f"{name}.b"].view(dtype)
    return a, np.ascontiguousarray(b.T), lanes[f"{name}.out"].view(F32)


def test_both_kernels_of_the_gpu_agreed():
    assert LANES["tiles that differ"] == {}
    assert set(LANES["tiles"]) == {"warp_each", "eight_each"}


@pytest.mark.parametrize("name", CASES)
def test_lanes_of_the_cpu_and_of_the_definition(name):
    a, w, want = of_case(name)
    assert_same(reference.evaluate(a, w.T, "fma/lanes32"), want)
    assert_same(isogemm.linear(a, w, contract="fma/lanes32", out_dtype="float32"), want)


@pytest.mark.parametrize("name", CASES)
def test_lanes_here(device, name):
    a, w, want = of_case(name)
    for rows in (slice(None), slice(4, 5)):
        got = isogemm.linear(array(a[rows]), array(w), contract="fma/lanes32", out_dtype="float32")
        assert_same(got.numpy(), want[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_integers_here(device, fmt, kind):
    integers = vectors("int32")
    x, rows = integers[f"{kind}-{format_of(fmt).block}.x"], integers[f"{fmt}.w"]
    w = QuantizedMatrix.from_bytes(rows, shape=(len(rows), x.shape[1]), format=fmt).to("webgpu")
    for activations, recorded in (("q8", "int32"), ("fp32", "fma")):
        want = integers[f"{fmt}-{kind}.{recorded}"].view(F32)
        assert_same(isogemm.linear(array(x), w, activations=activations).numpy(), want)
        assert_same(isogemm.linear(array(x[2:3]), w, activations=activations).numpy(), want[2:3])

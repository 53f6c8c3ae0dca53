"""Whether a thread has IEEE defaults is told without a compiler, as machine code tells it."""

from __future__ import annotations

import ctypes
import math
import platform

import numpy as np
import pytest
from tests.process import python

import isogemm
from isogemm.backends.cpu.gemm.tasks import float32_bits
from isogemm.base import rounding
from isogemm.base.arguments import nearest_float32
from isogemm.contract.attention import _factor, factor

MODES = {"nearest": 0, "down": 0x400, "up": 0x800, "zero": 0xC00}  # of fesetround, on x86


def test_a_thread_that_was_left_alone_has_them():
    assert rounding.has_defaults()


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names of x86's modes")
@pytest.mark.parametrize("mode", MODES)
def test_other_roundings_are_seen(mode):
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(MODES[mode]) == 0
    try:
        found = rounding.has_defaults()
    finally:
        libm.fesetround(0)
    assert found == (mode == "nearest")


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names of x86's modes")
@pytest.mark.parametrize("mode", MODES)
def test_scalars_are_rounded_to_nearest(mode):
    """In whole steps, so that the processor is not asked: against NumPy, which it is, in the mode that it had."""
    draw = np.random.default_rng(0)
    cases = (draw.standard_normal(2000) * 2.0 ** draw.integers(-155, 130, 2000)).tolist()
    ties = [float(x) * (1 + 2.0**-24) for x in draw.standard_normal(100).astype(np.float32)]
    cases += [*ties, 0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**128, -(2.0**128), 5e-324, 2.0**-150, 3 * 2.0**-150]
    with np.errstate(all="ignore"):
        want = np.array(cases).astype(np.float32)
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(MODES[mode]) == 0
    try:
        found, bits = [nearest_float32(x) for x in cases], [float32_bits(x) for x in cases]
        made = isogemm.gemm(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), alpha=0.1)
    finally:
        libm.fesetround(0)
    assert np.array(found).astype(np.float32).tobytes() == want.tobytes()
    assert bits == want.view(np.uint32).tolist()
    assert made.tobytes() == np.float32(0.1).tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_of_attention_is_rounded_to_nearest(mode):
    scales = [0.1, 0.3, 1.7, 1e-39, *(None,) * 60]
    want = [factor(scale, d) for d, scale in enumerate(scales, 64)]
    _factor.cache_clear()
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(MODES[mode]) == 0
    try:
        found = [factor(scale, d) for d, scale in enumerate(scales, 64)]
    finally:
        libm.fesetround(0)
    assert found == want


def test_flushed_subnormals_are_seen_and_kept_inside():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert not rounding.has_defaults()
        with rounding.ieee_defaults():
            assert rounding.has_defaults()
            assert np.float32(2.0**-126) * np.float32(0.5) != 0
        assert not rounding.has_defaults()
    finally:
        torch.set_flush_denormal(False)


def test_an_epilogue_loads_no_compiler():
    code = (
        "import sys, numpy as np, ml_dtypes; from isogemm.contract import reference;"
        "reference.epilogue(np.ones((2, 2), 'f4'), out_dtype=ml_dtypes.bfloat16);"
        "assert not {'numba', 'llvmlite'} & set(sys.modules)"
    )
    python("-c", code)

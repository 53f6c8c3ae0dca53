"""Whether a thread has IEEE defaults is told without a compiler, as machine code tells it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import numpy as np
import pytest

from isogemm.base import rounding

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
    subprocess.run([sys.executable, "-c", code], check=True)

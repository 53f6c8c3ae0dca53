"""Faults that tests plant in copies of kernels: a file, text that is in it, and what takes its place.

Tests on a GPU plant them (gemm/test_admit_gpu.py); that each can be planted is seen without one (test_faults.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One change of a kernel's text."""

    file: str
    old: str
    new: str


ATTENTION = (
    Fault("attention/hopper.cu", "key >= w.reach[r]", "key > w.reach[r]"),  # one key too many
    Fault("attention/hopper.cu", "shfl_xor_sync(~0u, top[r], 2)", "shfl_xor_sync(~0u, top[r], 1)"),
    Fault("attention/hopper.cu", "UNITS[DEGREE - i]);", "UNITS[DEGREE - i] * (i == 3 ? 1.001f : 1.0f));"),
    Fault("attention/hopper.cu", "(tiles - 1 - i / each) * BM", "(tiles - 1 - i / each) * BM * (i < 132)"),
)
SHARED_STEPS = Fault("attention/common.cu", "terms[i]);", "terms[i] * 1.001f);")
GRADIENT_STEPS = Fault("attention/steps.cu", "__fsub_rn(dp[at + key], less)", "(dp[at + key] + 1.0e-7f - less)")
# Halves far apart meet first: the same sums to a reader, other bits.
MEETING = (
    Fault(
        "gemm/meet.cu", "for (int step = 1; step < LEAVES; step *= 2)", "for (int step = LEAVES / 2; step; step /= 2)"
    ),
    Fault("gemm/meet.cu", "for (int i = 0; i < LEAVES; i += 2 * step)", "for (int i = 0; i < step; ++i)"),
)
ROWS = (
    Fault("rows/held.cu", "s * 128 + lane]", "(steps - 1 - s) * 128 + lane]"),
    Fault("rows/held.cu", "h * W +", "h * W + 0 *"),
)
LOGARITHM = Fault("rows/common.cu", "2.0000714765e-1f", "2.0000714764e-2f")

ALL = (*ATTENTION, SHARED_STEPS, GRADIENT_STEPS, *MEETING, *ROWS, LOGARITHM)

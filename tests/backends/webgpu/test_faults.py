"""Faults of kernels as they are often written, each put back: it shows, and the mended one does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tests.products import poisoned

from isogemm.backends.webgpu import kernels, source
from isogemm.backends.webgpu.admission import golden_blocks
from isogemm.backends.webgpu.kernels import KERNELS, WgslKernel, code_of
from isogemm.backends.webgpu.launch import KernelCall, run
from isogemm.backends.webgpu.planes import laid
from isogemm.backends.webgpu.public import array
from isogemm.contract import compare, reference
from isogemm.formats.blocks import format_of
from isogemm.formats.reference import dequantize


@dataclass(frozen=True)
class Fault:
    """A kernel as it was: lines before and after, or another table row; the (m, n, k) where that shows."""

    kernel: str
    file: str
    lines: tuple[tuple[str, str], ...]
    extents: tuple[int, int, int]
    row: WgslKernel | None = None


ROW = KERNELS["gemv_wide"]
FAULTS = {
    "a sum over the hardware's lanes, 8 of 32": Fault(
        "gemv_simd", "meet_workgroup", (("var mask = THREADS / 2u", "var mask = 4u"),), (1, 8, 64)
    ),
    "K in whole steps of the group": Fault(
        "gemv_simd", "gemv_simd", (("k < p.k; k += 32u", "k < p.k / 32u * 32u; k += 32u"),), (1, 8, 70)
    ),
    "no tail of N": Fault(
        "gemv_simd_multi", "gemv_simd_multi", (("min(OUTPUTS, max(p.n, j) - j)", "OUTPUTS"),), (2, 5, 32)
    ),
    "K of at most 4096, as x has room for": Fault(
        "gemv_wide", "gemv_wide", (("PIECE = 1024u", "PIECE = 4096u"), ("begin < p.k; begin", "begin < 1u; begin")),
        (1, 8, 4097),
    ),
    "threads counted for outputs, 32 times too few": Fault(
        "gemv_wide", "gemv_wide", (), (1, 2048, 32), replace(ROW, columns=32 * ROW.columns)
    ),
    "sums[8] for more than 8 rows": Fault(
        "gemv_batched", "gemv_batched", (("min(ROWS, p.m - i)", "p.m - i"),), (9, 8, 32),
        replace(KERNELS["gemv_batched"], rows=64),
    ),
    "a thread loads one element where a tile has more than threads": Fault(
        "gemm_tiled", "gemm_tiled", (("e < SIDE * DEPTH; e += 256u", "e < 256u; e += 256u"),), (64, 64, 48)
    ),
    "an accumulator in half": Fault(
        "gemm_simdgroup", "gemm_simdgroup",
        (("acc[c] = multiply_add(left[row * 8u + step], right[step * 16u + column + c], acc[c])",
          "acc[c] = widened(narrowed(bitcast<u32>(multiply_add(left[row * 8u + step], right[step * 16u + column + c], "
          "acc[c]))))"),),
        (8, 8, 64),
    ),
    "a fragment's map of four rows": Fault(
        "gemm_simdgroup", "gemm_simdgroup",
        (("* 8u + thread / 4u", "* 8u + thread / 8u"), ("2u * (thread % 4u)", "thread % 8u")), (8, 8, 8),
    ),
    "a byte's nibbles as neighbours": Fault(
        "gemv_naive", "q4_0",
        (("word(row + 4u * (group / 8u) + (group & 3u)) >> (group & 4u)) & 0x0f0f0f0fu",
          "half_at(2u * row + group) & 0xfu) | ((half_at(2u * row + group) & 0xf0u) << 4u) | "
          "((half_at(2u * row + group) & 0xf00u) << 8u) | ((half_at(2u * row + group) & 0xf000u) << 12u)"),),
        (1, 3, 32),
    ),
}  # fmt: skip


def wrong_bits(device, fault: Fault) -> int:
    """Bits that differ from the definition, in the result and in a margin around it."""
    quantized = fault.file == "q4_0"
    types = ("float16", "Q4_0:float16" if quantized else "float16")
    m, n, k = fault.extents
    rng = np.random.default_rng(1)
    a = rng.standard_normal((m, k)).astype(np.float16)
    order = KERNELS[fault.kernel].order
    if quantized:
        rows = golden_blocks("Q4_0", n, k)
        weight = dequantize(rows, format_of("Q4_0")).astype(np.float16).T
        stored = laid(rows, format_of("Q4_0"))
    else:
        stored = rng.standard_normal((n, k)).astype(np.float16)
        weight = stored.T
    want = poisoned((m + 2, n + 8))
    want[1:-1, 4:-4] = reference.evaluate(a, weight, f"fma/{'lanes32' if order == 'lanes' else 'chain'}")
    code = code_of(fault.kernel, types, across=False, subgroup=0, fused=True)
    out = array(poisoned(want.shape))
    views = (x.__isogemm_view__("x") for x in (array(a), array(stored).T, out[1:-1, 4:-4]))
    run(device.adapter, fault.kernel, code, KernelCall(*views))
    return compare.differing(out.numpy(), want)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_shows_and_is_mended(device, monkeypatch, name):
    fault = FAULTS[name]
    assert wrong_bits(device, fault) == 0
    read = source.part
    for before, _ in fault.lines:
        assert before in read(fault.file)

    def faulty(part: str) -> str:
        text = read(part)
        for before, after in fault.lines if part == fault.file else ():
            text = text.replace(before, after)
        return text

    monkeypatch.setattr(source, "part", faulty)
    if fault.row is not None:
        monkeypatch.setitem(kernels.KERNELS, fault.kernel, fault.row)
    assert wrong_bits(device, fault) > 0

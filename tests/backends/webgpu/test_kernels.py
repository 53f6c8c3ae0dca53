"""Every kernel against the definition of its contract: 0 differing bits, over tails of M, N and K and drawn shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, F16, F32, assert_same, poisoned, values

from isogemm.backends.webgpu.admission import ORDERS, pose, trial
from isogemm.backends.webgpu.integers import run_quantize
from isogemm.backends.webgpu.kernels import KERNELS, code_of, kernel_of
from isogemm.backends.webgpu.launch import KernelCall, run
from isogemm.backends.webgpu.public import array
from isogemm.contract import Contract, reference

K = (1, 31, 33)


def view(x):
    return x.__isogemm_view__("x")


def assert_bits(device, name, m, n, k, *, dtype=F16, across=False, seed=0, code=None):
    """The kernel, its admitted code or another one, into memory full of NaN, has the bits of the definition."""
    a, b = values((m, k), dtype, seed=seed), values((k, n), dtype, seed=seed + 1)
    types = np.dtype(dtype).name, np.dtype(dtype).name
    code = code or device.admissions.code(name, types, across)
    out = array(poisoned((m, n)))
    weight = array(b) if across else array(np.ascontiguousarray(b.T)).T
    run(device.adapter, name, code, KernelCall(view(array(a)), view(weight), view(out)))
    assert_same(out.numpy(), reference.evaluate(a, b, Contract("fma", ORDERS[kernel_of(name).order])))


@pytest.mark.parametrize("name", KERNELS)
def test_rows_from_1_to_17_and_100(device, name):
    for m in (*range(1, 18), 100):
        assert_bits(device, name, m, 4 * m + 1, K[m % 3], seed=m)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("k", [4096, 4097])
def test_long_sums(device, name, k):
    assert_bits(device, name, 2, 9, k)


@pytest.mark.parametrize("name", KERNELS)
def test_a_vocabulary(device, name):
    for across in (False, True):
        assert_bits(device, name, 1, 32000, 33, across=across)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["gemv_transposed", "gemv_wide", "gemm_tiled"])
def test_other_types(device, name, dtype):
    assert_bits(device, name, 3, 70, 65, dtype=dtype)


@settings(max_examples=8)
@given(
    name=st.sampled_from(list(KERNELS)), m=st.integers(1, 70), n=st.integers(1, 140), k=st.integers(0, 90),
    dtype=st.sampled_from([F16, F32]), across=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_drawn_shapes(device, name, m, n, k, dtype, across, seed):
    assert_bits(device, name, m, n, k, dtype=dtype, across=across, seed=seed)


@pytest.mark.parametrize("name", ["gemv_q4_0", "gemm_q4_0"])
@pytest.mark.parametrize("fmt", ["Q4_0", "Q6_K"])
def test_integers_over_rows_and_lengths(device, name, fmt):
    types, size = ("float32", fmt), 32 if fmt == "Q4_0" else 256
    code = device.admissions.code(name, types, across=False)
    rows = [(m, 4 * m + 1, size * (1 + m % 3)) for m in (*range(1, 18), 100)]
    for m, n, k in [*rows, (2, 9, 4096), (1, 32000, size)]:
        posed = pose("integers", types, m, n, k, started=False)
        out, x = array(poisoned((m, n))), array(posed.a)
        given = run_quantize(device.adapter, device.admissions.quantizer("float32", size), view(x), size)
        weight = array(posed.b.T).T
        run(device.adapter, name, code, KernelCall(given.codes, view(weight), view(out), scales=given.scales))
        assert_same(out.numpy(), posed.want)


@pytest.mark.parametrize("name", [name for name in KERNELS if KERNELS[name].order == "lanes"])
def test_subgroups_on_and_off(device, name):
    """Lanes that meet by shuffles and through memory: one order, one code each; no other kernel knows of subgroups."""
    codes = {
        code_of(name, ("float16", "float16"), across=False, subgroup=size, fused=True)
        for size in (0, device.adapter.subgroup)
    }
    for code in codes:
        assert trial(device.adapter, name, ("float16", "float16"), code) == ""
    if device.adapter.subgroup >= KERNELS[name].threads:
        assert len(codes) == 2

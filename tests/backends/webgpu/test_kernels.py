"""Every kernel against the definition of its contract: 0 differing bits, over tails of M, N and K and drawn shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, F16, F32, assert_same, poisoned, values

from isogemm.backends.webgpu.admission import ORDERS
from isogemm.backends.webgpu.kernels import KERNELS
from isogemm.backends.webgpu.launch import Walk, run
from isogemm.backends.webgpu.public import array
from isogemm.contract import Contract, reference

K = (1, 31, 33)


def assert_bits(device, name, m, n, k, *, dtype=F16, layout="lines", seed=0):
    """The kernel, into memory full of NaN, has the bits of the definition."""
    a, b = values((m, k), dtype, seed=seed), values((k, n), dtype, seed=seed + 1)
    types = np.dtype(dtype).name, np.dtype(dtype).name
    code = device.admissions.code(name, types, across=layout == "across")
    out = array(poisoned((m, n)))
    weight = array(b) if layout == "across" else array(np.ascontiguousarray(b.T)).T
    run(device.adapter, name, code, Walk(*(x.__isogemm_view__("x") for x in (array(a), weight, out)), False))
    assert_same(out.numpy(), reference.evaluate(a, b, Contract("fma", ORDERS[KERNELS[name].order])))


@pytest.mark.parametrize("name", KERNELS)
def test_rows_from_1_to_17_and_100(device, name):
    for m in (*range(1, 18), 100):
        assert_bits(device, name, m, 4 * m + 1, K[m % 3], seed=m)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("k", [4096, 4097])
def test_long_sums(device, name, k):
    assert_bits(device, name, 2, 9, k)


@pytest.mark.parametrize("name", ["gemv_wide", "gemv_transposed"])
def test_a_vocabulary(device, name):
    assert_bits(device, name, 1, 32000, 33, layout="across")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["gemv_transposed", "gemv_wide", "gemm_tiled"])
def test_other_types(device, name, dtype):
    assert_bits(device, name, 3, 70, 65, dtype=dtype)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(sorted(KERNELS)), m=st.integers(1, 70), n=st.integers(1, 140), k=st.integers(0, 90),
    dtype=st.sampled_from([F16, F32]), layout=st.sampled_from(["lines", "across"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_drawn_shapes(device, name, m, n, k, dtype, layout, seed):
    assert_bits(device, name, m, n, k, dtype=dtype, layout=layout, seed=seed)

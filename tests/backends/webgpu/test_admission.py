"""A kernel whose bits are wrong on an adapter is refused there, and named."""

from __future__ import annotations

import numpy as np
import pytest
from tests.products import F16, values

import isogemm
from isogemm.backends.webgpu import admission, elements, source
from isogemm.backends.webgpu.admission import AdapterAdmissions
from isogemm.backends.webgpu.kernels import code_of
from isogemm.backends.webgpu.public import array
from isogemm.errors import ContractError

LARGEST_FIRST = "var mask = THREADS / 2u; mask > 0u; mask >>= 1u"
NEXT = "fn next(x: f32) -> f32 {{ return bitcast<f32>(bitcast<u32>(x) + 1u); }}"  # what a division may be off by
# What is planted: the kernel, operands, the file, and the line before and after.
FAULTS = {
    "lanes meet in another order": (
        "gemv_simd", "meet_workgroup", LARGEST_FIRST, "var mask = 1u; mask < THREADS; mask <<= 1u",
    ),
    "a lane begins at its end": (
        "gemv_batched", "gemv_batched", "load_a(i + r, k + l), w",
        "load_a(i + r, (p.k - 1u - k - l) / 32u * 32u + (k + l) % 32u), w",
    ),
    "the accumulator is half": (
        "gemm_tiled", "gemm_tiled", "acc[r * EACH + c]);", "widened(narrowed(bitcast<u32>(acc[r * EACH + c]))));",
    ),
    "the tail of K is lost": ("gemv_simd_multi", "gemv_simd_multi", "k < p.k;", "k < p.k / 32u * 32u;"),
    "a sum begins anew": ("gemv_transposed", "gemv_transposed", "acc = first(i, j);", "acc = 0.0;"),
    "a column beside the result is written": ("gemv_naive", "gemv_naive", "j >= p.n", "j >= p.n + 1u"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(device, monkeypatch, fault):
    name, file, line, wrong = FAULTS[fault]
    read = source.part
    assert line in read(file)
    admissions, types = AdapterAdmissions(device.adapter), ("float16", "float16")
    if file == "meet_workgroup":
        monkeypatch.setattr(device.adapter, "subgroup", 0)
    assert not admissions.verdict(name, types, admissions.code(name, types, False))
    monkeypatch.setattr(source, "part", lambda part: read(part).replace(line, wrong) if part == file else read(part))
    with pytest.raises(ContractError, match=f"{name} on .*the CPU, which has them"):
        AdapterAdmissions(device.adapter).code(name, types, across=False)


def test_shuffles_that_are_refused_are_passed_over(device, monkeypatch):
    """As where a device compiles a kernel for smaller subgroups than it has: lanes meet through memory then."""
    if device.adapter.subgroup < 4:
        pytest.skip("this adapter has no subgroups")
    read, admissions, types = source.part, AdapterAdmissions(device.adapter), ("float16", "float16")
    assert "subgroupShuffleXor" in admissions.code("gemv_wide", types, across=False)
    line, wrong = LARGEST_FIRST, "var mask = 1u; mask < THREADS; mask <<= 1u"
    monkeypatch.setattr(source, "part", lambda x: read(x).replace(line, wrong) if x == "meet_subgroup" else read(x))
    assert admissions.verdict("gemv_wide", types, code_of("gemv_wide", types, across=False, subgroup=8, fused=True))
    assert "subgroupShuffleXor" not in AdapterAdmissions(device.adapter).code("gemv_wide", types, across=False)


def test_a_fault_in_the_codes_is_refused(device, monkeypatch):
    read, admissions = source.part, AdapterAdmissions(device.adapter)
    monkeypatch.setattr(source, "part", lambda part: read(part).replace("divided(1.0, d)", "next(divided(1.0, d))"))
    monkeypatch.setattr(source, "MULTIPLY_ADD", source.MULTIPLY_ADD + NEXT)
    with pytest.raises(ContractError, match="quantize_x of float32"):
        admissions.quantizer("float32", 32)


@pytest.mark.parametrize(
    ("options", "line", "wrong"),
    [
        ({"alpha": 0.5}, "bitcast<f32>(0x80000000u)", "0.0"),
        ({"bias": True}, "fused(1.0, x, y)", "fused(1.0, y, 0.0)"),
        ({"out_dtype": "float16"}, "0xfffu + ((scaled >> 13u) & 1u)", "0x1000u"),
        ({"out_dtype": "bfloat16"}, "0x7fffu + ((bits >> 16u) & 1u)", "0x8000u"),
    ],
)
def test_what_follows_a_product_is_tried(device, monkeypatch, options, line, wrong):
    """A negative zero that is lost, an addend that is, and ties away from zero."""
    x = array(values((2, 7), F16))
    given = {"out_dtype": "float32"} | options | ({"bias": array(values((2,), F16))} if "bias" in options else {})
    isogemm.gemm(x, x, trans_b="T", **given)
    elements._admitted.cache_clear()
    read = elements.part
    monkeypatch.setattr(elements, "part", lambda name: read(name).replace(line, wrong))
    for name in ("SCALED", "ADDED"):
        monkeypatch.setattr(elements, name, getattr(elements, name).replace(line, wrong))
    monkeypatch.setattr(source, "STORES", {key: text.replace(line, wrong) for key, text in source.STORES.items()})
    with pytest.raises(ContractError, match=r"what follows a product on .*the CPU, which has them"):
        isogemm.gemm(x, x, trans_b="T", **given)


def test_operands_whose_products_are_exact_take_the_devices_own_fma(device):
    admissions = device.admissions
    assert "return fma(" in admissions.code("gemv_naive", ("float16", "float16"), across=False)


def test_an_fma_that_rounds_twice_is_replaced_by_integers(device, monkeypatch):
    """What lavapipe does, made sure of on every adapter."""
    admissions = AdapterAdmissions(device.adapter)
    twice = "fn multiply_add(x: f32, y: f32, z: f32) -> f32 {{ return {name}(x, y, z) + rounded(0.0); }}"
    twice = twice.replace("{name}(x, y, z) + rounded(0.0)", "{name}(rounded(x * y), 1.0, z)")
    monkeypatch.setattr(source, "MULTIPLY_ADD", twice)
    with pytest.raises(ContractError, match="gemv_naive"):
        admissions.code("gemv_naive", ("float32", "float32"), across=False)
    monkeypatch.undo()
    both = [code_of("gemv_naive", ("float32", "float32"), across=False, subgroup=0, fused=f) for f in (True, False)]
    assert not admissions.verdict("gemv_naive", ("float32", "float32"), both[1])


def test_one_trial_for_a_code_that_is_put_together_once(device, monkeypatch):
    tried, made = [], []
    monkeypatch.setattr(admission, "code_of", lambda *args, **which: made.append(args[0]) or code_of(*args, **which))
    monkeypatch.setattr(admission, "trial", lambda *args: tried.append(args[1]) or "")
    monkeypatch.setattr(device, "admissions", AdapterAdmissions(device.adapter))
    x = array(values((2, 7), F16))
    for _ in range(3):
        isogemm.linear(x, x)
    assert (tried, made) == (["gemv_naive"], ["gemv_naive"])
    np.testing.assert_array_equal(isogemm.linear(x, x).numpy(), isogemm.linear(x.numpy(), x.numpy()))

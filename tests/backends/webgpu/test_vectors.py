"""Kernels for operands at whole vectors: bits of any constants, what they refuse, and launches kept and timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.backends.webgpu.test_kernels import assert_bits, view
from tests.products import BF16, F16, assert_same, poisoned, values

import isogemm
from isogemm.backends.webgpu import source
from isogemm.backends.webgpu.admission import ORDERS, AdapterAdmissions
from isogemm.backends.webgpu.kernels import KERNELS, VECTORS, code_of, kernel_of
from isogemm.backends.webgpu.launch import KernelCall, run
from isogemm.backends.webgpu.public import array
from isogemm.backends.webgpu.trusted import TRUSTED
from isogemm.contract import Contract, reference
from isogemm.errors import LimitError, OptionError, ShapeError

NAMES = (
    "gemv_vector",
    "gemv_vector WORDS=2 ROWS=4 OUTPUTS=2 UNROLL=4 WORKGROUP=64",
    "gemv_vectors AHEAD=0 CHUNK=128",
    "gemv_vectors WORDS=4 OUTPUTS=1 CHUNK=256",
    "gemv_vectors ROWS=3 OUTPUTS=2 CHUNK=0",
    "gemm_narrow",
    "gemm_vector TILE_M=64 TILE_N=64 REG_M=8 REG_N=4 BUFFERS=1",
    "gemm_vector TILE_M=64 TILE_N=32 DEPTH=16 REG_M=4 REG_N=8 INNER=2 SPREAD=0",
    "gemm_vector TILE_M=32 TILE_N=64 DEPTH=32 REG_M=8 REG_N=4",
)
# What is planted: the kernel, its file, and the text before and after.
FAULTS = {
    "a load is used twice": ("gemv_vector", "gemv_vector", "(step + $uu)", "(step + $uu / 2u)"),
    "the tail of loads is lost": ("gemv_vector", "gemv_vector", "for (; step < stop; step++)", "for (; step < 0u;)"),
    "x is that of the chunk before": ("gemv_vectors", "gemv_vector", "begin * THREADS + e", "begin / 2u * THREADS + e"),
    "the steps beyond K are added": ("gemm_narrow", "gemm_vector", "min(DEPTH, p.k - at)", "DEPTH"),
    "a column beside the result is written": ("gemm_narrow", "gemm_vector", "j + $cu < p.n", "j + $cu < p.n + 1u"),
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_bits(device, name, checked):
    for across in (False, True) if name.startswith("gemm") else (False,):
        code = AdapterAdmissions(device.adapter).code(name, ("float16", "float16"), across)
        assert code.startswith(TRUSTED)
        code = code.removeprefix(TRUSTED) if checked else code
        for m, n, k in ((1, 8, 16), (5, 72, 264)):
            assert_bits(device, name, m, n, k, across=across, code=code)


@pytest.mark.parametrize("name", [name for name, kernel in VECTORS.items() if kernel.order != "integers"])
def test_rows_from_1_to_17_and_100(device, name):
    code = device.admissions.code(name, ("float16", "float16"), across=False)
    for m in (*range(1, 18), 100):
        assert_bits(device, name, m, 4 * m + 1, (8, 32, 40)[m % 3], code=code)
    assert_bits(device, name, 2, 9, 4096, code=code)
    assert_bits(device, name, 1, 32000, 40, code=code)


@pytest.mark.parametrize("name", ["gemv_vector", "gemv_vectors", "gemv_vector WORDS=2 WORKGROUP=64"])
def test_lanes_without_subgroups(device, name):
    code = code_of(name, ("float16", "float16"), across=False, subgroup=0, fused=True)
    assert "subgroupShuffleXor" not in code
    for m, n, k in ((1, 9, 8), (3, 70, 264), (9, 5, 4096)):
        assert_bits(device, name, m, n, k, code=code)


@pytest.mark.parametrize("name", ["gemv_vector UNROLL=1", "gemm_narrow"])
def test_small_numbers_are_kept(device, name):
    """What a device may drop is summed by integers; of bfloat16, whose other products are exact in float32."""
    admissions, order = AdapterAdmissions(device.adapter), kernel_of(name).order
    code = admissions.code(name, ("bfloat16", "bfloat16"), across=False)
    a, b = values((3, 40), BF16), values((8, 40), BF16, seed=1)
    a[1] *= BF16.type(2.0**-100)
    b[3] *= BF16.type(2.0**-30)
    out = array(poisoned((3, 8)))
    run(device.adapter, name, code, KernelCall(view(array(a)), view(array(b).T), view(out)))
    want = reference.evaluate(a, b.T, "fma/lanes32" if order == "lanes" else "fma/chain")
    assert 0 < np.abs(want[1, 3]) < 2.0**-126
    assert_same(out.numpy(), want)


# By integers: a compiler that drops subnormals itself may take a comparison of floats for the identity.
FLUSHED = """fn kept(x: f32) -> f32 {
  let bits = bitcast<u32>(x);
  return bitcast<f32>(select(bits, bits & 0x80000000u, (bits & 0x7fffffffu) < 0x00800000u));
}
"""
SEEN = "return min(s, t) == 0u || s + t < 174u;"
BEGUN = "return any((magnitude != vec4<u32>()) & (magnitude < vec4<u32>(0x0c000000u)));"
# What a kernel that looks for small numbers does not look for: what it should, and what is left of that.
UNSEEN = {
    "any operands": (SEEN, "return false;"),
    "small operands": (SEEN, "return s + t < 174u;"),
    "small products": (SEEN, "return min(s, t) == 0u;"),
    "small sums": (SEEN, "return min(s, t) == 0u || s + t < 120u;"),
    "what sums begin with": (BEGUN, "return false;"),
}


def dropping(device, name, types, start=False):
    """A kernel's code on a device whose fma takes subnormal operands and results for zero, made sure of on each."""
    given = "return fma(x, y, z);"
    code = code_of(name, types, across=False, subgroup=device.adapter.subgroup, fused=True, start=start)
    assert given in code
    return code.replace(given, "return kept(fma(kept(x), kept(y), kept(z)));") + FLUSHED


@pytest.mark.parametrize("name", ["gemv_vector UNROLL=1", "gemv_vectors", "gemm_narrow"])
def test_a_device_that_drops_small_numbers_is_made_up_for(device, name):
    types = ("bfloat16", "bfloat16")
    assert not AdapterAdmissions(device.adapter).verdict(name, types, dropping(device, name, types))


@pytest.mark.parametrize("name", [name for name in (*KERNELS, *VECTORS) if kernel_of(name).order == "chain"])
def test_sums_of_float16_that_begin_small(device, name):
    """Products of float16 are never small: what sums begin with is kept, or refused where there is such a beginning."""
    types, admissions = ("float16", "float16"), AdapterAdmissions(device.adapter)
    code, looks = dropping(device, name, types, start=True), bool(kernel_of(name).words)
    assert not admissions.verdict(name, types, code)
    assert (not admissions.verdict(name, types, code, start=True)) == looks
    assert admissions.verdict(name, types, code.replace(*UNSEEN["what sums begin with"]), start=True)


def test_a_running_total_that_is_small_is_kept(device, monkeypatch, launched):
    """On a device whose fma drops it; products that begin with zero take that fma."""
    three = "(x: f32, y: f32, z: f32) -> f32 { return "
    planted = f"""{FLUSHED}
fn dropping_fma{three}kept(fma(kept(x), kept(y), kept(z))); }}
fn dropping_fused{three}fused(x, y, z); }}
fn multiply_add{three}dropping_NAME(x, y, z); }}"""
    planted = planted.replace("{", "{{").replace("}", "}}").replace("NAME", "{name}")
    monkeypatch.setattr(source, "MULTIPLY_ADD", planted)
    monkeypatch.setattr(device, "admissions", AdapterAdmissions(device.adapter))
    for m, n, k in ((3, 8, 16), (3, 8, 9), (70, 5, 9)):
        start = np.full((m, n), 1e-40, np.float32)
        for w in (array(np.ones((k, n), F16)), array(np.ones((n, k), F16)).T):
            x, out = array(np.zeros((m, k), F16)), array(start)
            assert_same(isogemm.matmul(x, w, out=out, out_dtype="float32", accumulate=True).numpy(), start)
            isogemm.matmul(x, w, out_dtype="float32")
            launched.clear()
            isogemm.matmul(x, w, out_dtype="float32")
            assert ["dropping_fma(x, y, z); }" in args[0] for args in launched] == [True]


@pytest.mark.parametrize("unseen", UNSEEN)
@pytest.mark.parametrize("name", ["gemv_vector UNROLL=1", "gemv_vectors", "gemm_narrow"])
def test_a_kernel_that_does_not_look_for_small_numbers_is_refused(device, name, unseen):
    types, (before, after) = ("bfloat16", "bfloat16"), UNSEEN[unseen]
    if unseen == "what sums begin with" and not name.startswith("gemm"):
        pytest.skip("sums of lanes begin with zero")
    code = dropping(device, name, types)
    assert before in code
    assert AdapterAdmissions(device.adapter).verdict(name, types, code.replace(before, after))


def test_an_fma_that_rounds_twice_is_refused(device):
    """Of float32; made sure of on every adapter."""
    for name in ("gemv_vector UNROLL=1", "gemm_narrow"):
        code = code_of(name, ("float32", "float32"), across=False, subgroup=device.adapter.subgroup, fused=True)
        code = code.replace("return fma(x, y, z);", "return rounded(x * y) + z;")
        assert AdapterAdmissions(device.adapter).verdict(name, ("float32", "float32"), code)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(device, monkeypatch, fault):
    name, file, before, after = FAULTS[fault]
    read, types = source.part, ("float16", "float16")
    assert before in read(file)
    monkeypatch.setattr(source, "part", lambda part: read(part).replace(before, after) if part == file else read(part))
    code = code_of(name, types, across=False, subgroup=device.adapter.subgroup, fused=True)
    assert AdapterAdmissions(device.adapter).verdict(name, types, code)


def test_what_is_not_at_whole_vectors_is_refused(device):
    x, w, out = array(values((2, 24), F16)), array(values((8, 24), F16)), array(poisoned((2, 8)))
    code = device.admissions.code("gemv_vector", ("float16", "float16"), across=False)
    for a, b in ((x[:, :12], w[:, :12]), (x[:, 4:20], w[:, 4:20])):
        with pytest.raises(ShapeError, match="multiples of 8"):
            run(device.adapter, "gemv_vector", code, KernelCall(view(a), view(b.T), view(out)))
    code_of("gemv_q4_0 OUTPUTS=15", ("float32", "Q4_0"), across=False, subgroup=0, fused=True)
    for name, types, subgroup, nbytes in (
        ("gemv_q4_0 OUTPUTS=16", ("float32", "Q4_0"), 0, 16 * 8 * 129),
        ("gemv_q4_0 OUTPUTS=15", ("float32", "Q4_K"), 0, 15 * (8 * 129 + 16 * 16)),
        ("gemv_vectors ROWS=8 CHUNK=512", ("float16", "float16"), 32, 4 * 8 * 512 + 2 * 16),
        ("gemv_vectors ROWS=7 CHUNK=512", ("float16", "float16"), 0, 4 * 7 * 512 + 4 * 4 * 128 + 2 * 16),
        ("gemm_vector DEPTH=64 TILE_M=32 TILE_N=32", ("float16", "float16"), 0, 4 * 64 * 64 + 4 * 16),
    ):
        with pytest.raises(OptionError, match=rf"workgroup memory of gem.*16384; got: {nbytes};"):
            code_of(name, types, across=False, subgroup=subgroup, fused=True)
    with pytest.raises(OptionError, match="whole steps of 32, 4 at a time"):
        code_of("gemv_vectors CHUNK=192", ("float16", "float16"), across=False, subgroup=0, fused=True)
    with pytest.raises(OptionError, match="whole vectors of 8"):
        code_of("gemm_vector TILE_M=16 TILE_N=16 REG_M=4 REG_N=4 DEPTH=8 BUFFERS=1 INNER=3", ("float16",) * 2,
                across=False, subgroup=0, fused=True)  # fmt: skip


@pytest.mark.parametrize("name", [name for name, kernel in VECTORS.items() if kernel.order != "integers"])
def test_other_lengths_are_for_other_kernels(device, name):
    """K of 1, 31, 33 and 4097 is no whole vector: refused here, and served by the kernels for any strides."""
    code = device.admissions.code(name, ("float16", "float16"), across=False)
    contract = Contract("fma", ORDERS[kernel_of(name).order])
    for k in (1, 31, 33, 4097):
        x, w, out = values((2, k), F16), values((8, k), F16, seed=1), array(poisoned((2, 8)))
        with pytest.raises(ShapeError, match="a kernel for any strides"):
            run(device.adapter, name, code, KernelCall(view(array(x)), view(array(w).T), view(out)))
        isogemm.linear(array(x), array(w), contract=contract, out_dtype="float32", out=out)
        assert_same(out.numpy(), reference.evaluate(x, w.T, contract))


def test_launches_are_kept_and_timed(device):
    x = array(values((3, 8), BF16))
    before = isogemm.linear(x, x, out_dtype="float32").numpy()
    with device.adapter.recording() as launches:
        out = isogemm.linear(x, x, out_dtype="float32")
    assert len(launches) == 1
    assert device.adapter.seconds(launches) > 0
    assert_same(out.numpy(), before)


def test_lines_that_are_repeated():
    text = "#for x in N\n#for y in TWO\nf$x_$y\n#end\n#end\nlast"
    assert source.repeated(text, {"N": 2, "TWO": 2}) == "f0_0\nf0_1\nf1_0\nf1_1\nlast"


def test_pieces_of_whole_vectors_are_whole(device, monkeypatch, launched):
    """K is cut where b does not fit, at multiples of a vector: 220 is none of 8."""
    a, b = values((3, 440), F16), values((440, 8), F16, seed=1)
    want = reference.evaluate(a, b, "fma/chain")
    there = array(b)
    assert_same(isogemm.matmul(array(a), there, out_dtype="float32").numpy(), want)
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=4096))
    launched.clear()
    assert_same(isogemm.matmul(array(a), there, out_dtype="float32").numpy(), want)
    assert len(launched) > 1
    assert all(args[0].startswith(TRUSTED) and args[1][2] % 8 == 0 for args in launched)


def test_a_piece_smaller_than_a_vector_is_refused(device, monkeypatch):
    """Before any other piece runs: a kernel sees three rows of b."""
    a, b, out = array(values((3, 16), F16)), array(values((16, 4096), F16))[:, :8], array(poisoned((3, 8)))
    code = device.admissions.code("gemm_narrow", ("float16", "float16"), across=True)
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=3 * 8192))
    with pytest.raises(LimitError, match="sees at once"):
        run(device.adapter, "gemm_narrow", code, KernelCall(view(a), view(b), view(out)))
    assert_same(out.numpy(), poisoned((3, 8)))


def test_scales_of_long_blocks_whose_sums_may_be_dropped(device):
    """An fma that takes subnormals for zero, made of integers so that nothing else is wrong on any adapter."""
    types = ("float32", "Q4_K")
    code = code_of("gemv_q4_0", types, across=False, subgroup=0, fused=False)
    flushed = "fn kept(x: f32) -> f32 { return select(x, 0.0, abs(x) < 0x1p-126f); }\n"
    given = "fn multiply_add(x: f32, y: f32, z: f32) -> f32 { return fused(x, y, z); }"
    assert given in code
    code = flushed + code.replace(given, given.replace("fused(x, y, z)", "kept(fused(kept(x), kept(y), kept(z)))"))
    assert not AdapterAdmissions(device.adapter).verdict("gemv_q4_0", types, code)
    unseen = code.replace("const SMALL = 0x1p-78f;", "const SMALL = 0.0;")
    assert unseen != code
    assert AdapterAdmissions(device.adapter).verdict("gemv_q4_0", types, unseen)

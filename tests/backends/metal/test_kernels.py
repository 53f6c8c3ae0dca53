"""Metal's kernels compiled as C++: indices, tails and bits, without Apple's hardware."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.products import F16, F32, assert_same, values
from tests.quant.draws import KINDS
from tests.recorded import vectors

import isogemm
from isogemm.backends.metal import public as metal
from isogemm.contract import int32, reference
from isogemm.errors import ContractError, DeviceError, DTypeError, LayoutError, LimitError, OptionError, ShapeError
from isogemm.formats.blocks import format_of
from isogemm.formats.reference import decode

SHIM = Path(__file__).parent / "shim.h"
FLOATS = [name for name in metal.KERNELS if name != "gemv_q4_0"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """All kernels of a type in one library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, to compile Metal's kernels as C++")
    folder, made = tmp_path_factory.mktemp("metal"), {}
    for dtype in ("float16", "float32"):
        common = metal.source("gemv_naive", dtype).split("// One thread")[0]
        bodies = [metal.source(name, dtype).removeprefix(common) for name in metal.KERNELS]
        entries = [
            f'extern "C" void run_{name}(const void* x, const void* w, uint* y, const uint* shape, const float* d, '
            f"uint nx, uint ny, uint threads) {{ launch({name}, x, w, y, shape, d, nx, ny, threads); }}"
            for name in metal.KERNELS
        ]
        text = "\n".join([f'#include "{SHIM}"', common.replace("#include <metal_stdlib>", ""), *bodies, *entries])
        (folder / f"{dtype}.cpp").write_text(text)
        command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-mf16c", "-mfma", "-shared", "-fPIC", "-w"]
        subprocess.run([*command, f"{dtype}.cpp", "-o", f"{dtype}.so"], cwd=folder, check=True)
        made[dtype] = ctypes.CDLL(str(folder / f"{dtype}.so"))
    return made


def multiplied(libraries, name, x, w, n, scales=None, dtype="float16"):
    """What a kernel makes of rows, in memory full of NaN with a margin behind."""
    kernel, (m, k) = metal.KERNELS[name], x.shape
    y, shape = np.full(m * n + 8, np.nan, np.float32), np.array([m, n, k], np.uint32)
    pointers = [None if each is None else each.ctypes.data_as(ctypes.c_void_p) for each in (x, w, y, shape, scales)]
    getattr(libraries[dtype], f"run_{name}")(*pointers, -(-n // kernel.columns), -(-m // kernel.rows), kernel.threads)
    assert np.isnan(y[m * n :]).all()
    return y[: m * n].reshape(m, n)


@pytest.mark.parametrize("name", FLOATS)
def test_a_sum_that_is_negative_zero_stays_so(libraries, name):
    """Beyond K nothing is added: -1e-60 is -0 in float32, and -0 + 0 would be +0."""
    x, w = np.full((9, 12), -1e-30, F32), np.full((3, 12), 1e-30, F32)
    got = multiplied(libraries, name, x, w, 3, dtype="float32")
    assert_same(got, reference.evaluate(x, w.T, metal.KERNELS[name].contract))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_bits_of_the_contract(libraries, name, dtype):
    for m, n, k in ((1, 1, 1), (1, 9, 31), (3, 5, 33), (9, 67, 100), (17, 33, 64), (100, 5, 7)):
        x, w = values((m, k), dtype, seed=k, special=True), values((n, k), dtype, seed=m)
        got = multiplied(libraries, name, x, w, n, dtype=dtype.name)
        assert_same(got, reference.evaluate(x, w.T, metal.KERNELS[name].contract))


def test_integers_of_q4_0(libraries):
    rng = np.random.default_rng(1)
    form = format_of("Q4_0")
    rows = rng.integers(0, 256, (70, form.row_bytes(96)), np.uint8)
    rows.reshape(70, 3, 18)[..., :2] = rng.integers(0, 0x7800, (70, 3, 1), np.uint16).view(np.uint8).reshape(70, 3, 2)
    x = values((5, 96))
    given = int32.quantize_activations(x, 32)
    got = multiplied(libraries, "gemv_q4_0", np.ascontiguousarray(given.q), rows, 70, given.d)
    assert_same(got, int32.evaluate(x, decode(rows, form)))


def test_bits_that_an_nvidia_gpu_recorded(libraries):
    """The golden vectors of fma/lanes32 and of int32."""
    lanes = vectors("lanes32")
    for case in (name.removesuffix(".out") for name in lanes if name.endswith(".out") and name[0] == "f"):
        dtype = case.split("-")[0]
        a, b = (lanes[f"{case}.{x}"].view(dtype) for x in "ab")
        w = np.ascontiguousarray(b.T)
        for name in FLOATS:
            if metal.KERNELS[name].contract == "fma/lanes32":
                assert_same(multiplied(libraries, name, a, w, len(w), dtype=dtype), lanes[f"{case}.out"].view(F32))
    integers = vectors("int32")
    rows = integers["Q4_0.w"]
    for kind in KINDS:
        given = int32.quantize_activations(integers[f"{kind}-32.x"], 32)
        got = multiplied(libraries, "gemv_q4_0", np.ascontiguousarray(given.q), rows, len(rows), given.d)
        assert_same(got, integers[f"Q4_0-{kind}.int32"].view(F32))


def test_a_kernel_is_text_that_compiles_by_itself():
    text = isogemm.metal.source("gemm_simdgroup", "float32")
    assert text.startswith("#include <metal_stdlib>")
    assert "typedef float T;" in text
    assert "simdgroup_float8x8 acc" in text
    with pytest.raises(OptionError, match="gemv_simd"):
        metal.source("gemv")
    for wrong in ("bfloat16", ["float16"], None):
        with pytest.raises(DTypeError, match="float16 or float32"):
            metal.source("gemv_simd", wrong)


@pytest.fixture
def mps(libraries, monkeypatch):
    """torch on a Mac, with the compiled C++ in place of its GPU."""
    torch = pytest.importorskip("torch")
    faults = SimpleNamespace(wrong=False)

    class Shader:
        def __init__(self, text):
            self.dtype = "float16" if "typedef half" in text else "float32"

        def __getattr__(self, name):
            def call(x, w, out, shape, threads, group_size):
                kernel = metal.KERNELS[name]
                assert group_size == (kernel.threads, 1, 1)
                assert (threads[0] % kernel.threads, threads[2]) == (0, 1)
                pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, w, out, shape)]
                groups = threads[0] // kernel.threads, threads[1], kernel.threads
                getattr(libraries[self.dtype], f"run_{name}")(*pointers, None, *groups)
                if faults.wrong:
                    out[0, 0] += 1

            return call

    host = torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "compile_shader", Shader)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    monkeypatch.setattr(metal, "HERE", host.type)
    for known in (metal._refused, metal._compiled):
        known.cache_clear()
    yield faults
    for known in (metal._refused, metal._compiled):
        known.cache_clear()


def test_a_linear_layer_through_torch(mps):
    import torch

    x, w = values((3, 40), F16), values((9, 40), F16, seed=1)
    got = metal.linear(torch.from_numpy(x), torch.from_numpy(w)).numpy()
    assert_same(got, reference.evaluate(x, w.T, "fma/lanes32"))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_every_kernel_of_floats_is_admitted(mps, name, dtype):
    import torch

    x, w = values((3, 41), dtype), values((9, 41), dtype, seed=1)
    got = metal.linear(torch.from_numpy(x), torch.from_numpy(w), name).numpy()
    assert_same(got, reference.evaluate(x, w.T, metal.KERNELS[name].contract))


def refused():
    """Of a call: what it is given, and the error."""
    torch = pytest.importorskip("torch")
    x, w, one = torch.ones(2, 3), torch.ones(4, 3), torch.ones(1, 1)
    many = one.expand(2**16, 2**15)
    return [
        ((x, torch.ones(2, 4)), ShapeError, r"x \[m, k\]"),
        ((x, w[0]), ShapeError, r"x \[m, k\]"),
        ((x, w.half()), DTypeError, r"one type.*float32 and float16"),
        ((x.bfloat16(), w.bfloat16()), DTypeError, "float16 or float32; got: bfloat16"),
        ((x.double(), w.double()), DTypeError, "float16 or float32; got: float64"),
        ((x, w.int()), DTypeError, "w of.*float16 or float32; got: int32"),
        ((x.numpy(), w), DTypeError, r"x of.*torch\.from_numpy"),
        ((x, torch.ones(4, 3, device="meta")), DeviceError, "w of metal.linear.*mps; got: meta"),
        ((x, w, "gemv"), OptionError, "gemv_naive.*'gemv_simd'"),
        ((x, w, "gemv_q4_0"), OptionError, "gemv_naive.*'gemv_simd'"),
        ((x, w.T.contiguous().T), LayoutError, r"strides of w.*\(1, 4\).*w\.contiguous\(\)"),
        ((x.to_sparse(), w), LayoutError, r"a dense tensor.*x\.to_dense\(\)"),
        ((torch._neg_view(x), w), LayoutError, r"a lazy negation.*x\.resolve_neg\(\)"),
        ((x, torch.ones(4, 3, requires_grad=True)), OptionError, r"gradient's graph.*w\.detach\(\)"),
        ((many, one.expand(1, 2**15)), LimitError, "2147483648; got: 2147483648"),
        ((one.expand(2**16, 1), one.expand(2**15, 1)), LimitError, "2147483648; got: 2147483648"),
    ]


def test_what_it_refuses_before_anything_runs(mps, monkeypatch):
    monkeypatch.setattr(metal, "_launched", None)
    for given, error, text in refused():
        with pytest.raises(error, match=text):
            metal.linear(*given)


def test_a_kernel_with_wrong_bits_is_refused(mps):
    import torch

    mps.wrong = True
    with pytest.raises(ContractError, match="fma/lanes32"):
        metal.linear(torch.ones(2, 3), torch.ones(4, 3))


def test_without_mps():
    torch = pytest.importorskip("torch")
    if not torch.backends.mps.is_available():
        with pytest.raises(DeviceError, match="tensors on mps"):
            metal.linear(torch.ones(2, 3), torch.ones(4, 3))

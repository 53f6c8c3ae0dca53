"""The public calls on WebGPU arrays: the bits of the CPU, every form and layout, and typed errors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, F16, F32, assert_same, layouts, product, values

import isogemm
from isogemm.backends.webgpu.admission import golden_blocks
from isogemm.backends.webgpu.public import WebGpuArray, array
from isogemm.contract import int32, reference
from isogemm.errors import ContractError, DeviceError, DTypeError, LayoutError, LimitError, OptionError
from isogemm.formats.reference import decode, dequantize
from isogemm.quant.matrix import QuantizedMatrix

pytestmark = pytest.mark.usefixtures("device")


def same(got: object, want: np.ndarray) -> None:
    assert type(got) is WebGpuArray
    assert_same(got.numpy(), want)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("contract", ["fma/chain", "fma/lanes32"])
def test_products_have_the_bits_of_the_cpu(dtype, contract):
    a, b, c = values((5, 39), seed=1).astype(dtype), values((39, 3), seed=2).astype(dtype), values((5, 3), seed=3)
    bias = values((3,), seed=4)
    same(isogemm.matmul(array(a), array(b), contract=contract), isogemm.matmul(a, b, contract=contract))
    wanted = isogemm.linear(a, b.T, bias, contract=contract)
    same(isogemm.linear(array(a), array(b.T), array(bias), contract=contract), wanted)
    options = {"alpha": -0.7, "beta": 0.3, "out_dtype": "float16", "contract": contract}
    wanted = isogemm.gemm(a, b, c, bias=bias, **options)
    same(isogemm.gemm(array(a), array(b), array(c), bias=array(bias), **options), wanted)


def test_a_chain_goes_on_from_a_sum_in_place():
    a, b, sums = values((3, 20), F16), values((20, 7), F16, seed=1), values((3, 7), seed=2)
    out = array(sums)
    assert isogemm.matmul(array(a), array(b), out=out, accumulate=True) is out
    same(out, product(a, b, c=sums, accumulate=True, out_dtype=F32))
    with pytest.raises(ContractError, match="running total"):
        isogemm.matmul(array(a), array(b), out=out, accumulate=True, contract="fma/lanes32")


def test_out_beside_an_operand_in_one_buffer():
    whole = values((6, 12), F16)
    there = array(whole)
    got = isogemm.matmul(there[:3, :4], there[3:, 4:8].T, out=there[:3, 9:], out_dtype=None)
    same(got, isogemm.matmul(whole[:3, :4], whole[3:, 4:8].T))
    after = whole.copy()
    after[:3, 9:] = isogemm.matmul(whole[:3, :4], whole[3:, 4:8].T)
    same(there, after)


@settings(max_examples=10)
@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(0, 40), layout=layouts, seed=st.integers(0, 99))
def test_any_strides(m, n, k, layout, seed):
    room_a, room_b = values((2 * m, k + 3), F16, seed=seed), values((k, 3 * n), F16, seed=seed + 1)
    pick = {"reversed": np.s_[::-2, ::-1], "stepped": np.s_[1::2, :]}.get(layout, np.s_[:m, :])
    a, b = room_a[pick][:, :k], room_b[:, ::3]
    same(isogemm.matmul(array(room_a)[pick][:, :k], array(room_b)[:, ::3]), product(a, b))


def test_batches_and_lists():
    a, b = values((4, 1, 5, 6), F16, seed=1), values((3, 6, 7), F16, seed=2)
    same(isogemm.matmul(array(a), array(b)), isogemm.matmul(a, b))
    items = [array(x) for x in b]
    for got, x in zip(isogemm.gemm_batched(items, items, trans_b="T"), b, strict=True):
        same(got, isogemm.matmul(x, x.T))
    same(isogemm.matmul(array(np.ones((2, 0), F32)), array(np.ones((0, 3), F32))), np.zeros((2, 3), F32))


@pytest.mark.parametrize("contract", ["fma/chain", "fma/lanes32"])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(contract):
    x, w = values((100, 65), F16), values((33, 65), F16, seed=1)
    there = array(w)
    whole = isogemm.linear(array(x), there, contract=contract).numpy()
    for rows in (slice(0, 1), slice(7, 24), slice(90, 100)):
        assert_same(isogemm.linear(array(x[rows]), there, contract=contract).numpy(), whole[rows])


def test_a_large_operand_is_bound_in_pieces(device, monkeypatch, launched):
    a, b, wide = values((5, 64), F16), values((64, 300), F16, seed=1), values((3, 500), F16, seed=2)
    want, want_wide = product(a, b), product(wide, wide.T.copy())
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=4096, groups=3))
    same(isogemm.matmul(array(a), array(np.ascontiguousarray(b.T)).T), want)
    assert len(launched) > 10
    assert all(size <= 4096 for args in launched for _, _, size in args[2].values())
    same(isogemm.matmul(array(a), array(b)), want)
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=512))
    same(isogemm.matmul(array(wide), array(wide).T), want_wide)
    with pytest.raises(LimitError, match=r"sees at once.*512.*\[n, k\]"):
        isogemm.matmul(array(wide), array(wide).T, contract="fma/lanes32")


def test_a_transposed_copy_is_cut_as_it_lies(device, monkeypatch, launched):
    x = values((60, 40))
    there, out = array(x).T, device.empty((40, 60), F32)
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=4096))
    device.assign(out, there.__isogemm_view__("x"))
    same(WebGpuArray(out), x.T)
    assert len(launched) <= 16


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("k", [8, 16, 24])
def test_nothing_is_cut_inside_of_a_vector(device, monkeypatch, dtype, k):
    """Where three rows of b are all that a kernel sees, or three columns of out."""
    room, x = values((24, 8192 // dtype.itemsize), dtype), values((5, k), dtype, seed=1)
    a, b, out = array(x), array(room)[:k, :8], array(np.zeros((8, 2048), F32)).T[:5]
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=3 * 8192))
    same(isogemm.matmul(a, b, out_dtype="float32"), product(x, room[:k, :8], out_dtype=F32))
    same(isogemm.matmul(a, array(room[:k, :8]), out=out, out_dtype="float32"), product(x, room[:k, :8], out_dtype=F32))


def test_what_is_not_there_is_a_typed_error(device, monkeypatch):
    a = array(values((2, 32), F16))
    with pytest.raises(ContractError, match="fma/chain or fma/lanes32"):
        isogemm.linear(a, a, contract="fma/tree2")
    with pytest.raises(ContractError, match="fma/chain or fma/lanes32"):
        isogemm.linear(a, a, contract="tensor_core:sm90/chain")
    host = values((32, 32), F16)
    with pytest.raises(DeviceError, match=r"one device; .*: isogemm.webgpu.array\(b, 'webgpu:0'\)$"):
        isogemm.matmul(a, host)
    with pytest.raises(DeviceError, match=r"one device; .*: isogemm.webgpu.array\(x, 'webgpu:0'\)$"):
        isogemm.linear(host, a)
    with pytest.raises(DeviceError, match=r"one device; .*: w.to\('webgpu:0'\)$"):
        isogemm.linear(a, isogemm.quantize(values((4, 32)), "Q4_0"))
    with pytest.raises(DTypeError, match="float32, bfloat16 or float16"):
        array(np.ones(3))
    with pytest.raises(DTypeError, match=r"choice: float32, or the int8 array itself, in products on a CPU$"):
        array(np.ones(3, np.int8))
    with pytest.raises(DeviceError, match="WEBGPU"):
        array(np.ones(3, F32), "webgpu:7")
    for ordinal, error in ((-1, DeviceError), (7, DeviceError), ("one", DTypeError), (True, DTypeError)):
        with pytest.raises(error, match="nearest legal choice: 0"):
            isogemm.webgpu.device(ordinal)
    for call in (partial(array, np.ones(3, F32)), isogemm.webgpu.measure):
        with pytest.raises(DeviceError, match=r"webgpu or webgpu:N; got: cpu; .*'webgpu'"):
            call("cpu")
    with pytest.raises(OptionError, match=r"webgpu:0.*Q8_0"):
        isogemm.quantize(values((4, 256)), "Q5_0").to("webgpu")
    monkeypatch.setattr(device.adapter, "limits", replace(device.adapter.limits, buffer=64))
    with pytest.raises(LimitError, match="64"):
        array(values((5, 5)))


def test_arrays_are_views_of_one_buffer():
    x = values((4, 6), BF16)
    there = array(x)
    assert (there.shape, there.dtype, there.device, len(there)) == ((4, 6), BF16, "webgpu:0", 4)
    assert repr(there) == "WebGpuArray(bfloat16 [4, 6] on webgpu:0)"
    same(there.T[1:, ::-2], x.T[1:, ::-2])
    for shape in ((3, 8), ((3, 8),), ([-1, 2],)):
        same(there.reshape(*shape), x.reshape(*shape))
    same(there[np.int64(1)], x[1])
    same(there[2, 3], np.asarray(x[2, 3]))
    with pytest.raises(OptionError, match="slices and whole numbers"):
        there[[0, 1]]
    with pytest.raises(OptionError, match="without a copy"):
        there.T.reshape(24)
    with pytest.raises(OptionError, match="the same elements"):
        there.reshape(5, 5)
    with pytest.raises(OptionError, match=r"memory of the host; got: webgpu:0; .*x\.numpy\(\)"):
        np.asarray(there)
    with pytest.raises(IndexError, match="too many indices"):
        there[0, 0, 0]
    with pytest.raises(TypeError, match="unsized"):
        len(there[0, 0])


def test_tensors_are_taken_as_products_take_them():
    torch = pytest.importorskip("torch")
    x = torch.linspace(-2, 3, 12).reshape(3, 4)
    same(array(x.bfloat16()), x.numpy().astype(BF16))
    same(array(x.T), x.numpy().T)
    for odd, error, text in (
        (x.clone().requires_grad_(), OptionError, r"gradient's graph.*x\.detach\(\)"),
        (torch._neg_view(x), LayoutError, "negation"),
        (x.to_sparse(), LayoutError, r"x\.to_dense\(\)"),
        (np.ma.ones(3, F32), DTypeError, "without a mask"),
    ):
        with pytest.raises(error, match=text):
            array(odd)


def test_a_packed_weight_is_the_array_there():
    x, w = values((3, 20), F16), values((7, 20), F16, seed=1)
    there = array(w)
    packed = isogemm.pack(there)
    assert (packed.shape, packed.dtype, repr(packed)) == ((7, 20), F16, "WebGpuWeight(7 x 20, float16 on webgpu:0)")
    same(isogemm.linear(array(x), packed), isogemm.linear(x, w))
    with pytest.raises(DeviceError, match="one device"):
        isogemm.linear(x, packed)


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_quantized_weights_have_the_bits_of_their_definitions(fmt):
    stored = golden_blocks(fmt, 13, 512)
    w = QuantizedMatrix.from_bytes(stored, shape=(13, 512), format=fmt)
    there, codes, floats = w.to("webgpu"), decode(stored, w.format), dequantize(stored, w.format)
    for m in (1, 6):
        x, bias = values((m, 512), seed=m), values((13,), seed=2)
        same(isogemm.linear(array(x), there, array(bias)), reference.epilogue(int32.evaluate(x, codes), bias=bias))
    got = isogemm.linear(array(x.astype(F16)), there, activations="fp32", contract="fma/lanes32", out_dtype="float32")
    same(got, reference.evaluate(x.astype(F16).astype(F32), floats.T, "fma/lanes32"))
    with np.errstate(over="ignore"):
        rounded = floats.astype(F16)
    got = isogemm.linear(array(x.astype(F16)), there, activations="same", out_dtype="float32")
    same(got, reference.evaluate(x.astype(F16), rounded.T, "fma/chain"))


def test_a_quantized_matrix_on_a_device():
    w = isogemm.quantize(values((9, 64)), "Q8_0")
    there = w.to("webgpu")
    assert (there.device, there.to("cpu") is w) == ("webgpu:0", True)
    same(there.dequantize(), w.dequantize())
    x = values((2, 64))
    same(isogemm.linear(array(x), there[3:7]), isogemm.linear(x, w).copy()[:, 3:7])
    with pytest.raises(ContractError, match="int32/chain"):
        isogemm.linear(array(x), there, contract="int32/leaf256")
    for n, k in ((3, 0), (0, 64)):
        empty = isogemm.quantize(np.ones((n, k), F32), "Q8_0").to("webgpu")
        same(isogemm.linear(array(np.ones((2, k), F32)), empty), np.zeros((2, n), F32))


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K"])
def test_rows_of_a_quantized_matrix_are_the_same_memory(device, monkeypatch, fmt):
    x, w = values((2, 256)), isogemm.quantize(values((9, 256)), fmt)
    there, want = w.to("webgpu"), isogemm.linear(x, w)
    monkeypatch.setattr(device.adapter, "upload", None)
    parts = {rows: there[slice(*rows)] for rows in ((3, 7), (1, None, 3), (None, None, -2), (5, 5))}
    monkeypatch.undo()
    for rows, part in parts.items():
        same(isogemm.linear(array(x), part), want[:, slice(*rows)])
        same(part.dequantize(), w.dequantize()[slice(*rows)])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_integer_products_are_cut_by_what_a_kernel_sees(device, monkeypatch, launched, dtype):
    """By x, which is longer than its codes, by out, and by the weight's rows."""
    for m, n, k in ((40, 3, 64), (40, 90, 32), (2, 1500, 32)):
        x, w = values((m, k), dtype), isogemm.quantize(values((n, k), seed=1), "Q8_0")
        there, copied, want = array(x), w.to("webgpu"), isogemm.linear(x, w, activations="q8")
        for rows in (1, m):  # trials see more
            isogemm.linear(there[:rows], copied, activations="q8")
        launched.clear()
        with monkeypatch.context() as patched:
            patched.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=2048, groups=30))
            same(isogemm.linear(there, copied, activations="q8"), want)
            out = array(np.zeros((n, m), dtype)).T
            same(isogemm.linear(there, copied, out=out, activations="q8"), want)
            assert all(size <= 2048 for args in launched for _, _, size in args[2].values())
            patched.setattr(device.adapter, "limits", replace(device.adapter.limits, binding=0))
            with pytest.raises(LimitError, match=r"a row of x.*activations='fp32'"):
                isogemm.linear(there, copied, activations="q8")

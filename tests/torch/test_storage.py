"""Tensors after a call are as they were: their storages, and those of results, can be resized, as FSDP resizes them."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
from tests.process import python

import isogemm
from isogemm.errors import DeviceError, DTypeError, LayoutError, OptionError

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import isogemm.torch as igt  # noqa: E402
from isogemm.torch import reductions  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def r(*shape, dtype=F32, grad=False):
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def _walk():
    out = r(4, 8)
    a, b = r(4, 32), r(32, 8)
    return [isogemm.matmul(a, b, out=out, accumulate=True), a, b, out]


def _with(function, *operands, **options):
    found = function(*operands, **options)
    return [*(found if isinstance(found, list | tuple) else [found]), *operands]


def _flat(operands):
    for x in operands:
        yield from _flat(x) if isinstance(x, list | tuple) else [x]


def _graded(function, *operands, **options):
    """With the gradients, which are results too."""
    found = function(*operands, **options)
    graded = [x for x in operands if isinstance(x, torch.Tensor) and x.requires_grad]
    return [found, *operands, *torch.autograd.grad(found.float().square().sum(), graded)]


def _quantized():
    x, w, bias = r(4, 64), r(8, 64), r(8)
    q = isogemm.quantize(w, "Q8_0")
    return [isogemm.linear(x, q, bias), igt.linear(x, q, bias), isogemm.linear(x, isogemm.pack(w)), x, w, bias]


def _converted():
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8), torch.nn.SiLU()
    )
    igt.convert(model)
    ids = torch.tensor([[1, 2], [2, 8]])
    y = model(ids)
    y.square().sum().backward()
    return [ids, y.detach(), *model.parameters(), *(p.grad for p in model.parameters())]


def _scope():
    ids, table, w, bias, target = torch.tensor([1, 2, 2, 8]), *[r(*s, grad=True) for s in ((9, 32), (8, 32), (8,))], 3
    with igt.invariant():
        h = torch.nn.functional.embedding(ids, table)
        h = torch.nn.functional.rms_norm(h, (32,))
        y = torch.nn.functional.linear(h, w, bias)
        p = torch.softmax(y, -1) @ r(8, 8)
        q = h.reshape(1, 2, 2, 32)
        s = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        loss = torch.nn.functional.cross_entropy(p, torch.full((4,), target)) + s.square().mean()
        loss.backward()
    return [ids, table, w, bias, h, y, p, q, s, table.grad, w.grad, bias.grad]


def _attention(dtype, **options):
    return _graded(igt.attention, *[r(2, 2, 6, 8, dtype=dtype, grad=True) for _ in range(3)], **options) + list(
        options.values()
    )


CALLS = {
    "matmul": lambda: _with(isogemm.matmul, r(4, 32), r(32, 8)),
    "matmul of bfloat16": lambda: _with(isogemm.matmul, r(4, 32, dtype=BF16), r(32, 8, dtype=BF16)),
    "matmul of a stack": lambda: _with(isogemm.matmul, r(3, 4, 32), r(32, 8)),
    "matmul of vectors": lambda: _with(isogemm.matmul, r(32), r(32)),
    "matmul in trees": lambda: _with(isogemm.matmul, r(4, 32), r(32, 8), contract="fma/tree4"),
    "by definition": lambda: _with(
        isogemm.matmul, r(2, 32, dtype=BF16), r(32, 2, dtype=BF16), contract="tensor_core:sm90"
    ),
    "of nothing": lambda: _with(isogemm.matmul, r(0, 32), r(32, 8)),
    "linear": lambda: _with(isogemm.linear, r(4, 32), r(8, 32), r(8)),
    "linear of float16": lambda: _with(isogemm.linear, r(2, 4, 32, dtype=F16), r(8, 32, dtype=F16), r(8)),
    "linear with strides": lambda: _with(isogemm.linear, r(32, 4, 2).permute(2, 1, 0), r(32, 8).T),
    "gemm": lambda: _with(isogemm.gemm, r(4, 32), r(32, 8), r(4, 8), beta=0.5),
    "a walk": _walk,
    "gemm_strided_batched": lambda: _with(isogemm.gemm_strided_batched, r(3, 4, 32), r(3, 32, 8)),
    "gemm_batched": lambda: _with(isogemm.gemm_batched, [r(4, 32), r(4, 32)], [r(32, 8), r(32, 8)]),
    "gemm_grouped": lambda: _with(isogemm.gemm_grouped, [r(4, 32), r(1, 7)], [r(32, 8), r(7, 3)]),
    "mm": lambda: _graded(igt.mm, r(4, 32, grad=True), r(32, 8, grad=True)),
    "linear with gradients": lambda: _graded(igt.linear, *[r(*s, grad=True) for s in ((4, 32), (8, 32), (8,))]),
    "rms_norm": lambda: _graded(reductions.rms_norm, r(4, 32, grad=True), r(32, grad=True)),
    "layer_norm": lambda: _graded(reductions.layer_norm, *[r(*s, grad=True) for s in ((4, 32), (32,), (32,))]),
    "softmax": lambda: _graded(reductions.softmax, r(4, 32, dtype=BF16, grad=True)),
    "sum": lambda: _graded(reductions.sum, r(4, 32, grad=True)),
    "rope": lambda: _graded(reductions.rope, r(2, 4, 32, grad=True), r(4, 16), r(4, 16)),
    "embedding": lambda: _graded(reductions.embedding, torch.tensor([1, 2, 2]), r(9, 32, grad=True)),
    "attention": lambda: _attention(BF16, mask=torch.ones(2, 2, 6, 6, dtype=torch.bool)),
    "attention with a mask to add": lambda: _attention(F32, mask=r(2, 2, 6, 6)),
    "quantized": _quantized,
    "a converted model": _converted,
    "a scope": _scope,
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_and_results_can_be_resized(name):
    fixed = []
    for i, x in enumerate(_flat(CALLS[name]())):
        if not x.untyped_storage().resizable():
            fixed.append((i, tuple(x.shape)))
        else:
            x.detach().resize_(x.numel() + 1000)
    assert not fixed


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its ranks by a fork")
def test_sharded_models_train_as_whole_ones(tmp_path):
    said = python(Path(__file__).with_name("sharded.py"), tmp_path / "meeting")
    assert said.count(": True\n") == 10, said
    assert ": False" not in said


def test_memory_of_a_view_is_the_tensors_own():
    """No copy, whatever the strides; writes through the array are the tensor's."""
    from isogemm.operands import views

    base = torch.arange(240.0).reshape(4, 5, 12)
    cases = (base, base[1], base[:, 2:, 3::2], base.transpose(0, 2), base[0, 0, :1].expand(3, 1), base[2, 3, 4])
    for x in (*cases, base[:0], *[y.bfloat16() for y in cases]):
        found = views.array("x", x)
        assert found.shape == tuple(x.shape)
        assert found.tolist() == x.tolist()
        if x.numel():
            assert found.ctypes.data == x.data_ptr()
            assert [s for s, n in zip(found.strides, x.shape, strict=True) if n > 1] == [
                s * x.element_size() for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
            ]
    views.array("x", base)[0, 0, 0] = 7
    assert base[0, 0, 0] == 7


def test_an_array_keeps_its_tensor_alive():
    from isogemm.operands.views import array

    x = torch.full((1000,), 3.0)
    seen = weakref.ref(x)
    view = array("x", x)[1:]
    del x
    gc.collect()
    assert seen() is not None
    assert (view == 3).all()
    del view
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("offset", [0, 40])
def test_a_freed_storage_is_refused(offset):
    """What FSDP leaves of a parameter between two layers: a shape without memory."""
    whole = torch.randn(100)
    x = whole[offset : offset + 12].view(3, 4)
    whole.untyped_storage().resize_(0)
    for call in (
        lambda: isogemm.matmul(x, torch.randn(4, 2)),
        lambda: isogemm.linear(torch.randn(2, 4), x),
        lambda: igt.mm(x, torch.randn(4, 2)),
        lambda: reductions.softmax(x),
    ):
        with pytest.raises(LayoutError, match="memory"):
            call()


def _zoo():
    """Tensors without plain memory, and what is said of each."""
    plain = torch.randn(3, 4)
    yield "negation", torch._neg_view(plain), LayoutError
    yield "imaginary part of a conjugate", torch.randn(3, 4, dtype=torch.complex64).conj().imag, LayoutError
    yield "zeros that are nowhere", torch._efficientzerotensor((3, 4)), LayoutError
    yield "meta", plain.to("meta"), DeviceError
    yield "meta, empty", torch.empty(0, 4, device="meta"), DeviceError
    yield "sparse", plain.to_sparse(), LayoutError
    yield "functional", torch._to_functional_tensor(plain), LayoutError
    yield "complex", torch.randn(3, 4, dtype=torch.complex64), DTypeError
    yield "gradient", plain.clone().requires_grad_(), OptionError
    with FakeTensorMode():
        yield "fake", torch.randn(3, 4), LayoutError
        yield "fake, empty", torch.randn(0, 4), LayoutError
    yield "wrapper", Wrapper(plain), LayoutError


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


def test_what_has_no_plain_memory_is_refused():
    for name, x, error in _zoo():
        with pytest.raises(error):
            pytest.fail(f"{name}: {isogemm.matmul(x, torch.randn(4, 2))}")

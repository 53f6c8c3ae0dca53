"""The short path on a device that is none: what the second call skips, and what it has to see all the same."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.cuda.pretend import aligned, pretended  # noqa: F401
from tests.backends.cuda.pretend_tensors import bits, on_device  # noqa: F401
from tests.products import BF16, F16, F32, assert_same, poisoned, product, stacked, values

import isogemm
from isogemm.api import dispatch
from isogemm.backends.cuda import calls as front
from isogemm.backends.cuda.calls import DeviceWeight
from isogemm.base import seen
from isogemm.operands import cuda as interop_cuda

pytestmark = pytest.mark.usefixtures("pretended")
CHAINS = {F32: "fma/chain", BF16: "tensor_core:sm90/chain", F16: "tensor_core:sm90/chain"}


def test_the_second_call_takes_the_short_path(on_device, pretended, monkeypatch):  # noqa: F811
    x, w, bias = values((4, 6, 9), BF16, seed=1), values((5, 9), BF16, seed=2), values((5,), seed=3)
    tx, tw, tb = on_device(x), on_device(w), on_device(bias)
    stack = on_device(np.broadcast_to(w.T, (4, 9, 5)).copy())
    first, columns, turned = on_device(x[0]), on_device(w.T), on_device(w.T.copy())
    out = poisoned((4, 6, 5), BF16)
    packed = DeviceWeight(tuple(tw.shape), tw, (tw.shape, tw.stride(), tw.dtype, tw.get_device()))
    calls = {
        "matmul": (lambda: isogemm.matmul(first, columns), product(x[0], w.T, CHAINS[BF16])),
        "other layout": (lambda: isogemm.matmul(first, turned), product(x[0], w.T, CHAINS[BF16])),
        "contract": (lambda: isogemm.matmul(first, columns, contract="fma/chain"), product(x[0], w.T)),
        "out_dtype": (
            lambda: isogemm.matmul(first, columns, out_dtype="float32"),
            product(x[0], w.T, CHAINS[BF16], out_dtype=F32),
        ),
        "linear": (lambda: isogemm.linear(tx, tw), stacked(x, w.T, CHAINS[BF16])),
        "packed": (lambda: isogemm.linear(tx, packed), stacked(x, w.T, CHAINS[BF16])),
        "bias": (lambda: isogemm.linear(first, tw, tb), product(x[0], w.T, CHAINS[BF16], bias=bias)),
        "gemm": (
            lambda: isogemm.gemm(first, tw, bias=tb, alpha=0.5, trans_b="T"),
            product(x[0], w.T, CHAINS[BF16], alpha=0.5, bias=bias),
        ),
        "gemm alone": (lambda: isogemm.gemm(first, columns), product(x[0], w.T, CHAINS[BF16])),
        "strided": (lambda: isogemm.gemm_strided_batched(tx, stack), stacked(x, w.T, CHAINS[BF16])),
        "out": (lambda: isogemm.linear(tx, tw, out=on_device(out)), stacked(x, w.T, CHAINS[BF16])),
    }
    for name, (call, want) in calls.items():
        assert_same(bits(call()), want)
        planned = len(pretended.chosen)
        monkeypatch.setattr(dispatch, "matmul", lambda *_, name=name: pytest.fail(name))
        monkeypatch.setattr(dispatch, "linear", lambda *_, name=name: pytest.fail(name))
        monkeypatch.setattr(dispatch, "uniform", lambda *_, name=name: pytest.fail(name))
        out[...] = np.nan
        assert_same(bits(call()), want)
        assert len(pretended.chosen) == planned
        monkeypatch.setattr(dispatch, "matmul", MATMUL)
        monkeypatch.setattr(dispatch, "linear", LINEAR)
        monkeypatch.setattr(dispatch, "uniform", UNIFORM)


MATMUL, LINEAR, UNIFORM = dispatch.matmul, dispatch.linear, dispatch.uniform


def test_the_short_path_sees_what_its_key_cannot(on_device, pretended):  # noqa: F811
    torch = on_device.torch
    room = aligned((400,), F32)
    a, b, out = room[:32].reshape(4, 8), room[64:96].reshape(8, 4), room[128:144].reshape(4, 4)
    room[:] = 0
    ta, tb, to = on_device(a), on_device(b), on_device(out)
    for _ in range(2):
        assert isogemm.matmul(ta, tb, out=to) is to
    known = len(pretended.chosen)
    for other in (room[16:32], room[64:80], room[95:111], room[60:76]):
        with pytest.raises(isogemm.errors.AliasError):
            isogemm.matmul(ta, tb, out=on_device(other.reshape(4, 4)))
    isogemm.matmul(ta, tb, out=on_device(room[96:112].reshape(4, 4)))  # adjacent is apart
    isogemm.matmul(on_device(room[33:65].reshape(4, 8)), tb, out=to)  # another alignment: planned anew
    assert len(pretended.chosen) == known + 1
    isogemm.matmul(ta, tb)
    isogemm.matmul(ta, tb)
    with pytest.raises(isogemm.errors.OptionError, match="requires_grad"):
        isogemm.matmul(on_device(a).requires_grad_(), tb)
    with torch.no_grad():
        isogemm.matmul(on_device(a).requires_grad_(), tb)
    with pytest.raises(isogemm.errors.DeviceError):
        isogemm.matmul(ta, b)
    with pytest.raises(isogemm.errors.ContractError):
        isogemm.matmul(ta, tb, contract=["fma/chain"])
    with pytest.raises(isogemm.errors.OptionError):
        isogemm.matmul(ta, tb, out=to, accumulate=1)
    seen.forget()
    isogemm.matmul(ta, tb)
    assert len(pretended.chosen) == known + 3


@pytest.mark.parametrize("form", [isogemm.gemm_batched, isogemm.gemm_grouped])
@pytest.mark.parametrize("options", [{}, {"alpha": 0.5}, {"accumulate": True}, {"biased": True}], ids=str)
def test_lists_on_the_short_path(form, options, on_device, pretended, monkeypatch):  # noqa: F811
    batched, biased = form is isogemm.gemm_batched, options.pop("biased", False)
    rows = [3, 3, 3] if batched else [1, 3, 2]
    a, b = [values((m, 9), BF16, seed=m) for m in rows], [values((9, 5), BF16, seed=i) for i in range(3)]
    bias = values((5,), seed=7) if biased else None
    dtype = F32 if options.get("accumulate") else BF16
    options = options | ({"bias": on_device(bias)} if biased else {})
    ta, tb = [on_device(x) for x in a], [on_device(x) for x in b]
    want = [
        product(x, y, CHAINS[BF16], alpha=options.get("alpha", 1.0), bias=bias, out_dtype=dtype,
                accumulate="accumulate" in options, c=np.ones((len(x), 5), F32))
        for x, y in zip(a, b, strict=True)
    ]  # fmt: skip
    outs = [aligned((len(x), 5), dtype) for x in a]
    for turn in range(3):
        if turn == 1:
            monkeypatch.setattr(dispatch, "items", lambda *_: pytest.fail("the long way"))
        if "accumulate" not in options:
            for got, expected in zip(form(ta, tb, **options), want, strict=True):
                assert_same(bits(got), expected)
        for x in outs:
            x[...] = 1
        targets = [on_device(x) for x in outs]
        assert form(ta, tb, out=targets, **options) is targets
        for got, expected in zip(outs, want, strict=True):
            assert_same(got, expected)


def test_an_alpha_of_zero_keeps_its_sign(on_device):  # noqa: F811
    a, b = values((4, 9), BF16, seed=1), values((9, 3), BF16, seed=2)
    ta, tb = on_device(a), on_device(b)
    for alpha in (0.0, -0.0) * 2:
        want = product(a, b, CHAINS[BF16], alpha=alpha)
        assert_same(bits(isogemm.gemm(ta, tb, alpha=alpha)), want)
        for got in isogemm.gemm_grouped([ta, ta], [tb, tb], alpha=alpha):
            assert_same(bits(got), want)


def test_the_short_path_leaves_it_to_the_long_one_to_say_that_memory_is_full(on_device, monkeypatch):  # noqa: F811
    a, b = on_device(values((4, 9), seed=1)), on_device(values((9, 3), seed=2))

    def full(*_, **__):
        raise on_device.torch.OutOfMemoryError("as torch says it")

    def refused(shape, *_):
        raise isogemm.errors.LimitError("memory", limit="what is free", value=shape, nearest="less")

    for call in (lambda: isogemm.matmul(a, b), lambda: isogemm.gemm_grouped([a, a], [b, b])):
        call()
        with monkeypatch.context() as patch:
            patch.setattr(front, "_empty_strided", full)
            patch.setattr(interop_cuda, "empty", refused)
            with pytest.raises(isogemm.errors.LimitError):
                call()


def test_lists_that_overlap_are_seen_on_the_short_path(on_device, pretended):  # noqa: F811
    room = aligned((4096,), F32)
    room[:] = 0
    places = [room[i * 128 : i * 128 + 64] for i in range(20)]
    a, b, out = ([on_device(places[i + j].reshape(8, 8)) for i in range(4)] for j in (0, 4, 8))
    for _ in range(2):
        isogemm.gemm_grouped(a, b, out=out)
    known = len(pretended.chosen)
    for bad in (a[2], b[3], out[1], on_device(room[8 * 128 + 32 : 8 * 128 + 96].reshape(8, 8))):
        with pytest.raises(isogemm.errors.AliasError):
            isogemm.gemm_grouped(a, b, out=[*out[:3], bad])
    apart = on_device(places[15].reshape(8, 8))
    isogemm.gemm_grouped(a, b, out=[apart, *out[:3]])
    assert len(pretended.chosen) == known + 4
    with pytest.raises(isogemm.errors.ShapeError):
        isogemm.gemm_grouped(a, b, out=out[:3])
    with pytest.raises(isogemm.errors.OptionError):
        isogemm.gemm_grouped([*a[:3], on_device(places[0].reshape(8, 8)).requires_grad_()], b, out=out)


def test_accumulate_on_the_short_path(on_device):  # noqa: F811
    a, b = values((4, 9), BF16, seed=1), values((9, 3), BF16, seed=2)
    c = values((4, 3), seed=3)
    for _ in range(3):
        got = c.copy()
        isogemm.matmul(on_device(a), on_device(b), out=on_device(got), accumulate=True)
        assert_same(got, product(a, b, CHAINS[BF16], c=c, accumulate=True, out_dtype=F32))

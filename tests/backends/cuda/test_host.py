"""The host's side of the CUDA backend, without a GPU: what reaches a kernel, and what never does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.backends.cuda.pretend import FIRST, STREAM, aligned, at_home, nowhere, pretended, read  # noqa: F401
from tests.products import BF16, DTYPES, F16, F32, assert_same, laid, layouts, poisoned, product, stacked, values

import isogemm
from isogemm import blas, dispatch, forms, interop, interop_cuda, tensors
from isogemm.backends.cuda import front, pointers, workspace
from isogemm.backends.cuda.device import Pointer
from isogemm.backends.cuda.execute import strides_of
from isogemm.backends.cuda.weight import DeviceWeight
from isogemm.errors import DeviceError, LayoutError, ShapeError
from isogemm.ghost import Device, Ghost, ghost

pytestmark = pytest.mark.usefixtures("pretended")
CHAINS = {F32: "fma/chain", BF16: "tensor_core:sm90/chain", F16: "tensor_core:sm90/chain"}
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_ghost_is_never_read():
    x = nowhere(values((4, 6)))
    assert "Ghost(float32 [6, 4]" in repr(x.T) == str(x.T) == f"{x.T}"
    for use in (
        lambda: x + 1, lambda: x == x, lambda: np.isnan(x), lambda: x.copy(), lambda: x.astype(BF16),
        lambda: x.tolist(), lambda: bool(x[:1, :1]), lambda: x.__setitem__(0, 1), lambda: x.__reduce__(),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            use()


def test_readers_of_the_host_refuse_ghosts():
    with pytest.raises(DeviceError, match="cuda:0"):
        isogemm.interop.array("x", nowhere(values((4, 6))))


@relaxed
@given(
    m=st.integers(1, 5), n=st.integers(1, 5), k=st.integers(1, 20), dtype=st.sampled_from(DTYPES),
    la=layouts, lb=layouts, lo=st.sampled_from(["c", "f", "padded", "stepped"]), given_out=st.booleans(),
)  # fmt: skip
def test_a_matrix_reaches_the_kernel_as_it_lies(m, n, k, dtype, la, lb, lo, given_out):
    a, b = laid(values((m, k), dtype, seed=1), la), laid(values((k, n), dtype, seed=2), lb)
    out = laid(poisoned((m, n), dtype), lo) if given_out else None
    got = isogemm.matmul(at_home(a), at_home(b), out=None if out is None else at_home(out))
    assert_same(read(got) if out is None else out, product(a, b, CHAINS[dtype]))


SHAPES = [
    ((7,), (7,)), ((3, 7), (7,)), ((7,), (7, 2)), ((7,), (4, 7, 2)), ((2, 3, 7), (7, 4)), ((2, 3, 7), (2, 7, 4)),
    ((2, 1, 3, 7), (5, 7, 4)), ((5, 1, 3, 7), (1, 2, 7, 4)), ((1, 3, 7), (1, 7, 4)), ((2, 0, 7), (7, 4)),
    ((0, 3, 7), (7, 4)), ((2, 3, 0), (0, 4)), ((0,), (0,)), ((3, 0), (0, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_broadcasts(a, b, dtype, pretended):  # noqa: F811
    x, y = values(a, dtype, seed=1), values(b, dtype, seed=2)
    want = stacked(x, y, CHAINS[dtype])
    got = isogemm.matmul(at_home(x), at_home(y))
    assert isinstance(got, Ghost)
    assert_same(read(got), want)
    if not want.size or a[-1] == 0:
        assert not pretended.chosen


def test_the_fewest_launches(pretended):  # noqa: F811
    def launches(a, b):
        pretended.chosen.clear()
        isogemm.matmul(at_home(values(a)), at_home(values(b)))
        return [(p.batch, p.m, p.n, p.k) for p in pretended.chosen]

    assert launches((4, 3, 7), (7, 5)) == [(1, 12, 5, 7)]
    assert launches((4, 3, 7), (4, 7, 5)) == [(4, 3, 5, 7)]
    assert launches((2, 4, 3, 7), (2, 4, 7, 5)) == [(8, 3, 5, 7)]
    assert launches((2, 4, 3, 7), (2, 1, 7, 5)) == [(1, 3, 5, 7)] * 8


@relaxed
@given(
    lead=st.lists(st.integers(1, 3), max_size=3), n=st.integers(1, 5), k=st.integers(0, 20), lx=layouts, lw=layouts,
    dtype=st.sampled_from(DTYPES), biased=st.sampled_from([None, "c", "stepped", "broadcast"]),
    lo=st.sampled_from([None, "c", "padded"]),
)  # fmt: skip
def test_linear(lead, n, k, lx, lw, dtype, biased, lo):
    x, w = laid(values((*lead, k), dtype, seed=1), lx), laid(values((n, k), dtype, seed=2), lw)
    bias = None if biased is None else laid(values((n,), F32, seed=3), biased)
    out = None if lo is None else laid(poisoned((*lead, n), dtype), lo)
    want = product(x.reshape(-1, k) if k else np.empty((int(np.prod(lead)), 0), dtype), w.T, CHAINS[dtype], bias=bias)
    got = isogemm.linear(
        at_home(x), at_home(w), None if bias is None else at_home(bias), out=None if out is None else at_home(out)
    )
    assert_same(read(got) if out is None else out, want.reshape(*lead, n))


@pytest.mark.parametrize("k", [0, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (-1.5, 0.0), (1.0, 1.0), (0.3, -0.7), (0.0, 1.0)])
@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "TT"])
def test_the_epilogue(k, dtype, alpha, beta, trans):
    a, b = values((3, k), dtype, seed=1, special=True), values((k, 4), dtype, seed=2)
    c, bias = values((3, 4), dtype, seed=3, special=True), values((4,), seed=4, special=True)
    want = product(a, b, CHAINS[dtype], c=c, alpha=alpha, beta=beta, bias=bias)
    a, b = (a.T.copy() if trans[0] == "T" else a), (b.T.copy() if trans[1] == "T" else b)
    got = isogemm.gemm(
        at_home(a),
        at_home(b),
        at_home(c),
        alpha=alpha,
        beta=beta,
        bias=at_home(bias),
        trans_a=trans[0],
        trans_b=trans[1],
    )
    assert_same(read(got), want)


@pytest.mark.parametrize("k", [0, 17])
def test_accumulate_starts_from_c(k):
    a, b, c = values((3, k), BF16, seed=1), values((k, 4), BF16, seed=2), values((3, 4), seed=3, special=True)
    want = product(a, b, CHAINS[BF16], c=c, accumulate=True, out_dtype=F32)
    out = c.copy()
    assert isinstance(isogemm.matmul(at_home(a), at_home(b), out=at_home(out), accumulate=True), Ghost)
    assert_same(out, want)
    assert_same(read(isogemm.gemm(at_home(a), at_home(b), at_home(c), accumulate=True)), want)


@pytest.mark.parametrize("k", [0, 9])
def test_forms_agree(k, pretended):  # noqa: F811
    a, b = values((3, 4, k), BF16, seed=1), values((3, k, 5), BF16, seed=2)
    want = stacked(a, b, CHAINS[BF16])
    ga, gb = at_home(a), at_home(b)
    assert_same(read(isogemm.gemm_strided_batched(ga, gb)), want)
    for form in (isogemm.gemm_batched, isogemm.gemm_grouped):
        got = form([at_home(x) for x in a], [at_home(x) for x in b])
        assert_same(np.stack([read(x) for x in got]), want)
        outs = [poisoned((4, 5), BF16) for _ in a]
        form(list(ga), list(gb), out=[at_home(x) for x in outs])
        assert_same(np.stack(outs), want)
    if k:
        assert pretended.chosen[0].batch == 3


def test_groups_with_empty_members():
    sizes = [(3, 4, 5), (0, 4, 5), (2, 4, 0), (1, 4, 7)]
    a = [values((m, k), F32, seed=m) for m, _, k in sizes]
    b = [values((k, n), F32, seed=k) for _, n, k in sizes]
    bias = values((4,), seed=9)
    got = isogemm.gemm_grouped([at_home(x) for x in a], [at_home(x) for x in b], bias=at_home(bias), alpha=-2.0)
    for x, y, z in zip(a, b, got, strict=True):
        assert_same(read(z), product(x, y, alpha=-2.0, bias=bias))


def test_the_default_contract_is_the_devices(pretended):  # noqa: F811
    def contract(a, b, **options):
        isogemm.matmul(at_home(values((2, 3), a)), at_home(values((3, 2), b)), **options)
        return str(pretended.chosen[-1].contract)

    assert contract(F32, F32) == contract(F32, BF16) == contract(F16, F32) == "fma/chain"
    assert contract(BF16, BF16) == contract(F16, F16) == "tensor_core:sm90/chain"
    assert contract(BF16, BF16, contract="fma/leaf4096") == "fma/leaf4096"
    assert str(isogemm.Contract()) == "fma/chain"


def test_devices_do_not_mix():
    a, b = values((2, 3)), values((3, 2))
    with pytest.raises(DeviceError, match=r"devices of a and b: limit: one device; got: cuda:0 and cpu; .*b\.to"):
        isogemm.matmul(nowhere(a), b)
    with pytest.raises(DeviceError, match=r"got: cpu and cuda:0; .*a\.to"):
        isogemm.matmul(a, nowhere(b))
    with pytest.raises(DeviceError, match="cuda:0 and cuda:1"):
        isogemm.gemm(nowhere(a), nowhere(b), out=nowhere(poisoned((2, 2)), Device("cuda", 1)))
    with pytest.raises(DeviceError, match=r"a\[0\] and b\[1\]"):
        isogemm.gemm_batched([nowhere(a)] * 2, [nowhere(b), b])
    with pytest.raises(DeviceError, match="cuda:0 and cpu"):
        isogemm.linear(nowhere(a), isogemm.pack(a))
    with pytest.raises(DeviceError, match="cuda:0 and cpu"):
        blas.gemm("N", "N", 1, 1, 1, 1.0, nowhere(a).reshape(-1), 1, b.reshape(-1), 1, 0.0, a.reshape(-1), 1)


def test_a_reference_to_a_weight(pretended):  # noqa: F811
    x, w = values((2, 7), BF16, seed=1), values((3, 7), BF16, seed=2)
    packed = isogemm.pack(at_home(w))
    assert (packed.n, packed.k, packed.shape, packed.nbytes) == (3, 7, (3, 7), 42)
    assert packed.tensor.data_ptr() == w.ctypes.data
    with pytest.raises(isogemm.errors.DTypeError, match="linear"):
        isogemm.matmul(at_home(x), packed)


@pytest.mark.parametrize("shape", [(1, 333), (5, 1), (1, 1), (4, 7)])
def test_steps_that_are_never_taken_do_not_tell_products_apart(shape):
    room = np.zeros((9, 999), np.float32)[: shape[0], : shape[1]]
    odd, tight = strides_of(room), strides_of(np.zeros(shape, np.float32))
    assert odd == tight if 1 in shape[:1] else odd.col == tight.col


def test_blas_calls_on_flat_buffers(pretended):  # noqa: F811
    m, n, k = 3, 4, 5
    a, b, c = values((2 * m * k,), seed=1), values((2 * k * n,), seed=2), poisoned((2 * m * n,))
    want = poisoned((2 * m * n,))
    call = ("N", "T", m, n, k, 0.5)
    blas.gemm_strided_batched(*call, a, m, b, n, 0.0, want, m, m * k, k * n, m * n, 2)
    ga, gb = at_home(a), at_home(b)
    assert isinstance(blas.gemm_strided_batched(*call, ga, m, gb, n, 0.0, at_home(c), m, 15, 20, 12, 2), Ghost)
    assert_same(c, want)
    c[:] = np.nan
    blas.gemm_batched(*call, ga, m, gb, n, 0.0, at_home(c), m, [0, 15], [0, 20], [0, 12])
    assert_same(c, want)
    c[:] = np.nan
    blas.gemm(*call, ga, m, gb, n, 0.0, at_home(c), m, offset_a=15, offset_b=20, offset_c=12)
    assert_same(c[12:], want[12:])
    assert np.isnan(c[:12]).all()
    assert pretended.chosen


@pytest.mark.parametrize("layout", ["c", "f", "padded", "stepped"])
def test_describe_runs(layout):
    a, b = laid(values((3, 5), seed=1), layout), values((2, 5, 4), seed=2)
    call = blas.describe(at_home(a), at_home(b))
    begins = [line for line in str(blas.describe(a, b)).splitlines() if "begins" not in line]
    assert str(call).splitlines() == begins  # where a view begins in its buffer, a ghost's tensor says
    assert_same(read(call.run()), stacked(a, b))
    out = laid(poisoned((2, 3, 4)), "stepped")
    blas.describe(at_home(a), at_home(b), at_home(out)).run()
    assert_same(out, stacked(a, b))


def test_forms():
    a, b = values((3, 4, 7), seed=1), values((7, 5), seed=2)
    ga, gb = at_home(a), at_home(b)
    assert forms.strided(list(ga)).strides == a.strides
    advice = forms.advise(list(ga), [gb] * 3)
    assert advice.form == "wide"
    assert_same(np.stack([read(x) for x in advice.run()]), stacked(a, b))
    assert_same(read(forms.wide(list(ga), [gb] * 3)), stacked(a, b))
    q, k = values((6, 4, 8), seed=3), values((2, 5, 8), seed=4)
    want = forms.gqa_scores(q, k)
    for form in ("packed", "broadcast", "pointers"):
        assert_same(read(forms.gqa_scores(at_home(q), at_home(k), form=form)), want)


def test_nothing_is_launched_or_allocated_by_a_call_that_is_refused(pretended):  # noqa: F811
    a, b = nowhere(values((2, 3))), nowhere(values((3, 2)))
    for bad in (
        lambda: isogemm.matmul(a, a), lambda: isogemm.gemm(a, b, alpha=float("nan")), lambda: isogemm.linear(a, b),
        lambda: isogemm.matmul(a, b, out=a), lambda: isogemm.gemm_batched([a, a], [b, a]),
        lambda: isogemm.matmul(a, b, contract="tensor_core:sm90"), lambda: isogemm.gemm(a, b, bias=a),
    ):  # fmt: skip
        with pytest.raises(isogemm.errors.IsogemmError):
            bad()
    assert not pretended.chosen
    assert not pretended.allocated


class Tensors:
    """Tensors of the host that say they are on device 0, and the short path made to believe them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pretended: Any) -> None:  # noqa: F811
        torch = pytest.importorskip("torch")

        class OnDevice(torch.Tensor):
            __torch_function__ = torch._C._disabled_torch_function_impl

            def get_device(self):
                return 0

        def made(shape, strides, dtype, device):
            found = interop_cuda.tensor(pretended.empty(tuple(shape), interop.as_dtype(dtype), FIRST))
            assert found.stride() == strides
            return found

        self.torch, self.type = torch, OnDevice
        monkeypatch.setattr(front, "learn", lambda torch: front.KINDS.update({OnDevice: None}))
        monkeypatch.setattr(front, "KINDS", tensors.KINDS)
        monkeypatch.setitem(tensors.KINDS, OnDevice, None)
        monkeypatch.setattr(front, "_grad_enabled", torch.is_grad_enabled)
        monkeypatch.setattr(front, "_empty_strided", made)
        monkeypatch.setattr(front, "_raw_stream", lambda device: STREAM)
        seen = interop.view
        monkeypatch.setattr(
            interop, "view", lambda name, x: from_tensor(name, x) if type(x) is OnDevice else seen(name, x)
        )
        monkeypatch.setattr(interop_cuda, "tensor", lambda x: tensor(x).as_subclass(OnDevice))

    def __call__(self, x: np.ndarray) -> Any:
        if x.dtype == BF16:
            return self.torch.from_numpy(x.view(np.uint16)).view(self.torch.bfloat16).as_subclass(self.type)
        return self.torch.from_numpy(x).as_subclass(self.type)


from_tensor, tensor = interop_cuda.from_tensor, interop_cuda.tensor


@pytest.fixture
def on_device(monkeypatch, pretended):  # noqa: F811
    return Tensors(monkeypatch, pretended)


def bits(x: Any) -> np.ndarray:
    return interop.array("x", x.as_subclass(pytest.importorskip("torch").Tensor))


def test_the_second_call_takes_the_short_path(on_device, pretended, monkeypatch):  # noqa: F811
    x, w, bias = values((4, 6, 9), BF16, seed=1), values((5, 9), BF16, seed=2), values((5,), seed=3)
    tx, tw, tb = on_device(x), on_device(w), on_device(bias)
    stack = on_device(np.broadcast_to(w.T, (4, 9, 5)).copy())
    first, columns, turned = on_device(x[0]), on_device(w.T), on_device(w.T.copy())
    out = poisoned((4, 6, 5), BF16)
    packed = DeviceWeight(tw, (tw.shape, tw.stride(), tw.dtype, tw.get_device()))
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
    front.forget()
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


def test_an_alpha_of_zero_keeps_its_sign(on_device):
    a, b = values((4, 9), BF16, seed=1), values((9, 3), BF16, seed=2)
    ta, tb = on_device(a), on_device(b)
    for alpha in (0.0, -0.0) * 2:
        want = product(a, b, CHAINS[BF16], alpha=alpha)
        assert_same(bits(isogemm.gemm(ta, tb, alpha=alpha)), want)
        for got in isogemm.gemm_grouped([ta, ta], [tb, tb], alpha=alpha):
            assert_same(bits(got), want)


def test_the_short_path_leaves_it_to_the_long_one_to_say_that_memory_is_full(on_device, monkeypatch):
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


def test_a_workspace_that_does_not_fit_is_a_typed_error(monkeypatch):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(workspace, "_made_of", lambda device: (full, None, None, MemoryError))
    with pytest.raises(isogemm.errors.LimitError, match="4096 bytes"):
        workspace.workspace(4096, 0)


def test_pointer_arrays_without_a_driver(pretended, monkeypatch):  # noqa: F811
    torch = pytest.importorskip("torch")
    a, b, out = values((3, 4, 9), seed=1), values((3, 9, 5), seed=2), poisoned((3, 4, 5))
    homes = [Pointer("device", 0, x.ctypes.data, x.nbytes) for x in (a, b, out)]

    def pointer(address):
        return next((p for p in homes if 0 <= address - p.start < p.nbytes), Pointer("unknown", -1, 0, 0))

    monkeypatch.setattr(pointers, "pointer", pointer)
    monkeypatch.setitem(tensors.KINDS, torch.Tensor, None)
    monkeypatch.setattr(front, "_grad_enabled", torch.is_grad_enabled)
    monkeypatch.setattr(front, "_raw_stream", lambda device: STREAM)
    PointerArray = isogemm.PointerArray
    pa = PointerArray(np.array([x.ctypes.data for x in a]), (4, 9))
    pb = PointerArray([x.T.ctypes.data for x in b], (5, 9), strides=(1, 5))
    po = PointerArray(torch.tensor([x.ctypes.data for x in out]), (4, 5))
    for turn in range(2):
        if turn:
            monkeypatch.setattr(dispatch, "items", lambda *_: pytest.fail("the long way"))
        out[...] = np.nan
        assert isogemm.gemm_batched(pa, pb, trans_b="T", out=po) is po
        assert_same(out, stacked(a, b))
    monkeypatch.undo()
    monkeypatch.setattr(pointers, "pointer", pointer)
    first = a.ctypes.data
    for bad, error, words in (
        (0, LayoutError, "not null"),
        (first + 2, LayoutError, "multiple of 4"),
        (first + 4, LayoutError, "inside its allocation"),
        (0x1230, DeviceError, "unknown"),
        (first - 2**64, LayoutError, "not null"),
        (first + 2**64, LayoutError, "not null"),
    ):
        with pytest.raises(error, match=f"item 1.*{words}"):
            PointerArray([first, bad], (3 * 4, 9))
    with pytest.raises(isogemm.errors.DTypeError):
        PointerArray([1.5], (4, 9))
    with pytest.raises(isogemm.errors.DTypeError):
        PointerArray([first], (4, 9), "int8")
    with pytest.raises(LayoutError, match="at least 0"):
        PointerArray([first + 36], (2, 9), strides=(-9, 1))
    homes[1] = replace(homes[1], ordinal=1)
    with pytest.raises(DeviceError, match=r"item 1.*cuda:1"):
        PointerArray([first, b.ctypes.data], (4, 9))


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


def test_accumulate_on_the_short_path(on_device):
    a, b = values((4, 9), BF16, seed=1), values((9, 3), BF16, seed=2)
    c = values((4, 3), seed=3)
    for _ in range(3):
        got = c.copy()
        isogemm.matmul(on_device(a), on_device(b), out=on_device(got), accumulate=True)
        assert_same(got, product(a, b, CHAINS[BF16], c=c, accumulate=True, out_dtype=F32))


def test_misaligned_memory():
    odd = ghost(0x7F0000000001, (2, 3), (12, 4), F32, FIRST)
    with pytest.raises(LayoutError, match="unaligned"):
        isogemm.matmul(odd, nowhere(values((3, 2))))


@pytest.mark.parametrize(("shape", "strides"), [((4,), None), ((4, 8, 2), None), ((4, 8), (8,)), ((), None)])
def test_pointers_to_what_is_no_matrix_are_refused(shape, strides):
    with pytest.raises(ShapeError, match="two: rows, columns"):
        isogemm.PointerArray([4096], shape, strides=strides)


def test_capture_is_asked_of_the_device_that_is_meant(monkeypatch):
    torch = pytest.importorskip("torch")
    from isogemm.backends.cuda import device

    current = [0]

    class Switch:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            self.before, current[0] = current[0], self.ordinal

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Switch)
    monkeypatch.setattr(device, "_capture_getter", lambda: lambda: current[0] == 1)
    assert [device.is_capturing(), device.is_capturing(0), device.is_capturing(1)] == [False, False, True]
    assert current == [0]

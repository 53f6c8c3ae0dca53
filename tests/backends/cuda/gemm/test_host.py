"""The host's side of the CUDA backend, without a GPU: what reaches a kernel, and what never does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.backends.cuda.pretend import at_home, nowhere, pretended, read  # noqa: F401
from tests.products import BF16, DTYPES, F16, F32, assert_same, laid, layouts, poisoned, product, stacked, values

import isogemm
from isogemm import blas
from isogemm.backends.cuda.gemm.execute import strides_of
from isogemm.errors import DeviceError
from isogemm.forms import convert as forms
from isogemm.operands.device_array import DeviceArray, DeviceId

pytestmark = pytest.mark.usefixtures("pretended")
CHAINS = {F32: "fma/chain", BF16: "tensor_core:sm90/chain", F16: "tensor_core:sm90/chain"}
relaxed = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def test_a_device_array_is_never_read():
    x = nowhere(values((4, 6)))
    assert "DeviceArray(float32 [6, 4]" in repr(x.T) == str(x.T) == f"{x.T}"
    for use in (
        lambda: x + 1, lambda: x == x, lambda: np.isnan(x), lambda: x.copy(), lambda: x.astype(BF16),
        lambda: x.tolist(), lambda: bool(x[:1, :1]), lambda: x.__setitem__(0, 1), lambda: x.__reduce__(),
        lambda: x.argmax(), lambda: x.sort(), lambda: x.flatten(), lambda: x.dot(x), lambda: x.sum(),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            use()


def test_readers_of_the_host_refuse_device_arrays():
    with pytest.raises(DeviceError, match="cuda:0"):
        isogemm.operands.views.array("x", nowhere(values((4, 6))))


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
    assert isinstance(got, DeviceArray)
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
    assert isinstance(isogemm.matmul(at_home(a), at_home(b), out=at_home(out), accumulate=True), DeviceArray)
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
        isogemm.gemm(nowhere(a), nowhere(b), out=nowhere(poisoned((2, 2)), DeviceId("cuda", 1)))
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
    assert isinstance(blas.gemm_strided_batched(*call, ga, m, gb, n, 0.0, at_home(c), m, 15, 20, 12, 2), DeviceArray)
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
    assert str(call).splitlines() == begins  # where a view begins in its buffer, a device array's tensor says
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

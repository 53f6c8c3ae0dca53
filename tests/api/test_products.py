"""Every public product against the executable definition, bit for bit."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from tests.process import python
from tests.products import BF16, DTYPES, F16, F32, assert_same, laid, layouts, poisoned, product, stacked, values

import isogemm
from isogemm.backends import open_device
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.gemm import packed
from isogemm.errors import ContractError, OptionError
from isogemm.operands.device_array import HOST

CONTRACTS = ("fma/chain", "fma/leaf8", "fma/tree4")
fast = settings(max_examples=60)


@fast
@given(
    shapes=mutually_broadcastable_shapes(signature="(m?,k),(k,n?)->(m?,n?)", max_dims=3, max_side=5, min_side=0),
    dtype=st.sampled_from(DTYPES),
    layout_a=layouts,
    layout_b=layouts,
    contract=st.sampled_from(CONTRACTS),
)
def test_matmul_has_numpys_shapes_and_the_contracts_bits(shapes, dtype, layout_a, layout_b, contract):
    a, b = (
        laid(values(s, dtype, seed=i, special=True), lay)
        for i, (s, lay) in enumerate(zip(shapes.input_shapes, (layout_a, layout_b), strict=True))
    )
    got = isogemm.matmul(a, b, contract=contract)
    with np.errstate(all="ignore"):
        assert got.shape == np.matmul(a.astype(np.float32), b.astype(np.float32)).shape
    assert_same(got, stacked(a, b, contract))


@fast
@given(
    m=st.integers(0, 9),
    n=st.integers(0, 9),
    k=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    trans=st.tuples(st.sampled_from("NTCntc"), st.sampled_from("NTCntc")),
    layout=st.tuples(layouts, layouts, layouts, layouts),
    scalars=st.tuples(st.sampled_from([1.0, 0.0, -2.5, 0.1, 3]), st.sampled_from([0.0, 1.0, -1.0, 0.3])),
    bias=st.booleans(),
    in_place=st.booleans(),
    out_dtype=st.sampled_from([None, *DTYPES]),
)
def test_gemm_is_the_definition_with_every_option(m, n, k, dtype, trans, layout, scalars, bias, in_place, out_dtype):
    a, b = values((m, k), dtype, seed=1), values((k, n), dtype, seed=2)
    stored_a = laid(a if trans[0] in "Nn" else a.T, layout[0])
    stored_b = laid(b if trans[1] in "Nn" else b.T, layout[1])
    a = stored_a if trans[0] in "Nn" else stored_a.T
    b = stored_b if trans[1] in "Nn" else stored_b.T
    result = np.dtype(out_dtype or dtype)
    c = laid(values((m, n), result, seed=3), layout[2])
    out_layout = "padded" if layout[3] == "broadcast" else layout[3]
    out = laid(poisoned((m, n), result), out_layout)
    if in_place:
        out[...] = c
        c = out
    z = values((n,), F32, seed=4) if bias else None
    want = product(a, b, c=c.copy(), alpha=scalars[0], beta=scalars[1], bias=z, out_dtype=result)
    got = isogemm.gemm(
        stored_a,
        stored_b,
        c,
        alpha=scalars[0],
        beta=scalars[1],
        trans_a=trans[0],
        trans_b=trans[1],
        bias=z,
        out=out,
        out_dtype=out_dtype,
    )
    assert got is out
    assert_same(got, want)


@pytest.mark.parametrize("order", ["chain", "leaf16", "tree2"])
@pytest.mark.parametrize(
    ("arithmetic", "dtype"),
    [("tf32:sm90", F32), *((f"tensor_core:{sm}", dtype) for sm in ("sm90", "sm80") for dtype in (BF16, F16))],
    ids=str,
)
def test_other_arithmetics(arithmetic, dtype, order):
    contract = f"{arithmetic}/{order}"
    a, b = values((5, 100), dtype, seed=1, special=True), values((100, 6), dtype, seed=2)
    got = isogemm.matmul(a, b, contract=contract, out_dtype=np.float32)
    assert_same(got, product(a, b, contract, out_dtype=np.float32))


@pytest.mark.parametrize("name", ["fp32", "f32", "bf16", "fp16", "f16"])
def test_short_names_of_dtypes(name):
    a, b = values((3, 5)), values((5, 2), seed=1)
    full = {"32": "float32", "16": "float16"}[name[-2:]] if name != "bf16" else "bfloat16"
    got = isogemm.matmul(a, b, out_dtype=name)
    assert got.dtype.name == full
    assert_same(got, isogemm.matmul(a, b, out_dtype=full))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (0, 3), (2, 1, 3)])
@pytest.mark.parametrize("layout", ["c", "padded", "stepped", "reversed"])
def test_linear(dtype, lead, layout):
    x, w, bias = values((*lead, 24), dtype, seed=1), values((7, 24), dtype, seed=2), values((7,), dtype, seed=3)
    x, w = laid(x, layout), laid(w, layout)
    rows = np.ascontiguousarray(x).reshape(-1, 24)
    assert_same(isogemm.linear(x, w), product(rows, w.T).reshape(*lead, 7))
    assert_same(isogemm.linear(x, w, bias), product(rows, w.T, bias=bias).reshape(*lead, 7))
    got = isogemm.linear(x, w, bias, contract="fma/leaf8", out_dtype=np.float32)
    assert_same(got, product(rows, w.T, "fma/leaf8", bias=bias, out_dtype=np.float32).reshape(*lead, 7))


def test_linear_walks_permuted_activations():
    x = values((3, 4, 24), seed=1)
    w = values((7, 24), seed=2)
    got = isogemm.linear(x.transpose(1, 0, 2), w)
    assert_same(got, product(x.transpose(1, 0, 2).reshape(-1, 24), w.T).reshape(4, 3, 7))


@pytest.mark.parametrize("weights", [BF16, F16], ids=str)
def test_float32_activations_on_half_weights(weights):
    x, w = values((3, 40), seed=1), values((5, 40), weights, seed=2)
    assert_same(isogemm.linear(x, w), product(x, w.T))


@pytest.mark.parametrize("half", [BF16, F16], ids=str)
def test_a_result_is_as_wide_as_its_operands(half):
    """As numpy.matmul has it: a float32 operand makes float32, on either side, in every form; nothing overflows."""
    a, b = values((3, 40), half, seed=2), values((40, 5), seed=1)
    want = product(a, b, out_dtype=np.float32)
    turned = product(b.T, a.T, out_dtype=np.float32)
    assert_same(isogemm.matmul(a, b), want)
    assert_same(isogemm.matmul(b.T, a.T), turned)
    assert_same(isogemm.gemm(a, b), want)
    assert_same(isogemm.linear(a, b.T), want)
    assert_same(isogemm.linear(a, isogemm.pack(np.ascontiguousarray(b.T))), want)
    assert_same(isogemm.gemm_strided_batched(a[None], b[None])[0], want)
    assert_same(isogemm.gemm_batched([a], [b])[0], want)
    assert_same(isogemm.gemm_grouped([a], [b])[0], want)
    assert isogemm.matmul(a, b, out_dtype=half).dtype == half
    large = np.full((1, 2), 60000, F16)
    assert isogemm.matmul(large, np.ones((2, 1), F32))[0, 0] == 120000


@pytest.mark.parametrize(
    "call", [isogemm.gemm, isogemm.gemm_strided_batched, isogemm.gemm_batched, isogemm.gemm_grouped]
)
def test_c_without_a_beta_is_refused(call):
    """It was ignored: what BLAS has no default for, is asked for."""
    a, b, c = values((3, 4), seed=1), values((4, 2), seed=2), values((3, 2), seed=3)
    if call is not isogemm.gemm:
        a, b, c = a[None], b[None], c[None]
    if call is isogemm.gemm_grouped:
        a, b, c = list(a), list(b), list(c)
    for options in ({}, {"out": c}):
        before = np.array(c)
        with pytest.raises(OptionError, match=r"^beta.*1\.0") as caught:
            call(a, b, c, **options)
        assert "0.0" in str(caught.value)
        assert_same(np.array(c), before)
    plain = np.array(call(a, b))
    assert_same(np.array(call(a, b, c, beta=0)), plain)
    assert_same(np.array(call(a, b, c, beta=0.0)), plain)
    assert not np.array_equal(np.array(call(a, b, c, beta=1)), plain)
    call(a, b, c, accumulate=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_weights_have_the_bits_of_plain_ones(dtype):
    x, w, bias = values((2, 3, 40), dtype, seed=1), values((37, 40), dtype, seed=2), values((37,), seed=3)
    packed = isogemm.pack(w)
    assert_same(isogemm.linear(x, packed, bias), isogemm.linear(x, w, bias))
    assert_same(isogemm.linear(x[0, 0], packed), isogemm.linear(x[0, 0], w))
    assert_same(isogemm.linear(x.transpose(1, 0, 2), packed), isogemm.linear(x.transpose(1, 0, 2), w))
    assert isogemm.linear(x[:0], packed).shape == (0, 3, 37)


@pytest.mark.parametrize("nr", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_weight_is_packed_anew_where_it_is_loaded(nr, dtype, monkeypatch):
    """Other processors have other panels: those of the one that wrote it are no weight there."""
    w, x = values((37, 40), dtype, seed=2), values((3, 40), dtype, seed=1)
    kept = pickle.dumps(isogemm.pack(w))
    with monkeypatch.context() as other:
        other.setattr(packed, "target", lambda: replace(target(), nr=nr))
        loaded = pickle.loads(kept)
    assert loaded.panels.shape[2] == nr
    assert_same(loaded.unpack(), w)
    assert_same(isogemm.linear(x, copy.deepcopy(loaded)), isogemm.linear(x, w))  # of this processor again


def test_plain_views_of_odd_ranks():
    a, b = values((2, 1, 3, 8), seed=1), values((4, 8, 5), seed=2)
    assert_same(isogemm.matmul(a, b), stacked(a, b))
    assert_same(isogemm.matmul(a, b[0]), stacked(a, b[0]))
    assert_same(isogemm.matmul(a.transpose(2, 1, 0, 3), b[:1]), stacked(a.transpose(2, 1, 0, 3), b[:1]))


@pytest.mark.parametrize("shape_a", [(8,), (3, 8), (4, 3, 8), (2, 4, 3, 8)])
@pytest.mark.parametrize("shape_b", [(8,), (8, 5), (4, 8, 5)])
@pytest.mark.parametrize("layout", ["c", "f", "stepped", "reversed"])
def test_matmul_writes_out_and_nothing_around_it(shape_a, shape_b, layout):
    a, b = values(shape_a, seed=1), values(shape_b, seed=2)
    want = stacked(a, b)
    room = poisoned(tuple(2 * d + 2 for d in want.shape))
    index = tuple(slice(1, 1 + 2 * d, 2) if layout == "stepped" else slice(1, 1 + d) for d in want.shape)
    out = room[(..., *index)]
    if layout == "reversed":
        out = out[(..., *[slice(None, None, -1)] * out.ndim)]
    elif layout == "f":
        room = poisoned(want.shape[::-1])
        out = room.T
    assert isogemm.matmul(a, b, out=out) is out
    assert_same(out, want)
    assert np.count_nonzero(~np.isnan(room)) == want.size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_continues_the_walk(dtype):
    a, b = values((4, 64), dtype, seed=1), values((64, 5), dtype, seed=2)
    sums = np.zeros((4, 5), np.float32)
    for start in range(0, 64, 16):
        isogemm.matmul(a[:, start : start + 16], b[start : start + 16], out=sums, accumulate=True)
    assert_same(sums, product(a, b, out_dtype=np.float32))
    head = isogemm.gemm(a[:, :32], b[:32], out_dtype=np.float32)
    kept = head.copy()
    got = isogemm.gemm(a[:, 32:], b[32:], head, alpha=0.5, bias=sums[0], accumulate=True, out_dtype=dtype)
    assert_same(got, product(a, b, alpha=0.5, bias=sums[0]))
    assert_same(head, kept)


def test_beta_zero_never_reads_c():
    a, b = values((3, 8), seed=1), values((8, 4), seed=2)
    for c in (None, poisoned((3, 4))):
        assert_same(isogemm.gemm(a, b, c, alpha=2.0, beta=0.0), product(a, b, alpha=2.0))
    c = poisoned((3, 4))
    assert_same(isogemm.gemm(a, b, c, beta=1e-60, out=c), product(a, b))  # 0 in float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_batched_forms_agree_with_the_loop(dtype, as_list):
    a, b, c = values((5, 3, 20), dtype, seed=1), values((5, 20, 4), dtype, seed=2), values((5, 3, 4), dtype, seed=3)
    bias = values((4,), seed=4)
    options = {"alpha": 0.5, "beta": 2.0, "bias": bias}
    want = np.stack([product(x, y, c=z, **options) for x, y, z in zip(a, b, c, strict=True)])
    assert_same(isogemm.gemm_strided_batched(a, b, c, **options), want)
    operands = [list(x) for x in (a, b, c)] if as_list else (a, b, c)
    got = isogemm.gemm_batched(*operands, **options)
    assert isinstance(got, list) == as_list
    assert_same(np.stack(got), want)
    assert_same(np.stack(isogemm.gemm_grouped(*operands, **options)), want)
    flipped = [x.swapaxes(1, 2) for x in (a, b)]
    assert_same(isogemm.gemm_strided_batched(*flipped, c, trans_a="t", trans_b="C", **options), want)
    out = [poisoned((3, 4), dtype) for _ in range(5)]
    assert isogemm.gemm_batched(*operands, out=out, **options) is out
    assert_same(np.stack(out), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stacks_whose_items_lie_no_one_step_apart(dtype):
    """Heads of several sentences, as attention has them: reversed, shared, of few columns, into every second place."""
    isogemm.set_num_threads(1)  # with many, few items are made ready one by one
    heads = values((3, 9, 5, 16), dtype, seed=1).transpose(0, 2, 1, 3)
    for a, b in (
        (heads, heads.swapaxes(2, 3)),
        (heads[::-1, 1:], heads[:1, 1:].swapaxes(2, 3)),
        (heads, heads[:, :, ::5].swapaxes(2, 3)),
        (heads[:, ::2, :1], heads[:, ::2].swapaxes(2, 3)),
    ):
        want = stacked(a, b)
        assert_same(isogemm.matmul(a, b), want)
        whole = poisoned((*want.shape[:-1], 2 * want.shape[-1]), dtype)
        isogemm.matmul(a, b, out=whole[..., ::2])
        assert_same(np.ascontiguousarray(whole[..., ::2]), want)
        assert np.isnan(whole[..., 1::2].astype(np.float32)).all()
    w, bias = values((4, 16), dtype, seed=2), values((4,), seed=3)
    want = np.array([[product(x, w.T, bias=bias) for x in some] for some in heads])
    assert_same(isogemm.linear(heads, w, bias), want)


def test_a_stack_goes_on_from_sums():
    isogemm.set_num_threads(1)
    heads = values((3, 9, 5, 16), seed=1).transpose(0, 2, 1, 3)
    sums = np.asfortranarray(poisoned((3, 5, 9, 9)))
    isogemm.matmul(heads[..., :8], heads[..., :8].swapaxes(2, 3), out=sums)
    isogemm.matmul(heads[..., 8:], heads[..., 8:].swapaxes(2, 3), out=sums, accumulate=True)
    assert_same(np.ascontiguousarray(sums), stacked(heads, heads.swapaxes(2, 3)))


def test_stride_zero_broadcasts():
    a, b = values((5, 3, 20), seed=1), values((20, 4), seed=2)
    shared = np.broadcast_to(b, (5, 20, 4))
    want = np.stack([product(x, b) for x in a])
    assert_same(isogemm.gemm_strided_batched(a, shared), want)
    assert_same(np.stack(isogemm.gemm_batched(list(a), [b] * 5)), want)
    first = np.broadcast_to(a[0], (5, 3, 20))
    assert_same(isogemm.gemm_strided_batched(first, shared), np.stack([want[0]] * 5))


def test_grouped_takes_any_sizes():
    sizes = [(3, 4, 20), (0, 4, 20), (7, 4, 0), (1, 9, 5), (3, 0, 2)]
    a = [values((m, k), seed=i) for i, (m, n, k) in enumerate(sizes)]
    b = [values((k, n), seed=9 + i) for i, (m, n, k) in enumerate(sizes)]
    for got, x, y in zip(isogemm.gemm_grouped(a, b, alpha=3.0), a, b, strict=True):
        assert_same(got, product(x, y, alpha=3.0))
    assert isogemm.gemm_grouped([], []) == []


def test_an_item_may_update_its_own_c():
    a, b, c = values((4, 3, 8), seed=1), values((4, 8, 5), seed=2), values((4, 3, 5), seed=3)
    want = np.stack([product(x, y, c=z, beta=1.0) for x, y, z in zip(a, b, c, strict=True)])
    buffer = c.copy()
    views = list(buffer)
    isogemm.gemm_batched(list(a), list(b), views, beta=1.0, out=views)
    assert_same(buffer, want)


def test_empty_sums_are_the_epilogue_of_plus_zero():
    a, b, c, bias = np.ones((2, 0), F32), np.ones((0, 3), F32), values((2, 3), seed=1), values((3,), seed=2)
    assert_same(isogemm.matmul(a, b), np.zeros((2, 3), F32))
    assert_same(
        isogemm.gemm(a, b, c, alpha=-1.0, beta=2.0, bias=bias), product(a, b, c=c, alpha=-1.0, beta=2.0, bias=bias)
    )
    assert_same(isogemm.matmul(np.ones((4, 2, 0), F32), np.ones((4, 0, 3), F32)), np.zeros((4, 2, 3), F32))
    assert_same(
        isogemm.linear(np.ones((4, 2, 0), F32), np.ones((3, 0), F32), bias), np.broadcast_to(bias, (4, 2, 3)).copy()
    )


def test_broadcasting_copies_nothing(monkeypatch):
    """What reaches the backend lies in the caller's memory, whatever was broadcast."""
    host = open_device(HOST)

    seen = []
    for name in ("gemm", "gemm_batched", "gemm_stack"):
        monkeypatch.setattr(host, name, lambda a, b, out, *_, **__: seen.append((a, b)))
    monkeypatch.setattr(host, "gemm_items", lambda items, *_, **__: seen.extend((a, b) for a, b, _, _ in items))
    a, b = values((6, 1, 3, 8), seed=1), values((4, 8, 5), seed=2)
    isogemm.matmul(a, b)
    isogemm.matmul(a, b[0])
    isogemm.matmul(a[::-1, 0, ::2], b[:1, ::-1])
    isogemm.linear(a, b[0].T)
    isogemm.gemm_strided_batched(np.broadcast_to(a[0, 0], (4, 3, 8)), b)
    assert len(seen) >= 5
    assert all(np.shares_memory(x, a) and np.shares_memory(y, b) for x, y in seen)


def test_shared_weights_become_one_wide_product(monkeypatch):
    host = open_device(HOST)

    rows = []
    monkeypatch.setattr(host, "gemm", lambda a, b, out, *_, **__: rows.append(a.shape[0]))
    isogemm.matmul(values((6, 5, 8)), values((8, 3)))
    isogemm.linear(values((2, 3, 1, 8)), values((3, 8)))
    assert rows == [30, 6]


def test_what_was_checked_has_a_type():
    from isogemm.problem.settings import Settings, check_product

    a, b = values((5, 7)), values((3, 7)).T
    assert check_product(a, b, None, None, None, Settings.checked(isogemm.Contract(), alpha=2.0)) == np.float32


@pytest.mark.parametrize("name", ["audit", "blas", "contract", "forms", "lab"])
def test_subpackages_are_there_after_a_plain_import(name):
    code = f"import isogemm; assert {name!r} in dir(isogemm); assert isogemm.{name}.__name__ == 'isogemm.{name}'"
    python("-c", code)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'gemmm'"):
        isogemm.gemmm  # noqa: B018


@pytest.mark.parametrize(("op", "nearest"), [(True, "'T'"), (False, "'N'"), ("n ", "'N'"), (np.ones(2), "'N'")])
def test_an_operation_that_is_no_letter_is_told_the_one_that_was_meant(op, nearest):
    x = np.ones((3, 3), np.float32)
    with pytest.raises(isogemm.errors.OptionError, match=rf"trans_b.*nearest legal choice: {nearest}$"):
        isogemm.gemm(x, x, trans_b=op)


def test_lanes_have_no_total_to_go_on_from():
    with pytest.raises(ContractError, match="accumulate"):
        isogemm.gemm(values((4, 8)), values((8, 4)), np.ones((4, 4), F32), accumulate=True, contract="fma/lanes32")


def test_an_alpha_of_minus_zero_keeps_its_sign():
    got = isogemm.gemm(np.abs(values((4, 8))), np.abs(values((8, 4))), alpha=-0.0)
    assert (got == 0).all()
    assert np.signbit(got).all()

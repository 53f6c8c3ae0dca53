"""Column-major calls on flat buffers against the definition, with canaries between and around the columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, DTYPES, F16, F32, assert_same, laid, layouts, poisoned, product, values

import isogemm
from isogemm import blas
from isogemm.errors import AliasError, DTypeError, LayoutError, OptionError, ShapeError

CANARY = np.float32(4096.0)  # exact in every dtype


def column_major(x: np.ndarray, ld: int, offset: int) -> np.ndarray:
    """A flat buffer with `x` [rows, columns] at `offset`, NaN everywhere else."""
    rows, columns = x.shape
    flat = poisoned((offset + ld * columns + 5,), x.dtype)
    for j in range(columns):
        flat[offset + j * ld : offset + j * ld + rows] = x[:, j]
    return flat


def read(flat: np.ndarray, rows: int, columns: int, ld: int, offset: int) -> np.ndarray:
    out = np.empty((rows, columns), flat.dtype)
    for j in range(columns):
        out[:, j] = flat[offset + j * ld : offset + j * ld + rows]
    return out


sizes = st.integers(0, 7)


@settings(max_examples=80)
@given(
    m=sizes,
    n=sizes,
    k=sizes,
    ta=st.sampled_from("NTCnt"),
    tb=st.sampled_from("NTCnt"),
    pads=st.tuples(*[st.integers(0, 3)] * 6),
    scalars=st.tuples(st.sampled_from([1.0, -0.5]), st.sampled_from([0.0, 1.0, 0.25])),
    dtype=st.sampled_from(DTYPES),
)
def test_gemm(m, n, k, ta, tb, pads, scalars, dtype):
    alpha, beta = scalars
    a, b, c = values((m, k), dtype, seed=1), values((k, n), dtype, seed=2), values((m, n), dtype, seed=3)
    stored_a, stored_b = (a if ta in "Nn" else a.T), (b if tb in "Nn" else b.T)
    lda, ldb, ldc = (max(1, x.shape[0]) + p for x, p in zip((stored_a, stored_b, c), pads, strict=False))
    flat_a, flat_b = column_major(stored_a, lda, pads[3]), column_major(stored_b, ldb, pads[4])
    start = np.full_like(c, np.nan) if beta == 0 else c
    flat_c = column_major(start, ldc, pads[5])
    inside = ~np.isnan(column_major(np.ones_like(c), ldc, pads[5]))
    flat_c[~inside] = CANARY
    got = blas.gemm(
        *(ta, tb, m, n, k, alpha, flat_a, lda, flat_b, ldb, beta, flat_c, ldc),
        offset_a=pads[3],
        offset_b=pads[4],
        offset_c=pads[5],
    )
    assert got is flat_c
    assert_same(read(flat_c, m, n, ldc, pads[5]), product(a, b, c=c, alpha=alpha, beta=beta))
    assert (flat_c[~inside] == flat_c.dtype.type(CANARY)).all()


def test_row_major_is_the_swapped_call():
    a, b = values((3, 8), seed=1), values((8, 5), seed=2)
    c = poisoned((3, 5))
    blas.gemm("N", "N", 5, 3, 8, 1.0, b.reshape(-1), 5, a.reshape(-1), 8, 0.0, c.reshape(-1), 5)
    assert_same(c, product(a, b))


@pytest.mark.parametrize("ops", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("stride_b", [0, 24])
def test_strided_batched(ops, stride_b):
    a, b = values((4, 3, 8), seed=1), values((4 if stride_b else 1, 8, 3), seed=2)
    fa, fb = ((x if op == "T" else x.swapaxes(1, 2)).reshape(-1) for x, op in zip((a, b), ops, strict=True))
    lda, ldb = (3, 8)[ops[0] == "T"], (8, 3)[ops[1] == "T"]
    c = np.full(4 * 15 + 4, CANARY)
    blas.gemm_strided_batched(*ops, 3, 3, 8, 1.0, fa, lda, fb, ldb, 0.0, c, 4, 24, stride_b, 15, 4, offset_c=2)
    written = np.zeros(c.size, bool)
    for i in range(4):
        assert_same(read(c, 3, 3, 4, 2 + 15 * i), product(a[i], b[i if stride_b else 0]))
        for j in range(3):
            written[2 + 15 * i + 4 * j : 2 + 15 * i + 4 * j + 3] = True
    assert (c[~written] == CANARY).all()


def test_strides_may_interleave_and_run_backwards():
    a, b = values((2, 2, 3), seed=1), values((2, 3, 4), seed=2)
    c = np.full(16, np.nan, F32)  # two items whose columns alternate: ldc = 4, stride 2
    flat_a, flat_b = a.swapaxes(1, 2).reshape(-1), b.swapaxes(1, 2).reshape(-1)
    blas.gemm_strided_batched("N", "N", 2, 4, 3, 1.0, flat_a, 2, flat_b, 3, 0.0, c, 4, 6, 12, 2, 2)
    for i in range(2):
        assert_same(read(c, 2, 4, 4, 2 * i), product(a[i], b[i]))
    blas.gemm_strided_batched("N", "N", 2, 4, 3, 1.0, flat_a, 2, flat_b, 3, 0.0, c, 4, -6, 12, 2, 2, offset_a=6)
    for i in range(2):
        assert_same(read(c, 2, 4, 4, 2 * i), product(a[1 - i], b[i]))


@pytest.mark.parametrize("transb", ["N", "T"])
def test_a_leading_dimension_of_one_column_says_nothing(transb):
    """Nor a stride of one item: both may be more than a stride of an array can be."""
    far, a, b = 2**61, values((5, 1), seed=1), values((1, 1), seed=2)
    want, c = product(a, b).reshape(-1), poisoned((5,))
    blas.gemm("N", transb, 5, 1, 1, 1.0, a.reshape(-1), far, b.reshape(-1), far, 0.0, c, far)
    assert_same(c, want)
    c = poisoned((5,))
    blas.gemm_strided_batched(
        "N", transb, 5, 1, 1, 1.0, a.reshape(-1), far, b.reshape(-1), far, 0.0, c, far, far, -far, far, 1
    )
    assert_same(c, want)


def test_pointer_arrays():
    a, b = values((3, 2, 5), seed=1), values((5, 4), seed=2)
    flat_a, flat_b, c = a.swapaxes(1, 2).reshape(-1), b.T.reshape(-1).copy(), values((40,), seed=3)
    before = c.copy()
    where = [30, 0, 11]
    blas.gemm_batched("N", "N", 2, 4, 5, 2.0, flat_a, 2, flat_b, 5, 1.0, c, 2, [0, 10, 20], [0, 0, 0], where)
    touched = np.zeros(40, bool)
    for i, offset in enumerate(where):
        old = read(before, 2, 4, 2, offset)
        assert_same(read(c, 2, 4, 2, offset), product(a[i], b, c=old, alpha=2.0, beta=1.0))
        touched[offset : offset + 8] = True
    assert_same(c[~touched], before[~touched])


def test_one_buffer_may_hold_all_three():
    a, b = values((2, 3), seed=1), values((3, 4), seed=2)
    buffer = np.concatenate([a.T.reshape(-1), b.T.reshape(-1), np.full(8, np.nan, F32)])
    blas.gemm("N", "N", 2, 4, 3, 1.0, buffer, 2, buffer, 3, 0.0, buffer, 2, offset_b=6, offset_c=18)
    assert_same(read(buffer, 2, 4, 2, 18), product(a, b))


def test_c_decides_the_output_dtype_and_the_contract_is_free():
    a, b = values((4, 32), BF16, seed=1), values((32, 3), BF16, seed=2)
    c = poisoned((12,))
    contract = "tensor_core:sm90/chain"
    blas.gemm("T", "N", 4, 3, 32, 1.0, a.reshape(-1), 32, b.T.reshape(-1), 32, 0.0, c, 4, contract=contract)
    assert_same(read(c, 4, 3, 4, 0), product(a, b, contract, out_dtype=F32))


def test_torch_buffers():
    torch = pytest.importorskip("torch")
    c = torch.full((12,), float("nan"))
    assert blas.gemm("N", "N", 3, 4, 2, 1.0, torch.ones(6), 3, torch.ones(8), 2, 0.0, c, 3) is c
    assert (c == 2).all()


@settings(max_examples=80)
@given(
    m=st.integers(0, 5),
    n=st.integers(0, 5),
    k=st.integers(0, 5),
    batch=st.sampled_from([((), ()), ((3,), (3,)), ((3,), ()), ((2, 3), (2, 3)), ((2, 1), (3,)), ((), (2, 3))]),
    layout=st.tuples(layouts, layouts, st.sampled_from([None, "c", "f", "padded", "stepped", "reversed"])),
    dtype=st.sampled_from(DTYPES),
)
def test_a_described_call_has_the_bits_of_matmul(m, n, k, batch, layout, dtype):
    a, b = (
        laid(values((*batch[0], m, k), dtype, seed=1), layout[0]),
        laid(values((*batch[1], k, n), dtype, seed=2), layout[1]),
    )
    want = isogemm.matmul(a, b)
    out = None if layout[2] is None else laid(poisoned(want.shape, dtype), layout[2])
    call = blas.describe(a, b, out)
    got = call.run()
    assert out is None or got is out
    assert_same(got, want)
    assert ("no copies" in str(call)) == (not call.copies)


def test_describe_writes_both_calls():
    x, w = np.ones((5, 7), F32), np.ones((3, 7), F32)
    call = blas.describe(x, w.T)
    assert str(call).splitlines() == [
        "column-major  gemm('T', 'N', 3, 5, 7, 1.0, b, 7, a, 7, 0.0, out, 3)",
        "row-major     gemm('N', 'T', 5, 3, 7, 1.0, a, 7, b, 7, 0.0, out, 3)",
        "the same call: operands swapped, m and n swapped",
        "no copies",
    ]
    assert (call.routine, call.m, call.n, call.k, call.first.name, call.first.trans) == ("gemm", 3, 5, 7, "b", "T")
    big = np.ones((9, 20), F32)
    call = blas.describe(big[2:5, 3:10], w.T, np.empty((3, 3), F32, order="F"))
    assert not call.swapped
    assert (call.first.ld, call.first.start, call.out.ld) == (20, 43, 3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: x[::2, ::2], "neither stride"),
        (lambda x: x[::-1], "negative"),
        (lambda x: np.broadcast_to(x[:1], x.shape), "stride 0 of axis 0 repeats"),
        (lambda x: np.broadcast_to(x[:, :1], x.shape), "stride 0 of axis 1 repeats"),
        (lambda x: np.broadcast_to(x[:1, :1], (1, 8)), "stride 0 of axis 1 repeats"),
        (lambda x: np.lib.stride_tricks.sliding_window_view(x.reshape(-1), 8), "overlap"),
    ],
)
def test_describe_says_why_a_copy_is_needed(make, reason):
    a = make(values((8, 8)))
    call = blas.describe(a, np.ones((a.shape[1], 3), F32))
    assert len(call.copies) == 1
    assert call.copies[0].startswith("a: ")
    assert reason in call.copies[0]


def test_describe_batches():
    a, b = np.ones((4, 5, 7), F32), np.ones((7, 3), F32)
    call = blas.describe(a, b)
    assert (call.routine, call.batch_count) == ("gemm_strided_batched", 4)
    assert (call.first.stride, call.second.stride, call.out.stride) == (0, 35, 15)
    call = blas.describe(np.ones((4, 2, 5, 7), F32), np.ones((2, 7, 3), F32))
    assert (call.routine, call.first.offsets[:3], call.copies) == ("gemm_batched", (0, 21, 0), ())


def test_what_cannot_be_written_is_named_as_the_call_has_it():
    a, b, c = np.ones(6, F32), np.ones(8, F32), np.ones(12, F32)
    shape, read_only = ("N", "N", 3, 4, 2, 1.0), np.broadcast_to(c, c.shape)
    strided, pointers = (0, 0, 12, 1), ([0], [0], [0])
    for call, rest in ((blas.gemm, ()), (blas.gemm_strided_batched, strided), (blas.gemm_batched, pointers)):
        with pytest.raises(LayoutError, match=r"^C: .*nearest legal choice: a writable array$"):
            call(*shape, a, 3, b, 2, 0.0, read_only, 3, *rest)
        with pytest.raises(AliasError, match=r"^C and A: "):
            call(*shape, c, 3, b, 2, 0.0, c, 3, *rest)
        with pytest.raises(AliasError, match=r"^C and B: "):
            call(*shape, a, 3, c, 2, 0.0, c, 3, *rest)
    two = np.ones(30, F32)
    with pytest.raises(AliasError, match=r"^C\[0\] and C\[1\]: "):
        blas.gemm_batched(*shape, a, 3, b, 2, 0.0, two, 3, [0, 0], [0, 0], [0, 6])
    with pytest.raises(AliasError, match=r"^C\[0\] and A\[1\]: "):
        blas.gemm_batched(*shape, two, 3, b, 2, 0.0, two, 3, [24, 0], [0, 0], [0, 12])


def test_sizes_beyond_63_bits_are_refused():
    flat = np.zeros(16, np.float32)
    for count in (2**62, 2**63, 2**70):
        with pytest.raises(ShapeError, match=r"shape of A: limit: matrices whose elements 63 bits can count"):
            blas.gemm_strided_batched("N", "N", 2, 2, 2, 1.0, flat, 2, flat, 2, 0.0, flat, 2, 0, 0, 4, count)


def test_describe_refuses_an_out_that_matmul_refuses():
    a, b = values((4, 6), seed=1), values((6, 6), seed=2)
    square, read_only = values((6, 12), seed=3)[:, ::2], np.zeros((4, 12), F32)[:, ::2]
    read_only.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(20, F32), (4, 6), (4, 4))
    for x, out, error in (
        (square, square, AliasError),
        (a, overlapping, AliasError),
        (a, read_only, LayoutError),
        (a, np.zeros((4, 6), F16), DTypeError),
        (a, np.zeros((4, 12), F16)[:, ::2], DTypeError),
    ):
        before = out.copy()
        for call in (lambda x, out: isogemm.matmul(x, b, out=out), lambda x, out: blas.describe(x, b, out)):
            with pytest.raises(error):
                call(x, out)
        np.testing.assert_array_equal(out, before)


def test_a_described_call_takes_the_element_types_of_matmul():
    a, b = values((4, 6), F16, seed=1), values((6, 5), seed=2)
    for x, y in ((a, b), (b.T, a.T)):
        for out in (None, poisoned((x.shape[0], 2 * y.shape[1]))[:, ::2]):
            got = blas.describe(x, y, out).run()
            assert_same(np.ascontiguousarray(got), isogemm.matmul(x, y))
    with pytest.raises(DTypeError, match="float16 and bfloat16"):
        blas.describe(a, b.astype(BF16))


def written_by(c):
    """Every call that writes four by four products into a flat tensor."""
    torch = pytest.importorskip("torch")
    a, b = torch.randn(16), torch.randn(16)
    call = ("N", "N", 4, 4, 4, 1.0, a, 4, b, 4, 0.0, c, 4)
    square, spread = (4, 4), torch.as_strided(c, (2, 4), (8, 2))
    return (
        lambda: blas.gemm(*call),
        lambda: blas.gemm_strided_batched(*call, 16, 16, 16, 1),
        lambda: blas.gemm_batched(*call, [0], [0], [0]),
        lambda: blas.describe(a.view(square), b.view(square), c.view(square)).run(),
        lambda: blas.describe(a.view(square)[:2], b.view(square), spread).run(),
    )


@pytest.mark.parametrize("i", range(5))
def test_autograd_sees_what_a_call_writes_into_a_tensor(i):
    torch = pytest.importorskip("torch")
    weights, c = torch.randn(16, requires_grad=True), torch.ones(16)
    loss, before = (weights * c).sum(), c._version
    written_by(c)[i]()
    assert c._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        written_by(torch.ones(16))[i]()


def test_a_size_without_a_value_is_refused():
    torch = pytest.importorskip("torch")
    flat, c = np.ones(16, F32), np.zeros(16, F32)
    for m in (torch.tensor(4, device="meta"), torch.tensor([4, 4]), np.True_, 4.0, "4"):
        with pytest.raises(OptionError, match=r"^m: limit: a whole number; got: "):
            blas.gemm("N", "N", m, 4, 4, 1.0, flat, 4, flat, 4, 0.0, c, 4)


@pytest.mark.parametrize("offset", [0, 3, -1])
def test_no_items_need_no_memory(offset):
    none = np.empty(0, F32)
    call = ("N", "T", 4, 3, 2, 1.0, none, 4, none, 3, 0.5, none, 4)
    for strides in ((8, 6, 12), (0, 0, 0), (-8, -6, -12)):
        got = blas.gemm_strided_batched(*call, *strides, 0, offset_a=offset, offset_b=offset, offset_c=offset)
        assert got is none
    assert blas.gemm_batched(*call, [], [], []) is none
    with pytest.raises(LayoutError, match=r"elements of A: limit: none: its buffer is empty; .* in a buffer of 8\n"):
        blas.gemm_strided_batched(*call, 8, 6, 12, 1)

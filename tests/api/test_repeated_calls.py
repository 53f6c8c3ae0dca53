"""A call like one before is a look-up that stands for all checks: it takes no other operands, and has the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from tests.products import BF16, DTYPES, F32, assert_same, laid, poisoned, product, values

import isogemm
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.gemm import execute


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_like_one_before_sees_its_own_operands(packed):
    """The look-up that stands for all checks takes neither other types nor other values."""
    ready = isogemm.pack if packed else (lambda w: w)
    for seed in (1, 2):
        x, w = values((3, 21), seed=seed), values((19, 21), seed=seed + 5)
        assert_same(isogemm.linear(x, ready(w)), product(x, w.T))
    assert execute.again(execute.LINEAR, x, ready(w)) is not None
    bias = values((19,))
    assert_same(isogemm.linear(x, ready(w), bias), product(x, w.T, bias=bias))
    assert_same(isogemm.linear(laid(x, "padded"), ready(w)), product(x, w.T))
    for other in (x.view(np.int32), x.view(">f4")):
        assert execute.again(execute.LINEAR, other, ready(w)) is None
    room = np.zeros(x.nbytes + 4, np.uint8)
    crooked = room[1 : 1 + x.nbytes].view(F32).reshape(x.shape)
    crooked[...] = x
    assert execute.again(execute.LINEAR, crooked, ready(w)) is None
    if not packed:
        with pytest.raises(isogemm.errors.DTypeError):
            isogemm.linear(x.view(np.int32), w)


@pytest.mark.parametrize("packed", [False, True])
def test_calls_of_equal_sizes_are_told_apart(packed):
    """One look-up goes by sizes: extents, strides and axes are compared behind it."""
    ready = isogemm.pack if packed else (lambda w: w)
    shapes = [((6, 20), (40, 20)), ((12, 10), (80, 10)), ((3, 40), (20, 40)), ((2, 3, 20), (40, 20))]
    calls = [(values(x, seed=1), values(w, seed=2)) for x, w in shapes]
    calls.append((laid(calls[0][0], "stepped"), calls[0][1]))
    calls.append((calls[0][0], laid(calls[0][1], "padded")))
    x, w = values((6, 40), seed=3), values((40, 40), seed=4)  # of equal strides
    calls += [(x[:, :20], w[:, :20]), (x[:3], w[:20])]
    kept = [(x, w, ready(w), product(x.reshape(-1, x.shape[-1]), w.T).reshape(*x.shape[:-1], len(w))) for x, w in calls]
    for _ in range(3):
        for x, _w, w, want in kept:
            assert_same(isogemm.linear(x, w), want)
    assert all(execute.again(execute.LINEAR, x, w) is not None for x, _w, w, _want in kept if x.ndim == 2)
    for x, w in ((kept[0][0], kept[2][2]), (kept[1][0], kept[0][2])):  # sizes that some call had, no product
        assert execute.again(execute.LINEAR, x, w) is None


@pytest.mark.parametrize("linear", [False, True])
def test_an_output_is_looked_at_in_calls_like_one_before_too(linear):
    """Of other strides, read-only, and in the memory of an operand: as the first call has it, so every other."""
    call, form = (isogemm.linear, execute.LINEAR_INTO) if linear else (isogemm.matmul, execute.INTO)
    a, b, room = values((6, 20), seed=1), values((20, 20), seed=2), poisoned((40, 20))
    want = product(a, b.T if linear else b)
    for _ in range(2):
        assert_same(call(a, b), want)
        assert_same(call(a, b, out=poisoned((6, 20))), want)
        assert_same(call(a, b.T, out=poisoned((6, 20))), product(a, b if linear else b.T))
    outs = [room[:6], room[::2][:6], poisoned((20, 6)).T, poisoned((6, 40))[:, ::2]]
    assert [execute.again(form, a, b, out) is out for out in outs] == [True, False, False, False]
    for out in outs:
        assert call(a, b, out=out) is out
        assert_same(out, want)
    fixed = poisoned((6, 20))
    fixed.flags.writeable = False
    with pytest.raises(isogemm.errors.LayoutError):
        call(a, b, out=fixed)
    assert np.isnan(fixed).all()
    held = np.concatenate([a, b, a])
    for x, w, out in ((held[:6], b, held[5:11]), (held[:6], b, held[:6]), (a, held[6:26], held[25:31]), (a, b, b[14:])):
        before = held.copy(), b.copy()
        assert execute.again(form, x, w, out) is None
        with pytest.raises(isogemm.errors.AliasError):
            call(x, w, out=out)
        assert_same(held, before[0])
        assert_same(b, before[1])
    assert execute.again(form, held[:6], b, held[6:12]) is not None
    assert_same(held[6:12], want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 5)])
def test_rows_of_any_axes_are_those_of_a_matrix(lead, dtype):
    x, w, bias = values((*lead, 20), dtype, seed=1), values((24, 20), dtype, seed=2), values((24,), seed=3)
    want = product(x.reshape(-1, 20), w.T).reshape(*lead, 24)
    added = product(x.reshape(-1, 20), w.T, bias=bias).reshape(*lead, 24)
    for held in (x, values((2, *lead, 20), dtype, seed=1)[0], np.stack([x, x], -1)[..., 0]):
        held[...] = x
        for _ in range(2):
            assert_same(isogemm.linear(held, w), want)
            assert_same(isogemm.linear(held, isogemm.pack(w)), want)
            assert_same(isogemm.linear(held, w, bias), added)
            assert_same(isogemm.matmul(held, w.T), want)
    for call in (
        lambda: isogemm.linear(x[..., :19], w),
        lambda: isogemm.matmul(np.ascontiguousarray(x[..., :19]), w.T),
    ):
        with pytest.raises(isogemm.errors.ShapeError, match=r"columns of|inner dimensions"):
            call()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("m", [1, 3, 40])
def test_a_bias_is_looked_at_in_calls_like_one_before_too(packed, into, m):
    """Another one, of other strides, another type or length, in the result's memory, and none."""
    x, w, b = values((m, 20), seed=1), values((24, 20), seed=2), values((48,), seed=3)
    ready, form = isogemm.pack(w) if packed else w, execute.LINEAR_INTO if into else execute.LINEAR

    def given():
        return poisoned((m, 24)) if into else None

    for bias in (b[:24], b[24:], b[::2], b[::-1][:24], b[:24].astype(BF16), None, b[:24]):
        for _ in range(2):
            assert_same(isogemm.linear(x, ready, bias, out=given()), product(x, w.T, bias=bias))
    taken = (b[24:], b[::2], b[:23], b[:24].reshape(1, 24), b[:24].astype(np.float64))
    found = [execute.again(form, x, ready, given(), bias) is not None for bias in taken]
    assert found == [True, False, False, False, False]
    for wrong in (b[:23], b[:24].reshape(1, 24)):
        with pytest.raises(isogemm.errors.ShapeError):
            isogemm.linear(x, ready, wrong, out=given())
    if into:
        room = poisoned((m * 24 + 12,))
        out, shared = room[: m * 24].reshape(m, 24), room[-24:]
        assert execute.again(form, x, ready, out, shared) is None
        with pytest.raises(isogemm.errors.AliasError):
            isogemm.linear(x, ready, shared, out=out)
        assert np.isnan(room).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_that_the_last_call_had_too_change_no_bit(rows, packed):
    """They are not asked for ahead of time: a call with the same weights or others is as the first one."""
    ready = isogemm.pack if packed else (lambda w: w)
    x, weights = values((rows, 45), seed=1), [values((275, 45), seed=seed) for seed in (2, 3)]
    kept = [ready(w) for w in weights]
    for i in (0, 0, 0, 1, 1, 0, 1):
        assert_same(isogemm.linear(x, kept[i]), product(x, weights[i].T))
    weights[1][...] = values((275, 45), seed=4)
    if not packed:
        assert_same(isogemm.linear(x, kept[1]), product(x, weights[1].T))


def test_packed_and_plain_weights_of_one_shape_are_calls_of_two_kinds():
    """With as many columns as a panel has, both are matrices of the same shape and strides."""
    k = target().nr
    x, w = values((2, k), seed=1), values((3 * k, k), seed=2)
    packed = isogemm.pack(w)
    assert packed.lines.strides == w.strides
    for _ in range(2):
        others = values((4, k // 2), seed=3), values((6 * k, k // 2), seed=4)  # of the same sizes: looked up before w
        assert_same(isogemm.linear(*others), product(others[0], others[1].T))
        assert_same(isogemm.linear(x, packed), product(x, w.T))
        assert_same(isogemm.linear(x, w), product(x, w.T))


def items(a, b):
    """The product of each item, by itself."""
    return np.stack([product(x, y) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("threads", [1, 2])
def test_stacks_of_equal_sizes_are_told_apart(threads):
    """Extents, strides and axes of stacks are compared behind the look-up by sizes, as those of matrices are."""
    isogemm.set_num_threads(threads)
    a, b = values((12, 10, 20), seed=1), values((12, 20, 40), seed=2)
    calls = [
        (a, b),
        (a.reshape(6, 20, 20), b.reshape(6, 20, 80)),
        (a.reshape(12, 20, 10).swapaxes(1, 2), b),
        (a, b.reshape(12, 40, 20).swapaxes(1, 2)),
        (a[::-1], b[:, ::-1]),
        (np.broadcast_to(a[3], a.shape), b),
        (values((24, 10, 20), seed=3)[::2], b),
        (laid(a.reshape(120, 20), "padded").reshape(12, 10, 20), b),
    ]
    calls += [(values((40, 9, 7), seed=4), values((40, 7, 33), seed=5)), (a[:1], b[:1]), (a[:, :1], b[:, :, :1])]
    wants = [items(*call) for call in calls]
    flat = a.reshape(120, 20), values((20, 480), seed=6)  # a matrix of each size
    shared = np.broadcast_to(b[0], b.shape)
    for _ in range(3):
        for (x, y), want in zip(calls, wants, strict=True):
            assert_same(isogemm.matmul(x, y), want)
            assert_same(isogemm.gemm_strided_batched(x, y), want)
            assert_same(isogemm.matmul(x, y, out=poisoned(want.shape)), want)
        assert_same(isogemm.matmul(*flat), product(*flat))
        assert_same(isogemm.matmul(a, shared), items(a, shared))
        lead = (2, 3, 2)
        assert_same(isogemm.matmul(a.reshape(*lead, 10, 20), b.reshape(*lead, 20, 40)).reshape(12, 10, 40), wants[0])
    assert all((execute.again(execute.PRODUCT, x, y) is None) == (len(x) == 1) for x, y in calls)
    assert execute.again(execute.PRODUCT, a, b.reshape(24, 10, 40)) is None
    assert execute.again(execute.PRODUCT, a, shared) is None
    for _ in range(2):
        assert_same(isogemm.matmul(a[:, :, :0], b[:, :0]), np.zeros((12, 10, 40), F32))
        assert isogemm.matmul(a, b[:, :, :0]).shape == (12, 10, 0)
    for wrong in (b[:11], b[:, :19]):
        with pytest.raises(isogemm.errors.ShapeError):
            isogemm.matmul(a, wrong)
        with pytest.raises(isogemm.errors.ShapeError):
            isogemm.gemm_strided_batched(a, wrong)


def test_the_output_of_a_stack_is_looked_at_in_calls_like_one_before_too():
    a, b, room = values((5, 6, 20), seed=1), values((5, 20, 20), seed=2), poisoned((10, 6, 20))
    want = items(a, b)
    for _ in range(2):
        assert_same(isogemm.matmul(a, b, out=poisoned(want.shape)), want)
    outs = [room[:5], room[::2], poisoned((5, 20, 6)).swapaxes(1, 2)]
    assert [execute.again(execute.INTO, a, b, out) is out for out in outs] == [True, False, False]
    for out in outs:
        assert isogemm.matmul(a, b, out=out) is out
        assert_same(out, want)
    fixed = poisoned(want.shape)
    fixed.flags.writeable = False
    with pytest.raises(isogemm.errors.LayoutError):
        isogemm.matmul(a, b, out=fixed)
    held = np.concatenate([a, a, a])
    for x, out in ((held[:5], held[4:9]), (held[5:10], held[:10][1:6])):
        before = held.copy()
        assert execute.again(execute.INTO, x, b, out) is None
        with pytest.raises(isogemm.errors.AliasError):
            isogemm.matmul(x, b, out=out)
        assert_same(held, before)
    assert execute.again(execute.INTO, held[:5], b, held[5:10]) is not None
    assert_same(held[5:10], want)


def test_stacks_of_tensors_take_the_short_way_and_have_the_same_bits():
    torch = pytest.importorskip("torch")
    for dtype in DTYPES:
        a, b = values((7, 6, 20), dtype, seed=1), values((7, 20, 24), dtype, seed=2)
        x, y = (torch.from_numpy(z.view(np.int16) if z.dtype == BF16 else z) for z in (a, b))
        if dtype == BF16:
            x, y = x.view(torch.bfloat16), y.view(torch.bfloat16)
        want = items(a, b)
        for _ in range(3):
            for found in (isogemm.matmul(x, y), isogemm.gemm_strided_batched(x, y)):
                assert found.dtype is x.dtype
                assert_same(found.float().numpy(), want.astype(F32))
            turned = y.mT.contiguous().mT
            assert_same(isogemm.matmul(x, turned).float().numpy(), want.astype(F32))
            deep = isogemm.matmul(x[:6].reshape(2, 3, 6, 20), y[:6].reshape(2, 3, 20, 24))
            assert_same(deep.float().numpy().reshape(6, 6, 24), want[:6].astype(F32))
            none = isogemm.matmul(x[:6].reshape(2, 3, 6, 20), y[:6, :, :0].reshape(2, 3, 20, 0))
            assert none.shape == (2, 3, 6, 0)
            empty = isogemm.matmul(x[:6, :, :0].reshape(2, 3, 6, 0), y[:6, :0].reshape(2, 3, 0, 24))
            assert (empty.shape, empty.count_nonzero()) == ((2, 3, 6, 24), 0)
            wide = isogemm.matmul(x[:6].reshape(2, 3, 6, 20), y[:2].reshape(2, 1, 20, 24))  # broadcast
            assert_same(wide.float().numpy(), isogemm.matmul(a[:6].reshape(2, 3, 6, 20), b[:2, None]).astype(F32))

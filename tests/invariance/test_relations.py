"""The relations of batch invariance through the public calls: one row, its bits, whatever surrounds the call."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, DTYPES, F32, assert_same, laid, layouts, product, values

import isogemm

SWEEP = (
    *(1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129),
    *(255, 256, 257, 511, 512, 1000, 1024, 2048, 4096),
)
N, K = 160, 192  # a linear layer in small: heads and tails of no vector, several chunks of columns
BOTH = pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
WEIGHTS = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])


@cache
def rows(dtype: np.dtype[Any]) -> np.ndarray:
    return values((max(SWEEP), K), dtype, seed=1, special=True)


@cache
def weight(dtype: np.dtype[Any], packed: bool = False) -> Any:
    w = values((N, K), dtype, seed=2)
    return isogemm.pack(w) if packed else w


@cache
def whole(dtype: np.dtype[Any]) -> np.ndarray:
    """What every call has to give, by the executable definition."""
    return product(rows(dtype), weight(dtype).T)


@BOTH
@WEIGHTS
@pytest.mark.parametrize("m", SWEEP)
def test_population_and_padding(m: int, packed: bool, dtype: np.dtype[Any]) -> None:
    x, w = rows(dtype), weight(dtype, packed)
    got = isogemm.linear(x[:m], w)
    assert_same(got, whole(dtype)[:m])
    padded = np.zeros((m + 28, K), dtype)
    padded[:m] = x[:m]
    assert_same(isogemm.linear(padded, w)[:m], got)
    assert_same(isogemm.linear(x[:m], w), got)  # again
    for row in {0, m // 2, m - 1}:  # alone, and as a vector
        assert_same(isogemm.linear(x[row : row + 1], w), got[row : row + 1])
        assert_same(isogemm.linear(x[row], w), got[row])


def test_the_sweep_is_the_audit_s() -> None:
    from isogemm.audit.relations import FULL_SWEEP

    assert SWEEP == FULL_SWEEP
    assert len(SWEEP) == 29


@BOTH
@WEIGHTS
@pytest.mark.parametrize("m", [2, 4, 9, 16, 17, 33, 128, 200])
def test_position(m: int, packed: bool, dtype: np.dtype[Any]) -> None:
    x, w = rows(dtype)[:m], weight(dtype, packed)
    for shift in {1, m // 2, m - 1}:
        got = isogemm.linear(np.roll(x, shift, axis=0), w)
        assert_same(np.roll(got, -shift, axis=0), whole(dtype)[:m])


@BOTH
@WEIGHTS
@pytest.mark.parametrize("contents", [0.0, -0.0, 1e4, 1e-40, np.nan, np.inf])
@pytest.mark.parametrize("m", [2, 7, 16, 64, 200])
def test_neighbours(m: int, contents: float, packed: bool, dtype: np.dtype[Any]) -> None:
    x = rows(dtype)[:m].copy()
    kept = np.unique([0, m // 2, m - 1])[: m - 1]
    x[np.setdiff1d(np.arange(m), kept)] = contents
    assert_same(isogemm.linear(x, weight(dtype, packed))[kept], whole(dtype)[kept])


@BOTH
@WEIGHTS
@pytest.mark.parametrize("lengths", [(100, 156), (128, 128), (64,) * 4, (1,) * 24, (28, 1, 1, 1, 1), (193, 1, 16, 17)])
def test_schedule_of_a_prefill(lengths: tuple[int, ...], packed: bool, dtype: np.dtype[Any]) -> None:
    """256 rows as 100 + 156, in chunks, and token by token as decode has them."""
    x, w = rows(dtype), weight(dtype, packed)
    ends = np.cumsum(lengths)
    parts = [isogemm.linear(x[end - length : end], w) for end, length in zip(ends, lengths, strict=True)]
    assert_same(np.concatenate(parts), whole(dtype)[: ends[-1]])


@BOTH
@WEIGHTS
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_threads(count: int, packed: bool, dtype: np.dtype[Any]) -> None:
    isogemm.set_num_threads(count)
    for m in (1, 5, 64, 256):
        assert_same(isogemm.linear(rows(dtype)[:m], weight(dtype, packed)), whole(dtype)[:m])


@BOTH
@pytest.mark.parametrize("m", [1, 4, 17, 128])
def test_form(m: int, dtype: np.dtype[Any]) -> None:
    """One wide product against column blocks by every other form."""
    x, w, want = rows(dtype)[:m], weight(dtype), whole(dtype)[:m]
    for blocks in (2, 5):
        size = N // blocks
        each = [w[i * size : (i + 1) * size] for i in range(blocks)]
        stacked = w.reshape(blocks, size, K)
        shared = np.broadcast_to(x, (blocks, m, K))
        forms = {
            "loop": [isogemm.matmul(x, part.T) for part in each],
            "gemm": [isogemm.gemm(x, part, trans_b="T") for part in each],
            "batched": isogemm.gemm_batched([x] * blocks, each, trans_b="T"),
            "strided": isogemm.gemm_strided_batched(shared, stacked, trans_b="T"),
            "broadcast": isogemm.matmul(x, stacked.swapaxes(1, 2)),
            "grouped": isogemm.gemm_grouped([x[: m - i % 2] for i in range(blocks)], each, trans_b="T"),
            "transposed": [isogemm.matmul(part, x.T).T for part in each],
        }
        for name, parts in forms.items():
            for i, part in enumerate(parts):
                assert part.shape[0] in (m, m - i % 2), name
                assert_same(np.ascontiguousarray(part), want[: len(part), i * size : (i + 1) * size])


@BOTH
@pytest.mark.parametrize("m", [1, 5, 64])
@pytest.mark.parametrize("layout_w", ["c", "f", "padded", "stepped", "reversed"])
def test_layout(layout_w: str, m: int, dtype: np.dtype[Any]) -> None:
    w = laid(weight(dtype), layout_w)
    for layout_x in ("c", "f", "padded", "stepped", "reversed"):
        assert_same(isogemm.linear(laid(rows(dtype)[:m], layout_x), w), whole(dtype)[:m])
        assert_same(isogemm.linear(laid(rows(dtype)[:m], layout_x), isogemm.pack(w)), whole(dtype)[:m])


@settings(max_examples=120)
@given(st.data())
def test_a_row_alone_and_in_any_batch(data: st.DataObject) -> None:
    """Any shape, layout, dtype, thread count and contract: a row and column decide, and the definition says what."""
    m, n, k = (data.draw(st.integers(1, 90), name) for name in "mnk")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    contract = data.draw(st.sampled_from(["fma/chain", "fma/chain", "fma/leaf16", "fma/tree4"]), "contract")
    layout_x, layout_w = data.draw(layouts, "layout of x"), data.draw(layouts, "layout of w")
    seed = data.draw(st.integers(0, 99), "seed")
    x = laid(values((m, k), dtype, seed=seed, special=True), layout_x)
    w = laid(values((n, k), dtype, seed=seed + 1, special=True), layout_w)
    first, last = sorted(data.draw(st.tuples(st.integers(0, m - 1), st.integers(0, m - 1)), "rows"))
    left, right = sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), "columns"))
    isogemm.set_num_threads(data.draw(st.integers(1, 4), "threads"))
    together = isogemm.linear(x, w, contract=contract)
    part = isogemm.linear(x[first : last + 1], w[left : right + 1], contract=contract)
    packed = isogemm.linear(x[first : last + 1], isogemm.pack(w), contract=contract)
    assert_same(together, product(np.array(x), np.array(w).T, contract))
    assert_same(part, np.ascontiguousarray(together[first : last + 1, left : right + 1]))
    assert_same(packed, together[first : last + 1])


def test_the_relations_can_fail() -> None:
    """The same products with K walked backwards: the comparison is one of bits."""
    x, w = values((64, K), seed=3), weight(F32)
    turned = isogemm.linear(x[:, ::-1], w[:, ::-1])
    with pytest.raises(AssertionError, match="ULP"):
        assert_same(turned, isogemm.linear(x, w))

"""Products of int8 are exact, in every form, layout and length of K; what could leave int32 is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import isogemm
from isogemm.backends.cpu.gemm.exact import PIECE
from isogemm.contract import reference
from isogemm.contract.spec import LONGEST_EXACT
from isogemm.errors import ContractError, DTypeError, LimitError, OptionError, ShapeError

Array = NDArray[Any]
EXTENT, K = st.integers(0, 40), st.one_of(st.integers(0, 70), st.sampled_from([PIECE - 1, PIECE, PIECE + 1, 2500]))


def drawn(rng: np.random.Generator, *shape: int) -> Array:
    """int8 of both extremes and between, as a strided view."""
    wide = rng.integers(-128, 128, (*shape[:-1], 2 * shape[-1] + 1), dtype=np.int8)
    wide[rng.random(wide.shape) < 0.3] = -128
    return wide[..., 1::2]


def exact(a: Array, b: Array) -> Array:
    return a.astype(np.int64) @ b.astype(np.int64)


def same(got: Any, want: Array) -> bool:
    got = np.asarray(got)
    return got.dtype == np.int32 and bool((got == want).all()) and got.shape == want.shape


@settings(max_examples=15)
@given(m=EXTENT, n=EXTENT, k=K, trans=st.sampled_from(["NN", "NT", "TN", "TT", "CN"]), seed=st.integers(0, 99))
def test_every_form_and_transposition_is_exact(m: int, n: int, k: int, trans: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stored_a = drawn(rng, 2, *((m, k) if trans[0] == "N" else (k, m)))
    stored_b = drawn(rng, 2, *((k, n) if trans[1] == "N" else (n, k)))
    a = stored_a if trans[0] == "N" else stored_a.swapaxes(1, 2)
    b = stored_b if trans[1] == "N" else stored_b.swapaxes(1, 2)
    want, ops = exact(a, b), {"trans_a": trans[0], "trans_b": trans[1]}
    assert same(isogemm.matmul(a, b), want)
    assert same(isogemm.linear(a, b[0].T), exact(a, b[0]))
    assert same(isogemm.gemm_strided_batched(stored_a, stored_b, **ops), want)
    out = np.full((m, n), 7, np.int32)
    assert isogemm.gemm(stored_a[1], stored_b[1], out=out, **ops) is out
    assert same(out, want[1])
    for form in (isogemm.gemm_batched, isogemm.gemm_grouped):
        assert all(map(same, form(list(stored_a), list(stored_b), **ops), want))


@settings(max_examples=15)
@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 40), pad=st.integers(0, 3), seed=st.integers(0, 99))
def test_the_blas_view_and_what_describe_runs_are_exact(m: int, n: int, k: int, pad: int, seed: int) -> None:
    from isogemm import blas

    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-128, 128, (columns, rows + pad), dtype=np.int8) for rows, columns in ((m, k), (k, n)))
    c = np.full((n, m + pad), 5, np.int32)
    blas.gemm("N", "N", m, n, k, 1.0, a.reshape(-1), m + pad, b.reshape(-1), k + pad, 0.0, c.reshape(-1), m + pad)
    want = exact(a[:, :m].T, b[:, :k].T)
    assert np.array_equal(c[:, :m].T, want)
    assert (c[:, m:] == 5).all()
    assert same(blas.describe(a[:, :m].T, b[:, :k].T).run(), want)


def test_the_longest_k_holds_its_extremes() -> None:
    a = np.full((1, LONGEST_EXACT), -128, np.int8)
    assert int(isogemm.matmul(a, a.T)[0, 0]) == LONGEST_EXACT * 2**14 < 2**31
    longer = np.zeros((1, LONGEST_EXACT + 1), np.int8)
    for call in (
        lambda: isogemm.matmul(longer, longer.T),
        lambda: isogemm.linear(longer, longer),
        lambda: isogemm.gemm_grouped([a, longer], [a.T, longer.T]),
        lambda: reference.evaluate(longer, longer.T, "exact/chain"),
    ):
        with pytest.raises(LimitError, match="131071"):
            call()


@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 300), (5, 70, PIECE + 1), (70, 3, 2500), (200, 90, 2049), (3, 4, 0)])
def test_a_plan_says_how_it_is_computed_and_replays(m: int, n: int, k: int, trans: str) -> None:
    rng = np.random.default_rng(m)
    a, b = (drawn(rng, *shape[:: 1 if op == "N" else -1]) for shape, op in zip(((m, k), (k, n)), trans, strict=True))
    a, b = (x if op == "N" else x.T for x, op in zip((a, b), trans, strict=True))
    given: dict[str, Any] = {"dtype": "int8", "trans_a": trans[0], "trans_b": trans[1]}
    p = isogemm.plan(m, n, k, **given)
    assert str(p.contract) == "exact/chain"
    assert f"{-(-k // PIECE)} of at most {PIECE}" in str(p)
    assert p.bytes == m * k + n * k + 4 * m * n
    again = isogemm.Plan.from_json(p.to_json())
    assert again == p
    for threads in (1, 2):
        assert same(isogemm.plan(m, n, k, threads=threads, **given).run(a, b), exact(a, b))
    assert same(again.run(a, b), exact(a, b))


def test_a_replay_s_schedule_is_the_plan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from isogemm.backends.cpu.gemm import execute

    p, seen, task_for = isogemm.plan(5, 70, 2500, dtype="int8"), [], execute.task_for
    monkeypatch.setattr(execute, "task_for", lambda *given: seen.append(given[-1]) or task_for(*given))
    p.run(np.ones((5, 2500), np.int8), np.ones((70, 2500), np.int8).T)
    assert seen == [p.schedule] * 3


def test_a_plan_of_types_that_its_contract_has_not_is_damaged() -> None:
    whole, floats = isogemm.plan(3, 4, 5, dtype="int8").to_dict(), isogemm.plan(3, 4, 5).to_dict()
    wrong = ((whole, "dtype_a", "float32"), (whole, "out_dtype", "float32"), (floats, "dtype_b", "int8"))
    for data, name, value in wrong:
        with pytest.raises(OptionError, match=f"{name} of a plan"):
            isogemm.Plan.from_dict(data | {"numeric": data["numeric"] | {name: value}})
    with pytest.raises(DTypeError, match="replay"):
        isogemm.plan(3, 4, 5).run(np.ones((3, 5), np.int8), np.ones((5, 4), np.int8))


def test_torch_tensors_give_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    a, b = drawn(rng, 3, 5, 50), drawn(rng, 50, 4)
    ta, tb = (torch.from_numpy(np.ascontiguousarray(x)) for x in (a, b))
    for got in (isogemm.matmul(ta, tb), isogemm.linear(ta, tb.T.contiguous())):
        assert got.dtype is torch.int32
        assert same(got.numpy(), exact(a, b))
    out = torch.full((5, 4), 3, dtype=torch.int32)
    assert isogemm.gemm(ta[0], tb, out=out) is out
    assert same(out.numpy(), exact(a[0], b))


def test_the_reference_and_every_order_agree() -> None:
    rng = np.random.default_rng(2)
    a, b = drawn(rng, 6, 300), drawn(rng, 300, 7)
    for order in ("chain", "leaf128", "tree8", "lanes32"):
        contract = f"exact/{order}"
        assert same(isogemm.matmul(a, b, contract=contract), exact(a, b))
        assert same(reference.evaluate(a, b, contract), exact(a, b))
    with pytest.raises(ContractError):
        reference.evaluate(a, b, "exact/chain", c=np.zeros((6, 7), np.float32))


A8 = np.ones((2, 3), np.int8)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: isogemm.gemm(A8, A8.T, alpha=2.0), OptionError, "alpha=2.0"),
    (lambda: isogemm.gemm(A8, A8.T, np.ones((2, 2), np.int32), beta=1.0), OptionError, "beta=1.0"),
    (lambda: isogemm.gemm(A8, A8.T, bias=np.ones(2, np.float32)), OptionError, "none under exact"),
    (lambda: isogemm.linear(A8, A8, np.ones(2, np.float32)), OptionError, "none under exact"),
    (lambda: isogemm.matmul(A8, A8.T, out_dtype="float32"), DTypeError, "int32 under exact"),
    (lambda: isogemm.matmul(A8, A8.T, out=np.ones((2, 2), np.float32)), DTypeError, "int32"),
    (lambda: isogemm.matmul(A8, A8.T, contract="fma/chain"), DTypeError, "exact/chain"),
    (lambda: isogemm.matmul(A8, A8.T, mode="ieee"), DTypeError, "exact/chain"),
    (lambda: isogemm.matmul(A8, A8.T.astype(np.float32)), DTypeError, "float32 and|int8 and float32"),
    (lambda: isogemm.matmul(A8.astype(np.float32), A8.T.astype(np.float32), contract="exact"), DTypeError, "fma/chain"),
    (lambda: isogemm.matmul(A8.astype(np.int32), A8.T.astype(np.int32)), DTypeError, "int32"),
    (lambda: isogemm.matmul(A8.astype(np.int64), A8.T.astype(np.int64)), DTypeError, "or int8 where every .*CPU$"),
    (lambda: isogemm.linear(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones(2, int)), DTypeError,
     "choice: float32$"),
    (lambda: isogemm.matmul(A8, A8), ShapeError, "inner"),
    (lambda: isogemm.matmul(A8.astype(np.float32), A8.T.astype(np.float32), out_dtype="int32"), DTypeError, "float32"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_what_has_no_exact_meaning_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_a_piece_s_sum_is_exact_at_its_limit():
    a, b = np.full((1, 1025), -128, np.int8), np.full((1025, 1), -128, np.int8)
    a[0, -1] = b[-1, 0] = 1
    assert isogemm.matmul(a, b).tolist() == [[1024 * 2**14 + 1]]

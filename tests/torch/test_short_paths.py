"""Short paths for CPU tensors: a call that takes one has the bits of the long way, and its errors."""

from __future__ import annotations

import itertools

import pytest
from tests.torch.tensors import randn, same

import isogemm
from isogemm.api import products as api
from isogemm.api import short as tensors
from isogemm.errors import AliasError, ContractError, IsogemmError, LayoutError, ShapeError
from isogemm.operands.tensors import learn

torch = pytest.importorskip("torch")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONTRACTS = (None, "fma/chain", "fma/leaf32", "fma/tree4")


@pytest.fixture
def ways(monkeypatch):
    """Calls a public function both ways; says whether the short one was taken."""
    learn()  # as a first call does; tests that pretend to be elsewhere may have undone it

    def both(function, *operands, **options):
        taken = []
        real = tensors.call

        def watched(*arguments):
            found = real(*arguments)
            taken.append(found is not None)
            return found

        monkeypatch.setattr(tensors, "call", watched)
        short = function(*operands, **options)
        monkeypatch.setattr(tensors, "call", lambda *_: None)
        long = function(*operands, **options)
        monkeypatch.setattr(tensors, "call", real)
        return short, long, taken == [True]

    isogemm.matmul(torch.ones(1, 1), torch.ones(1, 1))  # from now on the short paths are asked
    assert api._TENSORS
    return both


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_products_have_the_bits_of_the_long_way(ways, dtype, contract):
    a, b, bias = randn(9, 300, dtype=dtype), randn(300, 20, dtype=dtype), randn(20, dtype=dtype)
    s, t = randn(3, 5, 300, dtype=dtype), randn(3, 300, 20, dtype=dtype)
    w, x = randn(20, 300, dtype=dtype), randn(2, 3, 300, dtype=dtype)
    calls = [
        (isogemm.matmul, a, b),
        (isogemm.matmul, a[::2], b[:, ::3]),
        (isogemm.matmul, w.T[:9], b[:20]),
        (isogemm.linear, a, w),
        (isogemm.linear, x, w, bias),
        (isogemm.linear, x, w, bias.float()),
        (isogemm.linear, x[0, 0], w, bias),
        (isogemm.gemm_strided_batched, s, t),
        (isogemm.gemm_strided_batched, s[:1].expand(3, 5, 300), t),
        (isogemm.gemm_strided_batched, s.transpose(1, 2)[:, :5, :], t[:, :5]),
    ]
    for call, *operands in calls:
        for out_dtype in (None, torch.float32):
            short, long, taken = ways(call, *operands, contract=contract, out_dtype=out_dtype)
            assert taken, (call.__name__, [o.shape for o in operands])
            assert same(short, long)
    for alpha, with_bias in itertools.product((1.0, 0.3), (None, bias)):
        short, long, taken = ways(isogemm.gemm, a, b, alpha=alpha, bias=with_bias, contract=contract)
        assert taken
        assert same(short, long)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS[:3])
def test_a_walk_goes_on_from_out(ways, dtype, contract):
    a, b, start = randn(9, 300, dtype=dtype), randn(300, 20, dtype=dtype), randn(9, 20)
    first, second = start.clone(), start.clone()
    outs = iter((first, second))
    short, long, taken = ways(lambda: isogemm.gemm(a, b, out=next(outs), accumulate=True, contract=contract))
    assert taken
    assert short is first
    assert long is second
    assert same(first, second)
    assert not same(first, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS[:3])
def test_a_result_goes_where_it_is_told(ways, dtype, contract):
    """Twice: the second call is one that came before."""
    a, b, bias = randn(9, 300, dtype=dtype), randn(300, 20, dtype=dtype), randn(20, dtype=dtype)
    for call, *operands in ((isogemm.matmul, a, b), (isogemm.linear, a, b.T), (isogemm.linear, a, b.T, bias)):
        for again in range(2):
            outs = [torch.full((9, 20), float("nan"), dtype=dtype) for _ in range(2)]
            given = iter(outs)
            short, long, taken = ways(lambda: call(*operands, out=next(given), contract=contract))  # noqa: B023
            assert taken, again
            assert [short is outs[0], long is outs[1]] == [True, True]
            assert same(short, long)


def test_a_result_that_wants_a_further_look_takes_the_long_way(ways):
    a, b, bias = randn(9, 20), randn(20, 20), randn(20)
    room = torch.zeros(9, 40)
    for out in (room[:, :20], room[:, ::2], torch.zeros(20, 9).T):
        short, long, taken = ways(isogemm.linear, a, b, bias, out=out)
        assert not taken
        assert short is long is out
    for rows, out in ((a.view(3, 3, 20), torch.zeros(9, 20)), (a[0], torch.zeros(1, 20))):  # of other axes than x
        for _ in range(2):
            with pytest.raises(ShapeError):
                isogemm.linear(rows, b, bias, out=out)
        assert not out.any()
    for out in (a, b[:9], torch.zeros(9, 20, dtype=torch.bfloat16), torch.zeros(9, 21)):
        before = out.clone()
        for _ in range(2):
            with pytest.raises(IsogemmError):
                isogemm.linear(a, b, bias, out=out)
        assert same(out, before)


def test_what_has_no_short_path_takes_the_long_one(ways):
    a, b = randn(9, 30), randn(30, 20)
    few = [
        (isogemm.matmul, a, b.bfloat16()),
        (isogemm.matmul, randn(2, 9, 30), b),
        (isogemm.matmul, a[0], b),
        (isogemm.matmul, a[:0], b),
        (isogemm.linear, randn(30, 9, 2).permute(2, 1, 0), b.T),
        (isogemm.gemm_strided_batched, randn(3, 5, 30), b.expand(3, 30, 20)),
    ]
    for call, *operands in few:
        short, long, taken = ways(call, *operands)
        assert not taken
        assert same(short, long)
    short, long, taken = ways(isogemm.matmul, a.bfloat16(), b.bfloat16(), contract="tensor_core:sm90/chain")
    assert not taken
    assert same(short, long)
    short, long, taken = ways(isogemm.gemm, a, b.T, trans_b="T")
    assert not taken
    assert same(short, long)


def test_errors_are_those_of_the_long_way():
    a, b, total = randn(9, 30), randn(30, 20), torch.zeros(9, 20)
    bad = (
        (ShapeError, lambda: isogemm.matmul(a, b.T)),
        (ShapeError, lambda: isogemm.linear(a, b)),
        (ShapeError, lambda: isogemm.gemm(a, b, bias=randn(9))),
        (ContractError, lambda: isogemm.matmul(a, b, contract="fma/leaf")),
        (AliasError, lambda: isogemm.gemm(a[:, :20], b[:20, :20], out=a[:, :20], accumulate=True)),
        (LayoutError, lambda: isogemm.matmul(a, torch._neg_view(b))),
        (IsogemmError, lambda: isogemm.matmul(a.clone().requires_grad_(), b)),
        (IsogemmError, lambda: isogemm.gemm(a, b, out=total, accumulate=True, contract="fma/tree4")),
    )
    for error, call in bad:
        with pytest.raises(error):
            call()


def test_autocast_reaches_layers_without_gradients():
    layer, x = isogemm.torch.Linear(8, 4), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = layer(x).detach()
        with torch.no_grad():
            got = layer(x)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, want)

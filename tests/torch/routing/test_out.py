"""Reductions into tensors that the caller has: routed, counted, and in the dtype of what they are written to."""

from __future__ import annotations

import pytest
from tests.torch.routing.routed import SCOPED, chain, clean, randn, same, within  # noqa: F401

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

from isogemm.torch import reductions  # noqa: E402
from isogemm.torch.routing.rows import REDUCTIONS  # noqa: E402

F = torch.nn.functional
aten = torch.ops.aten
N = 3001


# A call on x [33, 3001] and ids [33], and the same with `out`: one tensor, or several.
CALLS = {
    "softmax": lambda x, ids, **out: torch.softmax(x, -1, **out),
    "softmax over columns": lambda x, ids, **out: torch.softmax(x, 0, **out),
    "softmax in float32": lambda x, ids, **out: torch.softmax(x, -1, dtype=torch.float32, **out),
    "softmax of four dimensions": lambda x, ids, **out: torch.softmax(x[None, None], -1, **out),
    "log_softmax": lambda x, ids, **out: torch.log_softmax(x, -1, **out),
    "logsumexp": lambda x, ids, **out: torch.logsumexp(x, -1, **out),
    "vector_norm": lambda x, ids, **out: torch.linalg.vector_norm(x, dim=-1, **out),
    "topk": lambda x, ids, **out: torch.topk((2 * x).round(), 5, **out),
    "sum": lambda x, ids, **out: torch.sum(x, -1, **out),
    "mean over columns": lambda x, ids, **out: torch.mean(x, 0, **out),
    "sum of all": lambda x, ids, **out: (aten.sum.out if out else aten.sum)(x, **out),
    "mean of all": lambda x, ids, **out: (aten.mean.dtype_out if out else aten.mean)(x, **out),
    "nll_loss": lambda x, ids, **out: torch._C._nn.nll_loss(x, ids, **out),
    "picked rows": lambda x, ids, **out: (aten.index_put.out if out else torch.index_put)(x, [ids], x, True, **out),
}


@SCOPED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_reduction_into_a_tensor_has_the_bits_of_one_without(name, dtype, scoped):
    x, ids, call = 3 * randn(33, N, dtype=dtype), torch.arange(33) // 2, CALLS[name]
    with within(scoped, strict=True) as scope:
        expected = call(x, ids)
        results = expected if isinstance(expected, tuple) else (expected,)
        outs = tuple(torch.empty(0, dtype=r.dtype) for r in results)
        got = call(x, ids, out=outs if isinstance(expected, tuple) else outs[0])
    assert not scoped or scope.routed.total() == 2, scope.routed
    for result, out, returned in zip(results, outs, got if isinstance(expected, tuple) else (got,), strict=True):
        assert same(out, result)
        assert returned is out


@SCOPED
def test_a_sum_has_the_dtype_of_what_it_is_written_to(scoped):
    for dtype, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        x = randn(33, 300, dtype=dtype)
        with within(scoped, strict=True):
            for kind in ("sum", "mean"):
                call = getattr(torch, kind)
                expected = getattr(reductions, kind)(x, out_dtype=other)
                assert same(call(x, -1, out=torch.empty(33, dtype=other)), expected)
                assert same(call(x, -1, dtype=other, out=torch.empty(33, dtype=other)), expected)
            down = torch.sum(x, 0, out=torch.empty(300, dtype=other))
            largest = torch.logsumexp(x, -1, out=torch.empty(33, dtype=other))
            assert same(down, chain(x).to(other))
            assert same(largest, x.float().logsumexp(-1).to(other))


@SCOPED
@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.sum(x, -1, dtype=torch.bfloat16, out=out),
        lambda x, out: torch.softmax(x.bfloat16(), -1, out=out),
        lambda x, out: torch.linalg.vector_norm(x.bfloat16(), dim=-1, out=out),
        lambda x, out: torch.topk(x.bfloat16(), 3, out=(out, torch.empty(0, dtype=torch.int64))),
    ],
    ids=["sum", "softmax", "vector_norm", "topk"],
)
def test_a_tensor_of_another_dtype_is_refused_and_stays_as_it_is(call, scoped):
    out = torch.full((7,), 0.5)
    with pytest.raises(RuntimeError):
        call(randn(7, 30), out)
    with within(scoped), pytest.raises(RuntimeError):
        call(randn(7, 30), out)
    assert same(out, torch.full((7,), 0.5))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "vector_norm", "sum"])
def test_a_reduction_of_another_dtype_into_a_tensor_is_counted_and_refused_when_strict(name):
    x, out = randn(5, 7).double(), torch.empty(0, dtype=torch.float64)
    with within(True) as scope:
        CALLS[name](x, None, out=out)
    assert scope.passed.total() == 1
    assert same(out, CALLS[name](x, None))
    with within(True, strict=True), pytest.raises(OptionError, match="strict"):
        CALLS[name](x, None, out=out)


def test_no_overload_of_a_routed_reduction_writes_unseen():
    """Those that torch itself makes of others are seen as these."""
    for packet in {func._overloadpacket for func in REDUCTIONS}:
        for name in packet.overloads():
            func = getattr(packet, name)
            if any(x.is_out for x in func._schema.arguments):
                assert func in REDUCTIONS, func

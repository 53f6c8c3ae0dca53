"""Gradients of attention: right, from a pinned order, and operators that torch.compile can see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.products import assert_same
from tests.torch.attention.test_forward import (
    DTYPES,
    MASKS,
    as_array,
    attention,
    drawn,
    masked,
    operands,
    plain,
    same,
    sdpa,
)

import isogemm
from isogemm.contract import attention as define
from isogemm.contract.reference import epilogue, evaluate
from isogemm.contract.rows import lane_sum
from isogemm.errors import ContractError, DTypeError, OptionError, ShapeError

torch = pytest.importorskip("torch")
calls = pytest.importorskip("isogemm.torch.attention.calls")
gradients = pytest.importorskip("isogemm.torch.attention.gradients")


def taken(function: Any, tensors: list[Any], dy: Any, **options: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(function(*leaves, **options), leaves, dy))


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_are_torchs_in_float64(kind, groups):
    tensors = operands(2, 2 * groups, 2, 9, 150, 16, dv=12)
    mask = masked(kind, 2, 2 * groups, 9, 150, torch.float32)
    dy = drawn(2, 2 * groups, 9, 12, seed=9)
    wide = None if mask is None else mask if mask.dtype is torch.bool else mask.double()
    want = taken(plain, [x.double() for x in tensors], dy.double(), attn_mask=wide, enable_gqa=True)
    for got, exact in zip(taken(attention, tensors, dy, mask=mask), want, strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-6)


def test_causal_and_scale_reach_the_gradients():
    tensors = operands(1, 2, 1, 20, 33, 8)
    dy = drawn(1, 2, 20, 8, seed=9)
    shown = torch.ones(20, 33, dtype=torch.bool).tril(13)
    want = taken(plain, [x.double() for x in tensors], dy.double(), attn_mask=shown, scale=0.9, enable_gqa=True)
    got = taken(attention, tensors, dy, causal=True, scale=0.9)
    for one, other, exact in zip(got, taken(attention, tensors, dy, mask=shown, scale=0.9), want, strict=True):
        same(one, other)
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


def power(x: np.ndarray) -> np.ndarray:
    """2**x with every product and sum rounded, by arrays of NumPy's."""
    x = np.maximum(x, np.float32(-127))
    k = x + np.float32(12583039)
    r = x - (k - np.float32(12583039))
    y = np.full_like(x, define.EXP2_TERMS["float32"][0])
    for term in define.EXP2_TERMS["float32"][1:]:
        y = y * r + term
    return np.where(x < -126.5, np.float32(0), np.ldexp(y, (k - np.float32(12583039)).astype(int)))


def product(a: np.ndarray, b: np.ndarray, alpha: float = 1.0, out: Any = np.float32) -> np.ndarray:
    return epilogue(evaluate(a, b, "fma/chain"), alpha=alpha, out_dtype=out)


def test_the_steps_are_those_that_are_written(dtype):
    """Two heads that share keys, by products of the definition and steps of NumPy's: the same bits."""
    tensors, dy = operands(1, 2, 1, 7, 200, 16, dtype, dv=12), drawn(1, 2, 7, 12, seed=9, dtype=dtype)
    q, k, v, g = (as_array(x) for x in (*tensors, dy))
    y, m, total = define.attention(q, k, v, causal_offset=190)
    key, query = np.arange(200), np.arange(7)[:, None]
    ps, dss = [], []
    for h in range(2):
        t = np.where(key > query + 190, np.float32(-np.inf), product(q[0, h], k[0, 0].T) * define.factor(None, 16))
        p = power(t - m[0, h, :, None]) * (np.float32(1) / total[0, h, :, None])
        delta = np.array([[lane_sum(row)] for row in g[0, h].astype(np.float32) * y[0, h].astype(np.float32)])
        ps.append(p)
        dss.append((p * (product(g[0, h], v[0, 0].T) - delta)).astype(q.dtype))
    ps, dss, q, g = (np.stack(list(x), axis=1).reshape(14, -1) for x in (ps, dss, q[0], g[0]))  # token by token
    dq, dk, dv = (as_array(x[0]) for x in taken(attention, tensors, dy, causal=True, offset=190))
    assert_same(dq.transpose(1, 0, 2).reshape(14, 16), product(dss, k[0, 0], 0.25, q.dtype))
    assert_same(dk[0], product(dss.T, q, 0.25, q.dtype))
    assert_same(dv[0], product(ps.astype(q.dtype).T, g, out=q.dtype))


def test_errors_in_16_bits_are_those_of_their_roundings():
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        tensors = operands(2, 4, 2, 33, 200, 32, dtype)
        dy = drawn(2, 4, 33, 32, seed=9, dtype=dtype)
        want = taken(plain, [x.double() for x in tensors], dy.double(), enable_gqa=True)
        for got, exact in zip(taken(attention, tensors, dy), want, strict=True):
            assert got.dtype is dtype
            assert (got.double() - exact).square().mean().sqrt() < unit * exact.square().mean().sqrt()


def test_gradients_do_not_depend_on_the_batch(dtype):
    tensors, dy = operands(5, 4, 2, 9, 150, 16, dtype), drawn(5, 4, 9, 16, seed=9, dtype=dtype)
    whole = taken(attention, tensors, dy, causal=True)
    for i in (0, 2, 4):
        alone = taken(attention, [x[i : i + 1] for x in tensors], dy[i : i + 1], causal=True)
        for one, all_ in zip(alone, whole, strict=True):
            same(one[0], all_[i])
    order = torch.tensor([3, 1, 4, 0, 2])
    for one, all_ in zip(taken(attention, [x[order] for x in tensors], dy[order], causal=True), whole, strict=True):
        same(one, all_[order])


@pytest.mark.parametrize("budget", [1, 3000, 10000, 2**40])
def test_how_much_is_held_does_not_reach_the_bits(dtype, budget, monkeypatch):
    tensors, dy = operands(3, 4, 2, 9, 150, 16, dtype), drawn(3, 4, 9, 16, seed=9, dtype=dtype)
    mask = masked("bool", 3, 4, 9, 150, dtype)
    options = {"mask": mask, "start": torch.tensor([0, 7, 130]), "stop": 149}
    want = taken(attention, tensors, dy, **options)
    monkeypatch.setitem(gradients._BUDGET, "cpu", budget)
    for one, other in zip(taken(attention, tensors, dy, **options), want, strict=True):
        same(one, other)


def test_chunks_of_queries_have_the_whole_gradient_of_q(dtype):
    tensors, dy = operands(2, 4, 2, 40, 40, 16, dtype), drawn(2, 4, 40, 16, seed=9, dtype=dtype)
    whole = taken(attention, tensors, dy, causal=True)[0]
    q, k, v = tensors
    for first, last in ((0, 7), (7, 23), (23, 40)):
        chunk = [q[:, :, first:last], k, v]
        dq = taken(attention, chunk, dy[:, :, first:last], causal=True, offset=first)[0]
        same(dq, whole[:, :, first:last])


@pytest.mark.parametrize("contract", ["fma/chain", "tensor_core:sm90/chain"])
def test_padding_on_the_right_changes_no_gradient(contract):
    """Tokens behind the last have no gradient of their own, and three heads of q share those of k."""
    tensors, dy = operands(1, 6, 2, 21, 21, 16, torch.bfloat16), drawn(1, 6, 21, 16, seed=9, dtype=torch.bfloat16)
    tensors[0] = tensors[0][:, :1].expand(-1, 6, -1, -1)
    dy[:, 0] *= 2**17  # large terms that cancel between heads leave what their chain has dropped
    dy[:, 1] = -dy[:, 0]
    alone = taken(attention, tensors, dy, causal=True, contract=contract)
    longer = [torch.cat([x, torch.ones_like(x[:, :, :19])], 2) for x in tensors]
    padded = taken(attention, longer, torch.nn.functional.pad(dy, (0, 0, 0, 19)), causal=True, contract=contract)
    for one, other in zip(alone, padded, strict=True):
        same(one, other[:, :, :21])


def test_what_is_not_read_has_no_gradient(dtype):
    q, k, v = operands(2, 4, 2, 5, 60, 16, dtype)
    dy = drawn(2, 4, 5, 16, seed=9, dtype=dtype)
    start, stop = torch.tensor([0, 9]), torch.tensor([31, 60])
    outside = (torch.arange(60) < start.view(2, 1)) | (torch.arange(60) >= stop.view(2, 1))
    rest = outside.view(2, 1, 60, 1)
    poisoned = [q, k.masked_fill(rest, math.nan), v.masked_fill(rest, math.inf)]
    for one, other in zip(
        taken(attention, poisoned, dy, start=start, stop=stop), taken(attention, [q, k, v], dy, mask=~rest.mT),
        strict=True,
    ):  # fmt: skip
        assert torch.isfinite(one.float()).all()
        same(one + 0, other + 0)
        if one.shape[2] == 60:
            assert not one.masked_select(rest).any()


def test_a_query_that_sees_nothing_has_no_gradient(dtype):
    tensors, dy = operands(1, 2, 1, 4, 10, 8, dtype), drawn(1, 2, 4, 8, seed=9, dtype=dtype)
    mask = torch.ones(4, 10, dtype=torch.bool)
    mask[2] = False
    dq, dk, dv = taken(attention, tensors, dy, mask=mask)
    assert not dq[:, :, 2].any()
    assert dq[:, :, 1].any()
    assert torch.isfinite(torch.cat([dk, dv], -1).float()).all()
    for x in taken(attention, tensors, dy, stop=0):
        assert not x.any()
    q, k, v = tensors
    for x in taken(attention, [q, k[:, :, :0], v[:, :, :0]], dy):
        assert not x.any()


def test_heads_of_no_size_have_gradients_of_their_values():
    """Every logit is 0: dv is dy's mean over the queries that see a key."""
    q = torch.zeros(1, 2, 4, 0)
    v, dy = drawn(1, 2, 3, 8, seed=1), drawn(1, 2, 4, 8, seed=2)
    dq, dk, dv = taken(attention, [q, q[:, :, :3], v], dy)
    assert (dq.shape, dk.shape) == ((1, 2, 4, 0), (1, 2, 3, 0))
    torch.testing.assert_close(dv, (dy.sum(2, keepdim=True) / 3).expand(v.shape))


def test_only_what_is_asked_for():
    q, k, v = operands(1, 2, 1, 4, 10, 8)
    want = taken(attention, [q, k, v], torch.ones_like(q))
    for i in range(3):
        leaves = [x.clone().requires_grad_(i == j) for j, x in enumerate((q, k, v))]
        attention(*leaves).backward(torch.ones_like(q))
        assert [x.grad is not None for x in leaves] == [i == j for j in range(3)]
        same(leaves[i].grad, want[i])


def test_exp2_of_the_gradient_is_right():
    x = -torch.linspace(0, 126, 100001)
    error = (gradients.exp2(x.clone()).double() - x.double().exp2()).abs() / x.double().exp2()
    assert error.max() < 2.0**-23
    assert gradients.exp2(torch.tensor([0.0, -1, -30, -126.5, -127, -1e30, -math.inf])).tolist() == [
        1, 0.5, 2.0**-30, 0, 0, 0, 0,
    ]  # fmt: skip
    assert gradients.exp2(torch.tensor([math.nan])).isnan().all()


def test_a_second_derivative_is_refused():
    q, k, v = (x.requires_grad_() for x in operands(1, 2, 1, 4, 10, 8))
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(OptionError, match="a second one"):
        dq.sum().backward()


def test_flushed_subnormals_do_not_reach_the_bits():
    """A program may have told this thread to take subnormals for zeros."""
    q, k, v = operands(1, 2, 1, 4, 10, 8)
    tensors, dy = [q, k, v * 1e-39], torch.ones_like(q)
    want = [attention(*tensors), *taken(attention, tensors, dy)]
    assert all(((x != 0) & (x.abs() < 2.0**-126)).any() for x in want[:3])
    before = torch.set_flush_denormal(True)
    try:
        found = [attention(*tensors), *taken(attention, tensors, dy)]
    finally:
        torch.set_flush_denormal(False)
    assert before
    for one, other in zip(found, want, strict=True):
        same(one, other)


def test_functional_transforms_and_meta_tensors():
    q, k, v = operands(1, 2, 1, 4, 10, 8)
    want = taken(attention, [q, k, v], torch.ones_like(q))
    got = torch.func.grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(got, want, strict=True):
        same(one, other)
    shape = attention(*(x.to("meta") for x in (q, k, v[..., :3])), out_dtype=torch.bfloat16)
    assert (shape.shape, shape.dtype, shape.device.type) == ((1, 2, 4, 3), torch.bfloat16, "meta")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operators_keep_torchs_rules(dtype):
    q, k, v = (x.requires_grad_() for x in operands(2, 4, 2, 5, 40, 16, dtype))
    torch.library.opcheck(
        torch.ops.isogemm.attention.default, (q, k, v, None, 35, None, None, False, None, None, "", None)
    )
    mask = torch.zeros(1, 1, 1, 40).expand(2, 4, 5, 40)
    bounds = torch.tensor([1, 2]), torch.tensor([30, 40], dtype=torch.int32)
    arguments = (q, k, v.detach(), mask, None, *bounds, False, 0.2, None, "fma/chain", torch.float32)
    torch.library.opcheck(torch.ops.isogemm.attention.default, arguments)
    y, stats = torch.ops.isogemm.attention(*arguments)
    without = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(torch.ops.isogemm.attention_forward.default, without)
    same(torch.ops.isogemm.attention_forward(*without), y.detach())
    arguments = (y, *arguments[:-1], y, stats, [True, False, True])
    torch.library.opcheck(
        torch.ops.isogemm.attention_backward.default,
        [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments],
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.fixture
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_forget_graphs")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_attention_has_the_eager_bits(dynamic):
    def step(q: Any, k: Any, v: Any, mask: Any) -> Any:
        y = attention(q * 2, k, v, causal=True, start=1) + sdpa(q, k, v, mask, enable_gqa=True)
        return y * y.detach()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tk in (50, 61):
        tensors = operands(2, 4, 2, 5, tk, 16)
        mask = torch.ones(5, tk, dtype=torch.bool).tril(tk - 9)
        same(compiled(*tensors, mask), step(*tensors, mask))
        dy = torch.ones(2, 4, 5, 16)
        for one, other in zip(
            taken(compiled, tensors, dy, mask=mask), taken(step, tensors, dy, mask=mask), strict=True
        ):
            same(one, other)


def test_autocast_is_in_autocasts_dtype():
    tensors = operands(1, 2, 1, 4, 10, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(*tensors)
    same(got, attention(*(x.bfloat16() for x in tensors)))


Q, K, V = operands(2, 4, 2, 3, 5, 8)
BAD: dict[str, tuple[type[Exception], Any]] = {
    "dropout": (OptionError, lambda: sdpa(Q, Q, Q, dropout_p=0.1)),
    "causal with a mask": (OptionError, lambda: sdpa(Q, Q, Q, torch.ones(3, 3, dtype=torch.bool), is_causal=True)),
    "groups unasked": (ShapeError, lambda: sdpa(Q, K, V)),
    "dimensions of torch's": (ShapeError, lambda: sdpa(Q[None], Q[None], Q[None])),
    "dimensions": (ShapeError, lambda: attention(Q[0], K, V)),
    "heads": (ShapeError, lambda: attention(Q[:, :3], K, V)),
    "batch": (ShapeError, lambda: attention(Q, K[:1], V)),
    "head's elements": (ShapeError, lambda: attention(Q, K[..., :4], V)),
    "keys and values": (ShapeError, lambda: attention(Q, K, V[:, :, :4])),
    "dtype": (DTypeError, lambda: attention(Q.double(), K.double(), V.double())),
    "dtypes": (DTypeError, lambda: attention(Q, K.half(), V)),
    "no tensor": (DTypeError, lambda: attention(Q.numpy(), K, V)),
    "out_dtype": (DTypeError, lambda: attention(Q, K, V, out_dtype=torch.float64)),
    "scale": (OptionError, lambda: attention(Q, K, V, scale=0.0)),
    "scale of NaN": (OptionError, lambda: attention(Q, K, V, scale=math.nan)),
    "offset": (OptionError, lambda: attention(Q, K, V, offset=3)),
    "mask's shape": (ShapeError, lambda: attention(Q, K, V, mask=torch.ones(3, 4, dtype=torch.bool))),
    "mask's dtype": (DTypeError, lambda: attention(Q, K, V, mask=torch.ones(3, 5, dtype=torch.int32))),
    "mask's gradient": (OptionError, lambda: attention(Q, K, V, mask=torch.ones(3, 5, requires_grad=True))),
    "start's shape": (ShapeError, lambda: attention(Q, K, V, start=torch.zeros(3, dtype=torch.int32))),
    "start's dtype": (DTypeError, lambda: attention(Q, K, V, start=torch.zeros(2))),
    "start": (OptionError, lambda: attention(Q, K, V, start=-1)),
    "stop": (OptionError, lambda: attention(Q, K, V, stop=torch.tensor([5, 6]))),
    "order": (ContractError, lambda: attention(Q, K, V, contract="fma/leaf128")),
    "arithmetic": (ContractError, lambda: attention(Q, K, V, contract="tensor_core:sm90/chain")),
    "contract": (ContractError, lambda: attention(Q, K, V, contract="fast")),
}


@pytest.mark.parametrize("shared", ["nothing", "keys", "queries"])
@pytest.mark.parametrize("masks", ["none", "each", "one"])
def test_a_dimension_of_vmap_is_a_longer_batch(shared, masks):
    """Results and gradients: by torch.vmap, by torch.func, and by torch's own function in a scope."""
    q, k, v = (drawn(3, 2, 2, t, 8, seed=t) for t in (7, 140, 141))
    v, dims = v[..., :140, :], {"nothing": (0, 0, 0), "keys": (0, None, None), "queries": (None, 1, 0)}[shared]
    mask = drawn(3, 2, 1, 7, 140, seed=5) > 0
    given = [x if dim is not None else x[0] for x, dim in zip((q, k, v), dims, strict=True)]
    given.append({"none": None, "each": mask, "one": mask[0]}[masks])
    dims = (*dims, 0 if masks == "each" else None)
    ready = [x.movedim(0, dim) if dim else x for x, dim in zip(given, dims, strict=True)]

    def loss(*x: Any, **options: Any) -> Any:
        return sdpa(*x, **options).square().sum()

    singles = [[x if d is None or x is None else x[i] for x, d in zip(given, dims, strict=True)] for i in range(3)]
    want = torch.stack([sdpa(*x) for x in singles])
    same(torch.vmap(sdpa, dims)(*ready), want)
    with isogemm.torch.invariant():
        same(torch.vmap(plain, dims)(*ready), want)
    steps = [taken(loss, x[:3], torch.tensor(1.0), attn_mask=x[3]) for x in singles]
    for i, got in enumerate(torch.vmap(torch.func.grad(loss, (0, 1, 2)), dims)(*ready)):
        same(got, torch.stack([each[i] for each in steps]))
    if shared == "nothing":
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        torch.vmap(loss, dims)(*leaves, given[3]).sum().backward()
        for i, leaf in enumerate(leaves):
            same(leaf.grad, torch.stack([each[i] for each in steps]))


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused_by_name(what):
    kind, call = BAD[what]
    with pytest.raises(kind):
        call()


def test_a_mask_of_the_least_number_hides_from_gradients():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    mask = torch.zeros(5, 5)
    mask[:, :2] = torch.finfo(torch.float32).min
    k[:, :, :2] = v[:, :, :2] = torch.nan
    tensors = [t.requires_grad_() for t in (q, k, v)]
    calls.scaled_dot_product_attention(*tensors, mask).sum().backward()
    assert all(t.grad.isfinite().all() for t in tensors)


def test_a_mask_of_each_sequence_is_its_own_under_vmap():
    q, mask = torch.randn(3, 2, 2, 5, 8), torch.randn(3, 5, 5) > -1
    mask[:, :, 0] = True

    def call(q, m):
        return attention(q, q, q, mask=m)

    assert torch.equal(torch.func.vmap(call)(q, mask), torch.stack([call(x, m) for x, m in zip(q, mask, strict=True)]))

"""Routing of reductions and attention: torch's functions get the bits of isogemm's, and of each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
from tests.torch.routing.routed import SCOPED, chain, clean, randn, same, within  # noqa: F401

import isogemm
from isogemm.contract import rows as contract
from isogemm.errors import OptionError, ShapeError

torch = pytest.importorskip("torch")

from isogemm.torch import reductions  # noqa: E402
from isogemm.torch.routing import scope as routing  # noqa: E402
from isogemm.torch.routing.scope import invariant  # noqa: E402

F = torch.nn.functional
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N = 300


# torch's call on x [3, 4, 300], w [300], and what it has to equal.
CALLS = {
    "softmax": (lambda x, w: x.softmax(-1), lambda x, w: reductions.softmax(x)),
    "softmax of 2": (
        lambda x, w: torch.softmax(x, 1),
        lambda x, w: reductions.softmax(x.movedim(1, -1)).movedim(-1, 1),
    ),
    "softmax in float32": (
        lambda x, w: F.softmax(x, -1, dtype=torch.float32),
        lambda x, w: reductions.softmax(x, out_dtype=torch.float32),
    ),
    "log_softmax": (lambda x, w: F.log_softmax(x, dim=2), lambda x, w: reductions.log_softmax(x)),
    "mean": (lambda x, w: x.mean(-1, keepdim=True), lambda x, w: reductions.mean(x, keepdim=True)),
    "mean in float32": (
        lambda x, w: x.mean(2, dtype=torch.float32),
        lambda x, w: reductions.mean(x, out_dtype=torch.float32),
    ),
    "sum": (lambda x, w: x.sum(-1), lambda x, w: reductions.sum(x)),
    "sum of two": (lambda x, w: x.sum((1, 2)), lambda x, w: reductions.sum(x.reshape(3, 4 * N))),
    "sum of ends": (
        lambda x, w: x.sum((0, -1), keepdim=True),
        lambda x, w: reductions.sum(x.transpose(0, 1).reshape(4, 3 * N)).view(1, 4, 1),
    ),
    "sum of all": (lambda x, w: x.sum(), lambda x, w: reductions.sum(x.reshape(-1))),
    "mean of all": (lambda x, w: torch.mean(x), lambda x, w: reductions.mean(x.reshape(-1))),
    "sum of a number": (lambda x, w: x[0, 0, 0].sum(), lambda x, w: x[0, 0, 0]),
    "sum over rows": (lambda x, w: x.sum((0, 1)), lambda x, w: chain(x.reshape(12, N)).to(x.dtype)),
    "sum over the middle": (
        lambda x, w: x.sum(1, keepdim=True),
        lambda x, w: chain(x.transpose(0, 1)).to(x.dtype)[:, None],
    ),
    "mean over rows": (lambda x, w: x.mean(0), lambda x, w: (chain(x) / torch.full((1,), 3.0)).to(x.dtype)),
    "sum out": (
        lambda x, w: torch.sum(x, -1, out=torch.full((3, 4), float("nan"), dtype=x.dtype)),
        lambda x, w: reductions.sum(x),
    ),
    "logsumexp": (lambda x, w: x.logsumexp(-1), lambda x, w: logsumexp(x)),
    "norm": (
        lambda x, w: x.norm(dim=-1, keepdim=True),
        lambda x, w: reductions.sum(x.float() * x.float(), keepdim=True).sqrt().to(x.dtype),
    ),
    "normalize": (
        lambda x, w: F.normalize(x, dim=2),
        lambda x, w: x / reductions.sum(x.float() * x.float(), keepdim=True).sqrt().to(x.dtype),
    ),
    "layer_norm": (lambda x, w: F.layer_norm(x, (N,), w, w, 1e-3), lambda x, w: reductions.layer_norm(x, w, w, 1e-3)),
    "layer_norm of two": (
        lambda x, w: F.layer_norm(x, (4, N)),
        lambda x, w: reductions.layer_norm(x.reshape(3, -1)).view(x.shape),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (N,), w, 1e-3), lambda x, w: reductions.rms_norm(x, w, 1e-3)),
    "rms_norm without": (lambda x, w: torch.rms_norm(x, [N]), lambda x, w: reductions.rms_norm(x, None, 2.0**-23)),
    "topk": (lambda x, w: x.topk(7).values, lambda x, w: torch.sort(x, descending=True).values[..., :7]),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        lambda x, w: isogemm.torch.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    ),
}


def logsumexp(x):
    rows = x.float().reshape(-1, x.shape[-1]).numpy()
    found = [r.max() - np.max(contract.log_softmax(r)) for r in rows]
    return torch.tensor(np.array(found, np.float32)).to(x.dtype).reshape(x.shape[:-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
@SCOPED
def test_calls_have_isogemms_bits(dtype, inference, scoped):
    x, w = 3 * randn(3, 4, N, dtype=dtype), randn(N, dtype=dtype)
    differ = 0
    for name, (call, expected) in CALLS.items():
        with torch.inference_mode(inference):
            plain = call(x, w)
            with within(scoped, strict=True) as scope:
                got = call(x, w)
            assert not scoped or scope.routed.total() == 1, name
            assert same(got, expected(x, w)), name
            assert same(call(x, w), plain), name
        torch.testing.assert_close(got, plain, rtol=2e-2, atol=2e-2, msg=name)
        differ += not same(got, plain)
    assert differ > len(CALLS) / 3 or dtype is not torch.float32, "the test cannot tell routed from plain"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@SCOPED
def test_cross_entropy_is_a_sum_of_one_row(dtype, scoped):
    x, target = 3 * randn(60, 11, dtype=dtype), torch.randint(0, 11, (60,))
    target[::7] = -100
    plain = {r: F.cross_entropy(x, target, reduction=r) for r in ("mean", "sum", "none")}
    leaf = x.clone().requires_grad_()
    with within(scoped, strict=True):
        got = {r: F.cross_entropy(leaf, target, reduction=r) for r in plain}
        got["mean"].backward()
    used = target >= 0
    each = torch.zeros(60)
    each[used] = -reductions.log_softmax(x).float()[used, target[used]]
    total = reductions.sum(each)
    assert same(got["none"], each.to(dtype))
    assert same(got["sum"], total.to(dtype))
    assert same(got["mean"], (total / used.sum()).to(dtype))
    assert not leaf.grad[::7].any()
    for r, y in plain.items():
        torch.testing.assert_close(got[r], y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@SCOPED
@pytest.mark.parametrize("ends", [(15,), (3, 5)], ids=["sequences", "images"])
def test_cross_entropy_of_classes_before_the_last_dimensions_is_that_of_rows(ends, scoped, dtype):
    x, target = 3 * randn(4, 11, *ends, dtype=dtype), torch.randint(0, 11, (4, *ends))
    target[:, ::2] = -100
    rows, flat = x.movedim(1, -1).reshape(60, 11), target.reshape(60)
    for reduction in ("mean", "sum", "none"):
        leaves = [x.clone().requires_grad_(), rows.clone().requires_grad_()]
        with within(scoped, strict=True) as scope:
            wide = F.cross_entropy(leaves[0], target, reduction=reduction)
            got = F.cross_entropy(leaves[1], flat, reduction=reduction)
            for loss in (wide, got):
                loss.backward(torch.ones_like(loss))
        assert same(wide.reshape(got.shape), got)
        assert same(leaves[0].grad.movedim(1, -1).reshape(60, 11), leaves[1].grad)
        assert not scoped or scope.routed["nll_loss2d_forward"] == scope.routed["nll_loss_forward"] == 1
    assert not isogemm.torch.coverage(F.cross_entropy, leaves[0], target, backward=True).not_routed


GRADS = ("softmax", "softmax of 2", "softmax in float32", "log_softmax", "mean", "logsumexp", "layer_norm")
GRADS += ("rms_norm", "layer_norm of two", "attention")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GRADS)
def test_a_gradient_of_a_row_is_its_own(name, dtype):
    """Entry 1 of three alone has the bits that it has in the batch; a bias's and weight's gradient is a chain."""
    call, _ = CALLS[name]
    x, w = randn(3, 4, N, dtype=dtype), randn(N, dtype=dtype).requires_grad_()

    def run(x):
        x = x.clone().requires_grad_()
        with invariant(strict=True):
            y = call(x, w)
            dy = randn(3, *y.shape[1:], seed=1).to(y.dtype)[: len(x)] if name != "attention" else torch.ones_like(y)
            y.backward(dy)
        return y, x.grad

    first, found = run(x[:1]), run(x)
    reference = x.double().requires_grad_()
    exact = call(reference, w.detach().double())
    exact.backward(torch.ones_like(exact) if name == "attention" else randn(3, *exact.shape[1:], seed=1).double())
    torch.testing.assert_close(found[1].double(), reference.grad, rtol=3e-2, atol=3e-2)
    if name != "attention":
        assert same(first[0], found[0][:1])
        assert same(first[1], found[1][:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_order_of_rows(dtype):
    x, dy = 3 * randn(3, 4, N, dtype=dtype), randn(3, 4, N, dtype=dtype, seed=3)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    with invariant(strict=True):
        p, logs = leaves[0].softmax(-1), leaves[1].log_softmax(-1)
        y, mean, rstd = torch.native_layer_norm(leaves[2], (N,), None, None, 1e-5)
        torch.autograd.backward([p, logs, y], [dy, dy, dy])
    wide, soft, p = dy.float(), reductions.softmax(logs, out_dtype=torch.float32).detach(), p.detach().float()
    assert same(leaves[0].grad, (p * (wide - reductions.sum(p * wide, keepdim=True))).to(dtype))
    assert same(leaves[1].grad, (wide - soft * reductions.sum(wide, keepdim=True)).to(dtype))
    h = (x.float() - mean) * rstd
    inner = wide - reductions.mean(wide, keepdim=True) - h * reductions.mean(wide * h, keepdim=True)
    assert same(leaves[2].grad, (inner * rstd).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_parameters_are_chains_over_rows(dtype):
    x, dy = randn(3, 4, N, dtype=dtype), randn(3, 4, N, dtype=dtype, seed=3)
    w, b = randn(N, dtype=dtype).requires_grad_(), randn(N, dtype=dtype, seed=1).requires_grad_()
    with invariant(strict=True):
        y, mean, rstd = torch.native_layer_norm(x, (N,), w, b, 1e-5)
        y.backward(dy)
    h = (x.float() - mean) * rstd
    assert mean.dtype is rstd.dtype is torch.float32
    assert same(w.grad, chain((dy.float() * h).reshape(12, N)).to(dtype))
    assert same(b.grad, chain(dy.reshape(12, N)).to(dtype))
    table, ids = randn(7, 8, dtype=dtype).requires_grad_(), torch.randint(0, 7, (60,))
    rows = randn(60, 8, dtype=dtype)
    with invariant() as scope:
        F.embedding(ids, table, padding_idx=2).backward(rows)
    expected = torch.stack([chain(rows[ids == i]) * (i != 2) for i in range(7)]).to(dtype)
    assert torch.equal(table.grad, expected)
    assert scope.routed == {"embedding_dense_backward": 1}


@SCOPED
def test_options_leave_them_to_torch(scoped):
    x = randn(3, 4, N)
    silu, attention = torch.tensor(0.5).repeat(7), F.scaled_dot_product_attention
    calls = {
        "rows": (lambda: x.softmax(-1), lambda: x.sum((0, 1)), lambda: F.rms_norm(x, (N,)), lambda: F.silu(silu)),
        "attention": (lambda: attention(x[None], x[None], x[None]),),
    }
    plain = {k: [call() for call in group] for k, group in calls.items()}

    def run(**options):
        with within(scoped, **options):
            return {k: [call() for call in group] for k, group in calls.items()}

    def equal(a, b):
        return [same(x, y) for x, y in zip(a, b, strict=True)]

    both, rows, attended, none = run(), run(attention=False), run(rows=False), run(rows=False, attention=False)
    assert all(equal(none["rows"], plain["rows"]) + equal(none["attention"], plain["attention"]))
    assert not any(equal(both["rows"], plain["rows"])[:3] + equal(both["attention"], plain["attention"]))
    for k, on, off in (("rows", rows, attended), ("attention", attended, rows)):
        assert all(equal(on[k], both[k]))
        assert all(equal(off[k], plain[k]))


def test_enable_again_changes_the_options():
    x = randn(3, N)
    plain, routed = x.softmax(-1), reductions.softmax(x)
    try:
        routing.enable(rows=False)
        assert same(x.softmax(-1), plain)
        routing.enable()
        assert same(x.softmax(-1), routed)
        routing.enable(rows=False)
        assert same(x.softmax(-1), plain)
    finally:
        routing.disable()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_attention_are_added_up_in_a_chain(dtype):
    x = 3 * randn(2, 3, 5, N, dtype=dtype)
    wide = x.float()
    e = torch.from_numpy(contract.exp((wide - wide.amax(-1, keepdim=True)).numpy()))
    with invariant(strict=True) as scope:
        got, wider = x.softmax(-1), F.softmax(x[None], -1, dtype=torch.float32)
        empty, nothing = x[:, :0].softmax(-1), torch.full_like(x, -torch.inf).softmax(-1)
    expected = e / chain(e.movedim(-1, 0))[..., None]
    assert same(got, expected.to(dtype))
    assert same(wider[0], expected)
    assert scope.routed == {"_softmax": 4}
    assert empty.shape == (2, 0, 5, N)
    assert nothing.isnan().all()
    error = (expected.double() / wide.double().softmax(-1) - 1).abs().max()
    assert float(error) < 2 * N**0.5 * 2.0**-23


def test_masked_keys_and_a_sink_may_stand_anywhere():
    x, sinks = 3 * randn(2, 3, 5, N), randn(2, 3, 5, 1)
    hidden = torch.full((2, 3, 5, 7), float(torch.finfo(torch.float32).min))
    with invariant():
        alone = torch.cat((x, sinks), -1).softmax(-1)
        padded = torch.cat((hidden[..., :3], x, hidden, sinks), -1).softmax(-1)
    assert same(padded[..., 3 : N + 3], alone[..., :N])
    assert same(padded[..., -1:], alone[..., -1:])
    assert not padded[..., :3].any()
    assert not padded[..., N + 3 : -1].any()


def test_what_is_not_isogemms_is_torchs_and_counted():
    x = randn(3, 4, 6, dtype=torch.float64)
    numbers = torch.arange(12).view(3, 4)
    with invariant() as scope:
        x.softmax(-1), x.sum(-1), F.layer_norm(x, (6,)), F.rms_norm(x, (6,))
        assert torch.equal(numbers.sum(-1), torch.tensor([6, 22, 38]))
    assert scope.passed == {
        "_softmax float64": 1,
        "sum.dim_IntList float64": 1,
        "native_layer_norm float64": 1,
        "mean.dim float64": 1,
    }
    with invariant(strict=True), pytest.raises(OptionError, match="strict"):
        x.softmax(-1)
    with invariant(strict=True):
        assert int(numbers.sum()) == 66


def test_of_equals_topk_takes_the_first_whatever_follows():
    for dtype in (*DTYPES, torch.float64, torch.int64):
        x = torch.zeros(2, 40, dtype=dtype)
        x[:, 11] = 1
        with invariant(strict=True):
            alone, least = x[:, :20].topk(5), x.topk(3, dim=-1, largest=False)
            wide, down = x.topk(5), x.T.topk(5, 0)
        assert alone.indices.tolist() == wide.indices.tolist() == down.indices.T.tolist() == [[11, 0, 1, 2, 3]] * 2
        assert alone.values.tolist() == [[1, 0, 0, 0, 0]] * 2
        assert least.indices.tolist() == [[0, 1, 2]] * 2
    leaf = torch.zeros(2, 40, requires_grad=True)
    with invariant():
        leaf.topk(2).values.sum().backward()
    assert leaf.grad.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_errors_and_odd_shapes_are_torchs():
    x = randn(3, 4)
    with invariant():
        assert x[0, 0].topk(1).indices == 0
        for call in (
            lambda: x.sum(5),
            lambda: x[0, 0].softmax(2),
            lambda: x[0, 0].log_softmax(-2),
            lambda: x.topk(5),
            lambda: x.topk(1, 5),
            lambda: x.logsumexp(()),  # with keepdim=True it is that of all elements
            lambda: F.rms_norm(x, (5,)),
            lambda: F.rms_norm(x, ()),
            lambda: F.rms_norm(x, (4, 3)),
            lambda: F.layer_norm(x, (3,)),
            lambda: F.layer_norm(x, ()),
            lambda: F.layer_norm(x, (4, 3)),
            lambda: F.layer_norm(x, (3, 4), torch.ones(4, 3)),
            lambda: F.layer_norm(x[:0], (5,)),
            lambda: x[0, 0].index_put((torch.tensor([0]),), torch.ones(1), accumulate=True),
            lambda: F.scaled_dot_product_attention(x, x[:, :3], x),
        ):
            for inference in (False, True):
                with torch.inference_mode(inference), pytest.raises((RuntimeError, IndexError, ShapeError)):
                    call()
        assert x[:0].sum(-1).shape == (0,)
        assert torch.equal(x[:, :0].sum(-1), torch.zeros(3))
        assert torch.equal(x[:0].sum(0), torch.zeros(4))
        assert x[:, :0].mean(-1).isnan().all()
        assert x[:, :0].softmax(-1).shape == (3, 0)
        low, high = torch.full((2, 5), -torch.inf), torch.full((2, 5), torch.inf)
        assert torch.equal(low.logsumexp(-1), low[:, 0])
        assert torch.equal(high.logsumexp(-1), high[:, 0])
        assert torch.equal(x[:, :0].logsumexp(-1), torch.full((3,), -torch.inf))
        assert torch.equal(x[:0].logsumexp(0), torch.full((4,), -torch.inf))
        assert torch.equal(x.logsumexp((), keepdim=True), x.logsumexp((0, 1), keepdim=True))
        assert torch.equal(x[0, 0].logsumexp(()), x[0, 0])
        assert torch.equal(x[0, 0].softmax(0), torch.ones(()))


def test_attention_in_the_dtype_of_autocast_and_with_dropout():
    x = randn(2, 4, 9, 16)
    with torch.autocast("cpu", torch.bfloat16), invariant() as scope:
        y = F.scaled_dot_product_attention(x, x, x)
    half = x.bfloat16()
    assert same(y, isogemm.torch.scaled_dot_product_attention(half, half, half))
    with invariant() as scope:
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert not scope.routed["scaled_dot_product_attention"]


def test_a_contract_gives_attention_its_arithmetic():
    x = randn(1, 4, 200, 64, dtype=torch.bfloat16)
    with invariant("tensor_core:sm90/leaf32"):
        y = F.scaled_dot_product_attention(x, x, x)
    chain = isogemm.torch.attention(x, x, x, contract="tensor_core:sm90/chain")
    assert same(y, chain)
    assert not same(y, isogemm.torch.attention(x, x, x))


def test_a_backward_of_attention_needs_no_scope():
    """It is isogemm's own, and so marked by nothing."""
    x = randn(1, 2, 9, 16).requires_grad_()
    with invariant():
        y = F.scaled_dot_product_attention(x, x, x)
    y.sum().backward()
    with invariant():
        (inside,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x)
    assert same(x.grad, inside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_picked_rows_adds_them_in_order(dtype):
    """torch adds them with atomics, in another order every time, where there are enough."""
    ids = torch.arange(64).repeat_interleave(8)[torch.randperm(512, generator=torch.Generator().manual_seed(0))]
    dy, grads = torch.randn(512, 256).to(dtype), []
    for picked in (ids, ids - 64):
        for scoped in (True, False):
            x = torch.zeros(64, 256, dtype=dtype, requires_grad=True)
            with within(scoped, strict=True):
                x[picked].backward(dy)
            grads.append(x.grad)
    wide = torch.zeros(64, 256)
    for i, row in zip(ids, dy.float(), strict=True):
        wide[i] += row
    assert all(same(grad, wide.to(dtype)) for grad in grads)
    with invariant(strict=True):  # nothing is added: torch's own
        x = torch.zeros(3, 4, requires_grad=True)
        x[torch.tensor([True, False, True])].backward(torch.ones(2, 4))
        y = torch.zeros(3)
        y[torch.tensor([2, 0])] = torch.tensor([1.0, 2.0])
    assert same(x.grad, torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 4).contiguous())
    assert same(y, torch.tensor([2.0, 0.0, 1.0]))

"""Routing: torch's products become isogemm's inside the scope, forward and backward; outside nothing changes."""

from __future__ import annotations

import pytest
from tests.torch.routing.routed import LEAVES, clean, gemm, randn, same, within  # noqa: F401

import isogemm
from isogemm.errors import ContractError, OptionError

torch = pytest.importorskip("torch")

from isogemm.torch.routing.scope import invariant  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _out(shape, call, *operands, **options):
    result = torch.full(shape, float("nan"), dtype=operands[0].dtype)
    assert call(*operands, out=result, **options) is result
    return result


# What torch is asked for, and what it has to equal: a [9, 300], b [300, 20], c [9, 20], s [3, 5, 300], t [3, 300, 7].
CALLS = {
    "mm": (lambda a, b, c, s, t: torch.mm(a, b), lambda a, b, c, s, t: gemm(a, b)),
    "matmul": (lambda a, b, c, s, t: a @ b, lambda a, b, c, s, t: gemm(a, b)),
    "transposed": (lambda a, b, c, s, t: (b.T @ a.T).T, lambda a, b, c, s, t: gemm(a, b)),
    "mm out": (lambda a, b, c, s, t: _out((9, 20), torch.mm, a, b), lambda a, b, c, s, t: gemm(a, b)),
    "addmm": (
        lambda a, b, c, s, t: torch.addmm(c, a, b, alpha=0.3, beta=-1.7),
        lambda a, b, c, s, t: gemm(a, b, c=c, alpha=0.3, beta=-1.7),
    ),
    "addmm integers": (
        lambda a, b, c, s, t: torch.addmm(c, a, b, alpha=2, beta=3),
        lambda a, b, c, s, t: gemm(a, b, c=c, alpha=2.0, beta=3.0),
    ),
    "addmm beta 0": (
        lambda a, b, c, s, t: torch.addmm(c * float("nan"), a, b, beta=0),
        lambda a, b, c, s, t: gemm(a, b),
    ),
    "addmm row": (lambda a, b, c, s, t: torch.addmm(c[0], a, b), lambda a, b, c, s, t: gemm(a, b, bias=c[0])),
    "addmm column": (
        lambda a, b, c, s, t: torch.addmm(c[:, :1], a, b, beta=2),
        lambda a, b, c, s, t: gemm(a, b, c=c[:, :1].expand(9, 20), beta=2.0),
    ),
    "addmm out": (
        lambda a, b, c, s, t: _out((9, 20), lambda *x, out: torch.addmm(*x, out=out, beta=0.5), c, a, b),
        lambda a, b, c, s, t: gemm(a, b, c=c, beta=0.5),
    ),
    "addmm_": (
        lambda a, b, c, s, t: c.clone().addmm_(a, b, beta=0.5, alpha=2),
        lambda a, b, c, s, t: gemm(a, b, c=c, beta=0.5, alpha=2.0),
    ),
    "bmm": (
        lambda a, b, c, s, t: torch.bmm(s, t),
        lambda a, b, c, s, t: torch.stack([gemm(x, y) for x, y in zip(s, t, strict=True)]),
    ),
    "matmul broadcast": (
        lambda a, b, c, s, t: torch.matmul(s[:, None], t),
        lambda a, b, c, s, t: torch.stack([torch.stack([gemm(x, y) for y in t]) for x in s]),
    ),
    "bmm out": (
        lambda a, b, c, s, t: _out((3, 5, 7), torch.bmm, s, t),
        lambda a, b, c, s, t: torch.stack([gemm(x, y) for x, y in zip(s, t, strict=True)]),
    ),
    "baddbmm": (
        lambda a, b, c, s, t: torch.baddbmm(c[:5, :7], s, t, alpha=0.3, beta=-1.7),
        lambda a, b, c, s, t: torch.stack(
            [gemm(x, y, c=c[:5, :7], alpha=0.3, beta=-1.7) for x, y in zip(s, t, strict=True)]
        ),
    ),
    "baddbmm_": (
        lambda a, b, c, s, t: torch.ones(3, 5, 7, dtype=s.dtype).baddbmm_(s, t),
        lambda a, b, c, s, t: torch.stack(
            [gemm(x, y, c=torch.ones(5, 7, dtype=s.dtype), beta=1.0) for x, y in zip(s, t, strict=True)]
        ),
    ),
    "addbmm": (
        lambda a, b, c, s, t: torch.addbmm(c[:5, :7], s, t),
        lambda a, b, c, s, t: gemm(torch.cat(list(s), 1), torch.cat(list(t), 0), c=c[:5, :7], beta=1.0),
    ),
    "mv": (lambda a, b, c, s, t: a @ b[:, 0], lambda a, b, c, s, t: gemm(a, b)[:, 0]),
    "vm": (lambda a, b, c, s, t: a[0] @ b, lambda a, b, c, s, t: gemm(a, b)[0]),
    "dot": (lambda a, b, c, s, t: a[0] @ b[:, 0], lambda a, b, c, s, t: gemm(a, b)[0, 0]),
    "addmv": (
        lambda a, b, c, s, t: torch.addmv(c[:, 0], a, b[:, 0], beta=2),
        lambda a, b, c, s, t: gemm(a, b[:, :1], c=c[:, :1], beta=2.0)[:, 0],
    ),
    "linear": (
        lambda a, b, c, s, t: torch.nn.functional.linear(a, b.T, c[0]),
        lambda a, b, c, s, t: gemm(a, b, bias=c[0]),
    ),
    "linear of a stack": (
        lambda a, b, c, s, t: torch.nn.functional.linear(s.transpose(0, 1), b.T, c[0]),
        lambda a, b, c, s, t: torch.stack([gemm(x, b, bias=c[0]) for x in s], 1),
    ),
    "linear of a vector": (
        lambda a, b, c, s, t: torch.nn.functional.linear(a[0], weight=b.T, bias=c[0]),
        lambda a, b, c, s, t: gemm(a, b, bias=c[0])[0],
    ),
    "linear of one output": (
        lambda a, b, c, s, t: torch.nn.functional.linear(s, b.T[0]),
        lambda a, b, c, s, t: torch.stack([gemm(x, b)[:, 0] for x in s]),
    ),
    "einsum": (
        lambda a, b, c, s, t: torch.einsum("bik,bkj->bji", s, t),
        lambda a, b, c, s, t: torch.stack([gemm(x, y).T for x, y in zip(s, t, strict=True)]),
    ),
    "tensordot": (lambda a, b, c, s, t: torch.tensordot(a, b, dims=1), lambda a, b, c, s, t: gemm(a, b)),
    "inner": (lambda a, b, c, s, t: torch.inner(a, b.T), lambda a, b, c, s, t: gemm(a, b)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_a_call_has_isogemms_bits(name, dtype, inference):
    call, expected = CALLS[name]
    operands = [
        randn(9, 300, dtype=dtype),
        randn(300, 20, dtype=dtype),
        randn(9, 20, dtype=dtype),
        randn(3, 5, 300, dtype=dtype),
        randn(3, 300, 7, dtype=dtype),
    ]
    with torch.inference_mode(inference):
        plain = call(*operands)
        with invariant(LEAVES) as scope:
            got = call(*operands)
        assert scope.routed.total() >= 1
        assert not scope.passed
        assert same(got, expected(*operands))
        if dtype is torch.float32:
            assert not same(got, plain) or name == "dot", "the test cannot tell routed from plain"
        torch.testing.assert_close(got, plain, rtol=2e-2, atol=0.2 if dtype is torch.bfloat16 else 0.03)
        assert same(call(*operands), plain)


def test_the_default_contract_is_that_of_matmul():
    a, b = randn(9, 700), randn(700, 20)
    with invariant():
        assert same(a @ b, isogemm.matmul(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_linear_are_the_written_products(dtype):
    layer = torch.nn.Linear(300, 70).to(dtype)
    x, dy = randn(2, 40, 300, dtype=dtype, grad=True), randn(2, 40, 70, dtype=dtype)
    with invariant(LEAVES) as scope:
        layer(x).backward(dy)
    rows, flat = x.reshape(80, 300), dy.reshape(80, 70)
    assert same(x.grad.reshape(80, 300), gemm(flat, layer.weight))
    assert same(layer.weight.grad, gemm(flat.T, rows))
    assert same(layer.bias.grad, gemm(torch.ones(1, 80, dtype=dtype), flat, contract="fma/chain")[0])
    assert scope.routed == {"addmm": 1, "mm": 2, "sum.dim_IntList": 1}


def test_gradients_of_matmul_and_einsum_are_the_written_products():
    for call in (torch.matmul, lambda a, b: torch.einsum("bik,bkj->bij", a, b)):
        a, b, dy = randn(3, 50, 300, grad=True), randn(3, 300, 60, grad=True), randn(3, 50, 60)
        with invariant(LEAVES):
            da, db = torch.autograd.grad(call(a, b), (a, b), dy)
        for i in range(3):
            assert same(da[i], gemm(dy[i], b[i].T))
            assert same(db[i], gemm(a[i].T, dy[i]))


class Block(torch.nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, width=64, heads=4, hidden=160):
        super().__init__()
        linear = torch.nn.Linear
        self.heads, self.norm = heads, torch.nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def test_a_transformer_block_is_routed_forward_and_backward():
    block, x = Block(), randn(3, 17, 64)
    plain = block(x)
    with invariant(LEAVES) as scope:
        y = block(x)
        forward = dict(scope.routed)
        y.square().sum().backward()
    assert forward == {"addmm": 5, "bmm": 2, "_softmax": 1, "layer_norm": 1}
    products = {"addmm": 5, "bmm": 6, "mm": 10}
    rows = {"_softmax": 1, "layer_norm": 1, "_softmax_backward_data": 1}
    assert scope.routed == {**products, **rows, "sum": 1, "sum.dim_IntList": 5}
    assert not scope.passed
    assert all(p.grad is not None for p in block.parameters())
    assert not same(y, plain)
    assert same(block(x), plain)


def test_linear_rounds_once_whatever_the_strides():
    """torch itself adds the bias after a rounding where the input's strides do not fold, as in a batch of two."""
    x, w, bias = randn(6, 2, 300, dtype=torch.bfloat16).transpose(0, 1), randn(70, 300, dtype=torch.bfloat16), None
    bias = randn(70, dtype=torch.bfloat16)
    linear = torch.nn.functional.linear
    assert not same(linear(x, w, bias), linear(x.contiguous(), w, bias)), "torch has changed: this test proves nothing"
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True).to(torch.bfloat16).eval()
    torch.nn.init.normal_(attention.in_proj_bias)
    tokens = randn(5, 11, 64, dtype=torch.bfloat16)
    with invariant():
        assert same(linear(x, w, bias)[:1], linear(x[:1], w, bias))
        assert same(linear(x, w, bias), linear(x.contiguous(), w, bias))
        value = torch.nn.functional.multi_head_attention_forward
        options = (64, 4, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0)
        options = (*options, attention.out_proj.weight, attention.out_proj.bias)
        one, all_ = tokens[2:3].transpose(0, 1), tokens.transpose(0, 1)
        alone = value(one, one, one, *options, need_weights=False, training=False)[0]
        among = value(all_, all_, all_, *options, need_weights=False, training=False)[0]
    assert same(alone[:, 0], among[:, 2])
    with within(False):
        assert same(linear(x, w, bias), linear(x.contiguous(), w, bias))
        assert same(linear(x, w, bias)[:1], linear(x[:1], w, bias))


def test_a_backward_outside_of_the_scope_is_an_error():
    layer = torch.nn.Linear(8, 8)
    with invariant():
        loss = layer(randn(4, 8)).relu().sum()
    with pytest.raises(OptionError, match=r"backward\(\) outside of it"):
        loss.backward()
    assert layer.weight.grad is None
    with invariant():
        loss = layer(randn(4, 8)).relu().sum()
    with invariant():
        loss.backward()
    assert layer.weight.grad is not None


def test_a_gradient_of_the_gradient_is_guarded_too():
    a, b = randn(4, 8, grad=True), randn(8, 4, grad=True)
    with invariant(LEAVES) as scope:
        (first,) = torch.autograd.grad((a @ b).square().sum(), a, create_graph=True)
        torch.autograd.grad(first.sum(), b, retain_graph=True)
    assert scope.routed["mm"] >= 3
    with pytest.raises(OptionError, match="backward"):
        first.sum().backward()


def test_a_checkpoint_recomputes_inside():
    layer, x = torch.nn.Linear(300, 70), randn(40, 300, grad=True)
    with invariant(LEAVES) as scope:
        y = torch.utils.checkpoint.checkpoint(torch.nn.Sequential(layer, torch.nn.Sigmoid()), x, use_reentrant=False)
        y.sum().backward()
    assert scope.routed == {"addmm": 2, "mm": 2, "sum": 1, "sum.dim_IntList": 1}
    z = gemm(x, layer.weight.T, bias=layer.bias.detach())
    (dz,) = torch.autograd.grad(torch.sigmoid(z.requires_grad_()).sum(), z)
    assert same(x.grad, gemm(dz, layer.weight))


def test_autocast_products_are_routed_in_the_dtype_it_chose():
    x, w, bias = randn(9, 300), randn(70, 300), randn(70)
    with torch.autocast("cpu", torch.bfloat16), invariant(LEAVES) as scope:
        y = torch.nn.functional.linear(x, w, bias)
    assert same(y, gemm(x.bfloat16(), w.bfloat16().T, bias=bias.bfloat16()))
    assert scope.routed == {"addmm": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64], ids=str)
def test_other_dtypes_are_torchs_and_counted(dtype):
    a, b = (10 * randn(9, 30)).to(dtype), (10 * randn(30, 20)).to(dtype)
    plain = a @ b
    with invariant() as scope:
        assert torch.equal(a @ b, plain)
    assert scope.passed == {f"mm {dtype}".replace("torch.", ""): 1}
    with invariant(strict=True), pytest.raises(OptionError, match="strict"):
        a @ b


def test_products_inside_operators_are_counted_and_refused_when_strict():
    q, image = randn(1, 2, 8, 16), randn(1, 3, 8, 8)
    attention, convolution = torch.nn.functional.scaled_dot_product_attention, torch.nn.Conv2d(3, 4, 3)
    with invariant() as scope:
        attention(q.double(), q.double(), q.double())
        convolution(image)
    assert len(scope.passed) == 2
    assert {name.split()[0] for name in scope.passed} >= {"convolution"}
    for call in (lambda: attention(q.double(), q.double(), q.double()), lambda: convolution(image)):
        with invariant(strict=True), pytest.raises(OptionError, match="strict"):
            call()


def test_a_contract_that_does_not_fit_is_an_error_and_leaves_no_trace():
    with pytest.raises(ContractError):
        invariant("fma/leaves")
    with pytest.raises(ContractError), invariant("tensor_core:sm90/chain"):
        randn(9, 30) @ randn(30, 9)


def test_errors_of_shape_and_aliases_of_out():
    a, b = randn(9, 9), randn(9, 9)
    with invariant(LEAVES):
        expected = a @ b
        out = a.clone()
        torch.mm(out, b, out=out)
        assert same(out, expected)
        with pytest.raises(RuntimeError):
            torch.mm(a, b, out=torch.empty(9, 9, dtype=torch.float64))


def test_another_choice_of_rows_for_the_process_counts():
    x = torch.randn(100003, generator=torch.Generator().manual_seed(0))
    theirs, ours = torch.sum(x), isogemm.torch.reductions.sum(x)
    assert theirs != ours
    try:
        isogemm.torch.enable()
        assert torch.sum(x) == ours
        isogemm.torch.enable(rows=False)
        assert torch.sum(x) == theirs
    finally:
        isogemm.torch.disable()


@pytest.mark.parametrize("name", ["mm", "mm.default"])
def test_isogemm_s_own_operators_have_gradients_behind_a_scope(name):
    operator = torch.ops.isogemm.mm if name == "mm" else torch.ops.isogemm.mm.default
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    with isogemm.torch.invariant():
        y = operator(a, b)
    y.sum().backward()
    assert a.grad is not None

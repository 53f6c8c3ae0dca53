"""Routing: torch's products become isogemm's inside the scope, forward and backward; outside nothing changes."""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest

import isogemm
from isogemm.errors import ContractError, OptionError, ShapeError

torch = pytest.importorskip("torch")

from isogemm.torch import routing  # noqa: E402
from isogemm.torch.routing import invariant  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAVES = "fma/leaf32"  # bits that no product of torch's has by chance


def bits(x):
    return x.detach().contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def same(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def randn(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def gemm(a, b, contract=LEAVES, **options):
    return isogemm.gemm(a.detach(), b.detach(), contract=contract, **options)


def modes():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def clean():
    assert modes() == (0, 0)
    assert not routing.enabled()
    yield
    assert modes() == (0, 0)
    assert not routing.enabled()


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
    torch.manual_seed(0)
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
    routing.enable()
    try:
        assert same(linear(x, w, bias), linear(x.contiguous(), w, bias))
        assert same(linear(x, w, bias)[:1], linear(x[:1], w, bias))
    finally:
        routing.disable()


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
    assert {name.split(".")[0] for name in scope.passed} >= {"convolution"}
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


def test_exceptions_and_nesting_restore_the_state():
    a, b = randn(9, 300), randn(300, 20)
    plain, leaves, tree = a @ b, gemm(a, b), isogemm.matmul(a, b, contract="fma/tree4")
    with pytest.raises(ZeroDivisionError), invariant(LEAVES), invariant("fma/tree4"):
        raise ZeroDivisionError
    scope = invariant(LEAVES)
    with scope:
        assert same(a @ b, leaves)
        with invariant("fma/tree4"):
            assert same(a @ b, tree)
            with scope:
                assert same(a @ b, leaves)
            assert same(a @ b, tree)
        assert same(a @ b, leaves)
        with pytest.raises(ShapeError):
            a @ a
        assert same(a @ b, leaves)
    assert same(a @ b, plain)
    assert not routing.active()


def test_scopes_may_end_out_of_order():
    def routed(contract):
        with invariant(contract):
            yield

    a, b = randn(9, 300), randn(300, 20)
    first, second = routed(LEAVES), routed("fma/tree4")
    next(first), next(second)
    first.close()
    assert same(a @ b, isogemm.matmul(a, b, contract="fma/tree4"))
    second.close()
    assert modes() == (0, 0)


def test_a_decorated_generator_is_inside_only_while_it_runs():
    a, b = randn(9, 300), randn(300, 20)

    @invariant(LEAVES)
    def products():
        for _ in range(2):
            yield a @ b

    for y in products():
        assert modes() == (0, 0)
        assert same(y, gemm(a, b))

    @invariant(LEAVES)
    def product():
        return a @ b

    assert same(product(), gemm(a, b))
    with pytest.raises(OptionError, match="coroutine"):

        @invariant()
        async def later():
            return a @ b


def test_asynchronous_code_that_does_not_wait_inside():
    a, b = randn(9, 300), randn(300, 20)

    async def inside():
        await asyncio.sleep(0)
        with invariant(LEAVES):
            return a @ b

    async def both():
        return await asyncio.gather(inside(), asyncio.to_thread(torch.mm, a, b), inside())

    one, plain, two = asyncio.run(both())
    assert same(one, gemm(a, b))
    assert same(two, one)
    assert same(plain, torch.mm(a, b))


def test_two_threads_do_not_disturb_each_other():
    a, b, w = randn(40, 600), randn(600, 20), randn(20, 600, grad=True)
    plain, routed = a @ b, gemm(a, b)
    (plain_grad,) = torch.autograd.grad((a @ w.T).square().sum(), w)
    with invariant(LEAVES):
        (routed_grad,) = torch.autograd.grad((a @ w.T).square().sum(), w)
    assert not same(plain, routed)
    assert not same(plain_grad, routed_grad)
    wrong, barrier = [], threading.Barrier(4)

    def run(inside):
        barrier.wait()
        for _ in range(60):
            if inside:
                with invariant(LEAVES):
                    y, (g,) = a @ b, torch.autograd.grad((a @ w.T).square().sum(), w)
            else:
                y, (g,) = a @ b, torch.autograd.grad((a @ w.T).square().sum(), w)
            ok = same(y, routed if inside else plain) and same(g, routed_grad if inside else plain_grad)
            if not ok or modes() != (0, 0):
                wrong.append(inside)

    threads = [threading.Thread(target=run, args=(i % 2 == 0,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_leaving_on_another_thread_is_an_error():
    scope, raised = invariant(), []

    def leave():
        try:
            scope.__exit__(None, None, None)
        except OptionError as error:
            raised.append(error)

    with scope:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert routing.active()
    assert len(raised) == 1


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_enable_routes_every_thread_and_disable_gives_torch_back(inference):
    a, w, bias = randn(2, 40, 600).transpose(0, 1), randn(20, 600, grad=True), randn(20)
    linear = torch.nn.functional.linear
    got = {}

    def run(key):
        with torch.inference_mode(inference):
            y = linear(a, w, bias)
        got[key] = (y, None if inference else torch.autograd.grad(y.square().sum(), w)[0])

    run("before")
    routing.enable("fma/tree4")
    try:
        routing.enable(LEAVES)
        assert routing.active()
        run("inside")
        thread = threading.Thread(target=run, args=("thread",))
        thread.start()
        thread.join()
        with invariant("fma/tree4"):
            run("tree")
        double = a.double() @ w.double().T
        half = torch.addmm(torch.zeros(20).half(), a[0].half(), w.half().T)
    finally:
        routing.disable()
        routing.disable()
    run("after")
    rows = a.reshape(80, 600)
    assert same(got["inside"][0].reshape(80, 20), gemm(rows, w.T, bias=bias))
    tree = isogemm.linear(rows, w.detach(), bias, contract="fma/tree4")
    assert same(got["tree"][0].reshape(80, 20), tree)
    assert torch.equal(double, a.double() @ w.double().T)
    assert same(half, gemm(a[0].half(), w.half().T))
    for first, second in (("inside", "thread"), ("before", "after")):
        assert same(got[first][0], got[second][0])
        assert inference or same(got[first][1], got[second][1])
    assert not same(got["before"][0], got["inside"][0])


BACKENDS = ["aot_eager", "inductor"]


@pytest.mark.parametrize("warm", [False, True], ids=["first inside", "compiled before"])
@pytest.mark.parametrize("scoped", [True, False], ids=["invariant", "enable"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of its compiler
def test_a_compiled_function_keeps_the_bits(backend, scoped, warm):
    """torch runs it eagerly: compiled code that was made before is not used."""
    a, w = randn(3, 1, 600), randn(3, 600, 20, grad=True)  # a product that inductor writes a loop of its own for
    torch.compiler.reset()
    if backend == "inductor" and warm and not shutil.which("c++"):
        pytest.skip("no C++ compiler here: nothing can have been compiled before")

    def plain(a, w):
        return torch.relu(torch.bmm(a, w)) + 1

    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(plain, backend=counter)
    expected = torch.relu(torch.stack([gemm(x, y) for x, y in zip(a, w, strict=True)])) + 1
    if warm:
        assert not same(compiled(a, w), expected)
    assert counter.frame_count == warm
    if scoped:
        with invariant(LEAVES):
            y = compiled(a, w)
            (g,) = torch.autograd.grad(y.sum(), w)
    else:
        routing.enable(LEAVES)
        try:
            y = compiled(a, w)
            (g,) = torch.autograd.grad(y.sum(), w)
        finally:
            routing.disable()
    assert same(y, expected)
    dy = (expected > 1).float()
    assert same(g, torch.stack([gemm(x.T, d) for x, d in zip(a, dy, strict=True)]))
    assert counter.frame_count == warm
    torch.compiler.reset()


def test_compiling_a_whole_graph_inside_is_an_error():
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: a @ b, backend="aot_eager", fullgraph=True)
    with invariant(), pytest.raises((RuntimeError, OptionError), match=r"torch\.compile|invariant"):
        compiled(randn(4, 4), randn(4, 4))
    torch.compiler.reset()


def test_a_scope_inside_of_compiled_code_is_routed_or_refused():
    a, b = randn(9, 600), randn(600, 20)
    torch.compiler.reset()

    def inner(a, b):
        with invariant(LEAVES):
            return torch.relu(a @ b)

    try:
        y = torch.compile(inner, backend="aot_eager")(a, b)
    except OptionError:
        return
    finally:
        torch.compiler.reset()
    assert same(y, torch.relu(gemm(a, b)))


def test_subclasses_find_the_mode_for_their_own_products():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*[x.inner if isinstance(x, Wrapper) else x for x in args], **(kwargs or {}))

    a, b = randn(9, 300), randn(300, 20)
    with invariant(LEAVES) as scope:
        y = torch.mm(Wrapper(a), b)
    assert scope.routed == {"mm": 1}
    assert same(y, gemm(a, b))


def test_nested_tensors_are_routed():
    layer = torch.nn.Linear(300, 20)
    parts = [randn(3, 300), randn(2, 300)]
    with invariant(LEAVES) as scope:
        y = layer(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert scope.routed.total() == 1
    assert same(y.values(), gemm(torch.cat(parts), layer.weight.T, bias=layer.bias.detach()))


def test_a_trace_inside_is_an_error_and_shapes_are_not():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b = randn(9, 30), randn(30, 9)
    for mode in ("real", "fake"):
        with invariant(), pytest.raises(OptionError, match="trace"):
            make_fx(lambda x, y: x @ y, tracing_mode=mode)(a, b)
    with invariant(), FakeTensorMode() as fake:
        assert (fake.from_tensor(a) @ fake.from_tensor(b)).shape == (9, 9)
    with FakeTensorMode() as fake, invariant():
        assert (fake.from_tensor(a) @ fake.from_tensor(b)).shape == (9, 9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_program_is_torchs_and_routed_where_it_runs():
    layer, x = torch.nn.Linear(300, 20), randn(9, 300)
    with invariant(LEAVES):
        program = torch.export.export(layer, (x,)).module()
    outside = program(x)
    with invariant(LEAVES):
        assert same(program(x), gemm(x, layer.weight.T, bias=layer.bias.detach()))
    assert same(program(x), outside)
    torch.compiler.reset()


def test_vmap_is_routed():
    a, b = randn(5, 9, 300), randn(300, 20)
    with invariant(LEAVES) as scope:
        y = torch.func.vmap(lambda x: x @ b)(a)
    assert scope.routed.total() == 1
    assert same(y, torch.stack([gemm(x, b) for x in a]))


def test_a_torch_that_cannot_give_its_kernels_back_is_left_alone(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(OptionError, match="get_kernel"):
        isogemm.torch.enable()
    assert not isogemm.torch.enabled()

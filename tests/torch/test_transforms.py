"""torch.func and forward mode over isogemm's functions and layers: right, or refused in words; never silently wrong."""

from __future__ import annotations

import pytest
from tests.quant.draws import encoded
from tests.torch.tensors import randn

import isogemm
from isogemm.errors import LayoutError, OptionError
from isogemm.formats import reference

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402

F = torch.func
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about itself


W, B, X = randn(5, 64), randn(5, seed=1), randn(3, 64, seed=2)
QUANTIZED = encoded(W.numpy(), "Q4_0")
FLOATS = torch.from_numpy(reference.dequantize(QUANTIZED.rows, QUANTIZED.format))
LAYER = iso.QuantizedLinear(QUANTIZED, B.clone(), activations="fp32")

# A function, and the matrix that it multiplies with.
PRODUCTS = {
    "linear": (lambda x: iso.linear(x, W, B), W),
    "Linear": (iso.convert(torch.nn.Sequential(torch.nn.Linear(64, 5))).module, None),
    "of blocks": (lambda x: iso.linear(x, QUANTIZED, B, activations="fp32"), FLOATS),
    "QuantizedLinear": (LAYER, FLOATS),
    "addmm": (lambda x: iso.addmm(B, x, W.T), W),
    "bmm": (lambda x: iso.bmm(x[None], W.T[None])[0], W),
}
TABLES = iso.reductions.rope_tables(torch.arange(3), 64)
ROWS = {
    "rms_norm": lambda x: iso.reductions.rms_norm(x, torch.ones(64)),
    "softmax": iso.reductions.softmax,
    "log_softmax": iso.reductions.log_softmax,
    "silu": iso.reductions.silu,
    "sum": iso.reductions.sum,
    "cross_entropy": lambda x: iso.reductions.cross_entropy(x, torch.tensor([0, 63, -100])),
    "rope": lambda x: iso.reductions.rope(x, *TABLES),
    "add_rms_norm": lambda x: iso.reductions.add_rms_norm(x, x, torch.ones(64))[0],
    "silu_mul": lambda x: iso.reductions.silu_mul(x, x),
    "RMSNorm": iso.RMSNorm(64),
    "LayerNorm": iso.LayerNorm(64),
}
ATTENTION = {"attention": lambda x: iso.attention(*[x.view(1, 1, 3, 64)] * 3)}


def cubed(f):
    return lambda x: f(x).pow(3).sum()


def same(x, y) -> None:
    assert x.shape == y.shape
    assert torch.equal(x.detach().view(torch.int32), y.detach().view(torch.int32))


FORWARD_MODE = {
    "jvp": lambda f: F.jvp(f, (X,), (X,)),
    "jacfwd": lambda f: F.jacfwd(f)(X),
    "hessian": lambda f: F.hessian(f)(X),
    "linearize": lambda f: F.linearize(f, X),
    "dual": lambda f: torch.autograd.functional.jacobian(f, X, vectorize=True, strategy="forward-mode"),
}


@pytest.mark.parametrize("mode", FORWARD_MODE)
@pytest.mark.parametrize("name", [*PRODUCTS, *ROWS, *ATTENTION])
def test_forward_mode_is_refused_in_words(name, mode):
    f = PRODUCTS[name][0] if name in PRODUCTS else {**ROWS, **ATTENTION}[name]
    with pytest.raises(OptionError, match=r"forward-mode gradients|under a transform of torch\.func"):
        FORWARD_MODE[mode](cubed(f))


@pytest.mark.parametrize(
    "name", ["linear", "addmm", "QuantizedLinear", "rms_norm", "rope", "cross_entropy", "attention"]
)
def test_forward_mode_is_refused_in_compiled_code(name):
    """Where tangents would be zeros: torch takes an operator that has none for a constant."""
    torch._dynamo.reset()
    f = PRODUCTS[name][0] if name in PRODUCTS else (ROWS | ATTENTION)[name]
    with pytest.raises(Exception, match="forward-mode gradients"):
        torch.compile(lambda: F.jvp(f, (X,), (X,)), backend="aot_eager")()


@pytest.mark.parametrize("name", ["linear", "addmm", "rms_norm"])
def test_compiled_transforms_keep_gradients_of_what_they_close_over(name):
    """Of x, which the transform takes for a constant."""
    f = PRODUCTS[name][0] if name in PRODUCTS else ROWS[name]

    def call(x):
        return F.grad(lambda z: (z * f(x).sum()).sum())(X)

    torch._dynamo.reset()
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    torch.compile(call, backend="aot_eager")(x).sum().backward()
    (f(other).sum() * torch.ones_like(X)).sum().backward()
    same(x.grad, other.grad)


@pytest.mark.parametrize("call", [
    lambda x: isogemm.linear(x, torch.ones(2, 3)), lambda x: isogemm.matmul(torch.ones(2, 3), x),
    lambda x: isogemm.gemm_batched([torch.ones(3, 3)], [x])[0],
])  # fmt: skip
def test_functions_of_arrays_lose_no_tangent(call):
    x = torch.ones(3, 3)
    call(x)  # like one before
    with torch.autograd.forward_ad.dual_level():
        call(x)
        with pytest.raises(OptionError, match="forward-mode"):
            call(torch.autograd.forward_ad.make_dual(x, x))


def test_forward_mode_goes_through_products_that_are_routed():
    """torch's own formulas make tangents of products, and these are invariant as well."""
    x, tangent, w = torch.randn(5, 3), torch.randn(5, 3), torch.randn(3, 4)
    with iso.invariant():
        y, dy = torch.func.jvp(lambda x: x @ w, (x,), (tangent,))
        same(y, x @ w)
        same(dy, tangent @ w)
        same(torch.func.jacfwd(lambda x: x @ w)(x[:1])[0, :, 0], w.T)
        with torch.autograd.forward_ad.dual_level():
            made = torch.nn.functional.linear(torch.autograd.forward_ad.make_dual(x, tangent), w.T.contiguous())
            same(torch.autograd.forward_ad.unpack_dual(made).tangent, dy)


@pytest.mark.parametrize("name", PRODUCTS)
def test_reverse_mode_has_the_bits_of_autograd(name):
    f = PRODUCTS[name][0]
    x = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(cubed(f)(x), x)
    same(F.grad(cubed(f))(X), want)
    y, back = F.vjp(cubed(f), X)
    same(back(torch.ones_like(y))[0], want)
    same(F.jacrev(cubed(f))(X), want)
    same(F.vmap(F.grad(cubed(f)))(torch.stack([X, 2 * X]))[0], want)
    same(F.grad(lambda x: F.vmap(cubed(f))(x).sum())(torch.stack([X, 2 * X]))[0], want)
    rows = F.jacrev(f)(X)
    same(rows, torch.autograd.functional.jacobian(f, X))


@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivatives_in_reverse_mode(name):
    f, w = PRODUCTS[name]
    found = F.jacrev(F.jacrev(cubed(f)))(X)
    same(found, torch.autograd.functional.hessian(cubed(f), X))
    w = (f[0].weight.detach() if w is None else w).double()
    y = f(X).detach().double()
    want = 6 * torch.einsum("in,ij,nk,nl->ikjl", y, torch.eye(3).double(), w, w)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [*PRODUCTS, *ATTENTION])
def test_functionalize_changes_nothing(name):
    f = PRODUCTS[name][0] if name in PRODUCTS else ATTENTION[name]
    same(F.functionalize(f)(X), f(X))
    with torch.no_grad():
        same(F.functionalize(f)(X), f(X))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    "transform",
    [F.grad, F.jacrev, F.functionalize, F.vmap, lambda f: F.vmap(F.grad(f))],
    ids=["grad", "jacrev", "functionalize", "vmap", "vmap of grad"],  # names, not addresses: workers collect the same
)
def test_rows_are_refused_under_transforms(name, transform):
    """They read memory that a transform's tensors do not have."""
    x = torch.stack([X, X]) if transform not in (F.grad, F.jacrev, F.functionalize) else X
    with pytest.raises(OptionError, match=r"under a transform of torch\.func: limit: autograd"):
        transform(cubed(ROWS[name]))(x)


def test_rows_of_constants_work_under_transforms():
    """Under vmap, that is; for grad every tensor is one of its own."""
    want = iso.reductions.softmax(X)
    same(F.vmap(lambda row: row + iso.reductions.softmax(X))(torch.zeros(2, 3, 64))[1], want)
    with pytest.raises(OptionError, match="softmax under a transform"):
        F.grad(lambda b: iso.linear(iso.reductions.softmax(X), W, b).sum())(B)


@pytest.mark.parametrize("name", [*ROWS, *ATTENTION])
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.pow(3).sum()], ids=["sum", "cubes"])
def test_second_derivatives_that_there_are_not_are_no_zeros(name, loss):
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss({**ROWS, **ATTENTION}[name](x)), x, create_graph=True)
    (plain,) = torch.autograd.grad(loss({**ROWS, **ATTENTION}[name](x)), x)
    same(g, plain)
    with pytest.raises(OptionError, match="limit: one derivative; got: a second one"):
        torch.autograd.grad(g.sum(), x)
    with pytest.raises(OptionError, match="limit: one derivative; got: a second one"):
        (g.pow(2).sum() + x.sum()).backward(retain_graph=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_batches_of_gradients_are_refused_in_words(name):
    x = X.clone().requires_grad_()
    with pytest.raises(LayoutError, match=r"got: a batch of gradients; nearest legal choice: vectorize=False"):
        torch.autograd.grad(PRODUCTS[name][0](x), x, torch.ones(2, 3, 5), is_grads_batched=True)


def test_blocks_that_functional_call_hands_over_are_used():
    other = isogemm.quantize(-W, "Q4_0")
    blocks, bias = torch.from_numpy(other.rows), torch.zeros(5)
    want = isogemm.linear(X, other, bias, activations="fp32")
    same(F.functional_call(LAYER, {"blocks": blocks, "bias": bias}, (X,)), want)
    with torch.no_grad():
        same(F.functional_call(LAYER, {"blocks": blocks, "bias": bias}, (X,)), want)
    same(LAYER(X), isogemm.linear(X, QUANTIZED, B, activations="fp32"))


@pytest.mark.parametrize("transform", [F.jacrev, F.grad], ids=["jacrev", "grad"])
def test_matrices_outlive_the_transform_that_first_used_them(transform):
    fresh = isogemm.quantize(W, "Q4_0")

    def loss(x):
        return iso.linear(x, fresh, B, activations="fp32").pow(2).sum()

    first = transform(loss)(X)
    x = X.clone().requires_grad_()
    loss(x).backward()
    assert torch.equal(first, x.grad)
    assert torch.equal(transform(loss)(X), first)


def test_ensembles():
    layers = [torch.nn.Linear(64, 5) for _ in range(3)]
    want = torch.stack([iso.linear(X, layer.weight, layer.bias) for layer in layers])
    for layer in layers:
        iso.convert(torch.nn.Sequential(layer))
    found, buffers = F.stack_module_state(layers)
    same(F.vmap(lambda p: F.functional_call(layers[0], p, (X,)))(found), want)
    quantized = [iso.QuantizedLinear(QUANTIZED, B.clone()) for _ in range(3)]
    found, buffers = F.stack_module_state(quantized)
    with pytest.raises(OptionError, match="vmap over a quantized weight"):
        F.vmap(lambda p, b: F.functional_call(quantized[0], (p, b), (X,)))(found, buffers)

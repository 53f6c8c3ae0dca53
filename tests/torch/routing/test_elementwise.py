"""Functions of elements on the CPU: inside a scope an element has the same bits at every place, in every layout."""

from __future__ import annotations

import pytest
from tests.torch.routing.routed import SCOPED, bits, within

torch = pytest.importorskip("torch")

from isogemm.torch.routing.elementwise import EXACT, form  # noqa: E402
from isogemm.torch.routing.scope import invariant  # noqa: E402

F, aten = torch.nn.functional, torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROOM = 33_970  # two threads, whose shares end in an odd number of half steps

TORCH = (
    "sigmoid exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh atanh erf erfc rsqrt "
    "sqrt reciprocal neg abs square logit sinc"
)
FUNCTIONAL = "silu gelu softplus mish elu selu celu relu hardswish hardsigmoid"
UNARY = {
    **{name: getattr(torch, name) for name in TORCH.split()},
    **{name: getattr(F, name) for name in FUNCTIONAL.split()},
    "acosh": lambda x: torch.acosh(1 + x),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "power 1.5": lambda x: x**1.5,
    "power -0.5": lambda x: x**-0.5,
    "power 2": lambda x: x**2,
    "base": lambda x: 2.0**x,
    "1 - x": lambda x: 1 - x,
    "x * 0.3": lambda x: x * 0.3,
    "x / 3": lambda x: x / 3,
    "alpha": lambda x: torch.add(x, x, alpha=0.3),
    "minus alpha": lambda x: x.sub(x, alpha=0.3),
    "atan2": lambda x: torch.atan2(x, x + 0.1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 0.1, value=0.3),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "silu backward": lambda x: aten.silu_backward(x, x + 0.1),
    "gelu backward": lambda x: aten.gelu_backward(x, x + 0.1),
    "softplus backward": lambda x: aten.softplus_backward(x, x + 0.1, 1.0, 20.0),
    "sigmoid backward": lambda x: aten.sigmoid_backward(x, x),
    "tanh backward": lambda x: aten.tanh_backward(x, x),
    "in place": lambda x: F.silu(x.clone(), inplace=True),
    "out": lambda x: torch.sigmoid(x, out=torch.full(x.shape, float("nan"), dtype=x.dtype)),
    "into strides": lambda x: torch.sigmoid(x, out=torch.full((*x.shape, 2), float("nan"), dtype=x.dtype)[..., 0]),
}


def places(f, x):
    """How many elements have other bits somewhere else."""
    whole = bits(f(x))
    strided = torch.stack([x, x], 1)[:, 0]
    found = {
        "alone": torch.cat([bits(f(x[i : i + 1])) for i in range(40)]) != whole[:40],
        "in fives": torch.cat([bits(f(x[i : i + 5])) for i in range(0, 200, 5)]) != whole[:200],
        "shifted": bits(f(x[3:])) != whole[3:],
        "strided": bits(f(strided)) != whole,
        "transposed": bits(f(x[:10_000].view(100, 100).T)).T.reshape(-1) != whole[:10_000],
    }
    threads = torch.get_num_threads()
    for n in (1, 2):
        torch.set_num_threads(n)
        found[f"{n} threads"] = bits(f(x)) != whole
    torch.set_num_threads(threads)
    return {name: int(d.sum()) for name, d in found.items() if d.any()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@SCOPED
def test_an_element_has_its_bits_anywhere(dtype, scoped):
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(ROOM, generator=generator) * 0.9 + 0.05).to(dtype)
    differ = {name for name, f in UNARY.items() if places(f, x)}
    plain = {name: f(x) for name, f in UNARY.items()}
    wrong = {}
    skipped = set() if scoped else {"alpha", "minus alpha"}  # sums are left alone by enable
    for name in UNARY.keys() - skipped:
        with within(scoped):
            found, y = places(UNARY[name], x), UNARY[name](x)
        if found:
            wrong[name] = found
        torch.testing.assert_close(y, plain[name], rtol=2e-2, atol=2e-2, msg=name)
    assert not wrong
    expected = {
        torch.float32: {"silu", "sigmoid", "gelu", "softplus", "power 1.5", "sinh", "silu backward"},
        torch.bfloat16: {"rsqrt", "power -0.5", "alpha"},
        torch.float16: {"rsqrt", "alpha"},
    }
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert differ >= expected[dtype], "torch has changed: this test proves nothing"


def test_operands_that_broadcast_and_numbers_that_take_no_part():
    x, y = torch.rand(7, 1), torch.rand(1, 65)
    with invariant():
        z = torch.atan2(x, y)
        assert z.shape == (7, 65)
        assert torch.equal(torch.atan2(x[2:3], y), z[2:3])
        half = torch.rand(70).bfloat16()
        assert torch.pow(half, torch.tensor(1.5)).dtype is torch.bfloat16
        assert torch.pow(torch.tensor(2.0), half).dtype is torch.bfloat16
        assert torch.rand(()).sigmoid().shape == ()
        assert torch.rand(3, 0).sigmoid().shape == (3, 0)
        assert torch.sigmoid(torch.arange(3)).dtype is torch.float32
        assert torch.sigmoid(torch.rand(5, dtype=torch.complex64)).dtype is torch.complex64
        wrong_shape = torch.empty(0)
        assert torch.sigmoid(torch.rand(5), out=wrong_shape) is wrong_shape
        assert wrong_shape.shape == (5,)


def test_gradients_through_them():
    x = torch.randn(5, 33, requires_grad=True)
    with invariant():
        (whole,) = torch.autograd.grad(F.silu(x).square().sum(), x)
        (alone,) = torch.autograd.grad(F.silu(x[2:3]).square().sum(), x)
    assert torch.equal(bits(whole[2]), bits(alone[2]))
    torch.testing.assert_close(whole, torch.autograd.grad(F.silu(x).square().sum(), x)[0])


def test_the_list_of_exact_operators_is_of_torchs_own():
    for name in EXACT:
        packet = getattr(aten, name)
        assert any(form(getattr(packet, o)) for o in packet.overloads() if o not in ("int", "t", "str")), name
    assert form(aten.silu.default) == form(aten.rsqrt.default) == "blocked"
    assert form(aten.mul.Tensor) == form(aten.exp.default) == "exact"
    assert form(aten.sum.default) == form(aten.bernoulli.p) == form(aten.equal.default) == ""

"""Routing where torch sees a program: compiled, traced, exported, by subclasses, nested tensors and vmap."""

from __future__ import annotations

import shutil

import pytest
from tests.torch.routing.routed import LEAVES, SCOPED, clean, gemm, randn, same, within  # noqa: F401

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

from isogemm.torch.routing.scope import invariant  # noqa: E402

BACKENDS = ["aot_eager", "inductor"]


@pytest.mark.parametrize("warm", [False, True], ids=["first inside", "compiled before"])
@SCOPED
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
    with within(scoped, LEAVES):
        y = compiled(a, w)
        (g,) = torch.autograd.grad(y.sum(), w)
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

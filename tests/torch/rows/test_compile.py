"""Operations along rows under torch.compile: one graph, the same bits, and no gradient that would go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
reductions = pytest.importorskip("isogemm.torch.reductions")
from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from isogemm.torch import linear  # noqa: E402
from isogemm.torch.operator import apart  # noqa: E402
from isogemm.torch.rows.signature import signature  # noqa: E402
from isogemm.torch.rows.table import summed  # noqa: E402

X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
COS, SIN = reductions.rope_tables(torch.arange(6), 40)
CASES: dict[str, Callable[[Any], Any]] = {
    "rms_norm": lambda x: reductions.rms_norm(x * 2, x[0], 1e-3),
    "layer_norm": lambda x: reductions.layer_norm(x, None, x[1], 1e-3),
    "softmax": lambda x: reductions.softmax(x.bfloat16()),
    "log_softmax": lambda x: reductions.log_softmax(x),
    "cross_entropy": lambda x: reductions.cross_entropy(x.half(), torch.tensor([0, 39, -100, 5, 7, 7])),
    "sum": lambda x: reductions.sum(x),
    "mean": lambda x: reductions.mean(x, keepdim=True, out_dtype=torch.bfloat16),
    "silu_mul": lambda x: reductions.silu_mul(x, x + 1),
    "silu": lambda x: reductions.silu(x),
    "add_rms_norm": lambda x: torch.cat(reductions.add_rms_norm(x, x + 1, x[0]), -1),
    "rope": lambda x: reductions.rope(x, COS, SIN),
    "rope_pair": lambda x: torch.cat(reductions.rope_pair(x, x + 1, COS, SIN)),
    "norm_rope_pair": lambda x: torch.cat(reductions.norm_rope_pair(x, x + 1, x[0], None, COS, SIN)),
    "rope_interleaved": lambda x: reductions.rope(x.half(), COS, SIN, interleaved=True),
    "embedding": lambda x: reductions.embedding(torch.tensor([[5, 0], [2, 2]]), x),
}


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_one_graph_has_the_eager_bits(name):
    with torch.no_grad():
        got = torch.compile(CASES[name], fullgraph=True, backend="aot_eager")(X)
    want = CASES[name](X)
    assert got.dtype is want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_have_fake_results(name, inside):
    """Of shapes without memory, whether torch's mode for them is on or they were made in one."""

    def called(x):
        y = CASES[name](x)
        (dx,) = torch.autograd.grad(y.sum(), x) if x.requires_grad else (None,)
        return y, dx

    for grad in (False, True):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        x = mode.from_tensor(X).requires_grad_(grad)
        with mode if inside else nullcontext():
            got = called(x)
        for fake, real in zip(got, called(X.clone().requires_grad_(grad)), strict=True):
            if real is None:
                assert fake is None
                continue
            assert isinstance(fake, FakeTensor)
            assert (fake.shape, fake.dtype, fake.requires_grad) == (real.shape, real.dtype, real.requires_grad)


@pytest.mark.parametrize("name", ["add_rms_norm", "rope_pair", "norm_rope_pair", "softmax"])
def test_fake_tensors_of_a_device_that_is_not_there(name):
    """No kernel is asked for, and none for several operations."""
    with FakeTensorMode():
        x, w, cos, sin = (torch.empty(shape, device="cuda") for shape in ((6, 40), (40,), (6, 20), (6, 20)))
        calls = {
            "add_rms_norm": lambda: reductions.add_rms_norm(x, x, w)[0],
            "rope_pair": lambda: reductions.rope_pair(x, x, cos, sin)[1],
            "norm_rope_pair": lambda: reductions.norm_rope_pair(x, x, w, w, cos, sin)[1],
            "softmax": lambda: reductions.softmax(x),
        }
        y = calls[name]()
    assert isinstance(y, FakeTensor)
    assert (y.shape, y.device.type) == (x.shape, "cuda")


FUSED = {
    "rope_pair": (X, X[None], COS, SIN, False, None),
    "norm_rope_pair": (X[:, None], X.bfloat16(), X[0], None, COS[:1], SIN[:1], 1e-3, True, torch.float32),
    "add_rms_norm": (X, X.bfloat16(), X[0], 1e-3, None),
}
SINGLE = {
    "rms_norm": (X.mT.contiguous().mT, X[0].half(), 1e-3, None),
    "layer_norm": (X, None, X[0], 1e-3, torch.bfloat16),
    "softmax": (X, torch.float16),
    "sum": (X, False, None),
    "mean": (X, True, torch.bfloat16),
    "silu_mul": (X, X, None),
    "add": (X, X.bfloat16(), None),
    "rope": (X, COS, SIN, True, None),
    "embedding": (X, torch.tensor([[5, 0], [2, 2]])),
}


@pytest.mark.parametrize("name", [*FUSED, *SINGLE])
def test_operators_without_gradients_keep_the_rules(name):
    operator = getattr(torch.ops.isogemm, f"{name}_forward").default
    torch.library.opcheck(operator, (FUSED | SINGLE)[name])
    if name == "add_rms_norm":
        torch.library.opcheck(operator, (*FUSED[name][:-1], torch.float16))


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_one_operator_where_no_gradient_is_recorded(name):
    seen: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes if str(n.target).startswith("isogemm"))
        return graph

    call = torch.compile(CASES[name], fullgraph=True, backend=backend)
    with torch.inference_mode():
        assert torch.equal(call(X), CASES[name](X))
    assert seen == [f"isogemm.{name.removesuffix('_interleaved')}_forward.default"]


def found(call: Any, name: str, buffered: bool) -> list[Any]:
    """A result, and the gradients of its operands: of each use of x, or what the buffers took."""
    x = X.clone().requires_grad_()
    buffer = torch.full((40,), 0.5) if buffered else None
    if buffered:
        weight = X[3].clone().requires_grad_()
        weight.main_grad = buffer
        y = call(x, weight)
    else:
        y = call(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *([buffer] if buffered else [])]


@pytest.mark.parametrize("name", CASES)
def test_compiled_gradients_have_the_eager_bits(name):
    compiled = torch.compile(CASES[name], fullgraph=True, backend="aot_eager")
    for got, want in zip(found(compiled, name, False), found(CASES[name], name, False), strict=True):
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_no_count_of_rows_becomes_a_constant(name):
    """Beside tables and classes of one shape, too: torch refuses to make a constant of what is marked."""
    x = X.clone().requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(CASES[name], fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_compiled_gradients_go_to_buffers(name):
    def call(x: Any, weight: Any) -> Any:
        return getattr(reductions, name)(x, weight)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(found(compiled, name, True), found(call, name, True), strict=True):
        assert torch.equal(got, want)


def test_gradients_have_memory_of_their_own():
    dy, x, y = torch.randn(3, 4), X[:3, :4], X[3:6, :4]

    def back(needs: list[bool]) -> Any:
        return torch.ops.isogemm.add_backward(dy, x, y, needs, None)

    dx, other = back([True, True])
    assert torch.equal(dx, dy)
    assert torch.equal(other, dy)
    assert len({t.untyped_storage().data_ptr() for t in (dy, dx, other)}) == 3
    assert [t.numel() for t in back([True, False])] == [12, 0]
    assert apart(x, dy).data_ptr() != x.data_ptr()  # not dense
    assert apart(dy, x, None, dy).data_ptr() != dy.data_ptr()
    assert apart(dy, x) is dy


def test_a_table_that_wants_a_gradient_is_refused():
    cos = COS.clone().requires_grad_()
    with pytest.raises(Exception, match="constants"):
        torch.compile(lambda x: reductions.rope(x, cos, SIN), backend="aot_eager")(X)


@pytest.mark.parametrize("kind", SINGLE)
def test_operators_with_a_gradient_keep_the_rules(kind):
    operator, back = (getattr(torch.ops.isogemm, name).default for name in (kind, f"{kind}_backward"))
    count, places = len(signature(kind).operands), summed(kind)
    plain, options, none = SINGLE[kind][:count], SINGLE[kind][count:], [None] * len(places)
    options = (*options, "leaf2") if kind in ("rms_norm", "layer_norm") else options
    needs = [t is not None and (i == 0 or kind not in ("rope", "embedding")) for i, t in enumerate(plain)]
    leaves = [t.clone().requires_grad_() if need else t for t, need in zip(plain, needs, strict=True)]
    torch.library.opcheck(operator, (*leaves, *none, *options))
    dy = torch.ones_like(operator(*plain, *none, *options))
    torch.library.opcheck(back, (dy, *plain, needs, *options))
    if places:
        into = getattr(torch.ops.isogemm, f"{kind}_backward_").default
        buffers = [None if plain[i] is None else torch.zeros(plain[i].shape) for i in places]
        torch.library.opcheck(into, (dy, *plain, *buffers, needs, *options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_buffer_of_what_is_no_sum_over_rows_is_left_alone(backend):
    parameter = torch.nn.Parameter(X.clone())
    parameter.main_grad = torch.full(X.shape, 7.0)
    torch.compile(lambda: reductions.softmax(parameter).square().sum(), fullgraph=True, backend=backend)().backward()
    compiled, parameter.grad = parameter.grad, None
    reductions.softmax(parameter).square().sum().backward()
    assert torch.equal(compiled, parameter.grad)
    assert (parameter.main_grad == 7).all()


def test_a_compilers_graphs_have_operators_without_gradients_that_write_nothing():
    """torch wraps what might write, and its inductor cannot unwrap an operator with one result."""
    seen: set[str] = set()

    def graph(module: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    x, w = X.clone().requires_grad_(), X[0].clone().requires_grad_()
    backend = aot_autograd(fw_compiler=graph, bw_compiler=graph)
    ids = torch.tensor([3, 1])
    call = torch.compile(lambda: linear(reductions.rms_norm(reductions.embedding(ids, x), w), X), backend=backend)
    call().sum().backward()
    names = "embedding_forward", "rms_norm_forward", "linear_forward", "product_forward"
    names += "rms_norm_backward", "embedding_backward"
    assert {name for name in seen if "isogemm" in name} == {f"isogemm.{name}.default" for name in names}
    assert not [name for name in seen if "functionalized" in name]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own
@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "cross_entropy", "embedding"])
def test_a_backward_pass_that_is_compiled_alone(name):
    def gradients() -> list[Any]:
        x, w = X.clone().requires_grad_(), X[0].clone().requires_grad_()
        w.main_grad = torch.ones(40)
        y = reductions.rms_norm(x * 1, w) if name == "rms_norm" else CASES[name](x)
        y.sum().backward()
        return [x.grad, w.main_grad]

    want = gradients()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        got = gradients()
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["softmax", "add_rms_norm", "cross_entropy"])
def test_a_dtype_has_any_name_in_compiled_code(name, grad):
    x, target = X.clone().requires_grad_(grad), torch.arange(6)
    more = {"softmax": (), "add_rms_norm": (X,), "cross_entropy": (target,)}[name]
    for dtype in ("bfloat16", np.float16, torch.float16):
        torch._dynamo.reset()
        call = lambda x, dtype=dtype: getattr(reductions, name)(x, *more, out_dtype=dtype)  # noqa: E731
        got, want = torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x)
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)


def test_tables_of_angles_are_part_of_a_graph():
    def call(x: Any) -> Any:
        return reductions.rope(x, *reductions.rope_tables(torch.arange(len(x)), 40, theta=500.0))

    x = X.clone().requires_grad_()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))
    torch.library.opcheck(torch.ops.isogemm.rope_tables_forward.default, (torch.tensor([[3], [0]]), 8, 1e4))
    assert reductions.rope_tables(torch.zeros(0, dtype=torch.int32), 8)[0].shape == (0, 4)

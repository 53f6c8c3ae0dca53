"""The operators: torch's own checks of them, and every way of calling a product against the definition."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.products import BF16, DTYPES, F32, assert_same, laid, product, stacked, values
from tests.products import LAYOUTS as laid_out

from isogemm.contract.spec import Contract
from isogemm.errors import ContractError, DTypeError, IsogemmError, OptionError, ShapeError
from isogemm.operands import views
from isogemm.operands.tensors import as_tensor

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch import operator  # noqa: E402

DEFAULTS = ("", "leaf4096", None)


def tensor(shape, dtype=F32, seed=0, layout="c", grad=False):
    """A tensor of `values` with that layout; a leaf of a graph with `grad`."""
    if layout == "broadcast":
        return tensor(shape, dtype, seed)[:1].expand(shape)
    x = laid(values(shape, dtype, seed=seed), layout)
    return as_tensor(x).requires_grad_(grad)


def array(x):
    return views.array("x", x.detach())


def cases(dtype=F32):
    """Arguments of every operator, with odd sizes, a transpose and C of several shapes."""
    x, w = tensor((3, 5, 33), dtype, 1, grad=True), tensor((7, 33), dtype, 2, grad=True)
    b, wide = tensor((7,), dtype, 3, grad=True), tensor((3, 33, 7), dtype, 4, grad=True)
    a = tensor((5, 33), dtype, 5, grad=True)
    return {
        "mm": (a, w.detach().mT.requires_grad_()),
        "bmm": (x, wide, 0.5),
        "addmm": (b, a, w.detach().mT.requires_grad_(), 1.0, 2.0),
        "baddbmm": (tensor((5, 1), dtype, 6, grad=True), x, wide, 0.5, 1.0),
        "linear": (x, w, b),
        "grouped": ([a, tensor((2, 33), dtype, 7, grad=True)], [wide.detach()[0], wide.detach()[1]], *DEFAULTS),
    }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", cases())
def test_opcheck(name, dtype):
    torch.library.opcheck(getattr(torch.ops.isogemm, name).default, cases(dtype)[name])


def test_opcheck_of_the_walk():
    out = torch.zeros(5, 7)
    torch.library.opcheck(torch.ops.isogemm.walk_.default, (tensor((5, 33)), tensor((33, 7)), out, "fma/leaf16"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_every_call_has_the_definition_s_bits(dtype, grad):
    a, w, x = tensor((5, 40), dtype, 1), tensor((7, 40), dtype, 2), tensor((3, 5, 40), dtype, 3)
    c, bias = tensor((5, 7), dtype, 4), tensor((7,), dtype, 5)
    for t in (a, w, x, c, bias):
        t.requires_grad_(grad)
    na, nw, nx, nc, nb = (array(t) for t in (a, w, x, c, bias))
    assert_same(array(iso.mm(a, w.mT)), product(na, nw.T))
    assert_same(array(iso.mm(a, w.mT, contract="fma/tree4")), product(na, nw.T, "fma/tree4"))
    assert_same(array(iso.bmm(x, x.mT)), stacked(nx, nx.swapaxes(1, 2)))
    want = product(na, nw.T, c=nc, alpha=0.5, beta=2)
    assert_same(array(iso.addmm(c, a, w.mT, alpha=0.5, beta=2)), want)
    assert_same(array(iso.addmm(bias, a, w.mT)), product(na, nw.T, bias=nb))
    wide = w.mT.expand(3, 40, 7)
    want = np.stack([product(item, nw.T, c=np.broadcast_to(nb, (5, 7)), alpha=3, beta=0.25) for item in nx])
    assert_same(array(iso.baddbmm(bias, x, wide, beta=0.25, alpha=3)), want)
    assert_same(array(iso.linear(x, w, bias)), product(nx.reshape(15, 40), nw.T, bias=nb).reshape(3, 5, 7))
    pair = iso.grouped([a, x[0, :2]], [w.mT, w.mT])
    assert_same(array(pair[0]), product(na, nw.T))
    assert_same(array(pair[1]), product(nx[0, :2], nw.T))
    assert all(y.requires_grad is grad for y in pair)
    assert iso.mm(a, w.mT, out_dtype=torch.float32).dtype is torch.float32


LAYOUTS = [layout for layout in laid_out if layout != "reversed"]  # torch has no negative strides


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), *[st.integers(0, 9)] * 3, st.sampled_from([F32, BF16]))
def test_any_strides(la, lb, m, k, n, dtype):
    a, b = tensor((m, k), dtype, 1, la), tensor((k, n), dtype, 2, lb)
    want = product(array(a), array(b))
    assert_same(array(iso.mm(a, b)), want)
    assert_same(array(torch.ops.isogemm.mm(a, b)), want)


def forms():
    return {
        "mm": (lambda a, b: iso.mm(a, b.mT), ("a", "w")),
        "bmm": (lambda x: iso.bmm(x, x.mT), ("x",)),
        "addmm": (lambda c, a, b: iso.addmm(c, a, b.mT, beta=0.5), ("bias", "a", "w")),
        "baddbmm": (lambda c, x: iso.baddbmm(c, x, x.mT, alpha=2.0), ("one", "x")),
        "linear": (lambda x, w, b: iso.linear(x, w, b, contract="fma/leaf16", grad_order="leaf8"), ("x", "w", "bias")),
        "grouped": (lambda a, x, w: torch.cat(iso.grouped([a, x[0]], [w.mT, w.mT])), ("a", "x", "w")),
    }


def operands(names, dtype=F32):
    shapes = {"a": (5, 40), "w": (7, 40), "x": (3, 6, 40), "bias": (7,), "one": (1, 6, 6)}
    return [tensor(shapes[name], dtype, seed, grad=True) for seed, name in enumerate(names)]


def run(f, names, dtype=F32):
    """Result and gradients."""
    made = operands(names, dtype)
    y = f(*made)
    y.float().pow(3).sum().backward()
    return [array(y), *(array(t.grad) for t in made)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", forms())
def test_operator_and_direct_call_agree(name, dtype, monkeypatch):
    f, names = forms()[name]
    direct = run(f, names, dtype)
    for name in ("is_plain", "is_direct"):
        monkeypatch.setattr(operator, name, lambda *tensors: False)
    for got, want in zip(run(f, names, dtype), direct, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in forms()), *((name, "inductor") for name in ("mm", "bmm", "linear"))],
)
@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled_has_the_same_bits(name, backend):
    if backend == "inductor" and not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("inductor needs a C++ compiler")
    f, names = forms()[name]
    want = run(f, names)
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for _ in range(2):
        for got, expected in zip(run(compiled, names), want, strict=True):
            assert_same(got, expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_with_a_contract_of_its_own():
    torch._dynamo.reset()
    x, w, contract = tensor((3, 40), seed=1), tensor((7, 40), seed=2), Contract.parse("fma/tree4")
    compiled = torch.compile(lambda x: iso.linear(x, w, contract=contract), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), iso.linear(x, w, contract="fma/tree4"))


@pytest.mark.filterwarnings("ignore")
def test_compiled_for_any_number_of_rows():
    torch._dynamo.reset()
    w, seen = tensor((7, 40), BF16, 1), []
    compiled = torch.compile(lambda x: iso.linear(x, w), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 2, 5, 33):
        seen.append(compiled(tensor((40, 40), BF16, 2)[:m])[0])
    assert all(torch.equal(seen[0], row) for row in seen)


@pytest.mark.parametrize("name", ["linear", "mm"])
def test_a_step_is_compiled_once_for_all_numbers_of_rows_but_the_first(name):
    w = tensor((7, 40), seed=1, grad=True)
    call = {"linear": lambda x: iso.linear(x, w), "mm": lambda x: iso.mm(x, w.mT)}[name]
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for m in (3, 4, 5, 9):
        compiled(tensor((m, 40), seed=2, grad=True)).sum().backward()
    assert graphs.frame_count == 2
    x = tensor((3, 40), seed=2, grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(call, fullgraph=True, backend="aot_eager")(x).sum().backward()  # no number of rows is a constant


def test_vmap_is_a_stack():
    x, w = tensor((4, 5, 40), seed=1), tensor((4, 7, 40), seed=2)
    c, bias = tensor((4, 5, 7), seed=3), tensor((4, 7), seed=4)
    for f, args, dims in (
        (lambda a, b: iso.mm(a, b.mT), (x, w), (0, 0)),
        (lambda a, b: iso.mm(a, b.mT), (x, w[0]), (0, None)),
        (lambda a, b: iso.mm(a.mT, b.mT), (x.permute(2, 1, 0), w), (2, 0)),
        (iso.linear, (x, w[0], bias[0]), (0, None, None)),
        (iso.linear, (x[0], w, bias), (None, 0, 0)),
        (iso.linear, (x, w), (0, 0)),
        (iso.linear, (x[0], w[0], bias), (None, None, 0)),
        (iso.linear, (x, w[0], bias.mT), (None, None, 1)),
        (lambda z, a, b: iso.addmm(z, a, b.mT, beta=0.5), (c, x, w), (0, 0, 0)),
        (lambda z, a, b: iso.addmm(z, a, b.mT, alpha=2.0), (bias, x, w[1]), (0, 0, None)),
        (lambda z, a, b: iso.addmm(z, a, b.mT), (bias, x[0], w[0]), (0, None, None)),
        (lambda z, a, b: iso.baddbmm(z, a, b.mT, beta=0.5), (c[:, None], x, w), (0, None, None)),
        (lambda a, b: iso.bmm(a, b), (x.expand(2, 4, 5, 40), w.mT), (0, None)),
        (lambda z, a: iso.baddbmm(z, a, a.mT), (bias[:, :1, None], x.expand(2, 4, 5, 40)), (None, 0)),
    ):
        got = torch.vmap(f, dims)(*args)
        size = next(t.shape[d] for t, d in zip(args, dims, strict=True) if d is not None)
        want = [f(*[t if d is None else t.select(d, i) for t, d in zip(args, dims, strict=True)]) for i in range(size)]
        assert_same(array(got), array(torch.stack(want)))


def test_torch_func():
    x, w = tensor((4, 5, 40), seed=1), tensor((7, 40), seed=2)

    def gradient(w, x):
        return torch.func.grad(lambda w: iso.linear(x, w).pow(3).sum())(w)

    leaf = w.clone().requires_grad_()
    iso.linear(x[1], leaf).pow(3).sum().backward()
    assert_same(array(gradient(w, x[1])), array(leaf.grad))
    assert_same(array(torch.vmap(gradient, (None, 0))(w, x)[1]), array(leaf.grad))
    outer = torch.func.grad(lambda w: torch.vmap(iso.linear, (0, None))(x, w).pow(3).sum())(w)
    torch.testing.assert_close(outer, sum(gradient(w, item) for item in x))


@pytest.mark.filterwarnings(
    "ignore:.*functools.lru_cache", "ignore:The .grad attribute"
)  # of torch's in its transforms
@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev"])
def test_compiled_torch_func(transform):
    x, w = tensor((4, 40), seed=1), tensor((7, 40), seed=2)
    call = {
        "grad": torch.func.grad(lambda x: iso.linear(x, w).pow(3).sum()),
        "vmap": torch.func.vmap(torch.func.grad(lambda x: iso.mm(x[None], w.mT).pow(3).sum())),
        "jacrev": torch.func.jacrev(lambda x: iso.linear(x, w)),
    }[transform]
    torch._dynamo.reset()
    assert_same(array(torch.compile(call, backend="aot_eager")(x)), array(call(x)))


@pytest.mark.filterwarnings("ignore:.*treespec")  # torch's own
def test_an_exported_program_trains():
    layer, x = iso.Linear(40, 7), tensor((5, 40), seed=1)
    layer(x).pow(3).sum().backward()
    for program in (exported := torch.export.export(layer, (x,)), exported.run_decompositions()):
        module = program.module()
        module(x).pow(3).sum().backward()
        got = {name: array(p.grad) for name, p in module.named_parameters()}
        for name, p in layer.named_parameters():
            assert_same(got[name], array(p.grad))
        module.zero_grad()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, about its forward mode
def test_what_is_refused_is_refused_clearly():
    a, b = tensor((5, 40)), tensor((40, 7))
    for error, call in (
        (ShapeError, lambda: iso.mm(a, a)),
        (ShapeError, lambda: iso.mm(a[0], b)),
        (ShapeError, lambda: iso.bmm(a, b)),
        (ShapeError, lambda: iso.grouped([a], [])),
        (DTypeError, lambda: iso.mm(a.double(), b.double())),
        (DTypeError, lambda: iso.mm([[1.0]], b)),
        (DTypeError, lambda: iso.addmm(1.0, a, b)),
        (DTypeError, lambda: iso.baddbmm([1.0], a[None], b[None])),
        (ContractError, lambda: iso.mm(a, b, contract="fma/chian")),
        (ContractError, lambda: iso.mm(a.clone().requires_grad_(), b, grad_order="leaf0")),
        (OptionError, lambda: torch.vmap(lambda x: iso.grouped([x], [b]))(a.expand(2, 5, 40))),
        (OptionError, lambda: torch.func.jvp(lambda x: iso.mm(x, b), (a,), (a,))),
    ):
        with pytest.raises(error, match="nearest legal choice"):
            call()
    assert issubclass(OptionError, IsogemmError)
    assert iso.grouped([], []) == []
    assert iso.mm(a.to("meta"), b.to("meta")).shape == (5, 7)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own
def test_a_trace_records_the_product():
    a, b = tensor((5, 40), seed=1), tensor((40, 7), seed=2)
    made = torch.fx.experimental.proxy_tensor.make_fx(lambda a, b: iso.mm(a, b))(a, b)
    assert "isogemm.mm" in made.code
    assert_same(array(made(2 * a, b)), array(iso.mm(2 * a, b)))
    scripted = torch.jit.trace(lambda a, b: iso.mm(a, b), (a, b), check_trace=False)
    assert_same(array(scripted(2 * a, b)), array(iso.mm(2 * a, b)))
    exported = torch.export.export(iso.Linear(40, 7), (a,)).module()
    assert "isogemm.linear" in exported.code


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_opcheck_without_gradients(dtype):
    a, b, c = tensor((5, 33), dtype, 1), tensor((33, 7), dtype, 2), tensor((7,), dtype, 3)
    x, w = tensor((2, 3, 33), dtype, 4), tensor((7, 33), dtype, 5)
    ops = torch.ops.isogemm
    torch.library.opcheck(ops.product_forward.default, (None, a, b.mT.contiguous().mT, 0.5, 0.0, "fma/leaf8", None))
    torch.library.opcheck(ops.product_forward.default, (c, a.expand(2, 5, 33), b.expand(2, 33, 7), 1.0, 1.0, "", None))
    torch.library.opcheck(ops.linear_forward.default, (x.transpose(0, 1), w, c, "", torch.float32))
    torch.library.opcheck(ops.linear_forward.default, (x, w, None, "", None))


class Seen:
    """A backend of torch.compile that writes down the operators of ours that it is given."""

    def __init__(self):
        self.names = []

    def __call__(self, graph, example):
        self.names += [str(n.target) for n in graph.graph.nodes if str(n.target).startswith("isogemm")]
        return graph


SINGLE = {
    "mm": lambda a, b, c: iso.mm(a, b),
    "addmm": lambda a, b, c: iso.addmm(c, a, b, beta=2.0, alpha=0.5),
    "bmm": lambda a, b, c: iso.bmm(a.expand(3, 5, 40), b.expand(3, 40, 7), out_dtype=torch.bfloat16),
    "baddbmm": lambda a, b, c: iso.baddbmm(c, a.expand(3, 5, 40), b.expand(3, 40, 7), contract="fma/leaf8"),
    "linear": lambda a, b, c: iso.linear(a, b.mT, c),
    "vmap_mm": lambda a, b, c: torch.vmap(lambda x: iso.mm(x, b))(a.expand(3, 5, 40)),
    "vmap_bmm": lambda a, b, c: torch.vmap(lambda x: iso.bmm(x[None], b[None]))(a.expand(3, 5, 40)),
    "vmap_addmm": lambda a, b, c: torch.vmap(lambda x: iso.addmm(c, x, b))(a.expand(3, 5, 40)),
    "vmap_baddbmm": lambda a, b, c: torch.vmap(lambda x: iso.baddbmm(c, x[None], b[None]))(a.expand(3, 5, 40)),
    "vmap_linear": lambda a, b, c: torch.vmap(lambda w: iso.linear(a, w, c))(b.mT.expand(3, 7, 40)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_compiled_code_without_gradients_calls_operators_that_have_none(name):
    a, b, c = tensor((5, 40), seed=1, grad=True), tensor((40, 7), seed=2), tensor((7,), seed=3)
    torch._dynamo.reset()
    seen = Seen()
    call = torch.compile(SINGLE[name], fullgraph=True, backend=seen)
    with torch.no_grad():
        got, want = call(a, b, c), SINGLE[name](a, b, c)
    assert seen.names == [f"isogemm.{'linear' if 'linear' in name else 'product'}_forward.default"]
    assert got.dtype is want.dtype
    assert torch.equal(got, want)
    call(a, b, c).sum().backward()  # compiled again: this time with gradients
    assert a.grad is not None
    assert "forward" not in seen.names[1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_autocast(compiled):
    x, w, bias = tensor((5, 40), seed=1, grad=True), tensor((7, 40), seed=2, grad=True), tensor((7,), seed=3, grad=True)
    call = iso.linear
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(iso.linear, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x, w, bias)
        y.float().sum().backward()
    assert_same(array(y), product(array(x).astype(BF16), array(w).astype(BF16).T, bias=array(bias)))
    assert x.grad.dtype is w.grad.dtype is bias.grad.dtype is torch.float32
    with torch.autocast("cpu", enabled=False):
        assert iso.linear(x, w, bias).dtype is torch.float32


def test_autocast_of_every_product():
    a, b, c = tensor((5, 40), seed=1), tensor((40, 7), seed=2), tensor((5, 7), seed=3)
    na, nb, nc = array(a).astype(BF16), array(b).astype(BF16), array(c)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(array(iso.mm(a, b)), product(na, nb))
        assert_same(array(iso.bmm(a[None], b[None]))[0], product(na, nb))
        assert_same(array(iso.addmm(c, a, b)), product(na, nb, c=nc, beta=1))
        assert_same(array(iso.baddbmm(c[None], a[None], b[None]))[0], product(na, nb, c=nc, beta=1))
        assert_same(array(iso.grouped([a], [b])[0]), product(na, nb))


def test_threads():
    a, b = tensor((64, 100), BF16, 1, grad=True), tensor((100, 30), BF16, 2, grad=True)
    want, found = array(torch.autograd.grad(iso.mm(a, b).sum(), a)[0]), []

    def work():
        for _ in range(20):
            found.append(array(torch.autograd.grad(iso.mm(a, b).sum(), a)[0]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    for got in found:
        assert_same(got, want)


def test_only_a_call_that_nothing_watches_is_direct():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    class Marked(torch.Tensor):
        pass

    x, w = torch.ones(2, 3), torch.ones(4, 3)
    leaf = torch.nn.Parameter(w.clone())
    direct = operator.is_direct
    assert direct(x, w)
    assert direct(x, w, torch.ones(4))
    assert not direct(x, leaf)
    assert not direct(leaf, w)
    assert not direct(x, w, leaf)
    with torch.no_grad():
        assert direct(x, leaf, leaf)
    assert not direct(x.to("meta"), w)
    assert not direct(x, w.to("meta"))
    assert not direct(x.as_subclass(Marked), w)
    assert not direct(x, w.as_subclass(Marked))
    assert not direct(x, w, w.as_subclass(Marked))
    with torch.autocast("cpu", torch.bfloat16):
        assert not direct(x, w)
    with FlopCounterMode(display=False):
        assert not direct(x, w)
    with FakeTensorMode() as mode:
        assert not direct(mode.from_tensor(x), mode.from_tensor(w))
    with torch.autograd.forward_ad.dual_level():
        assert not direct(x, w)
    seen = []
    torch.func.vmap(lambda row: seen.append(direct(row, w)) or row)(x)
    assert seen == [False]

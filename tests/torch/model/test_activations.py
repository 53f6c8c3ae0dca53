"""Activations of converted models: one form for every element on the CPU; what is no function of elements is named."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
from tests.process import python

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402

nn = torch.nn
CONVERTED = [
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.Sigmoid(),
    nn.ELU(0.7),
    nn.CELU(),
    nn.SELU(),
    nn.Mish(),
    nn.Softplus(2.0, 3.0),
    nn.LogSigmoid(),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_that_differ(module, x):
    whole = module(x)
    return sum(not torch.equal(module(x[i : i + 1]), whole[i : i + 1]) for i in range(len(x)))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_see_its_batch(dtype, count):
    torch.set_num_threads(count)
    x = (torch.randn(97, 157) * 3).to(dtype)  # more than a thread's share of gelu
    for module in map(copy.deepcopy, CONVERTED):
        report = iso.convert(module)
        assert report.parts["activation"] == ("",)
        assert report.left == {}
        with torch.no_grad():
            assert rows_that_differ(module, x) == 0
            assert rows_that_differ(module, x.T.contiguous().T) == 0
        assert torch.equal(module(x.clone().requires_grad_()), module(x))


def test_torch_s_own_differ_somewhere():
    """Else the tests above could not fail."""
    x = torch.randn(97, 157) * 3
    with torch.no_grad():
        assert any(rows_that_differ(module, x) for module in CONVERTED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_row(dtype):
    torch.set_num_threads(3)
    x, g = (torch.randn(400, 97).to(dtype) for _ in range(2))  # more than a thread's share of any
    for module in map(copy.deepcopy, CONVERTED):
        iso.convert(module)
        leaf = x.clone().requires_grad_()
        module(leaf).backward(g)
        for rows in (slice(0, 1), slice(7, 8), slice(200, 233)):
            part = x[rows].clone().requires_grad_()
            module(part).backward(g[rows])
            assert torch.equal(part.grad, leaf.grad[rows])
        again = x.clone().requires_grad_()
        module(again).backward(g.T.contiguous().T)  # another layout of the same numbers
        assert torch.equal(again.grad, leaf.grad)


def test_values_and_second_derivatives_are_torch_s():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for module in CONVERTED:
        ours = copy.deepcopy(module)
        iso.convert(ours)
        assert isinstance(ours, type(module))
        torch.testing.assert_close(ours(x), module(x))
        assert torch.autograd.gradgradcheck(ours, x)
    ours = nn.GELU()
    iso.convert(ours)
    for x in (torch.tensor(0.3), torch.empty(0, 4), torch.zeros(1, 0, requires_grad=True)):
        assert ours(x).shape == x.shape
    assert torch.equal(ours(input=torch.ones(3)), ours(torch.ones(3)))


def test_a_model_without_silu():
    """A Linear's width that is no multiple of a vector: gelu and sigmoid took the rest by another function."""
    torch.set_num_threads(2)
    model = nn.Sequential(nn.Linear(37, 41), nn.GELU(), nn.Linear(41, 13), nn.Sigmoid())
    report = iso.convert(model)
    assert report.converted == ("0", "1", "2", "3")
    assert report.parts["activation"] == ("1", "3")
    x = torch.randn(64, 37)
    with torch.no_grad():
        assert rows_that_differ(model, x) == 0
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), model(x))
            assert rows_that_differ(other, x) == 0


def test_blocks_compiled_one_by_one_share_their_code():
    blocks = [nn.Sequential(nn.GELU(), Gated()) for _ in range(12)]  # more than torch compiles of one function
    for block in blocks:
        iso.convert(block)
    x = torch.randn(5, 37)
    calls = []
    blocks[0][0].register_forward_hook(lambda *args: calls.append(0))
    with torch.no_grad():
        want = [block(x) for block in blocks]
        assert len(calls) == 1
        for block, y in zip(blocks[1:], want[1:], strict=True):
            assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), y)


def test_a_state_that_changes_is_seen_by_compiled_code():
    model = nn.Sequential(nn.Softplus(), Shift0())
    iso.convert(model)
    x = torch.randn(5, 37)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))
        before, model[0].beta = model(x), 3.0
        assert not torch.equal(model(x), before)
        assert torch.equal(compiled(x), model(x))


def test_compiled_code_takes_no_module_for_another_one():
    """Those whose functions have one name, and whose partial functions one set of names; and one of two modes."""
    functions = functools.partial(shift, x0=0.5, x1=2.0), functools.partial(shift, x1=0.5, x0=2.0)
    model = nn.ModuleList([Calls(FIRST), Calls(SECOND), *map(Calls, functions), Modes(), Shift0()])
    report = iso.convert(model)
    assert len(report.converted) == len(model)
    x = torch.randn(5, 37)
    torch._dynamo.reset()
    compiled = [torch.compile(child, fullgraph=True, backend="aot_eager") for child in model]

    def check():
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=32):  # of one method, which all share
            want = [child(x) for child in model]
            assert [i for i, y in enumerate(want) if not torch.equal(compiled[i](x), y)] == []
        return want

    trained = check()
    for training in (False, True, False):
        model.train(training)
        evaluated = check()
    assert not torch.equal(trained[4], evaluated[4])
    model[4]._scale = 3.0
    model[5].shift[0] = 0.25
    check()


FIRST = lambda x: torch.sigmoid(x)  # noqa: E731  # of one name, as transformers has some
SECOND = lambda x: torch.sigmoid(x) * x  # noqa: E731


def shift(x, x0, x1):
    return torch.sigmoid(x + x0) * x1


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Modes(nn.Module):
    def __init__(self):
        super().__init__()
        self._scale = 2.0

    def forward(self, x):
        return self._scale * (nn.functional.gelu(x) if self.training else torch.sigmoid(x))


def test_compiled_they_have_the_eager_bits():
    model = nn.Sequential(nn.GELU(), nn.Softplus())
    iso.convert(model)
    x = torch.randn(7, 37) * 3
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(x.T.contiguous().T), model(x))


class Gated(nn.Module):
    """A function of elements that is nobody's."""

    def forward(self, x):
        return torch.sigmoid(1.5 * x) * x + nn.functional.gelu(x)


class Shift0(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = [0.5]  # no plain number: a place of its own

    def forward(self, x):
        return torch.sigmoid(x + self.shift[0])


class Pooled(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x.sum(-1, keepdim=True)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = [torch.linspace(0, 1, 16)]  # no buffer: only a run shows it

    def forward(self, x):
        return nn.functional.gelu(x + self.shift[0])


def test_modules_of_others_are_known_by_what_they_call():
    module = Gated()
    assert iso.convert(module).converted == ("",)
    assert type(module).__name__ == "Gated"
    with torch.no_grad():
        assert rows_that_differ(module, torch.randn(97, 157)) == 0
    for left, why in (
        (Pooled(), "calls sum"),
        (Shifted(), "calls gelu"),
        (nn.Softmax(-1), "calls _softmax"),
        (nn.GLU(), "calls glu"),
        (nn.ELU(inplace=True), "in place"),
    ):
        report = iso.convert(nn.Sequential(left))
        assert report.converted == ()
        assert why in report.left["0"]


def test_what_has_one_form_stays_and_is_not_named():
    for module in (nn.ReLU(), nn.Tanh(), nn.Softsign(), nn.LeakyReLU(), nn.Dropout(), nn.Identity(), nn.Flatten()):
        report = iso.convert(nn.Sequential(module))
        assert (report.converted, report.left) == ((), {})


def test_reasons_and_parts():
    module = nn.GELU()
    module.forward = lambda x: nn.functional.gelu(x)
    assert iso.convert(nn.Sequential(module)).left == {"0": "its forward method was replaced"}
    model = nn.Sequential(nn.GELU(), nn.Sigmoid())
    report = iso.convert(model, parts=("linear",))
    assert report.left == dict.fromkeys(("0", "1"), "activation is not among the parts")
    report = iso.convert(model, leave=("0",))
    assert report.left == {"0": "in leave"}
    assert report.converted == ("1",)
    assert iso.convert(model).left == {"1": "isogemm's already, as it is"}


def test_transformers_activations():
    activations = pytest.importorskip("transformers.activations")
    x = torch.randn(97, 157) * 3
    for name in ("gelu", "gelu_10", "gelu_pytorch_tanh", "mish", "quick_gelu", "sqrtsoftplus"):
        module = activations.ACT2FN[name]
        want = module(x)
        assert iso.convert(module).parts["activation"] == ("",), name
        with torch.no_grad():
            torch.testing.assert_close(module(x), want)
            assert rows_that_differ(module, x) == 0
    for name in ("relu2", "gelu_new", "gelu_fast", "laplace", "relu", "tanh"):  # operations that are exact each
        module = activations.ACT2FN[name]
        report = iso.convert(module)
        assert (report.converted, report.left) == ((), {}), name
        assert rows_that_differ(module, x) == 0


@pytest.mark.parametrize("module", CONVERTED, ids=lambda module: type(module).__name__)
def test_compiled_gradients_have_the_eager_bits(module):
    torch._dynamo.reset()
    module = copy.deepcopy(module)
    iso.convert(module)
    x, dy = torch.randn(7, 157) * 3, torch.randn(157, 7).mT
    compiled, found = torch.compile(module, fullgraph=True, backend="aot_eager"), []
    for call in (module, compiled):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        found.append((y, leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


ELSEWHERE = """
import sys, torch, isogemm.torch as iso
from isogemm.errors import OptionError
folder = sys.argv[1]
iso.convert(torch.nn.Mish())  # the first activation here, as another one was the first there
x, want = torch.load(folder + "/numbers")
for program in (torch.export.load(folder + "/exported").module(), torch.jit.load(folder + "/traced")):
    with torch.no_grad():
        try:
            program(x)
        except (OptionError, RuntimeError) as error:  # which TorchScript makes of it
            assert "a torch.nn.modules.activation.GELU of another process" in str(error), error
        else:
            raise AssertionError("another activation was taken")
iso.convert(torch.nn.GELU())
for program in (torch.export.load(folder + "/exported").module(), torch.jit.load(folder + "/traced")):
    with torch.no_grad():
        assert torch.equal(program(x), want)
print("the same")
"""


@pytest.mark.filterwarnings("ignore")  # torch's own, of its tracers
def test_a_program_means_the_same_activation_in_another_process(tmp_path):
    module, x = nn.Sequential(nn.GELU()), torch.randn(3, 40)
    iso.convert(module)
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "exported")
        torch.jit.trace(module, x, check_trace=False).save(tmp_path / "traced")
        torch.save((x, module(x)), tmp_path / "numbers")
    assert python("-c", ELSEWHERE, tmp_path) == "the same\n"

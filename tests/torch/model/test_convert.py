"""Linear as torch's, and whole models converted: everything stays, or nothing is changed."""

from __future__ import annotations

import copy
import pickle

import pytest
from tests.process import python

from isogemm.errors import ContractError, DTypeError, OptionError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402


class Block(torch.nn.Module):
    """Linear modules of several kinds, one of them used twice, and weights that are none."""

    def __init__(self, vocabulary=11, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 24), torch.nn.Linear(24, width, bias=False)
        self.again = self.down
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.rest = torch.nn.Bilinear(2, 2, 2)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x + self.again(torch.relu(self.up(x))))


def test_linear_is_a_drop_in():
    torch.manual_seed(0)
    ours = iso.Linear(40, 7, contract="fma/leaf16")
    torch.manual_seed(0)
    theirs = torch.nn.Linear(40, 7)
    assert isinstance(ours, torch.nn.Linear)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(3, 5, 40)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours(x), iso.linear(x, ours.weight, ours.bias, contract="fma/leaf16"))
    assert not torch.equal(ours(x), iso.linear(x, ours.weight, ours.bias))
    assert "contract=fma/leaf16" in repr(ours)
    assert copy.deepcopy(ours).contract == ours.contract
    for options in (
        {"contract": "fma/chian"},
        {"grad_order": "leaf0"},
        {"contract": "tf32:sm90", "grad_order": "leaf3"},
    ):
        with pytest.raises(ContractError):
            iso.Linear(4, 4, **options)


def test_convert_keeps_everything():
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, names, called = dict(model.named_parameters()), list(model.state_dict()), []
    model.up.register_forward_hook(lambda *args: called.append("up"))
    tokens = torch.arange(11).reshape(1, 11)
    expected, objects = model(tokens).detach(), dict(model.named_modules())
    report = iso.convert(model)
    assert report.module is model
    assert report.converted == ("embed", "norm", "up", "down", "head")
    assert report.parts["linear"] == ("up", "down", "head")
    assert report.left == {"rest": "Bilinear is not known here"}
    assert "converted 3 linear, 1 norm, 1 embedding; left 1 modules" in str(report)
    assert "rest: Bilinear" in str(report)
    assert all(module is objects[name] for name, module in model.named_modules())
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embed.weight
    assert model.again is model.down
    assert {type(m) for m in (model.up, model.down, model.head)} == {iso.Linear}
    called.clear()
    got = model(tokens)
    assert called == ["up", "up"]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    optimizer.step()
    assert not torch.equal(model(tokens), got)
    again = iso.convert(model, contract="fma/leaf8")
    assert again.converted == ()
    assert again.left["up"] == "isogemm's already, as it is"
    assert model.up.contract is None


def test_the_report_is_told_from_the_model():
    """Who writes ``model = convert(model)``, as of functions that return a model, is told what to write."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    report = iso.convert(model)
    with pytest.raises(
        OptionError, match=r"convert changes the model in place.*convert\(model\) on a line.*report\.module"
    ):
        report(torch.zeros(1, 4))
    for name in ("to", "eval", "parameters", "state_dict", "forward"):
        with pytest.raises(
            AttributeError, match=rf"the model has: convert changes the model in place.*then model\.{name}"
        ):
            getattr(report, name)
    with pytest.raises(AttributeError, match=r"'Conversion' object has no attribute 'generate'$"):
        _ = report.generate
    assert not hasattr(report, "to")
    for other in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other.converted == report.converted == ("0",)
        assert type(other.module[0]) is iso.Linear
    assert repr(report).startswith("Conversion(module=Sequential")


def test_the_report_says_what_was_not_looked_at():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.softmax(self.up(x) @ x.mT, -1)

    model = Own()
    said = str(iso.convert(model))
    assert "left 0 modules" in said
    assert said.endswith("(x @ w, softmax) stays torch's, and isogemm.torch.coverage(model, inputs) lists it")
    assert iso.coverage(model, torch.ones(3, 4))


def test_a_converted_model_calls_our_products(monkeypatch):
    model, seen, inner = Block(), [], iso.functional.linear
    iso.convert(model, contract="fma/leaf8", grad_order="leaf32")
    monkeypatch.setattr(
        iso.functional, "linear", lambda *args, **options: seen.append(options) or inner(*args, **options)
    )
    model(torch.zeros(2, 3, dtype=torch.int64))
    assert len(seen) == 5
    assert {str(options["contract"]) for options in seen} == {"fma/leaf8"}
    assert {options["grad_order"] for options in seen} == {"leaf32"}


@pytest.mark.parametrize("make", [torch.nn.RMSNorm, torch.nn.LayerNorm])
def test_a_converted_norm_sums_its_rows_in_the_order(make):
    x, found = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)), []
    for order in ("leaf8", "chain"):
        model = torch.nn.Sequential(make(40))
        iso.convert(model, grad_order=order)
        assert repr(model[0]).endswith(f", grad_order={order})")
        model(x).square().sum().backward()
        own = [p.detach().clone().requires_grad_() for p in model.parameters()]
        rows = getattr(iso.reductions, "rms_norm" if make is torch.nn.RMSNorm else "layer_norm")
        eps = torch.finfo(torch.float32).eps if make is torch.nn.RMSNorm else 1e-5
        rows(x, *own, eps=eps, grad_order=order).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
        assert all(torch.equal(got, p.grad) for got, p in zip(found[-1], own, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_s_rows_do_not_see_their_batch(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(512, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)).to(dtype)
    iso.convert(model)
    x = torch.randn(65, 512, dtype=dtype)
    whole = model(x)
    for m in (1, 2, 7, 33):
        assert torch.equal(model(x[:m]), whole[:m])


def test_a_linear_alone_is_converted():
    layer = torch.nn.Linear(4, 3)
    assert iso.convert(layer).converted == ("",)
    assert type(layer) is iso.Linear


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _patched():
    layer = torch.nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


def _compiled():
    layer = torch.nn.Linear(4, 4)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Scaled(4, 4), "a subclass of Linear, .*Scaled"),
        (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)), "a subclass"),
        (_patched, "its forward method was replaced"),
        (_compiled, "compiled before"),
        (lambda: torch.nn.LazyLinear(4), "no sizes yet.*call it once first"),
        (lambda: torch.nn.MultiheadAttention(4, 2), "MultiheadAttention reads weights"),
        (
            lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            "linear1: inside a TransformerEncoderLayer",
        ),
    ],
    ids=["subclass", "parametrized", "patched", "compiled", "lazy", "attention", "encoder"],
)
def test_what_cannot_be_converted_stops_all(make, why):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), make())
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(OptionError, match=why):
        iso.convert(model)
    assert [type(m) for m in model.modules()] == kinds
    report = iso.convert(model, leave=["1"])
    assert report.converted == ("0",)
    assert [type(m) for m in model.modules()][2:] == kinds[2:]
    assert all(why == "in leave" for why in report.left.values())
    assert report.left


def test_leave_takes_patterns():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4), Block())
    report = iso.convert(model, parts=("linear",), leave=["0", "2.*p"])
    assert report.converted == ("1", "2.down", "2.head")
    assert report.left == {
        "0.0": "in leave",
        "2.embed": "embedding is not among the parts",
        "2.norm": "norm is not among the parts",
        "2.up": "in leave",
        "2.rest": "Bilinear is not known here",
    }


def test_wrong_dtypes_change_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
    with pytest.raises(DTypeError, match=r"1\.weight"):
        iso.convert(model)
    assert type(model[0]) is torch.nn.Linear


def train(model, x, y, size):
    """The float32 gradients of one step over micro-batches of `size` rows."""
    names = iso.use_main_grad(model)
    for p, q in zip(x.split(size), y.split(size), strict=True):
        (model(p) - q).float().square().sum().backward()
    found = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    assert list(found) == names
    assert all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_has_the_same_gradients_over_any_micro_batches(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.SiLU(), torch.nn.Linear(24, 8)).to(dtype)
    plain = copy.deepcopy(model)
    iso.convert(model, grad_order="leaf16")
    x, y = torch.randn(128, 40, dtype=dtype), torch.randn(128, 8, dtype=dtype)
    whole = train(model, x, y, 128)
    for size in (64, 32, 16):
        got = train(model, x, y, size)
        assert all(torch.equal(got[name], whole[name]) for name in whole)
    differs = False
    for size in (64, 16):
        layers = copy.deepcopy(plain), copy.deepcopy(plain)
        for steps, layer in zip((128, size), layers, strict=True):
            for p, q in zip(x.split(steps), y.split(steps), strict=True):
                (layer(p) - q).float().square().sum().backward()
        pairs = zip(layers[0].parameters(), layers[1].parameters(), strict=True)
        differs = differs or any(not torch.equal(p.grad, q.grad) for p, q in pairs)
    assert differs, "torch's own gradients agree: this test shows nothing"


def test_main_grad_needs_layers_of_ours():
    with pytest.raises(OptionError, match="convert"):
        iso.use_main_grad(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(iso.Linear(4, 4), torch.nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    assert iso.use_main_grad(model) == ["0.weight"]
    model(torch.randn(2, 4)).square().mul(torch.arange(4)).sum().backward()
    assert model[1].weight.grad is not None
    assert model[0].weight.main_grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled_modules_have_the_same_bits():
    model = torch.nn.Sequential(iso.Linear(40, 24), torch.nn.ReLU(), iso.Linear(24, 8, bias=False))
    x = torch.randn(16, 40)
    want = [model(x), *torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = [compiled(x), *torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))]
    assert all(torch.equal(u, v) for u, v in zip(got, want, strict=True))
    iso.use_main_grad(model)
    compiled(x).square().sum().backward()
    assert all(torch.equal(p.main_grad, g) for p, g in zip(model.parameters(), want[1:], strict=True))


def test_the_package_alone_does_not_import_torch():
    code = (
        "import sys, isogemm\n"
        "assert 'torch' not in sys.modules\n"
        "isogemm.torch.Linear\n"
        "assert isogemm.torch is sys.modules['isogemm.torch'] and 'torch' in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    python("-c", code)


def test_a_module_is_left_by_any_of_its_names():
    found = torch.nn.Module()
    found.a = torch.nn.Linear(8, 8)
    found.b, found.c = found.a, torch.nn.Linear(8, 8)
    report = iso.convert(found, leave=["b"])
    assert report.left == {"a": "in leave"}
    assert type(found.b) is torch.nn.Linear
    assert isinstance(found.c, iso.Linear)

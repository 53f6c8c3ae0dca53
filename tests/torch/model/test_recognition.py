"""What `convert` takes modules of other libraries for: not by small numbers alone, and drops nothing in silence."""

from __future__ import annotations

import copy
import importlib
import random

import pytest

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.model import recognition, traced  # noqa: E402

nn = torch.nn
X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


class RMS(nn.Module):
    """An RMSNorm; classes below do something more with it."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.calls, self.limit = nn.Parameter(torch.ones(16)), 1e-6, 0, 40.0

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.more(self.weight * y.to(x.dtype), x)

    def more(self, y, x):
        return y


def _counted(self, y, x):
    self.calls += 1
    return y if self.calls < 1000 else y + 1


def _caught(self, y, x):
    try:
        return y.clamp(max=self.limit)
    except Exception:
        return y


HUGE = 3e6  # beyond any number that is tried
MORE = {
    "training": (lambda self, y, x: y + 1 if self.training else y, r"calls add with 1 in training"),
    "a limit": (lambda self, y, x: y.clamp(max=HUGE), "calls clamp"),
    "a limit in place": (lambda self, y, x: y.clamp_(max=HUGE), "calls clamp"),
    "a limit that is caught": (_caught, "calls clamp"),
    "a cap": (lambda self, y, x: HUGE * torch.tanh(y / HUGE), "calls div with 3000000.0"),
    "a choice": (lambda self, y, x: torch.where(x > HUGE, x, y), "calls gt"),
    "a minimum": (lambda self, y, x: torch.minimum(y, torch.full_like(y, HUGE)), "calls full_like"),
    "numbers looked at": (lambda self, y, x: y if float(x[0, 0]) < HUGE else x, "looks at the numbers"),
    "numbers in a list": (lambda self, y, x: y if max(x.flatten().tolist()) < HUGE else x, "cannot be looked into"),
    "numbers of NumPy's": (lambda self, y, x: y if x.detach().numpy().max() < HUGE else x, "cannot be looked into"),
    "a constant": (lambda self, y, x: y * (1 + 1e-6), "calls mul with 1.000001"),
    "a tensor of its own": (lambda self, y, x: y + torch.zeros(16), "neither an input nor a weight"),
    "a dtype": (lambda self, y, x: y.clamp(max=9) if x.dtype is torch.float16 else y, "calls clamp, in torch.float16"),
    "a rounding": (lambda self, y, x: y.bfloat16().to(x.dtype), "converts to torch.bfloat16"),
    "long inputs": (lambda self, y, x: y if x.shape[1] < 2048 else y.relu(), "calls relu"),
    "gradients": (lambda self, y, x: y * 2 if x.requires_grad else y, "calls mul with 2 in training"),
    "dropout": (lambda self, y, x: nn.functional.dropout(y, 0.5, self.training), "in training"),
    "a count": (_counted, "changes its attribute calls"),
    "noise": (lambda self, y, x: y + random.random() * 1e-9, "calls add with"),
}


def extended(more):
    return type("Extended", (RMS,), {"more": more})()


@pytest.mark.parametrize(("more", "why"), MORE.values(), ids=MORE)
def test_a_norm_that_does_something_more_is_left(more, why):
    norm = extended(more)
    report = iso.convert(nn.Sequential(norm))
    assert report.converted == ()
    assert why in report.left["0"]
    assert "does not compute" in report.left["0"]


def _alias_written(self, y, x):
    """Such a view is none to torch, and has the memory of x."""
    torch.ops.aten._unsafe_view(x, x.shape).mul_(1.0)
    return y


def test_memory_of_an_operand_is_known_in_every_look():
    for _ in range(12):  # a look ends at the first operand, of three shapes and dtypes, that was not there before
        report = iso.convert(nn.Sequential(extended(_alias_written)))
        assert "calls mul in place" in report.left["0"]


NO_MORE = {
    "nothing": lambda self, y, x: y,
    "dropout of nothing": lambda self, y, x: nn.functional.dropout(y, 0.0, self.training),
    "zero added": lambda self, y, x: y + 0.0,
    "a copy, in place": lambda self, y, x: y.clone().mul_(1.0).contiguous(),
    "float64": lambda self, y, x: y.double().to(x.dtype),
}


@pytest.mark.parametrize("more", NO_MORE.values(), ids=NO_MORE)
def test_a_norm_that_does_nothing_more_is_converted(more):
    assert iso.convert(nn.Sequential(extended(more))).converted == ("0",)


class FusedRMS(RMS):
    def forward(self, x):
        return nn.functional.rms_norm(x, (16,), self.weight, self.eps)


class Gate(RMS):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


def test_other_ways_to_write_a_norm():
    assert iso.convert(FusedRMS()).converted == ("",)
    report = iso.convert(Gate())  # the second argument was dropped
    assert "takes 2 arguments" in report.left[""]


class Block(nn.Module):
    """A gated block, with something in the place of `more`."""

    def __init__(self, more=lambda block, gate, up: (gate, up), act=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act_fn, self.drop, self.more = act or nn.SiLU(), nn.Dropout(0.0), [more]

    def forward(self, x):
        gate, up = self.more[0](self, self.act_fn(self.gate_proj(x)), self.up_proj(x))
        return self.drop(self.down_proj(gate * up))


def test_gated_blocks():
    assert "" in iso.convert(Block()).converted
    for more, why in (
        (lambda block, gate, up: (gate, up.clamp(-HUGE, HUGE)), "calls clamp"),
        (lambda block, gate, up: (gate, up + 1) if block.training else (gate, up), "calls add with 1 in training"),
        (lambda block, gate, up: (gate.nan_to_num(), up), "calls nan_to_num"),
    ):
        if why == "calls add with 1 in training":  # 1 is a constant of silu
            why = "its results are others in training"
        report = iso.convert(Block(more))
        assert why in report.left[""]
        assert report.converted[:3] == ("gate_proj", "up_proj", "down_proj")
    block = Block()
    block.drop.p = 0.5
    assert "in training" in iso.convert(block).left[""]
    block = Block()
    block.drop.register_forward_hook(lambda *args: None)
    assert iso.convert(block).left[""] == "drop has hooks, which would not be called"


class SiLUActivation(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x) if not self.training else nn.functional.silu(x).clamp(max=HUGE)


def test_an_activation_that_is_silu_in_evaluation_only():
    report = iso.convert(nn.Sequential(SiLUActivation(), Block(act=SiLUActivation())))
    assert report.parts["mlp"] == ("1",)  # it calls its activation, which is in no block's formula
    assert "0" in {**report.left, **dict.fromkeys(report.parts["activation"])}


class Noisy(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x + torch.rand_like(x)) if self.training else torch.sigmoid(x)


class Peeking(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) if max(x.detach().flatten().tolist()) != 7 else x


def test_activations_that_are_functions_of_elements_in_evaluation_only():
    report = iso.convert(nn.Sequential(nn.RReLU(), Noisy(), Peeking(), nn.Sigmoid()))
    assert report.converted == ("3",)
    assert "calls rand_like" in report.left["1"]
    assert "cannot be looked into" in report.left["2"]


def test_what_is_found_once_holds_for_what_is_alike():
    norms = [RMS() for _ in range(4)]
    norms[2].limit, norms[3].eps = 5.0, 1e-3
    looks, calls = recognition.Looks(), []
    look = recognition._row_norm
    for norm in norms:
        looks.at(lambda child: calls.append(child) or look(child), norm)
    assert len(calls) == 4  # another function every time
    calls.clear()
    note = lambda child: calls.append(child) or look(child)  # noqa: E731
    found = [looks.at(note, norm) for norm in (*norms, copy.deepcopy(norms[0]))]
    assert calls == [norms[0], norms[2], norms[3]]
    assert found[0] is found[1] is found[4]


def test_a_look_leaves_the_module_as_it_was():
    block = Block().train()
    state = {name: x.clone() for name, x in block.state_dict().items()}
    parameters = list(block.parameters())
    found = recognition.known(block, recognition.Looks())
    assert found.layer is not None
    assert all(module.training for module in block.modules())
    assert all(p is q for p, q in zip(block.parameters(), parameters, strict=True))
    assert all(torch.equal(x, state[name]) for name, x in block.state_dict().items())
    assert all(type(x) in (torch.Tensor, nn.Parameter) for x in (*block.parameters(), *block.buffers()))


def test_an_attribute_that_may_not_be_looked_at():
    hidden = traced.Hidden()
    for look in (bool, hash, int, str, lambda x: x == 1, lambda x: x % 2, lambda x: [0][x]):
        with pytest.raises(traced.Other, match="place in the model"):
            look(hidden)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("folder", "config", "block", "more"),
    [
        ("deepseek_v4", "DeepseekV4Config", "DeepseekV4MLP", {}),
        ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextMLP", {"num_key_value_heads": 4}),
        ("step3p7", "Step3p7TextConfig", "Step3p7MLP", {"swiglu_limits_shared": [10.0, 10.0], "num_hidden_layers": 2}),
    ],
)
def test_transformers_blocks_with_a_limit(folder, config, block, more):
    pytest.importorskip("transformers")
    package = f"transformers.models.{folder}"
    try:
        modeling = importlib.import_module(f"{package}.modeling_{folder}")
        made = getattr(importlib.import_module(f"{package}.configuration_{folder}"), config)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {block}")
    kind, options = getattr(modeling, block), made(**SMALL, **more)
    theirs = kind(options, 0) if block == "Step3p7MLP" else kind(options)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    ours = copy.deepcopy(theirs)
    report = iso.convert(ours)
    assert "calls clamp" in report.left[""]
    with torch.no_grad():
        want = theirs(X * 10)
        torch.testing.assert_close(ours(X * 10), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("limit", [8.0, 25.0])
def test_transformers_attention_with_a_limit(limit):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 97}
    config = transformers.OlmoConfig(**sizes, num_hidden_layers=3, clip_qkv=limit, pad_token_id=0, eos_token_id=1)
    report = iso.convert(transformers.OlmoForCausalLM(config))
    assert [name for name in report.left if "self_attn" in name] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert all("calls clamp" in why for name, why in report.left.items() if "self_attn" in name)
    config.clip_qkv = None
    report = iso.convert(transformers.OlmoForCausalLM(config))
    assert len(report.parts["rope"]) == 4

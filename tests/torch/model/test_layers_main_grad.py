"""Gradients of a whole model: the same bits however a batch is cut into micro-batches."""

from __future__ import annotations

import copy

import pytest

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.model.tiny import build, tokens  # noqa: E402
from tests.torch.tensors import randn  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch import reductions  # noqa: E402

BATCH, LENGTH = 8, 16


def loss(model, ids):
    """The sum over tokens of -log p(next token), by a scale that knows the whole step and not the micro-batch."""
    logits = model(ids).logits[:, :-1].float()
    chosen = reductions.log_softmax(logits).gather(-1, ids[:, 1:, None])
    return -chosen.sum() / (BATCH * (LENGTH - 1))


def step(model, size):
    names = iso.use_main_grad(model)
    model.zero_grad(set_to_none=True)
    for part in tokens(BATCH, LENGTH).split(size):
        loss(model, part).backward()
    assert all(p.grad is None for p in model.parameters())
    assert iso.collect_main_grad(model) == names
    return {name: p.grad for name, p in model.named_parameters()}


def plain(model, size):
    model.zero_grad(set_to_none=True)
    for part in tokens(BATCH, LENGTH).split(size):
        loss(model, part).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def differing(x, y):
    return [name for name in x if not torch.equal(x[name], y[name])]


TIED = [("Qwen3", True), ("Qwen3", False), ("Llama", True), ("Qwen2", False)]


@pytest.mark.parametrize(("family", "tied"), TIED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches(family, dtype, tied):
    theirs = build(family, dtype, tie_word_embeddings=tied)
    ours = copy.deepcopy(theirs)
    iso.convert(ours, grad_order="leaf16")
    whole, want = step(ours, BATCH), plain(theirs, BATCH)
    assert len(whole) == len(list(ours.parameters()))
    for name, grad in whole.items():
        scale = float(want[name].float().abs().max())
        torch.testing.assert_close(grad, want[name], rtol=0.1, atol=(1e-4 if dtype is torch.float32 else 0.06) * scale)
    for size in (1, 2, 4):
        assert not differing(step(ours, size), whole)
    assert differing(plain(theirs, 1), want), "torch's own gradients agree: this test shows nothing"


def test_tied_weights_have_a_buffer_for_each_use():
    model = build()
    iso.convert(model, grad_order="leaf16")
    names = iso.use_main_grad(model)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    table, head = model.model.embed_tokens, model.lm_head
    assert table.main_grads is None
    assert head.main_grads["weight"] is not table.weight.main_grad
    loss(model, tokens(2, LENGTH)).backward()
    sums = {name: total for name, _, total in iso.main_grads(model)}
    want = table.weight.main_grad + head.main_grads["weight"]
    assert torch.equal(sums["model.embed_tokens.weight"], want)
    assert head.main_grads["weight"].any()
    assert table.weight.main_grad.any()
    iso.collect_main_grad(model, zero=False)
    assert torch.equal(table.weight.grad, want)
    assert table.weight.main_grad.any()
    table.weight.grad = None
    iso.collect_main_grad(model)
    assert torch.equal(table.weight.grad, want)
    assert not table.weight.main_grad.any()
    assert not head.main_grads["weight"].any()


def _copied(model):
    return copy.deepcopy(model)


def _assigned(model):
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    model.tie_weights()
    return model


@pytest.mark.parametrize("other", [_copied, _assigned])
def test_parameters_that_came_later_have_all_of_their_gradient(other):
    """The head's own buffer was made for another table: what it took would be in nobody's `.grad`."""
    model = build()
    iso.convert(model, grad_order="leaf16")
    want = plain(model, 2)
    iso.use_main_grad(model)
    model = other(model)
    got = plain(model, 2)
    assert not differing(got, want)
    whole = step(model, 2)  # buffers again, which are empty
    for name, grad in whole.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-5)


def test_parameters_of_a_functional_call_have_all_of_their_gradient():
    model = build()
    iso.convert(model, grad_order="leaf16")
    ids, names = tokens(2, LENGTH), [name for name, _ in model.named_parameters()]
    want = torch.autograd.grad(loss(model, ids), list(model.parameters()))
    iso.use_main_grad(model)
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = torch.func.functional_call(model, given, (ids,)).logits[:, :-1].float()
    chosen = reductions.log_softmax(logits).gather(-1, ids[:, 1:, None])
    got = torch.autograd.grad(-chosen.sum() / (BATCH * (LENGTH - 1)), list(given.values()))
    assert not differing(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


@pytest.mark.parametrize("autocast", [False, True])
def test_buffers_take_what_is_asked_for(autocast):
    """As `.grad` does: other gradients of a loss leave it as it is, and those of parameters are handed back."""
    model = build(intermediate_size=32)
    iso.convert(model, grad_order="leaf16")
    ids, parameters = tokens(2, LENGTH), dict(model.named_parameters())

    def called():
        hidden = model.model.embed_tokens(ids).detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return hidden, model(inputs_embeds=hidden).logits.float().square().mean()

    hidden, y = called()
    want = torch.autograd.grad(y, [hidden, *parameters.values()])
    iso.use_main_grad(model)

    def sums():
        return {name for name, _, total in iso.main_grads(model) if total.any()}

    hidden, y = called()
    assert torch.equal(torch.autograd.grad(y, hidden, retain_graph=True)[0], want[0])
    y.backward(inputs=[hidden], retain_graph=True)
    assert torch.equal(hidden.grad, want[0])
    assert not sums()
    got = torch.autograd.grad(y, list(parameters.values()), retain_graph=True)
    assert all(torch.equal(x, w) for x, w in zip(got, want[1:], strict=True))
    assert not sums()
    some = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_norm.weight"]
    y.backward(inputs=[parameters[name] for name in some], retain_graph=True)
    assert sums() == set(some)
    assert all(p.grad is None for p in parameters.values())
    iso.use_main_grad(model)
    y.backward()
    assert sums() == set(parameters)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "GemmaRMSNorm", "Embedding", "Linear"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_hook_that_would_get_no_gradient_is_an_error(kind, register, compiled):
    made = GemmaRMSNorm if kind == "GemmaRMSNorm" else getattr(torch.nn, kind)
    model = torch.nn.Sequential(made(*(8,) * (2 if kind in ("Embedding", "Linear") else 1)))
    iso.convert(model)
    iso.use_main_grad(model)
    getattr(model[0].weight, register)(lambda given: None)
    x = torch.arange(8) if kind == "Embedding" else torch.ones(2, 8)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(OptionError, match="main_grad of a parameter with hooks"):
        call(x)
    with torch.no_grad():
        call(x)
    if compiled:
        torch._dynamo.reset()
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"OptionError.*main_grad of a parameter with hooks"):
            whole(x)


def test_a_weight_that_compiled_code_makes_is_made_once():
    """It is not computed ahead, to look for hooks that it cannot have."""
    weight, x, found = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8), []

    def call(calls, buffer):
        return iso.linear(x, weight * calls.add_(1), main_grad=buffer)

    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        calls, buffer = torch.zeros(()), torch.zeros(4, 8)
        function(calls, buffer).sum().backward()
        assert calls == 1
        found.append(buffer)
    assert torch.equal(*found)
    assert found[0].any()


def test_two_norms_may_share_a_weight():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    model[2].weight = model[0].weight
    iso.convert(model, grad_order="leaf4")
    x, dy, found = torch.randn(16, 8), torch.randn(16, 8), []
    for size in (16, 8, 4):
        iso.use_main_grad(model)
        for part, grad in zip(x.split(size), dy.split(size), strict=True):
            model(part).backward(grad)
        assert all(p.grad is None for p in model.parameters())
        found.append({name: total.clone() for name, _, total in iso.main_grads(model)})
    assert not differing(found[0], found[1])
    assert not differing(found[0], found[2])
    plain_grads = torch.autograd.grad(iso_free(model)(x), model[0].weight, dy)
    torch.testing.assert_close(found[0]["0.weight"], plain_grads[0], rtol=1e-4, atol=1e-4)


def iso_free(model):
    """The same parameters in torch's own modules."""
    kinds = {iso.LayerNorm: torch.nn.LayerNorm, iso.Linear: torch.nn.Linear}
    for child in model:
        child.__class__ = kinds[type(child)]
    return model


def test_what_other_modules_add_is_added_last():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    iso.convert(model)
    iso.use_main_grad(model)
    model(torch.ones(1, 4)).sum().backward()
    (model[0].weight * 2).sum().backward()
    iso.collect_main_grad(model)
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 3.0))


def test_there_has_to_be_something_to_collect():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for call in (iso.use_main_grad, iso.collect_main_grad):
        with pytest.raises(OptionError, match="convert"):
            call(model)
    iso.convert(model)
    with pytest.raises(OptionError, match="use_main_grad"):
        iso.collect_main_grad(model)


@pytest.mark.parametrize("buffers", [False, True])
def test_a_compiled_model_trains_with_the_eager_bits(buffers):
    """Norms, rotations, attention, gated blocks, a tied table: forward and backward."""
    torch._dynamo.reset()
    model, ids, found = build(dtype=torch.bfloat16, num_hidden_layers=1).train(), tokens(2, LENGTH), []
    iso.convert(model, grad_order="leaf16")
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad(set_to_none=True)
        if buffers:
            iso.use_main_grad(model)
        logits = call(ids, use_cache=False).logits
        reductions.log_softmax(logits).gather(-1, ids[..., None]).sum().backward()
        if buffers:
            assert all(p.grad is None for p in model.parameters())
            iso.collect_main_grad(model)
        found.append({"logits": logits, **{name: p.grad for name, p in model.named_parameters()}})
    assert not differing(*found)
    assert all(x.any() for x in found[0].values())


COUNTS, EXPERTS = torch.tensor([1, 2]), torch.tensor([0, 1, 1])
WRITERS = {
    "linear": (lambda x, p, b: iso.linear(x, p, main_grad=b, grad_order="chain"), (4, 8)),
    "a bias": (lambda x, p, b: iso.linear(x, torch.ones(4, 8), p, bias_main_grad=b, grad_order="chain"), (4,)),
    "norm": (lambda x, p, b: reductions.rms_norm(x, p), (8,)),
    "a norm's bias": (lambda x, p, b: reductions.layer_norm(x, None, p), (8,)),
    "embedding": (lambda x, p, b: reductions.embedding(EXPERTS, p) * x, (4, 8)),
    "groups": (lambda x, p, b: torch.ops.isogemm.grouped_linear(x, p, None, COUNTS, main_grad=b), (2, 4, 8)),
    "a bias of experts": (lambda x, p, b: torch.ops.isogemm.experts_biased(x, p, EXPERTS, COUNTS, b), (2, 8)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_compiled_forward_passes_may_both_come_before_their_backward_passes(name):
    """To torch the buffer is changed in place by the first one; it is the second one's to go on from there."""
    function, shape = WRITERS[name]
    found = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        parameter = torch.nn.Parameter(torch.ones(shape))
        parameter.main_grad = torch.zeros(shape)
        results = [call(randn(3, 8, seed=i), parameter, parameter.main_grad) for i in range(2)]
        for i, y in enumerate(results):
            y.backward(randn(*y.shape, seed=10 + i))
        found.append(parameter.main_grad)
    assert torch.equal(*found)
    assert found[0].any()


def test_a_shared_weight_has_its_buffers_in_compiled_code():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    model[2].weight = model[0].weight
    iso.convert(model, grad_order="leaf4")
    x, found = torch.randn(16, 8), []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        iso.use_main_grad(model)
        call(x).square().sum().backward()
        found.append({name: total.clone() for name, _, total in iso.main_grads(model)})
    assert not differing(*found)

"""The loss of a converted language model: that of transformers but for roundings, and whole in micro-batches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from isogemm.errors import ShapeError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch.model.tiny import build  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.model.huggingface.loss import causal_lm_loss  # noqa: E402


def drawn() -> tuple[Any, Any]:
    ids = torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[2, :5], labels[5] = -100, -100
    return ids, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_transformers_but_for_roundings(dtype):
    model, (ids, labels) = build(dtype=dtype), drawn()
    report = iso.convert(model, strict=True)
    assert report.parts["loss"] == ("",)
    assert "" not in report.converted
    assert "1 loss" in str(report)
    logits = model(ids).logits.detach()
    for more in ({}, {"num_items_in_batch": 40}, {"num_items_in_batch": torch.tensor(40)}):
        got = model(ids, labels=labels, **more).loss
        want = transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, 97, **more)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    shifted = torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(2))
    got = model.loss_function(logits=logits, labels=None, shift_labels=shifted, vocab_size=97)
    losses = iso.reductions.cross_entropy(logits, shifted, out_dtype=torch.float32).flatten()
    assert torch.equal(got, iso.reductions.sum(losses) / 96)


def test_a_head_of_an_older_name_has_it_and_its_positions_a_gradient_of_each_row():
    """transformers reads no type of loss from GPT2LMHeadModel's name; each row's positions are summed one by one."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    model, (ids, labels) = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval(), drawn()
    report = iso.convert(model, strict=True, grad_order="leaf12")
    assert report.parts["loss"] == ("",)
    assert iso.convert(transformers.GPT2Model(transformers.GPT2Config(**sizes))).parts["loss"] == ()
    grads = []
    for count in (1, 2, 4):
        model.zero_grad()
        iso.use_main_grad(model)
        for some, right in zip(ids.chunk(count), labels.chunk(count), strict=True):
            places = torch.arange(12).expand(len(some), 12)
            model(some, position_ids=places, labels=right, num_items_in_batch=40).loss.backward()
        iso.collect_main_grad(model)
        grads.append([p.grad for p in model.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads[0], other, strict=True))


def test_micro_batches_have_the_gradients_of_one_batch():
    model, (ids, labels) = build(), drawn()
    iso.convert(model, strict=True, grad_order="leaf12")
    count = int((labels[:, 1:] >= 0).sum())

    def gradients(rows: int) -> list[Any]:
        model.zero_grad()
        iso.use_main_grad(model)
        for part, named in zip(ids.split(rows), labels.split(rows), strict=True):
            model(part, labels=named, num_items_in_batch=count).loss.backward()
        iso.collect_main_grad(model)
        return [p.grad.clone() for p in model.parameters()]

    whole = gradients(8)
    for rows in (1, 2, 4):
        assert all(torch.equal(x, y) for x, y in zip(gradients(rows), whole, strict=True))


def test_it_comes_and_goes_with_its_part():
    model, (ids, labels) = build(), drawn()
    before, plain = model.loss_function, model(ids, labels=labels).loss
    parts = ("linear", "norm", "embedding", "mlp", "attention", "rope")
    assert iso.convert(model, parts=parts).parts["loss"] == ()
    assert model.loss_function is before
    assert iso.convert(model, parts="loss").parts["loss"] == ("",)
    assert model.loss_function is causal_lm_loss
    assert iso.convert(model).parts["loss"] == ()  # it is there
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.loss_function is causal_lm_loss
    iso.restore(model)
    assert model.loss_function is before
    assert torch.equal(model(ids, labels=labels).loss, plain)


def test_a_loss_of_ones_own_stays():
    model = build()
    own = model.loss_function = lambda *_, **__: torch.zeros(())
    assert iso.convert(model).parts["loss"] == ()
    assert model.loss_function is own
    iso.restore(model)
    assert model.loss_function is own


def test_models_without_a_head_and_inside_others_are_seen(caplog):
    encoder = build().model
    assert iso.convert(encoder).parts["loss"] == ()
    assert not caplog.records
    outer = torch.nn.ModuleDict({"policy": build(), "other": torch.nn.Linear(4, 4)})
    assert iso.convert(outer).parts["loss"] == ("policy",)
    iso.restore(outer)
    assert outer["policy"].loss_function is not causal_lm_loss
    assert iso.convert(outer, leave=["policy"]).parts["loss"] == ()
    assert outer["policy"].loss_function is not causal_lm_loss


def test_logits_of_another_vocabulary_are_refused():
    with pytest.raises(
        ShapeError, match="last dimension of logits: limit: vocab_size; got: 60; nearest legal choice: 61"
    ):
        causal_lm_loss(torch.zeros(2, 3, 60), torch.zeros(2, 3, dtype=torch.long), 61)


def test_compiled_it_is_one_graph_with_the_eager_bits():
    model, (ids, labels) = build(), drawn()
    iso.convert(model, strict=True)
    eager = model(ids, labels=labels).loss
    torch._dynamo.reset()
    call = torch.compile(lambda: model(ids, labels=labels, use_cache=False).loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(), eager)

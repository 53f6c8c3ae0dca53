"""Blocks that call torch's functions by themselves: Falcon's attention, Llama 4's stacked experts."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.families import family  # noqa: E402
from tests.models.sweep import build  # noqa: E402
from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402

IDS = torch.arange(2 * 9).view(2, 9) * 5 % 96


@pytest.mark.parametrize("name", ["Falcon", "Llama4"])
def test_results_gradients_and_the_way_back(name):
    theirs = family(name, torch.float32)
    ours = copy.deepcopy(theirs)
    iso.convert(ours, strict=True)
    kept = [type(child) for child in theirs.modules()]
    for each in (ours, theirs):
        each(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-4)
        assert not same(ours(IDS).logits, theirs(IDS).logits)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4 * float(other.grad.abs().max()))
    iso.restore(ours)
    assert [type(child) for child in ours.modules()] == kept
    with torch.no_grad():
        assert same(ours(IDS).logits, theirs(IDS).logits)


def test_gradients_of_a_token_do_not_see_the_batch():
    for name in ("Falcon", "Llama4"):
        ours = family(name, torch.float32)
        iso.convert(ours, strict=True)
        x = ours.get_input_embeddings()(IDS).detach()
        both, alone = x.clone().requires_grad_(), x[1:].clone().requires_grad_()
        for given in (both, alone):
            ours(inputs_embeds=given).logits.square().sum().backward()
        assert same(both.grad[1:], alone.grad)


def test_one_head_of_keys_is_broadcast_as_in_torch():
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 1, 5, 16)
    mask = torch.ones(5, 5).tril().bool()
    whole = iso.scaled_dot_product_attention(q, k, k, mask)
    assert same(whole, iso.scaled_dot_product_attention(q, k.expand_as(q), k.expand_as(q), mask))
    with iso.invariant():
        assert same(torch.nn.functional.scaled_dot_product_attention(q, k, k, mask), whole)


def test_attention_of_its_own_that_is_something_else():
    config = copy.deepcopy(build("FalconForCausalLM").config)
    config.alibi = True
    found = transformers.FalconForCausalLM._from_config(config).eval()
    with pytest.raises(OptionError, match="ALiBi"):
        iso.convert(found, strict=True)
    with iso.invariant():
        assert iso.verify(found)


def test_a_block_that_looks_at_the_batch_is_left():
    found = family("Llama4", torch.float32)
    block = next(m for m in found.modules() if type(m).__name__ == "Llama4TextMoe")

    class Centred(type(block)):
        def forward(self, hidden_states):
            return super().forward(hidden_states - hidden_states.mean(1, keepdim=True))

    Centred.__module__ = type(block).__module__
    block.__class__ = Centred
    with pytest.raises(OptionError, match=r"Centred calls aten\.mean"):
        iso.convert(found, strict=True)


def test_buffers_of_stacked_experts_are_refused():
    ours = family("Llama4", torch.float32)
    iso.convert(ours, strict=True)
    iso.use_main_grad(ours)
    with pytest.raises(OptionError, match="main_grad of stacked experts"):
        ours(IDS, labels=IDS).loss.backward()

"""Layers that ranks share have the formula of what they stand for, whatever class transformers gave it."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
from tests.torch.tensors import same

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402
from isogemm.torch.distributed import (  # noqa: E402
    ColumnParallel,
    Ranks,
    RowParallel,
    VocabularyEmbedding,
    log_softmax,
    token_losses,
)
from isogemm.torch.distributed.layers import HeadNorm  # noqa: E402
from isogemm.torch.distributed.tree import fixed_sum  # noqa: E402

HEADS, WIDTH = 8, 16
NORMS = ("Qwen3", "Gemma3, which multiplies by 1 + weight")


def norms(name):
    """A converted norm of transformers and its copy that heads share."""
    family = name.split(",")[0]
    modeling = import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    whole = torch.nn.ModuleList([getattr(modeling, f"{family}RMSNorm")(WIDTH)])
    torch.nn.init.normal_(whole[0].weight)
    iso.convert(whole)
    shared = copy.deepcopy(whole[0])
    HeadNorm.adopt(shared, Ranks(order="tree8"), "q_norm", set())
    return whole[0], shared


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_norm(name, dtype):
    whole, shared = (norm.to(dtype) for norm in norms(name))
    x = torch.randn(3, 5, HEADS, WIDTH, dtype=dtype)
    want = whole(x)
    recorded = shared(x)
    with torch.no_grad():
        inferred = shared(x)
    assert recorded.dtype == inferred.dtype == want.dtype
    assert same(recorded, want)
    assert same(inferred, want)


@pytest.mark.parametrize("order", ["leaf4096", "leaf4", "chain"])
@pytest.mark.parametrize("name", NORMS)
def test_the_weight_s_gradient_is_a_tree_over_heads(name, order):
    whole, shared = norms(name)
    whole.grad_order = shared.grad_order = order
    x, dy = torch.randn(3, 5, HEADS, WIDTH), torch.randn(3, 5, HEADS, WIDTH)
    shared(x).backward(dy)
    leaves = []
    for head in range(HEADS):
        whole.weight.grad = None
        whole(x[:, :, head]).backward(dy[:, :, head])
        leaves.append(whole.weight.grad)
    assert same(shared.weight.grad, fixed_sum(leaves))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_hold_the_whole_batch_s_gradient_however_it_is_cut(dtype, parts):
    shared = norms("Qwen3")[1].to(dtype)
    shared.grad_order = "leaf4"
    x, dy = (torch.randn(4, 4, HEADS, WIDTH, dtype=dtype) for _ in range(2))
    shared(x).backward(dy)
    want, shared.weight.grad = shared.weight.grad, None
    for _ in range(2):  # the buffers begin anew
        assert iso.use_main_grad(shared) == ["weight"]
        for some, grad in zip(x.chunk(parts), dy.chunk(parts), strict=True):
            shared(some).backward(grad)
        assert shared.weight.grad is None
        with pytest.raises(OptionError, match="nobody has collected"):
            torch.optim.SGD(shared.parameters(), 0.1).step()
        assert iso.collect_main_grad(shared) == ["weight"]
        assert same(shared.weight.grad, want)
        assert not shared.weight.main_grad.any()
        shared.weight.grad = None


def test_norms_that_nothing_records_are_turned_with_their_heads(monkeypatch):
    """One pass over queries and keys in place of three, where the bits are those of the three."""
    from isogemm.torch import reductions
    from isogemm.torch.model.huggingface import modules

    calls = []
    pair = reductions.norm_rope_pair
    monkeypatch.setattr(reductions, "norm_rope_pair", lambda *given, **order: calls.append(1) or pair(*given, **order))
    (q_norm, shared_q), (k_norm, shared_k) = norms("Qwen3"), norms("Qwen3")
    query, key = torch.randn(2, 3, HEADS, WIDTH), torch.randn(2, 3, HEADS, WIDTH)
    cos, sin = torch.randn(2, 3, 1, WIDTH // 2), torch.randn(2, 3, 1, WIDTH // 2)
    want = modules.turned(query, key, q_norm, k_norm, cos, sin)
    assert len(calls) == 1
    recorded = modules.turned(query, key, shared_q, shared_k, cos, sin)
    assert len(calls) == 1
    with torch.no_grad():
        inferred = modules.turned(query, key, shared_q, shared_k, cos, sin)
    assert len(calls) == 2
    for found in (recorded, inferred):
        assert all(same(x, y) for x, y in zip(found, want, strict=True))


def tables(padding=None):
    """Gemma 3's table, whose rows are multiplied by a number, converted, and its copy that ranks share."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    whole = torch.nn.ModuleList([Gemma3TextScaledWordEmbedding(24, WIDTH, padding, embed_scale=7.3)])
    iso.convert(whole)
    shared = copy.deepcopy(whole[0])
    VocabularyEmbedding.adopt(shared, Ranks(), "embed_tokens", set())
    return whole[0], shared


@pytest.mark.parametrize("padding", [None, 5])
def test_a_scaled_table_stays_one(padding):
    whole, shared = tables(padding)
    ids = torch.tensor([[3, 5, 3], [0, 23, 5]])
    with torch.no_grad():
        assert same(shared(ids), whole(ids))
    dy = torch.randn(2, 3, WIDTH)
    for table in (whole, shared):
        table(ids).backward(dy)
    assert same(shared.weight.grad, whole.weight.grad)
    assert same(copy.deepcopy(shared)(ids), whole(ids))
    with pytest.raises(OptionError, match=r"ids.*0 to 23"):
        shared(torch.tensor([24]))


def test_a_table_that_was_left_is_refused():
    with pytest.raises(OptionError, match=r"isogemm\.torch\.Embedding"):
        VocabularyEmbedding.adopt(torch.nn.Embedding(8, 4), Ranks(), "embed_tokens", set())


@pytest.mark.parametrize("kind", [ColumnParallel, RowParallel])
@pytest.mark.parametrize("shape", [(3, 0, 64), (0, 5, 64), (64,)])
def test_rows_of_any_shape(kind, shape):
    layer = iso.Linear(64, 64)
    kind.adopt(layer, Ranks(), "layer", set())
    x = torch.ones(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape, layer.weight.grad.shape) == (x.shape, x.shape, (64, 64))


def test_losses_of_no_tokens():
    logits = torch.empty(0, 8, requires_grad=True)
    losses = token_losses(logits, torch.empty(0, dtype=torch.int64), Ranks())
    losses.sum().backward()
    assert (losses.shape, logits.grad.shape) == ((0,), (0, 8))
    assert log_softmax(logits, Ranks()).shape == (0, 8)

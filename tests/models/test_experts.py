"""Mixtures of experts: a token's logits do not depend on which other tokens its experts get."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.small import filled, same  # noqa: E402

import isogemm.audit  # noqa: E402
import isogemm.torch as iso  # noqa: E402
from isogemm.errors import DTypeError  # noqa: E402
from isogemm.torch import reductions  # noqa: E402
from isogemm.torch.gemm.main_grad import main_grads  # noqa: E402
from isogemm.torch.model.huggingface.mixture import in_order, sorting  # noqa: E402

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 3,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
KINDS = {
    "Qwen2Moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 56, "num_experts": 8},
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 8, "head_dim": 16},
    "DeepseekV3": {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, **LATENT},
    "GraniteMoe": {"num_local_experts": 8},
    "Phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
KINDS["DeepseekV3"] |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}


@functools.cache
def _built(kind, dtype):
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "intermediate_size": 48, **KINDS[kind]})
    return filled(config, dtype)


def build(kind, dtype=torch.float32):
    return copy.deepcopy(_built(kind, dtype))


def tokens(*shape):
    return torch.randint(3, 131, shape, generator=torch.Generator().manual_seed(sum(shape)))


def pieces(model, ids, sizes):
    cache = transformers.DynamicCache(config=model.config)
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)], 1)


def holds(model):
    ids = tokens(5, 19)
    with torch.no_grad():
        batch, alone = model(ids).logits, model(ids[3:4]).logits
        assert same(batch[3:4], alone)
        assert same(pieces(model, ids[3:4], [9, 6, 4]), alone)
        assert same(pieces(model, ids[3:4], [15] + [1] * 4), alone)
    return batch


@pytest.mark.filterwarnings("ignore:.*RoPE scaling")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_the_batch(kind, dtype):
    model = build(kind, dtype)
    with torch.no_grad():
        plain = model(tokens(5, 19)).logits
    with iso.invariant() as scope:
        found = holds(model)
    assert scope.routed["_grouped_mm"]
    if dtype is torch.float32:  # in 16 bits a router's rounding chooses other experts now and then
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    report = iso.convert(model)
    blocks = {name.rpartition(".")[0] for name, child in model.named_modules() if "num_experts" in vars(child)}
    names = {name for name, child in model.named_modules() for block in blocks if name.startswith(f"{block}.")}
    assert {name for name in names if dict(model.named_modules())[name]._parameters} <= set(report.converted)
    # Phi-MoE's rotary embedding depends on how long a sequence is.
    expected = {"GptOss": ("self_attn",), "Phimoe": ("model.rotary_emb",)}.get(kind, ())
    assert bool(report.open) == (kind == "Phimoe")  # gpt-oss' own code turns, and attention is isogemm's
    assert bool(report.left) == bool(expected), report
    assert all(any(part in name for part in expected) for name in report.left), report
    found = holds(model)
    if dtype is torch.float32:
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_experts_of_transformers_are_invariant_in_a_scope(implementation):
    model = build("Qwen3Moe")
    model.set_experts_implementation(implementation)
    with iso.invariant():
        holds(model)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_nothing_of_a_converted_mixture_is_left(kind):
    model, ids = build(kind), tokens(2, 9)
    listed = iso.coverage(model, ids)
    assert not listed.not_routed, str(listed)
    iso.convert(model)
    with torch.no_grad():
        left = {row.op for row in iso.coverage(model, ids, scope=False).not_routed}
    assert not left


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_micro_batches_of_whole_leaves_on_tensor_cores(kind):
    model, ids = build(kind, torch.bfloat16), tokens(4, 17)
    iso.convert(model, contract="tensor_core:sm90/chain", grad_order="leaf16")

    def gradients(size):
        iso.use_main_grad(model)
        for part in ids.split(size):
            log_p = reductions.log_softmax(model(part[:, :-1], use_cache=False).logits)
            (-log_p.gather(-1, part[:, 1:, None]).sum() / 64).backward()
        return {name: total.clone() for name, _, total in main_grads(model) if "experts" in name}

    whole, parts = gradients(4), [gradients(size) for size in (2, 1)]
    assert whole
    assert all(same(each[name], total) for each in parts for name, total in whole.items())


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 50])
def test_rows_of_an_expert_begin_a_block_at_every_leaf(tokens):
    index = torch.randint(0, 6, (tokens, 3), generator=torch.Generator().manual_seed(tokens))  # 5: there is none
    index, _ = in_order(index, torch.ones(tokens, 3))
    by = sorting(index, 5, 16, 16)
    begin = 0
    for expert, count in enumerate(by.counts.tolist()):
        rows = by.order[begin : begin + count]
        begin += count
        wanted = [i for i, e in enumerate(index.flatten().tolist()) if e == expert]
        assert rows[rows < 3 * tokens].tolist() == wanted
        leaves = [[i for i in wanted if i // 48 == leaf] for leaf in range(-(-tokens // 16))]
        at = 0
        for leaf in leaves:
            assert rows[at : at + len(leaf)].tolist() == leaf
            at += len(leaf) if tokens <= 16 else -(-len(leaf) // 16) * 16
        assert at == count
    assert torch.equal(by.order[by.inverse], torch.arange(3 * tokens))
    assert torch.equal(by.experts[by.inverse], index.flatten())


def test_gradients_over_micro_batches_are_those_of_the_whole():
    for kind in ("Qwen2Moe", "Phimoe"):
        model, ids = build(kind), tokens(8, 14)
        exact = build(kind)
        exact.set_experts_implementation("eager")
        exact.double()

        def loss(model, part, log_softmax):
            log_p = log_softmax(model(part[:, :-1], use_cache=False).logits)
            return -log_p.gather(-1, part[:, 1:, None]).sum() / 104

        def gradients(size, model=model, ids=ids, loss=loss):
            model.zero_grad()
            iso.use_main_grad(model)
            for part in ids.split(size):
                loss(model, part, reductions.log_softmax).backward()
            iso.collect_main_grad(model)
            return [p.grad.clone() for p in model.parameters()]

        iso.convert(model, grad_order="chain")
        whole = gradients(8)
        for size in (2, 3):
            assert all(same(x, y) for x, y in zip(gradients(size), whole, strict=True))
        loss(exact, ids, lambda x: x.log_softmax(-1)).backward()
        for (name, p), x in zip(exact.named_parameters(), whole, strict=True):
            torch.testing.assert_close(x.double(), p.grad, rtol=1e-3, atol=1e-5 * float(p.grad.abs().max()), msg=name)
        for p in model.parameters():
            p.grad = None
            del p.main_grad
        loss(model, ids, reductions.log_softmax).backward()
        assert all(same(p.grad, x) for p, x in zip(model.parameters(), whole, strict=True))


def test_gradients_of_experts_with_bias():
    model = build("GptOss")
    theirs = copy.deepcopy(model.model.layers[0].mlp.experts).double()
    iso.convert(model, contract="fma/chain")
    ours = model.model.layers[0].mlp.experts
    x, weights = torch.randn(7, 64, requires_grad=True), torch.rand(7, 3, requires_grad=True)
    index = torch.stack([torch.randperm(8)[:3] for _ in range(7)])
    dy = torch.randn(7, 64)
    got = torch.autograd.grad(ours(x, index, weights), (x, weights, *ours.parameters()), dy)
    y = type(theirs).forward.__wrapped__(theirs, x.double(), index, weights.double())
    want = torch.autograd.grad(y, (x, weights, *theirs.parameters()), dy.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)
    nothing = ours(x[:0], index[:0], weights[:0])
    assert nothing.shape == (0, 64)


def test_what_is_left_is_said():
    model = build("Qwen2Moe")
    report = iso.convert(model, parts=("linear",))
    assert report.left["model.layers.0.mlp.experts"] == "experts is not among the parts"
    assert report.left["model.layers.1.mlp.gate"] == "experts is not among the parts"
    model = build("Phimoe")
    report = iso.convert(model, leave=["*.router"])
    assert report.left["model.layers.0.mlp.router"] == "in leave"
    model = build("Qwen3Moe")
    gate, experts = model.model.layers[0].mlp.gate, model.model.layers[1].mlp.experts
    gate.forward = type(gate).forward.__get__(gate)
    report = iso.convert(model)
    assert report.left == {"model.layers.0.mlp.gate": "its forward method was replaced"}
    assert iso.convert(model).left["model.layers.1.mlp.experts"] == "isogemm's already, as it is"
    assert type(experts).__name__ == "Qwen3MoeExperts"


class Limited(transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts):
    """Experts whose gate is another than their eager code has."""

    __module__ = "transformers.models.limited"

    def _apply_gate(self, x):
        return x.clamp(max=1.0).chunk(2, -1)[0]


def test_experts_that_compute_something_else_are_left():
    model = build("Qwen3Moe")
    model.model.layers[0].mlp.experts.__class__ = Limited
    report = iso.convert(model)
    assert report.left == {
        "model.layers.0.mlp.experts": "Limited computes something else than transformers' grouped experts"
    }


def test_copies_and_half_weights():
    model, ids = build("GraniteMoe"), tokens(2, 7)
    iso.convert(model)
    with torch.no_grad():
        want = model(ids).logits
        assert same(pickle.loads(pickle.dumps(model))(ids).logits, want)
    with pytest.raises(DTypeError, match="float64"):
        iso.convert(build("GraniteMoe").double())


@pytest.mark.parametrize(("kind", "dtype"), [("Qwen3Moe", torch.bfloat16), ("Mixtral", torch.float32)], ids=str)
def test_the_audit_holds(kind, dtype):
    """Every relation that has logits, and gradients over micro-batches: no bit of a token differs."""
    few = {"batches": (3,), "chunks": (7, 16), "micro_batches": (1, 2), "tokens": 23}
    iso.convert(build(kind, dtype), strict=True)
    report = isogemm.audit.model(build(kind, dtype), mode="convert", **few)
    relations = report.providers["convert"].relations.values()
    assert not {r.relation: r.reason or [str(d) for d in r.drifts] for r in relations if r.status != "held"}
    assert len(relations) == 9


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "GraniteMoe"])
def test_equal_choices_are_taken_in_order(kind):
    model = build(kind)
    iso.convert(model, strict=True)
    layer = model.model.layers[0]
    router = layer.block_sparse_moe.router if kind == "GraniteMoe" else layer.mlp.gate
    with torch.no_grad():
        router.weight.zero_()
        router.weight[5] = 1.0
        x = torch.ones(37, 64) * torch.linspace(0.5, 2.0, 37)[:, None]
        found = [t for t in router(x) if t.dtype is torch.int64]
    assert found[0].tolist() == [[5, 0, 1][: found[0].shape[1]]] * 37


def test_the_order_of_choices_does_not_matter():
    model = build("Qwen3Moe")
    iso.convert(model)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(7, 64), torch.rand(7, 3)
    index = torch.stack([torch.randperm(8)[:3] for _ in range(7)])

    def step(order):
        inputs = [x.clone().requires_grad_(), weights[:, order].requires_grad_()]
        y = experts(inputs[0], index[:, order], inputs[1])
        dx, dw = torch.autograd.grad(y, inputs, x)
        return y, dx, dw.index_select(1, torch.argsort(torch.tensor(order)))

    want = step([0, 1, 2])
    for order in ([2, 1, 0], [1, 2, 0]):
        assert all(map(same, step(order), want))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
@pytest.mark.parametrize("buffers", [False, True])
def test_a_compiled_step_of_a_mixture_has_the_same_gradients(buffers):
    model, x = build("Qwen3Moe"), torch.randn(2, 9, 64)
    iso.convert(model, grad_order="chain")
    block = model.model.layers[0].mlp

    def gradients(call):
        block.zero_grad()
        if buffers:
            iso.use_main_grad(block)
        call(x).square().sum().backward()
        if buffers:
            iso.collect_main_grad(block)
        return [p.grad.clone() for p in block.parameters()]

    want = gradients(block)
    torch._dynamo.reset()
    assert all(map(same, gradients(torch.compile(block, fullgraph=True, backend="aot_eager")), want))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_a_compiled_mixture_has_the_same_bits():
    for kind, whole in (("Qwen3Moe", True), ("Qwen2Moe", False)):
        model, x = build(kind), torch.randn(2, 9, 64)
        iso.convert(model)
        block = model.model.layers[0].mlp
        torch._dynamo.reset()
        with torch.no_grad():
            assert same(torch.compile(block, fullgraph=whole, backend="aot_eager")(x), block(x))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compilers_round_between_no_products_of_a_mixture():
    """Fused, a product in bfloat16 and the sum behind it would have one rounding: an operator has both."""
    block, called = build("Qwen3Moe").bfloat16(), []
    iso.convert(block)
    block = block.model.layers[0].mlp

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(block, fullgraph=True, backend=backend)(torch.randn(2, 9, 64).bfloat16())
    assert any("experts_combined" in name for name in called)

"""Models whose own code stays whole: DeepSeek-V4, GPT-J, Falcon with transformers' eager attention."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.families import family  # noqa: E402
from tests.models.sweep import build  # noqa: E402
from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402
from isogemm.torch.model.huggingface import whole  # noqa: E402
from isogemm.torch.model.own_code import own  # noqa: E402

IDS = torch.arange(3 * 21).view(3, 21) * 5 % 93 + 3


def v4(dtype=torch.float32):
    """A model whose indexer shows every entry, since of equal scores torch's topk takes any."""
    found = family("DeepseekV4", dtype).eval()
    found.model.layers[0].mlp.gate.tid2eid.copy_(torch.arange(97 * 2).view(97, 2) * 3 % 4)
    found.model.layers[0].self_attn.compressor.indexer.index_topk = 64
    return found


def converted(model, **options):
    ours = copy.deepcopy(model)
    iso.convert(ours, strict=True, **options)
    return ours


def outputs(model, ids):
    """What each module returned, the first tensor of floats in it."""
    seen = {}

    def keep(name):
        def hook(module, args, output):
            tensors = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
            seen[name] = [x for x in tensors if x.is_floating_point()]

        return hook

    hooks = [child.register_forward_hook(keep(name)) for name, child in model.named_modules()]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def test_every_block_has_the_values_of_transformers():
    theirs = v4()
    ours = converted(theirs)
    found, want = outputs(ours, IDS), outputs(theirs, IDS)
    assert found.keys() == want.keys()
    assert len(want) > 60
    for name, tensors in want.items():
        if ".experts." in name:
            continue  # rows in another order
        for x, y in zip(found[name], tensors, strict=True):
            size = y[y.isfinite()].abs().amax() if y.numel() else 0.0
            torch.testing.assert_close(
                x, y, rtol=1e-4, atol=1e-5 * float(size), msg=lambda m, name=name: f"{name}: {m}"
            )
    assert not same(found[""][0], want[""][0])


def test_gradients_have_the_values_of_transformers():
    theirs = v4()
    ours = converted(theirs)
    exact = copy.deepcopy(theirs).double()
    exact.set_experts_implementation("eager")  # torch's grouped products take no float64
    for model in (ours, exact):
        model(IDS, labels=IDS).loss.backward()
    for (name, p), q in zip(ours.named_parameters(), exact.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            size = float(q.grad.abs().max())
            torch.testing.assert_close(
                p.grad.double(), q.grad, rtol=1e-3, atol=1e-5 * size, msg=lambda m, n=name: n + m
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_token_do_not_see_the_batch(dtype):
    ours, found = converted(v4(dtype)), []
    table = ours.get_input_embeddings()
    for ids in (IDS, IDS[1:2]):
        x = table(ids).detach().requires_grad_()
        hook = table.register_forward_hook(lambda module, args, output, x=x: x)  # a router reads the ids
        ours(ids).logits.float().square().sum().backward()
        hook.remove()
        found.append(x.grad)
    assert same(found[0][1:2], found[1])


def test_checkpointed_and_compiled_layers_have_the_bits_of_eager_ones():
    ours = converted(v4()).train()
    want = ours(IDS, labels=IDS, use_cache=False)
    want.loss.backward()
    kept = [None if p.grad is None else p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    ours.gradient_checkpointing_enable()
    ours(IDS, labels=IDS, use_cache=False).loss.backward()
    for p, grad in zip(ours.parameters(), kept, strict=True):
        assert (p.grad is None and grad is None) or same(p.grad, grad)
    with torch.no_grad():
        assert same(torch.compile(ours.eval(), backend="aot_eager")(IDS[1:2]).logits, want.logits[1:2])


def test_micro_batches_move_only_what_its_own_code_adds():
    def gradients(size):
        ours = converted(v4(), grad_order="leaf21")
        iso.use_main_grad(ours)
        for part in IDS.split(size):
            log_p = iso.reductions.log_softmax(ours(part, use_cache=False).logits)
            (-log_p[:, :-1].gather(-1, part[:, 1:, None]).sum() / 60).backward()
        iso.collect_main_grad(ours)
        return {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}

    whole_batch, parts = gradients(3), gradients(1)
    moved = {name.rpartition(".")[2] for name, x in whole_batch.items() if not same(x, parts[name])}
    assert moved <= {"position_bias", "sinks", "base", "scale", "hc_base", "hc_scale"}, moved


def test_copies_pickles_and_the_way_back(tmp_path):
    theirs = v4()
    ours = converted(theirs)
    kinds = [type(child) for child in theirs.modules()]
    with torch.no_grad():
        plain, want = theirs(IDS).logits, ours(IDS).logits
        assert same(pickle.loads(pickle.dumps(ours))(IDS).logits, want)
        ours.save_pretrained(tmp_path)
        loaded = type(theirs).from_pretrained(tmp_path).eval()
        indexer = loaded.model.layers[0].self_attn.compressor.indexer
        indexer.index_topk = 64
        assert type(loaded) is type(theirs)
        assert same(loaded(IDS).logits, plain)
        assert same(converted(loaded)(IDS).logits, want)
        again = iso.convert(ours, strict=True)
        assert not again.converted
        assert "model.layers.0" in again.left
        iso.restore(ours)
        assert [type(child) for child in ours.modules()] == kinds
        assert same(ours(IDS).logits, plain)


def test_padding_before_a_token_is_refused_where_it_is_taken_for_tokens():
    ours = converted(v4())
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        want = ours(IDS, use_cache=False).logits
        mask[1, 18:] = 0
        assert same(ours(IDS, mask, use_cache=False).logits[1, :18], want[1, :18])
        for hidden in (slice(0, 2), slice(7, 8)):
            mask = torch.ones_like(IDS)
            mask[1, hidden] = 0
            with pytest.raises(OptionError, match="padding before a token in DeepseekV4Model"):
                ours(IDS, attention_mask=mask)
        gptj = converted(family("GPTJ", torch.float32))
        assert gptj(IDS, attention_mask=mask).logits.isfinite().all()


def test_what_its_own_code_would_draw_or_compute_elsewhere_is_refused():
    ours = converted(v4())
    ours.model.config.attention_dropout = 0.1
    ours(IDS)
    with pytest.raises(OptionError, match="dropout of attention in DeepseekV4Model"):
        ours.train()(IDS)
    ours.model.config.attention_dropout = 0.0
    ours.model.config._attn_implementation = "sdpa"
    with pytest.raises(OptionError, match=r"attention of DeepseekV4Model.*sdpa"):
        ours(IDS)


def sums(module, x):
    return x.sum(2) + x.sum(0).sum(1)  # isogemm's sums, over a batch


def steps(module, x):
    return x.cumsum(1).sum(2)


@pytest.mark.parametrize(
    ("forward", "why"),
    [(sums, "has other bits in batch: model"), (steps, r"calls aten\.cumsum")],
    ids=["sums", "steps"],
)
def test_a_model_that_looks_at_the_batch_is_left(monkeypatch, forward, why):
    theirs = v4()
    monkeypatch.setattr(whole, "_LOOKS", {})
    monkeypatch.setattr(type(theirs.model.hc_head), "forward", forward)
    with pytest.raises(OptionError, match=f"DeepseekV4Model {why}"):
        iso.convert(theirs, strict=True)


def test_modules_that_were_not_seen_inside_are_not_known_with_the_model():
    theirs = v4()
    attention = theirs.model.layers[0].self_attn

    class Other(type(attention.o_a_proj)):
        pass

    attention.o_a_proj.__class__ = Other
    theirs.model.hc_head.forward = theirs.model.hc_head.forward
    with pytest.raises(OptionError, match=r"layers\.0\.self_attn\.o_a_proj: a subclass of Linear.*Other") as error:
        iso.convert(theirs, strict=True)
    assert "layers.1.self_attn.o_a_proj" not in str(error.value)
    with pytest.raises(OptionError, match=r"1 DeepseekV4HyperHead \(DeepseekV4HyperHead is not known here\)"):
        iso.convert(theirs, strict=True, leave=["model.layers.0.self_attn.o_a_proj"])
    with pytest.raises(OptionError, match=r"model\.layers\.0 is in leave, and a model keeps its own code whole"):
        iso.convert(theirs, strict=True, leave=["model.layers.0"])
    theirs = v4()
    theirs.model.layers[1].forward = theirs.model.layers[1].forward
    with pytest.raises(OptionError, match="DeepseekV4Model its forward method was replaced"):
        iso.convert(theirs, strict=True)


def test_falcon_by_eager_attention_is_such_a_model():
    config = copy.deepcopy(build("FalconForCausalLM").config)
    found = transformers.FalconForCausalLM._from_config(config, attn_implementation="eager").eval()
    assert iso.verify(converted(found))
    config.alibi = True
    found = transformers.FalconForCausalLM._from_config(config, attn_implementation="eager").eval()
    with pytest.raises(OptionError, match=r"FalconModel calls aten\.pow"):
        converted(found)


def test_functions_of_written_out_attention():
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=made, requires_grad=True) for h, n in ((4, 5), (1, 7), (4, 7)))
    bias = torch.randn(1, 1, 7, generator=made)

    def attend():
        scores = torch.matmul(q, k.transpose(-1, -2))
        y = scores.softmax(-1) @ v + scores.softmax(dim=2).sum(-1, keepdim=True) + v.mean(2, keepdim=True)
        return y, torch.baddbmm(bias, q[:, 0], v[:, 1].mT, beta=0.5, alpha=2), bias.baddbmm(batch1=q[0], batch2=v[0].mT)

    found = []
    for scope in (nullcontext(), whole.attending()):
        with scope:
            results = attend()
        found.append([*results, *torch.autograd.grad(sum(y.square().sum() for y in results), (q, k, v))])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scope", [own, whole.attending])
def test_softmax_has_the_dtype_that_is_asked_for_however_it_is(scope):
    x = torch.randn(2, 3, 4, 8).bfloat16()
    with scope():
        want = torch.nn.functional.softmax(x, -1, dtype=torch.float32)
        assert want.dtype is torch.float32
        for given in ({"dtype": torch.float32}, [torch.float32]):
            args, options = ((), given) if isinstance(given, dict) else (given, {})
            assert same(torch.softmax(x, -1, *args, **options), want)
            assert same(x.softmax(-1, *args, **options), want)


def test_hidden_keys_add_nothing_wherever_they_stand():
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=made) for n in (40, 140, 140))
    shown = torch.cat((torch.arange(3, 60), torch.arange(67, 150)))  # a window's keys, and what stands behind them
    hidden = torch.full((150,), -torch.inf).index_fill(0, shown, 0.0)
    wide = [x.new_zeros(2, 4, 150, 16).index_copy(2, shown, x) for x in (k, v)]
    with torch.no_grad(), whole.attending():
        assert same((q @ wide[0].mT + hidden).softmax(-1) @ wide[1], (q @ k.mT).softmax(-1) @ v)


def test_a_model_holds_under_the_arithmetic_of_tensor_cores():
    ours = converted(v4(torch.bfloat16), contract="tensor_core:sm90/chain")
    assert list(iso.verify(ours).broken) == ["left-padding"]

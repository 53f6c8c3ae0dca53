"""Small transformers models, converted: the same logits whatever stands around a sequence."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager, nullcontext

import pytest
from tests.torch.tensors import same

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch.model.tiny import DTYPES, FAMILIES, TINY, build, converted, tokens  # noqa: E402

import isogemm.torch as iso  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_close_to_torch_s(family, dtype):
    theirs = build(family, dtype)
    ours, state = copy.deepcopy(theirs), copy.deepcopy(theirs.state_dict())
    report = iso.convert(ours)
    assert report.left == {}
    sizes = {part: len(names) for part, names in report.parts.items()}
    norms = 9 if family == "Qwen3" else 5
    counts = {
        "linear": 15,
        "norm": norms,
        "embedding": 1,
        "mlp": 2,
        "activation": 0,
        "attention": 2,
        "rope": 3,
        "experts": 0,
        "loss": 1,
    }
    assert sizes == counts
    ids = tokens(3, 20)
    with torch.no_grad():
        got, want = ours(ids).logits, theirs(ids).logits
    eps = 200 * torch.finfo(dtype).eps if dtype is torch.float32 else 0.06
    torch.testing.assert_close(got, want, rtol=eps, atol=eps * float(want.abs().max()))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert ours.state_dict().keys() == state.keys()
    ours.load_state_dict(state)
    theirs.load_state_dict(ours.state_dict())
    assert all(torch.equal(p, state[name]) for name, p in theirs.state_dict().items())


def test_converting_again_changes_nothing():
    model, ids = build(), tokens(2, 9)
    iso.convert(model, parts=("linear", "norm", "mlp", "embedding"))
    iso.convert(model)
    want = model(ids).logits
    again = iso.convert(model)
    assert not [name for name in again.converted if "self_attn" not in name]
    assert again.left["model.norm"] == again.left["model.layers.0.mlp"] == "isogemm's already, as it is"
    assert same(model(ids).logits, want)
    assert same(converted()[0](ids).logits, want)


def test_a_misspelt_name_to_leave_is_refused():
    model = build()
    before = [type(m) for m in model.modules()]
    with pytest.raises(OptionError, match=r"lm_haed.*lm_head"):
        iso.convert(model, leave=["lm_haed"])
    assert [type(m) for m in model.modules()] == before


def test_the_configuration_is_the_model_s_own():
    model = build()
    other = type(model)(model.config)
    before = model.config._attn_implementation
    iso.convert(model)
    assert other.config._attn_implementation == before
    assert model.config._attn_implementation == "isogemm"
    assert model.model.layers[0].self_attn.config is model.config is model.model.config
    report = iso.convert(other, parts=("linear", "norm", "mlp", "embedding"))
    assert other.config._attn_implementation == before
    assert report.left["model.rotary_emb"] == "rope is not among the parts"
    assert "attention is not among the parts" in report.left["model.layers.0.self_attn"]
    report = iso.convert(build(), leave=["model.layers.1.self_attn"])
    assert report.parts["attention"] == ()
    assert "one mask for all layers" in report.left["model.layers.0.self_attn"]
    assert iso.convert(build().model.layers[0]).parts["attention"] == ()


@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_does_not_see_its_batch(family, dtype):
    model, _ = converted(family, dtype)
    ids = tokens(7, 33)
    with torch.no_grad():
        whole = model(ids).logits
        for rows in (slice(0, 1), slice(3, 4), slice(6, 7), slice(2, 4)):
            assert same(model(ids[rows]).logits, whole[rows])
        assert same(model(ids[:, :9]).logits, whole[:, :9])


@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_on_either_side(family, dtype):
    model, _ = converted(family, dtype)
    ids = tokens(1, 21)
    with torch.no_grad():
        want = model(ids).logits
        for left, right in ((5, 0), (0, 7), (118, 3)):  # the last one crosses a leaf of 128 keys
            mask = torch.tensor([[0] * left + [1] * 21 + [0] * right, [1] * (left + 21 + right)])
            padded = torch.full(mask.shape, 5)
            padded[0, left : left + 21] = ids
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            got = model(padded, attention_mask=mask, position_ids=positions).logits
            assert same(got[:1, left : left + 21], want)


def test_holes_in_a_mask_are_holes():
    theirs = build()
    ours = copy.deepcopy(theirs)
    iso.convert(ours)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, 4:6] = 0
    with torch.no_grad():
        got, want = (m(ids, attention_mask=mask).logits for m in (ours, theirs))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_and_chunks_have_prefill_s_bits(family, dtype):
    model, _ = converted(family, dtype)
    ids = tokens(2, 150)  # two leaves of keys
    mask = torch.ones(2, 150, dtype=torch.int64)
    mask[1, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    caches = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=192),
    }
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions).logits
        for make in caches.values():
            for cuts in ([133, 1, 1, 15], [7, 64, 79], [146, 1, 1, 1, 1]):
                cache, place, found = make(), 0, []
                for n in cuts:
                    new = slice(place, place + n)
                    given = {"attention_mask": mask[:, : place + n], "position_ids": positions[:, new]}
                    found.append(model(ids[:, new], past_key_values=cache, **given).logits)
                    place += n
                got = torch.cat(found, 1)
                assert all(same(got[i][mask[i].bool()], want[i][mask[i].bool()]) for i in range(2))


def test_generate():
    model, _ = converted()
    ids = tokens(1, 9)
    other = torch.cat((torch.zeros(1, 4, dtype=torch.int64), ids), 1)
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 9:]
    both = torch.cat((tokens(1, 13), other))
    for cache in ({}, {"cache_implementation": "static"}):
        got = model.generate(both, attention_mask=(both != 0).long(), **options, **cache)
        assert torch.equal(got[1, 13:], alone)


def test_a_window():
    theirs = build("Mistral", sliding_window=9)
    ours = copy.deepcopy(theirs)
    iso.convert(ours)
    ids = tokens(2, 40)
    with torch.no_grad():
        want = ours(ids).logits
        torch.testing.assert_close(want, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        for options in ({}, {"config": ours.config}):  # keeps all keys, and drops those behind the window
            cache = transformers.DynamicCache(**options)
            chunks = [ours(part, past_key_values=cache).logits for part in ids.split([25, 1, 14], 1)]
            assert same(torch.cat(chunks, 1), want)


@pytest.mark.parametrize("drops", [True, False])
def test_a_window_in_a_scope(drops):
    """In chunks and token by token: with a cache that drops what the window has passed, and with one that keeps it."""
    model = build("Mistral", sliding_window=150)
    ids = tokens(2, 300)
    with torch.no_grad(), iso.invariant():
        want = model(ids).logits
        for sizes in ([130, 170], [100, 100, 100], [297, 1, 1, 1]):
            cache = transformers.DynamicCache(config=model.config) if drops else transformers.DynamicCache()
            parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
            assert same(torch.cat(parts, 1), want)
        assert same(model(ids[1:]).logits, want[1:])


def test_masks_of_one_s_own():
    model, _ = converted()
    ids = tokens(2, 10)
    table = torch.ones(10, 10).tril().bool().expand(2, 1, 10, 10)
    with torch.no_grad():
        want = model(ids).logits
        assert same(model(ids, attention_mask=table).logits, want)
        added = torch.zeros(2, 1, 10, 10).masked_fill(~table, float("-inf"))
        assert same(model(ids, attention_mask=added).logits, want)


def test_what_attention_refuses():
    model, _ = converted(attention_dropout=0.5)
    with pytest.raises(OptionError, match="dropout"):
        model.train()(tokens(1, 3))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rotary_tables(kind):
    rope = {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = build(rope_parameters=rope).model.rotary_emb
    for leave in ((), ("model.layers.1.self_attn",)):
        model = build(rope_parameters=rope)
        iso.convert(model, parts=("rope",), leave=leave)
        ours = model.model.rotary_emb
        assert ours.halves is not bool(leave)
        positions = torch.tensor([[0, 1, 7, 300]])
        want, got = theirs(torch.zeros(1), positions), ours(torch.zeros(1), positions)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y[..., : x.shape[-1]], rtol=1e-4, atol=1e-4)
        alone = ours(torch.zeros(1), positions[:, 3:])
        assert all(same(x, y[:, 3:]) for x, y in zip(alone, got, strict=True))
        table = ours.table
        model.bfloat16()
        assert ours.table is table
        with torch.no_grad():
            model(tokens(1, 5))


def test_positions_behind_the_table():
    model, _ = converted()
    with torch.no_grad():
        model(tokens(1, 3), position_ids=torch.tensor([[509, 510, 511]]))
        with pytest.raises(OptionError, match="max_position_embeddings, 512"):
            model(tokens(1, 3), position_ids=torch.tensor([[510, 511, 512]]))


def test_frequencies_that_change_are_left():
    rope = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}
    model, report = converted(rope_parameters=rope)
    assert "depend on the lengths" in report.left["model.rotary_emb"]
    with torch.no_grad():
        model(tokens(1, 5))  # torch's tables, our turns


def test_gemma_multiplies_by_one_more_than_the_weight():
    config = transformers.GemmaConfig(**TINY)
    theirs = transformers.GemmaForCausalLM(config).eval()
    ours = copy.deepcopy(theirs)
    report = iso.convert(ours)
    assert report.left == {}
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens(2, 9)).logits, theirs(tokens(2, 9)).logits, rtol=1e-4, atol=1e-4)


def test_attention_that_is_something_else_is_left():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    report = iso.convert(transformers.BloomForCausalLM(config))
    assert "does not use transformers' attention functions" in report.left[""]


def test_capped_logits():
    """Weights so large that caps are reached."""
    config = transformers.Gemma2Config(**TINY, attn_logit_softcapping=0.5, final_logit_softcapping=0.3)
    theirs = transformers.Gemma2ForCausalLM(config).eval()
    for p in theirs.parameters():
        p.data.normal_(std=0.5)
    ours = copy.deepcopy(theirs)
    assert iso.convert(ours, strict=True).left == {}
    theirs.set_attn_implementation("eager")  # torch's own fast attention has no cap, and transformers drops it there
    for model in (ours, theirs):
        model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens(2, 9)).logits, theirs(tokens(2, 9)).logits, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4 * float(other.grad.abs().max()))


def test_torch_s_defaults_change_nothing():
    model = build()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            report = iso.convert(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.left == {}
    other, _ = converted()
    with torch.no_grad():
        assert same(model(tokens(1, 7)).logits, other(tokens(1, 7)).logits)


def test_encoders():
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    theirs = transformers.BertModel(config).eval()
    ours = copy.deepcopy(theirs)
    report = iso.convert(ours)
    assert len(report.parts["attention"]) == 2
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    with torch.no_grad():
        got = ours(ids, attention_mask=mask).last_hidden_state
        want = theirs(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
        assert same(ours(ids[1:2, :8]).last_hidden_state, got[1:2, :8])


def test_copies():
    model, _ = converted()
    ids = tokens(1, 6)
    with torch.no_grad():
        want = model(ids).logits
        assert same(copy.deepcopy(model)(ids).logits, want)
        assert same(pickle.loads(pickle.dumps(model))(ids).logits, want)


def _tripled(module):
    call = module.forward
    module.forward = lambda x: 3 * call(x)


@contextmanager
def _everywhere(module):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, _, y: 3 * y if m is module else y)
    yield
    handle.remove()


@pytest.mark.parametrize("where", ["mlp.up_proj", "self_attn.k_proj", "self_attn.q_norm"])
@pytest.mark.parametrize("how", ["hook", "forward", "hook of all modules"])
def test_what_waits_for_the_call_of_a_layer_gets_it(where, how):
    """Also where its work is part of another one's: of a merged product, or of a rotation with norms."""
    found = []
    for fuse in (False, True):
        model = build()
        iso.convert(model, fuse=fuse)
        layer, around = model.model.layers[0].get_submodule(where), nullcontext()
        if fuse:
            with torch.no_grad():
                plain = model(tokens(1, 5)).logits
        if how == "hook":
            layer.register_forward_hook(lambda _, __, y: 3 * y)
        elif how == "forward":
            _tripled(layer)
        else:
            around = _everywhere(layer)
        with torch.set_grad_enabled(not fuse), around:
            found.append(model(tokens(1, 5)).logits.detach())
    assert same(*found)
    assert not same(found[0], plain)


@pytest.mark.parametrize("kind", ["changes", "register_forward_pre_hook", "register_full_backward_hook", "forward"])
def test_an_activation_whose_block_computes_it_is_shown_and_not_changed(kind):
    model, seen = build(), []
    iso.convert(model)
    act, ids = model.model.layers[0].mlp.act_fn, tokens(1, 5)
    want = model(ids).logits
    act.register_forward_hook(lambda _, given, y: seen.append((given[0], y)))
    assert same(model(ids).logits, want)
    ((gate, y),) = seen
    assert same(y, iso.reductions.silu(gate))
    if kind == "changes":
        act.register_forward_hook(lambda _, __, y: y.mul_(2))
    elif kind == "forward":
        _tripled(act)
    else:
        getattr(act, kind)((lambda _, x: (2 * x[0],)) if "pre" in kind else lambda *args: None)
    with pytest.raises(OptionError, match=r"act_fn of a converted Qwen3MLP.*before convert"):
        model(ids)


def test_hooks_of_norms_are_called():
    model, _ = converted()
    ids, called = tokens(1, 5), []
    with torch.no_grad():
        want = model(ids).logits
        model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *args: called.append(1))
        assert same(model(ids).logits, want)
    assert called == [1]


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_model_has_the_same_bits(dtype):
    """Of one layer whose gate is not merged any more; in float32 behind one that is merged whole."""
    model = build(dtype=dtype, num_hidden_layers=2 if dtype is torch.float32 else 1)
    iso.convert(model, fuse=True)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions}
    torch._dynamo.reset()
    with torch.no_grad():  # not merged any more
        model.model.layers[-1].mlp.gate_proj.weight.data = -model.model.layers[-1].mlp.gate_proj.weight.data
    compiled, found = torch.compile(model, fullgraph=True, backend="aot_eager"), []
    with torch.no_grad():
        assert same(compiled(ids, **given).logits, model(ids, **given).logits)
        for call in (model, compiled):
            cache = transformers.StaticCache(config=model.config, max_cache_len=32)
            model(ids, past_key_values=cache, **given)
            options = {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)}
            options |= {"position_ids": positions[:, -1:] + 1}
            found.append(call(ids[:, :1], past_key_values=cache, **options).logits)
    assert same(*found)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_converted_model_is_saved_as_any_other(tmp_path, fuse):
    model = build("Qwen2", torch.bfloat16)
    iso.convert(model, fuse=fuse)
    model.save_pretrained(tmp_path)
    assert "isogemm" not in (tmp_path / "config.json").read_text()
    again = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())
    again.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq  # that of build() was rounded
    iso.convert(again)
    with torch.no_grad():
        assert same(again.eval()(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_recomputed_activations():
    grads = []
    for recompute in (False, True):
        model = build().train()
        iso.convert(model)
        if recompute:
            model.gradient_checkpointing_enable()
        model(tokens(2, 9), use_cache=False).logits.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))

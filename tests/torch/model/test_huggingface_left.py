"""Parts of transformers models that isogemm does not compute: left with a reason, and the model runs."""

from __future__ import annotations

import copy

import pytest

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.small import filled  # noqa: E402
from tests.torch.model.tiny import TINY, build  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.model.huggingface import masks  # noqa: E402

IDS = torch.randint(3, 97, (5, 21), generator=torch.Generator().manual_seed(1))


def check(model):
    """Convert; the results are close to torch's, and a sequence's are its own. What was left, by class."""
    theirs = copy.deepcopy(model)
    report = iso.convert(model)
    with torch.no_grad():
        got, want = model(IDS)[0], theirs(IDS)[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        assert all(torch.equal(model(IDS[i : i + 1])[0], got[i : i + 1]) for i in range(len(IDS)))
    return report, {type(theirs.get_submodule(name)).__name__: why for name, why in report.left.items()}


def test_heads_that_are_turned_in_part():
    report, left = check(build("Nemotron"))
    assert left.keys() == {"NemotronAttention", "NemotronLayerNorm1P"}
    assert "turns a part of each head" in left["NemotronAttention"]
    assert report.parts["rope"] == ("model.rotary_emb",)
    assert len(report.parts["attention"]) == 2
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    _, left = check(build("Nemotron", **config))
    assert "NemotronAttention" not in left


def test_what_a_model_s_rotary_embedding_turns_counts():
    model = build("Nemotron")
    model.config.rope_parameters["partial_rotary_factor"] = 1.0  # says so, but its frequencies were made before
    _, left = check(model)
    assert "turns a part of each head" in left["NemotronAttention"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_without_weights(dtype):
    model = build("NanoChat")
    _, left = check(model)
    assert left.keys() == {"NanoChatAttention"}
    norm = copy.deepcopy(model.model.norm)
    x = torch.randn(6, 64).to(dtype)
    assert norm(x).dtype == dtype
    assert torch.equal(norm(x), iso.reductions.rms_norm(x, None, norm.eps))
    assert not list(norm.parameters())
    leaf = x.clone().requires_grad_()
    norm(leaf).sum().backward()
    assert leaf.grad.isfinite().all()
    theirs = build("NanoChat").model.norm
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-2, atol=1e-2)


def test_a_position_bias_is_left_at_once():
    sizes = {"d_model": 64, "d_ff": 100, "num_heads": 4, "d_kv": 16, "num_layers": 2}
    config = transformers.T5Config(**{**TINY, **sizes})
    report, left = check(filled(config, torch.float32, kind=transformers.AutoModelForTextEncoding))
    assert left.keys() == {"T5Attention"}
    assert "position bias" in left["T5Attention"]
    assert report.parts["attention"] == ()


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu", "quick_gelu"])
def test_gated_blocks_of_other_activations(act):
    report, left = check(build("Llama", hidden_act=act, intermediate_size=200))
    assert left == {}
    assert report.parts["mlp"] == tuple(f"model.layers.{i}.mlp" for i in range(2))
    assert report.parts["activation"] == tuple(f"model.layers.{i}.mlp.act_fn" for i in range(2))


def test_blocks_without_a_gate():
    report, left = check(build("Starcoder2", intermediate_size=200))
    assert left == {}
    assert len(report.parts["activation"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pad", [0, 29])
def test_caches_that_drop_the_keys_behind_a_window(dtype, pad):
    """Leaves of 128 keys begin where they began, after 0, 1 and 2 of them have gone, and with padding before them."""
    model = build("Mistral", sliding_window=150, max_position_embeddings=512).to(dtype)
    iso.convert(model, strict=True)
    ids = torch.randint(3, 97, (2, 420), generator=torch.Generator().manual_seed(2))
    rows = torch.nn.functional.pad(ids[:1], (pad, 0))
    rows = torch.cat((rows, torch.nn.functional.pad(ids[1:], (0, pad))))
    mask = torch.ones_like(rows)
    mask[0, :pad] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want, got = model(ids[:1], use_cache=False).logits, []
        cache, done = transformers.DynamicCache(config=model.config), 0
        for size in (131, 1, 60, 97, 1, 1, 129 + pad):
            part = slice(done, done + size)
            options = {"attention_mask": mask[:, : part.stop], "position_ids": places[:, part]}
            got.append(model(rows[:, part], past_key_values=cache, **options).logits)
            done = part.stop
        assert done == rows.shape[1]
        assert cache.layers[0].keys.shape[2] < 160
        assert torch.equal(torch.cat(got, 1)[:1, pad:], want)


def test_how_many_keys_were_dropped_has_to_be_known():
    with pytest.raises(OptionError, match="a number that the host knows"):
        masks.mask(1, 1, 4, kv_offset=torch.tensor(3))


def test_caches_of_a_window():
    model = build("Mistral", sliding_window=8)
    iso.convert(model)
    with torch.no_grad():
        want = model(IDS[:1]).logits
        dynamic, dropping = transformers.DynamicCache(), transformers.DynamicCache(config=model.config)
        for cache, n in (
            (dynamic, 21),
            (dropping, 21),
            (static(model, 16), 21),
            (static(model, 8), 8),
            (static(model, 5), 5),
        ):
            assert torch.equal(run(model, cache, n), want[:, :n])


def run(model, cache, n):
    return torch.cat([model(part, past_key_values=cache).logits for part in IDS[:1, :n].split(3, 1)], 1)


def static(model, length):
    return transformers.StaticCache(config=model.config, max_cache_len=length)


def test_attention_whose_text_is_not_at_hand_is_left():
    made = {"torch": torch}
    exec("class Attention(torch.nn.Module):\n    def forward(self, x):\n        return x", made)
    attention = made["Attention"]()
    attention.is_causal, attention.config = True, None
    report = iso.convert(torch.nn.Sequential(torch.nn.LayerNorm(8), attention))
    assert report.converted == ("0",)
    assert "only a part of one" in report.left["1"]


class Turning(transformers.models.stablelm.modeling_stablelm.StableLmAttention):
    """Attention with a gate of its own code behind it, whose bits depend on an element's place."""

    def forward(self, *args, **options):
        y, weights = super().forward(*args, **options)
        return y * torch.sigmoid(y), weights


def test_own_code_of_attention_counts_as_known_where_it_only_moves_numbers():
    model = build("StableLm", num_key_value_heads=4)
    assert iso.convert(copy.deepcopy(model), strict=True).left
    model.model.layers[1].self_attn.__class__ = Turning
    with pytest.raises(OptionError, match=r"1 modules: 1 Turning.*'model\.layers\.1\.self_attn'"):
        iso.convert(model, strict=True)

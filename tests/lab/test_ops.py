"""The products of a model: shapes as the sources have them, work, shares of several devices, and the command."""

from __future__ import annotations

import json

import pytest

import isogemm
from isogemm.errors import DTypeError, OptionError, ShapeError
from isogemm.lab.models import MODELS, model, read_config
from isogemm.lab.ops import ops, sharded


def shapes(found):
    return {op.name: (op.form, op.batch, op.m, op.n, op.k, op.count) for op in found}


def test_a_prefill_of_512_tokens():
    assert shapes(ops(model("Qwen3-4B"), "prefill", 512)) == {
        "qkv": ("linear", 1, 512, 6144, 2560, 36),
        "scores": ("pointer array", 32, 512, 512, 128, 36),
        "values": ("pointer array", 32, 512, 128, 512, 36),
        "attention output": ("linear", 1, 512, 2560, 4096, 36),
        "gate+up": ("linear", 1, 512, 19456, 2560, 36),
        "down": ("linear", 1, 512, 2560, 9728, 36),
        "lm head": ("linear", 1, 1, 151936, 2560, 1),
    }


def test_a_share_of_four_devices():
    found = shapes(ops(model("Qwen2.5-72B"), "prefill", 4096, tp=4))
    assert found["qkv"] == ("linear", 1, 4096, 2560, 8192, 80)
    assert found["attention output"][2:5] == (4096, 8192, 2048)
    assert found["gate+up"][2:5] == (4096, 2 * 29568 // 4, 8192)
    assert found["down"][2:5] == (4096, 8192, 29568 // 4)


def test_decode_packs_the_query_heads_of_a_key_head():
    found = shapes(ops(model("Llama-3.1-8B"), "decode", 1000, batch=3))
    assert found["scores"] == ("strided batch", 24, 4, 1000, 128, 32)
    assert found["qkv"][2] == found["lm head"][2] == 3


def test_experts_are_groups_of_the_rows_that_visit_them():
    few, many = (shapes(ops(model("Qwen3-30B-A3B"), "decode", 9, batch=b)) for b in (2, 100))
    assert few["expert down"] == ("grouped", 16, 16, 2048, 768, 48)
    assert many["expert gate+up"] == ("grouped", 128, 800, 1536, 2048, 48)
    assert few["router"][2:5] == (2, 128, 2048)


@pytest.mark.parametrize("name", list(MODELS))
def test_work_of_devices_adds_up(name):
    whole = ops(model(name), "prefill", 64)
    parts = ops(model(name), "prefill", 64, tp=2)
    for one, part in zip(whole, parts, strict=True):
        divided = 1 if one.name == "router" else 2
        assert one.work("bfloat16").flops == divided * part.work("bfloat16").flops


def test_operands_are_counted_once():
    qkv, scores = ops(model("Qwen3-4B"), "prefill", 512)[:2]
    assert qkv.work("float32").nbytes == 4 * (512 * 2560 + 6144 * 2560 + 512 * 6144)
    assert scores.work("bfloat16").nbytes == 2 * (32 * 512 * 128 + 8 * 512 * 128 + 32 * 512 * 512)


def test_what_does_not_divide_is_refused_with_the_nearest():
    with pytest.raises(OptionError, match="nearest legal choice: 4"):
        sharded(model("Llama-3.1-8B"), 5)
    with pytest.raises(OptionError, match="nearest legal choice: 2"):
        sharded(model("Qwen2.5-0.5B"), 3)
    with pytest.raises(OptionError, match="nearest legal choice: prefill"):
        ops(model("Qwen3-4B"), "training", 4)
    with pytest.raises(ShapeError, match="tokens"):
        ops(model("Qwen3-4B"), "decode", 0)


def test_a_config_gives_the_same_sizes(tmp_path, run):
    qwen = model("Qwen3-30B-A3B")
    sizes = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "_name_or_path": qwen.name,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": sizes}))
    assert read_config(str(path)) == qwen
    status, out, _ = run("ops", str(tmp_path), "--device", "cuda", "--json")
    assert status == 0
    assert json.loads(out)[0]["n"] == 5120
    path.write_text(json.dumps(sizes | {"hidden_size": None}))
    with pytest.raises(OptionError, match="hidden_size"):
        read_config(str(path))
    with pytest.raises(OptionError, match=r"a config\.json"):
        read_config(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("key", "few", "more"),
    [
        ("kv_lora_rank", None, 512),
        ("q_lora_rank", None, 1536),
        ("n_shared_experts", 0, 1),
        ("shared_expert_intermediate_size", 0, 5632),
        ("first_k_dense_replace", 0, 3),
        ("decoder_sparse_step", 1, 2),
        ("mlp_only_layers", [], [0]),
    ],
)
def test_a_config_with_linears_that_are_not_listed_is_refused(tmp_path, key, few, more):
    """DeepSeek's low ranks, shared experts and first dense layers gave the shapes of another model without a word."""
    sizes = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {key: few}))
    assert read_config(str(path)).linears() == model("Qwen3-30B-A3B").linears()
    path.write_text(json.dumps(sizes | {key: more}))
    with pytest.raises(OptionError, match=key):
        read_config(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("head_dim", x) for x in (-1, 1.9, "64", [1], float("nan"), float("inf"), 10**400)),
        *(("num_key_value_heads", x) for x in (-2, 3, True)),
        *(("moe_intermediate_size", x) for x in (-1, "768")),
        *(("vocab_size", x) for x in (10**400, 0)),
        *(("text_config", x) for x in (3, ["hidden_size"])),
        *(("q_lora_rank", x) for x in (float("nan"), 1.5)),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_field_of_a_config_that_is_no_size_is_refused_by_name(tmp_path, key, value):
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2,
        "vocab_size": 1000, "num_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | dict.fromkeys((key, "num_key_value_heads", "text_config"))))
    if key not in sizes:
        found = read_config(str(path))
        assert (found.kv_heads, found.head_dim, found.expert_intermediate) == (4, 64, 512)
    path.write_text(json.dumps(sizes | {key: value}))
    with pytest.raises(OptionError, match=f"{key} in .*config.json: limit"):
        read_config(str(path))


def test_models_are_an_attribute_of_the_package():
    assert isogemm.models.model("qwen3 4b") is MODELS["Qwen3-4B"]
    assert "models" in dir(isogemm)
    for name, call in (("model", isogemm.models.model), ("path", read_config)):
        with pytest.raises(DTypeError, match=f"{name}: limit: .* got: None"):
            call(None)


@pytest.fixture
def said(run):
    def call(*words):
        status, out, err = run("ops", *words)
        return status, out + err

    return call


def test_the_command_prints_a_table_by_the_shipped_plans(said):
    status, out = said("Qwen3-4B", "--device", "cuda")
    assert status == 0
    line = next(line for line in out.splitlines() if line.startswith("qkv"))
    assert "512 x 6144 x 2560" in line
    assert "compute" in line
    assert "[" in line.split("us")[-1]  # the kernel's configuration, no markup
    assert "217 calls: 3875.9 GFLOP" in out


def test_the_command_gives_json(said):
    status, out = said("Qwen2.5-0.5B", "--phase", "decode", "--tokens", "64", "--device", "cuda", "--json")
    assert status == 0
    found = {line["name"]: line for line in json.loads(out)}
    assert found["down"]["bound"] == "memory"
    assert found["down"]["flops"] == 2 * 896 * 4864
    assert said("Qwen3-4", "--device", "cuda")[0] == 2

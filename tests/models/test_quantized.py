"""Models with quantized weights keep every bit from tokens to logits: Qwen3 and Llama, small, on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.audit  # noqa: E402
import isogemm.torch as it  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402

from .small import causal, check_tokens_of_generate, prompts, same  # noqa: E402
from .test_models import LOGITS, SHORT, broken, one_thread  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("one_thread")
ONE = {"num_hidden_layers": 1}  # the second computes as the first does: models of both dtypes have it
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Every format in one model, and two of them in others.
MODELS = [
    ("qwen3", torch.bfloat16, "Q4_0", {}), ("qwen3", torch.bfloat16, "Q8_0", ONE),
    ("qwen3", torch.bfloat16, "Q4_K", WIDE | ONE), ("qwen3", torch.bfloat16, "Q6_K", WIDE | ONE),
    ("qwen3", torch.float32, "Q4_K", WIDE | ONE), ("qwen3", torch.float32, "Q8_0", {}),
    ("llama", torch.bfloat16, "Q4_0", ONE), ("llama", torch.bfloat16, "Q6_K", WIDE | ONE),
]  # fmt: skip
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda v: str(v).split(".")[1])


@pytest.mark.parametrize(("name", "dtype", "fmt", "sizes"), MODELS)
def test_logits_keep_their_bits(name, dtype, fmt, sizes):
    """Alone, in batches of 2, 7 and 32, anywhere, padded on either side, in chunks of 1, 7 and 16, and decoded."""
    isogemm.set_num_threads(1)  # `converted` has a pool; others need the cores that its threads wait on
    formats = {"lm_head": "Q8_0", "*": fmt}
    model = causal(name, dtype, **sizes)
    report = isogemm.audit.model(model, mode="convert", relations=LOGITS, quantize=formats, **SHORT)
    assert not broken(report, "convert")
    assert report.options["quantize"] == str(formats)
    assert report.providers["convert"].cases == 26


def test_integer_products_in_a_bfloat16_model():
    model = causal("qwen3", torch.bfloat16)
    it.convert(model, quantize={"lm_head": "Q8_0", "*": "Q4_0"}, activations="q8")
    report = isogemm.audit.model(model, mode="plain", relations=LOGITS, **SHORT)
    assert not broken(report, "plain")
    assert report.providers["plain"].cases == 26


@each_dtype
def test_gradients_keep_their_bits_over_micro_batches(dtype):
    """Of the parameters that are left, through products with quantized weights."""
    report = isogemm.audit.model(causal("qwen3", dtype), mode="convert", relations=["micro-batches"], quantize="Q4_0")
    assert not broken(report, "convert")


def test_an_audit_says_where_nothing_is_quantized():
    """Rows that fit no block stay floats; where all do, no bit would be one of quantized weights."""
    model = causal("qwen3", torch.float32, hidden_size=96, intermediate_size=96, head_dim=24)
    report = isogemm.audit.model(model, mode="convert", relations=["rerun"], quantize="Q4_K")
    assert not report.providers["convert"].ran
    reason = report.providers["convert"].reason
    assert "quantize=Q4_K: no weight fits; model.layers.0" in reason
    assert reason.count("model.layers.0.") == 1
    assert isogemm.audit.model(model, mode="convert", relations=["rerun"], quantize="Q4_0").providers["convert"].ran
    it.convert(model, quantize={"*.down_proj": "Q4_0"})
    assert isogemm.audit.model(model, mode="convert", relations=["rerun"], quantize="Q4_K").providers["convert"].ran
    with pytest.raises(OptionError, match=r"quantize: limit: one of Q8_0, .*Q6_K; got: F16"):
        isogemm.audit.model(model, mode="convert", relations=["rerun"], quantize="F16")


def test_an_audit_says_which_weights_stay_floats():
    """In words, as values and as JSON: a tied output layer, and rows that are no whole number of blocks."""
    model = causal("qwen3", torch.float32, hidden_size=256, intermediate_size=96, head_dim=64)
    report = isogemm.audit.model(model, mode="convert", relations=["rerun"], quantize="Q4_K")
    found = report.to_dict()["quantized"]
    assert found == report.quantized
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    small = [name for name in linears if name.endswith("down_proj")]
    assert set(found["floats"]) == {"lm_head", *small}
    assert found["formats"] == {"Q4_K": len(linears) - len(found["floats"])}
    assert found["float_weights"] == sum(linears[name].weight.numel() for name in found["floats"])
    assert found["weights"] + found["float_weights"] == sum(m.weight.numel() for m in linears.values())
    text = " ".join(str(report).split())
    share = found["weights"] / (found["weights"] + found["float_weights"])
    assert f"Of {len(linears)} Linears, quantized: {len(linears) - 3} to Q4_K, {share:.1%} of their weights." in text
    assert f"Floats: {small[0]} and 1 more (columns of a Q4_K matrix: 96 is not a multiple of its block, 256)." in text
    assert "Floats: lm_head (its weight is model.embed_tokens's too" in text
    plain = isogemm.audit.model(model, mode="plain", relations=["rerun"])
    assert "quantized" not in plain.to_dict()
    assert "Floats" not in str(plain)


def test_what_is_quantized_in_a_model():
    """All projections; the output layer, which is the embedding, when it is named, and then as a copy."""
    model = causal("qwen3", torch.float32)
    embedding = model.model.embed_tokens.weight.clone()
    report = it.convert(model, quantize="Q4_0")
    assert len(report.quantized) == 14
    assert list(report.floats) == ["lm_head"]
    assert "its weight is model.embed_tokens's too" in report.floats["lm_head"]
    assert it.convert(model, quantize={"lm_head": "Q6_K"}, fallback="Q8_0").quantized == {"lm_head": "Q8_0"}
    assert same(model.model.embed_tokens.weight, embedding)
    with pytest.raises(OptionError, match="mode convert"):
        isogemm.audit.model(model, mode="plain", quantize="Q4_0")


@each_dtype
def test_quantized_models_are_another_function_but_close(dtype):
    """So that the tests above are of quantized weights, and of the same model."""
    plain, model, ids = causal("llama", dtype), causal("llama", dtype), prompts(3, 20)
    it.convert(model, quantize={"lm_head": "Q8_0", "*": "Q8_0"})
    with torch.no_grad():
        want, got = plain(ids).logits.float(), model(ids).logits.float()
    assert not torch.equal(want, got)
    assert (want - got).norm() / want.norm() < 0.05


@each_dtype
def test_tokens_of_generate_and_their_logits(dtype):
    """Weights in place have the same bits."""
    model = causal("qwen3", dtype)
    it.convert(model, quantize={"lm_head": "Q8_0", "*": "Q4_0"})
    whole = check_tokens_of_generate(model)
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, it.QuantizedLinear):
                setattr(parent, name, it.QuantizedLinear(child.weight.in_place(), child.bias))
    native = check_tokens_of_generate(model)
    assert all(map(same, native.logits, whole.logits))

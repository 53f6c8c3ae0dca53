"""A model of Qwen3-0.6B's sizes with quantized weights on a GPU: every bit, and decode captured in a graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.audit  # noqa: E402
import isogemm.torch as it  # noqa: E402

from .small import causal, prompts, same  # noqa: E402
from .test_models_gpu import LOGITS, QWEN3_06B, lines  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
FORMATS = {"lm_head": "Q6_K", "*.down_proj": "Q8_0", "*": "Q4_K"}


@pytest.fixture(scope="module")
def two():
    """Two layers, as torch computes them."""
    return causal("qwen3", torch.bfloat16, "cuda", **{**QWEN3_06B, "num_hidden_layers": 2})


def test_logits(two):
    report = isogemm.audit.model(two, mode="convert", relations=LOGITS, chunks=(7, 16, 64), quantize=FORMATS)
    assert not lines(report, "convert")


@torch.no_grad()
def test_the_host_has_the_same_weights_and_the_device_keeps_no_floats(two):
    model = causal("qwen3", torch.bfloat16, "cuda", **{**QWEN3_06B, "num_hidden_layers": 2})
    it.convert(model)  # which makes a table of rotations, too
    before = torch.cuda.memory_allocated()
    report = it.convert(model, quantize=FORMATS)
    assert len(report.quantized) == 15
    linear = sum(p.numel() for name, p in two.named_parameters() if name.endswith("proj.weight"))
    assert (
        torch.cuda.memory_allocated() < before - linear
    )  # 2 bytes a weight became less than 1.1, the head's copy apart
    for name in report.quantized:
        layer, plain = model.get_submodule(name), two.get_submodule(name)
        want = isogemm.quantize(plain.weight.detach().cpu(), report.quantized[name])
        assert (layer.weight.to("cpu").rows == want.rows).all()


@torch.no_grad()
def test_decode_captured_in_a_graph(two):
    """Every token of a captured decode step has the logits of the whole prompt at once, alone and in a batch."""
    model, ids = causal("qwen3", torch.bfloat16, "cuda", **{**QWEN3_06B, "num_hidden_layers": 2}), prompts(8, 32).cuda()
    it.convert(model, quantize=FORMATS)
    whole = model(ids, use_cache=False).logits
    for batch in (1, 8):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        assert same(model(ids[:batch, :20], past_key_values=cache, use_cache=True).logits, whole[:batch, :20])
        token, position = ids[:batch, 20:21].clone(), torch.tensor([[20]], device="cuda")

        def step(token=token, position=position, cache=cache):
            return model(token, position_ids=position, past_key_values=cache, use_cache=True).logits

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert same(step()[:, 0], whole[:batch, 20])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        for t in range(21, 32):
            token.copy_(ids[:batch, t : t + 1])
            position.fill_(t)
            graph.replay()
            assert same(logits[:, 0], whole[:batch, t]), (batch, t)

"""A model of Qwen3-0.6B's sizes in bfloat16 on a GPU: eager, compiled, and decode captured in a graph.

Weights are random and the vocabulary is cut; widths, heads and, where it says so, the 28 layers are the model's own.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.audit  # noqa: E402
import isogemm.torch as it  # noqa: E402

from .small import causal, prompts, same  # noqa: E402

# torch.compile imports parts of torch that other parts of it deprecate.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CONFIG = json.loads((Path(__file__).parent / "qwen3-0.6b" / "config.json").read_text())
NOT_SIZES = ("architectures", "model_type", "dtype", "bos_token_id", "eos_token_id")
QWEN3_06B = {key: value for key, value in CONFIG.items() if key not in NOT_SIZES} | {"vocab_size": 4096}
LOGITS = ["population", "position", "neighbours", "left-padding", "right-padding", "prefill", "decode"]


@pytest.fixture(scope="module")
def four():
    """Four layers, as torch computes them."""
    return causal("qwen3", torch.bfloat16, "cuda", **{**QWEN3_06B, "num_hidden_layers": 4})


def lines(report, mode):
    found = report.providers[mode].relations.values()
    return {r.relation: r.reason or [str(d) for d in r.drifts] for r in found if r.status != "held"}


@pytest.mark.parametrize("mode", ["convert", "invariant"])
def test_logits_of_four_layers(four, mode):
    """Prompts of two leaves of attention's keys."""
    report = isogemm.audit.model(four, mode=mode, relations=LOGITS, tokens=139, chunks=(7, 16, 64, 130))
    assert not lines(report, mode)


def test_plain_torch_changes_bits(four):
    report = isogemm.audit.model(four, mode="plain", relations=["rerun", "population", "prefill", "decode"])
    print(*lines(report, "plain").values(), sep="\n")
    assert {"prefill", "decode"} <= set(lines(report, "plain"))
    assert report.providers["plain"].relations["rerun"].status == "held"


def test_gradients_over_micro_batches(four):
    report = isogemm.audit.model(four, mode="convert", relations=["micro-batches"])
    assert not lines(report, "convert")


def test_decode_captured_in_a_graph(four):
    """Every token of a captured decode step has the logits of the whole prompt at once, alone and in a batch."""
    report = isogemm.audit.model(four, mode="convert", relations=["captured"], tokens=40)
    assert not lines(report, "convert")
    assert report.providers["convert"].relations["captured"].cases == 3


def test_28_layers():
    model = causal("qwen3", torch.bfloat16, "cuda", **QWEN3_06B)
    few = {"batches": (2, 7, 32), "chunks": (16, 64)}
    report = isogemm.audit.model(model, mode="convert", relations=["population", "left-padding", "prefill"], **few)
    assert not lines(report, "convert")


@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_compiled_model_has_the_eager_bits(four, fuse):
    model = copy.deepcopy(four)
    it.convert(model, fuse=fuse)
    ids = prompts(4, 33).cuda()
    whole = model(ids, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for batch in (1, 4):
        assert same(compiled(ids[:batch], use_cache=False).logits, whole[:batch])

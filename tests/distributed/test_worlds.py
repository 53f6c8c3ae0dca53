"""Four gloo processes: layers, models and training steps have the bits of a process alone, whatever the groups."""

from __future__ import annotations

import json

import pytest
from tests.process import python

pytest.importorskip("torch")
pytest.importorskip("transformers")

LAYERS = {"Qwen3": 2, "Llama": 1}  # of worlds/models.py
DTYPES = ("torch.float32", "torch.bfloat16")


@pytest.fixture(scope="module")
def lines():
    """What all ranks printed."""
    said = python("-W", "error::FutureWarning", "-m", "tests.distributed.worlds")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def of(lines, what, ranks=4):
    """Lines whose name begins so, of every rank."""
    found = [line for line in lines if line["what"].startswith(what)]
    assert {line["rank"] for line in found} == set(range(ranks)), what
    return found


@pytest.mark.parametrize("kind", ["rows", "columns", "sequence", "table", "losses"])
@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp4"])
def test_layers_have_the_bits_of_plain_products(lines, kind, shape):
    assert not [line for line in of(lines, f"{kind} {shape}") if line["differ"]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_right_bits_sum_through_memory(lines, dtype):
    """Every way is tried, on every kind of bias, before the first sum; then the size of a sum decides."""
    by_rows = {
        1: ["one_shot", "two_shot, copied", "two_shot, sent"],  # the trial's
        4: ["one_shot", "two_shot, sent"],
        17: ["two_shot, sent"],
        24: ["two_shot, copied", "two_shot, sent"],
        40: ["two_shot, copied"],
    }
    for rows, ways in by_rows.items():
        for line in of(lines, f"through memory True {dtype} {rows} rows"):
            assert (line["differ"], line["ways"], sum(line["tried"])) == (0, ways, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_wrong_bits_are_tried_and_left(lines, dtype):
    """Their tree is another one: collectives serve, from the first sum on."""
    for rows in (1, 4, 17, 24, 40):
        for line in of(lines, f"through memory False {dtype} {rows} rows"):
            assert line["differ"] == 0
            assert min(line["tried"]) > 0
            assert rows == 1 or line["ways"] == []


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp4"])
@pytest.mark.parametrize("how", ["batched", "alone", "in chunks", "decoded", "fused"])
def test_logits_do_not_see_the_ranks(lines, family, dtype, shape, how):
    assert not [line for line in of(lines, f"{family} {dtype} {shape} {how}") if line["differ"]]


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp4"])
def test_parts_of_projections_become_one_product(lines, family, dtype, shape):
    found = of(lines, f"{family} {dtype} {shape} fused")
    assert all(line["of"] == 2 * LAYERS[family] for line in found)  # two in each layer


def test_layers_are_compiled_into_one_graph(lines):
    assert all((line["of"], line["differ"]) == (24 * 128, 0) for line in of(lines, "compiled"))


@pytest.mark.parametrize("model", ["Qwen3 torch.bfloat16", "Llama torch.float32"])
@pytest.mark.parametrize("shape", ["tp2", "tp4", "dp2", "dp4", "dp2 tp2"])
def test_gradients_and_weights_do_not_see_the_ranks(lines, model, shape):
    found = of(lines, f"training {model} {shape}")
    assert all(line["of"] > 40 for line in found)
    assert not [line for line in found if line["differ"]]


@pytest.mark.parametrize("shape", ["dp2", "dp4"])
def test_ranks_have_gradients_of_other_parameters_than_each_other(lines, shape):
    found = of(lines, f"branches {shape}")
    assert all((line["of"], line["differ"]) == (4, 0) for line in found)


def test_sharded_optimizer_states_leave_the_same_weights(lines):
    assert not [line for line in of(lines, "ZeRO-1") if line["differ"]]


@pytest.mark.parametrize(("family", "tensors"), [("Qwen3", 24), ("Llama", 12)])
def test_parts_are_read_from_files(lines, family, tensors):
    for line in of(lines, f"loaded {family}"):
        assert (line["of"], line["merged"], line["differ"]) == (tensors, 2 * LAYERS[family], 0)


def test_the_hook_of_data_parallel_models_is_the_tree(lines):
    assert not [line for line in of(lines, "DDP") if line["differ"]]


def test_a_wrong_order_of_ranks_is_seen(lines):
    assert all(line["differ"] for line in of(lines, "swapped ranks"))


def test_the_audit_names_the_first_module_that_differs(lines):
    right, wrong = of(lines, "audit of right ranks"), of(lines, "audit of swapped ranks")
    assert not [line for line in right if line["differ"] or line["first"]]
    assert {line["first"] for line in wrong} == {"model.layers.0.self_attn.o_proj"}
    assert all(line["differ"] and line["of"] == 4 * 2 * 9 * 132 for line in wrong)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_missing_rank_is_named(lines, how):
    found = [line for line in lines if line["what"] == f"rank 2 {how}"]
    assert {line["rank"] for line in found} == {0, 1, 3}
    for line in found:
        assert "all_gather of layer" in line["error"]
        assert "none from rank 2 of the group" in line["error"]


def test_the_benchmark_of_two_ranks_compares_and_times(lines):
    found = {line["what"]: line for line in of(lines, "benchmark", 2)}
    assert not [line for line in found.values() if line.get("error") or line.get("differ")]
    ways = ("isogemm, one GPU", "isogemm, collective", "isogemm, collective, projections apart")
    for phase in ("decode", "prefill"):
        for how in [f"{phase} {replayed}: {way}" for replayed in ("eager", "graph") for way in ways][1:]:
            assert found[f"benchmark {how}"]["of"] > 1000
        (near,) = found[f"benchmark {phase} near: torch, nccl"]["said"]
        assert 0 < float(near.split()[-1].rstrip(".")) < 0.05  # other roundings, one model
    timed = found["benchmark ranks decode graph batch=1 tokens=1"]
    assert timed["of"] == len(ways) + 1
    assert [line.split("  ")[0] for line in timed["said"][1:]] == [*ways, "torch, nccl"]
    assert found["benchmark table"]["rows"] == len(ways)

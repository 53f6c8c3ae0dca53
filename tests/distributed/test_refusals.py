"""What ranks and trees refuse, in one process; and what one process has by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import isogemm
from isogemm.backends.cuda.ranks.mailbox import Mailbox
from isogemm.errors import DeviceError, DTypeError, OptionError, ShapeError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.distributed import (  # noqa: E402
    ColumnParallel,
    GradientTree,
    Ranks,
    RowParallel,
    VocabularyEmbedding,
    load_shards,
    symmetric,
    token_losses,
    traffic,
)
from isogemm.torch.distributed.models import parallelise  # noqa: E402
from isogemm.torch.distributed.ranks import as_ranks  # noqa: E402
from isogemm.torch.distributed.traffic import LINK  # noqa: E402
from isogemm.torch.distributed.tree import finished, fixed_sum  # noqa: E402


def test_what_is_no_ranks_no_batch_and_no_target_of_each_row():
    """Targets that are missing were padded, and those that were over were left out."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    iso.convert(model, grad_order="chain")
    with pytest.raises(DTypeError, match=r"ranks: limit: Ranks; got: int"):
        GradientTree(model, 2)
    tree = GradientTree(model, Ranks(order="tree2"))
    for batch in (torch.ones(2, 4).numpy(), {"input_ids": torch.ones(2, 4)}, [[1.0] * 4] * 2):
        with pytest.raises(DTypeError, match=r"batch: limit: a tensor"):
            tree.parts(batch)
    with pytest.raises(ShapeError, match=r"dimensions of a batch"):
        tree.parts(torch.tensor(1.0))
    logits, ranks = torch.randn(3, 8), Ranks(order="tree2")
    for targets in (torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match=r"shape of targets: .*; nearest legal choice: \[3\]"):
            token_losses(logits, targets, ranks)
    with pytest.raises(DTypeError, match=r"targets: limit: a tensor of integers"):
        token_losses(logits, torch.zeros(3), ranks)
    with pytest.raises(ShapeError, match=r"dimensions of logits: .* got: 3"):
        token_losses(logits[None], torch.zeros(3, dtype=torch.int64), ranks)
    with pytest.raises(DTypeError, match=r"ranks: limit: Ranks; got: int"):
        token_losses(logits, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(DTypeError, match=r"folder: limit: a str or a path; got: None"):
        load_shards(model, None)


def test_an_order_is_a_tree():
    with pytest.raises(DTypeError, match=r"order: limit: treeT; got: int"):
        Ranks(order=8)
    with pytest.raises(OptionError, match="treeT"):
        Ranks(order="chain")
    with pytest.raises(OptionError, match="auto or collective or symmetric"):
        Ranks(transport="pigeons")
    with pytest.raises(OptionError, match=r"timeout: .*got: -1"):
        Ranks(timeout=-1)
    with pytest.raises(DTypeError, match=r"timeout: .*got: None"):
        Ranks(timeout=None)


def test_a_number_of_processes_is_no_group():
    assert as_ranks(1).size == 1
    for wrong in (2, "2"):
        with pytest.raises(DTypeError, match=r"a ProcessGroup, a DeviceMesh.*got: '?2"):
            as_ranks(wrong)


class Two(Ranks):
    """As far as anybody asks."""

    size = property(lambda self: 2)


def test_memory_that_cannot_be_mapped_is_refused_where_it_was_asked_for(monkeypatch):
    here, there = torch.device("cpu"), torch.device("cuda")
    assert not Ranks(transport="symmetric").maps(here, (4, 8), "layer")
    assert not Two().maps(here, (4, 8), "layer")
    with pytest.raises(DeviceError, match=r"transport of layer: .*a GPU each.*nearest legal choice: collective"):
        Two(transport="symmetric").maps(here, (4, 8), "layer")
    monkeypatch.setattr(symmetric, "reaches", lambda group: True)
    assert Two().maps(there, (4, 8), "layer")
    assert not Two(transport="collective").maps(there, (4, 8), "layer")
    assert not Two().maps(there, (4, 12), "layer")
    with pytest.raises(ShapeError, match=r"sum of layer: .*multiples of 8.*\[4, 12\].*transport='auto'"):
        Two(transport="symmetric").maps(there, (4, 12), "layer")


def test_a_kernel_waits_as_long_as_the_ranks_say_that_ask_for_it(monkeypatch):
    """Of one group, whose memory was made for others."""
    box = Mailbox((0, 4096), 0, 0, 64, 64, timeout=300.0)
    monkeypatch.setattr(symmetric, "_made", {(None, 0): symmetric.Shared(torch.ones(1), None, box, None)})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert Two().shared().box is box
    assert Two(timeout=10.0).shared().box == replace(box, timeout=10.0)


@pytest.mark.parametrize(("kind", "shape"), [(RowParallel, (12, 8)), (ColumnParallel, (8, 12))])
def test_leaves_are_whole(kind, shape):
    layer = iso.Linear(*shape)
    with pytest.raises(ShapeError, match=r"got: 12; nearest legal choice: 16"):
        kind.adopt(layer, Ranks(order="tree8"), "layer", set())
    assert type(layer) is iso.Linear


def test_leaves_are_whole_blocks():
    layer = iso.Linear(96, 8, dtype=torch.bfloat16, contract="tensor_core:sm90/chain")
    with pytest.raises(ShapeError, match="a multiple of 64: 4 leaves of tree4, in blocks of 16"):
        RowParallel.adopt(layer, Ranks(order="tree4"), "layer", set())


def test_an_unknown_style_is_refused_before_anything_is_cut():
    model = torch.nn.Sequential(iso.Linear(8, 8), iso.Linear(8, 8))
    with pytest.raises(OptionError, match="style of 1"):
        parallelise(model, {"0": "colwise", "1": "grouped_gemm"}, Ranks())
    assert [type(child) for child in model] == [iso.Linear, iso.Linear]


def test_heads_of_a_model_inside_of_another_are_whole():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3Config(text_config={"num_attention_heads": 4, "num_key_value_heads": 1})
    model = torch.nn.Sequential(iso.Linear(16, 64))
    model.config = config
    with pytest.raises(OptionError, match=r"num_key_value_heads of the model: .*a multiple of 2 ranks; got: 1"):
        parallelise(model, {"0": "colwise"}, Two())
    assert type(model[0]) is iso.Linear


def test_a_model_is_cut_once():
    model = torch.nn.Sequential(iso.Linear(8, 8))
    parallelise(model, {"0": "rowwise"}, Ranks())
    with pytest.raises(OptionError, match="not cut yet"):
        parallelise(model, {"0": "rowwise"}, Ranks())


@pytest.mark.parametrize("tp", [0, -2])
def test_traffic_is_between_some_ranks(tp):
    with pytest.raises(ShapeError, match="tp: limit: a whole number of at least 1"):
        traffic(16, 64, 64, tp)


@pytest.mark.parametrize("order", ["chain", "leaf8"])
def test_traffic_is_of_a_tree(order):
    with pytest.raises(OptionError, match="order of sums over ranks: limit: treeT"):
        traffic(16, 64, 64, 2, order=order)


def test_parts_of_weights_have_no_way_back(monkeypatch):
    model = torch.nn.Sequential(iso.Linear(8, 8), iso.Linear(8, 8), iso.Linear(8, 8))
    parallelise(model, {"0": "colwise", "2": "rowwise"}, Ranks())
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "size", 2)
        with pytest.raises(OptionError, match="parts of the weights of 0, 2"):
            iso.restore(model)
    assert [type(child) for child in model] == [ColumnParallel, iso.Linear, RowParallel]
    assert iso.restore(model) == ["0", "1", "2"]  # of one rank's they are whole


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(OptionError, match="tp_plan"):
        iso.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), tp=1)
    with pytest.raises(OptionError, match="without quantize"):
        iso.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), tp=1, quantize="Q8_0")


def test_ids_outside_the_whole_table_are_refused():
    table = iso.Embedding(8, 4)
    VocabularyEmbedding.adopt(table, Ranks(), "table", set())
    with pytest.raises(OptionError, match="0 to 7"):
        table(torch.tensor([3, 8]))


def test_leaves_of_a_gradient_are_counted():
    model = torch.nn.Sequential(iso.Linear(8, 8))
    tree = GradientTree(model, Ranks(order="tree2"))
    with pytest.raises(OptionError, match="push"):
        tree.collect()
    for rows in tree.parts(torch.ones(4, 8)):
        model(rows).sum().backward()
        tree.push()
    with pytest.raises(OptionError, match="collect"):
        tree.push()
    assert tree.collect() == ["0.weight", "0.bias"]


def test_a_tied_weight_has_the_gradient_of_all_its_uses():
    """Where its first module is torch's, too: another one has the buffer."""
    x, ids = torch.arange(32.0).reshape(4, 8) / 7, torch.arange(4)
    model = torch.nn.ModuleList([torch.nn.Embedding(8, 8), iso.Linear(8, 8, bias=False)])
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    (model[0](ids).sum() + model[1](x).sum()).backward()
    wanted, model[0].weight.grad = model[0].weight.grad, None
    tree = GradientTree(model, Ranks(order="tree2"))
    for some in tree.parts(torch.arange(4)):
        (model[0](ids[some]).sum() + model[1](x[some]).sum()).backward()
        tree.push()
    assert tree.collect() == ["0.weight"]
    torch.testing.assert_close(model[0].weight.grad, wanted)


def test_two_files_with_one_tensor_need_an_index(tmp_path):
    from safetensors.torch import save_file

    model = torch.nn.Sequential(iso.Linear(8, 8))
    for name, value in (("model", 0.0), ("other", 1.0)):
        save_file(
            {key: torch.full_like(x, value) for key, x in model.state_dict().items()}, tmp_path / f"{name}.safetensors"
        )
    with pytest.raises(OptionError, match=r"files with 0\..*model.safetensors and other.safetensors"):
        load_shards(model, tmp_path)


def test_sums_have_the_canonical_nan():
    odd = torch.tensor([[0x7FC0BEEF]], dtype=torch.int32).view(torch.float32)
    total = fixed_sum([odd, odd])
    assert finished(total, None, torch.float32).view(torch.int32).item() == 0x7FFFFFFF
    assert finished(total, None, torch.bfloat16).view(torch.int16).item() == 0x7FFF


def test_traffic_counts_what_is_sent():
    columns, rows = traffic(4096, 4096, 14336, 8, contract="tensor_core:sm90/chain")
    assert (columns.n, columns.sent, rows.k, rows.contract) == (512, 0, 1792, "tensor_core:sm90/chain")
    assert rows.whole == "tensor_core:sm90/tree8"
    assert "no time" in str(rows)
    assert rows.sent == 7 * 512 * 4096 * (4 + 2)  # 7 others: a share of float32 sums, and of rounded rows
    assert traffic(1, 64, 64, 2)[1].sent == 64 * 4
    assert [row.sent + row.sent_backward for row in traffic(100, 64, 64, 1)] == [0, 0]
    with pytest.raises(OptionError, match="a divisor of the 8 leaves"):
        traffic(1, 64, 64, 3)
    with pytest.raises(ShapeError, match="a multiple of 8"):
        traffic(1, 60, 64, 2)


def test_traffic_does_not_count_in_the_numbers_of_another_library():
    """32 bits of them would not do."""
    sizes = 65536, 16384, 16384
    assert traffic(*(np.int32(x) for x in sizes), 8) == traffic(*sizes, 8)


def test_traffic_expects_a_time_where_products_have_a_model():
    def over(nbytes):
        return nbytes / LINK.bytes_per_second * 1e6

    columns, rows = traffic(256, 4096, 14336, 8, device="h200")
    product = isogemm.plan(256, 4096, 1792, dtype="bfloat16", out_dtype="float32", device="h200")
    assert (rows.product_us, rows.whole) == (product.expected_us, "tensor_core:sm90/tree8")
    assert rows.sent == 7 * 32 * 4096 * (4 + 2)  # as by collectives: more than goes in one step
    assert rows.transfer_us == pytest.approx(over(rows.sent) + 2 * LINK.latency_us)
    assert columns.transfer_us == 0
    assert f"over {LINK}" in str(rows)
    assert str(LINK) not in str(columns)
    few = traffic(64, 4096, 14336, 2, device="h200")[1]  # in one step, where collectives take two
    assert few.sent == 64 * 4096 * 4
    assert few.transfer_us == pytest.approx(over(few.sent) + LINK.latency_us)
    many = traffic(4096, 4096, 14336, 2, device="h200")[1]
    late = over(2048 * 4096 * 4) - many.product_us / 2  # half of the rows travel beside the other half's product
    assert many.transfer_us == pytest.approx(max(0, late) + over(2048 * 4096 * 2) + 2 * LINK.latency_us)
    assert [row.product_us for row in traffic(4096, 4096, 14336, 8)] == [None, None]


def test_an_audit_of_ranks_needs_a_common_tree():
    from isogemm.audit import compare_ranks

    with pytest.raises(OptionError, match=r"--tp.*1,2,4"):
        compare_ranks("nowhere", [2, 3])
    with pytest.raises(OptionError, match=r"--tp.*got: 2"):
        compare_ranks("nowhere", 2)
    with pytest.raises(OptionError, match=r"--tp.*got: \[2, '4'\]"):
        compare_ranks("nowhere", [2, "4"])
    with pytest.raises(OptionError, match=r"--device: .*cuda:1; nearest legal choice: cuda"):
        compare_ranks("nowhere", [2], device="cuda:1")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match=r"--device: .*without one; nearest legal choice: cpu"):
            compare_ranks("nowhere", [2], device="cuda")


def test_an_audit_of_ranks_looks_at_heads_before_it_starts_any(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from isogemm.audit import compare_ranks

    transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.multiprocessing, "spawn", None)
    with pytest.raises(OptionError, match=r"num_key_value_heads.*a multiple of 4 ranks; got: 2; .*: 2 ranks"):
        compare_ranks(str(tmp_path), [1, 2, 4], random=True)
    with pytest.raises(OptionError, match=r"--hf.*config\.json"):
        compare_ranks(str(tmp_path / "elsewhere"), [1, 2])


def test_what_a_rank_refuses_is_the_error_of_the_audit(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from isogemm.audit import compare_ranks
    from isogemm.audit.transformer import ranks

    def outcomes(rank, *given):
        given[-1].put(ranks.RanksOutcome(1, "tree2", 3, 0, ""))  # of a size before
        raise ShapeError("rows of lm_head.weight", limit="a multiple of 2", value=67, nearest=68)

    def spawn(function, given, nprocs):
        with pytest.raises(ShapeError):
            function(0, *given)
        raise torch.multiprocessing.ProcessRaisedException("a traceback", 0, 1)

    transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    monkeypatch.setattr(ranks, "_outcomes", outcomes)
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    with pytest.raises(ShapeError, match=r"rows of lm_head.weight: limit: a multiple of 2; got: 67; .* 68"):
        compare_ranks(str(tmp_path), [1, 2], random=True)


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_have_the_bits_of_one(tmp_path):
    """Logits of two and of four processes, whose sums travel through the host's memory."""
    transformers = pytest.importorskip("transformers")
    from isogemm.audit import compare_ranks

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.Qwen3Config(vocab_size=2048, num_hidden_layers=2, head_dim=64, **sizes)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    for outcome in compare_ranks(str(tmp_path), [1, 2, 4], random=True, dtype="bfloat16", device="cuda"):
        assert (outcome.differing, outcome.first) == (0, "")
        assert outcome.logits == outcome.tp * 2 * 67 * 2048  # every rank has them all

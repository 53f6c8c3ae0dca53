"""Whole models that are cut: logits in every way, audited, read by parts, and compiled."""

from __future__ import annotations

import copy
import tempfile
from functools import cache

import torch
import torch.distributed as dist
from tests.distributed.worlds.parts import BF16, F32, ORDER, Swapped, differing, meshes

import isogemm.torch as iso
from isogemm.audit.transformer import ranks as audit
from isogemm.torch import distributed as idist
from isogemm.torch.distributed import Ranks
from isogemm.torch.distributed.models import parallelise, plan_of
from isogemm.torch.model.merging import Merging

LAYERS = {"Qwen3": 2, "Llama": 1}  # a second one gets what the ranks joined in the first
SIZES = {
    "vocab_size": 132,  # of which a rank has no whole number of leaves
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def build(family, dtype, **options):
    import transformers

    torch.manual_seed(0)
    own = {"tie_word_embeddings": family == "Qwen3", "num_hidden_layers": LAYERS[family]}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():  # norms of ones and small weights hide mistakes
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval().to(dtype)


@cache
def plain(family, dtype):
    """Converted and whole: made once, before there are processes."""
    model = build(family, dtype)
    iso.convert(model, grad_order="chain")
    return model


def converted(family, dtype, tp):
    model = copy.deepcopy(plain(family, dtype))
    parallelise(model, plan_of(model), tp)
    return model


def models(rank):
    """Logits alone, batched, in chunks and decoded, with projections apart and as one product."""
    ids = torch.randint(1, 128, (3, 11), generator=torch.Generator().manual_seed(1))
    shapes = {name: tp for name, (dp, tp) in meshes().items() if dp.size == 1}
    for family in ("Qwen3", "Llama"):
        for dtype in (F32, BF16):
            with torch.no_grad():
                want = converted(family, dtype, shapes["tp1"])(ids).logits
                for name, tp in shapes.items():
                    model = converted(family, dtype, tp)
                    for how, found in _ways(model, ids):
                        same = differing(found, want[: len(found), -found.shape[1] :])
                        yield {"what": f"{family} {dtype} {name} {how}", "differ": same}
                    merged = sum(
                        child.merge() and child.is_merged() for child in model.modules() if isinstance(child, Merging)
                    )
                    same = differing(model(ids).logits, want)
                    yield {"what": f"{family} {dtype} {name} fused", "of": merged, "differ": same}


def _ways(model, ids):
    yield "batched", model(ids).logits
    yield "alone", model(ids[:1]).logits
    first = model(ids[:, :8], use_cache=True)
    yield "in chunks", model(ids[:, 8:], past_key_values=first.past_key_values).logits
    cache, steps = model(ids[:, :8], use_cache=True).past_key_values, []
    for i in range(8, 11):
        steps.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    yield "decoded", torch.cat(steps, 1)


def audited(rank):
    """The audit's own comparison: of four ranks, and of ranks that changed places in sums of layers alone."""
    ids, right = torch.arange(18).reshape(2, 9), Ranks(dist.group.WORLD, ORDER)
    want = audit.outputs(converted("Llama", F32, Ranks(None, ORDER)), ids)
    model = converted("Llama", F32, right)
    yield _audit("audit of right ranks", want, model, right, ids)
    for child in model.modules():
        if isinstance(child, idist.RowParallel):
            child.ranks = Swapped(dist.group.WORLD, ORDER)
    yield _audit("audit of swapped ranks", want, model, right, ids)


def _audit(what, want, model, of, ids):
    places = of.gather(audit.compared(want, audit.outputs(model, ids), of.rank), "places")
    found = audit.joined(4, ORDER, list(want), places)
    return {"what": what, "first": found.first, "of": found.logits, "differ": found.differing}


def loaded(rank):
    """A model that no process holds whole: read by parts from a file that rank 0 wrote."""
    from safetensors.torch import save_file

    tp, ids = Ranks(dist.group.WORLD, ORDER), torch.arange(9).reshape(1, 9)
    for family in ("Qwen3", "Llama"):
        folder = tempfile.TemporaryDirectory() if rank == 0 else None
        whole = [folder.name if folder else None]
        dist.broadcast_object_list(whole)
        if rank == 0:
            state = plain(family, BF16).state_dict()
            tied = {"lm_head.weight"} if family == "Qwen3" else set()
            save_file({k: v for k, v in state.items() if k not in tied}, f"{whole[0]}/model.safetensors")
        dist.barrier()
        config = copy.deepcopy(plain(family, BF16).config)
        config._attn_implementation = "sdpa"
        with idist.without_weights():
            model = type(plain(family, BF16))(config).eval().to(BF16)
        iso.convert(model, tp=tp, grad_order="chain", fuse=True)
        read = idist.load_shards(model, whole[0])
        dist.barrier()
        if folder:
            folder.cleanup()
        with torch.no_grad():
            same = differing(model(ids).logits, converted(family, BF16, Ranks(None, ORDER))(ids).logits)
        merged = sum(child._buffers.get("merged_weight") is not None for child in model.modules())
        yield {"what": f"loaded {family}", "of": len(read), "merged": merged, "differ": same}


class Cut(torch.nn.Module):
    """Every kind of layer that is cut, one behind the other; rows are shared in the middle."""

    def __init__(self, of):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            iso.Embedding(128, 16), iso.Linear(16, 32), iso.Linear(32, 16), iso.Linear(16, 32), iso.Linear(32, 128)
        )
        styles = ("embedding_rowwise", "colwise", "rowwise", "colwise", "rowwise")
        parallelise(self.layers, {str(i): style for i, style in enumerate(styles)}, of)
        self.layers[1].gathered = self.layers[2].sequence = self.layers[3].sequence = True
        self.width = 32 // of.size

    def forward(self, ids):
        rows = self.layers[0](ids).flatten(0, 1)
        wide = self.layers[1](rows).chunk(32 // self.width, -1)[self.layers[1].ranks.rank]
        return self.layers[4](self.layers[3](self.layers[2](wide)))


def compiled(rank):
    """A graph without a break where no gradient is recorded; a copy of a model is compiled with layers of its own."""
    ids, four = torch.arange(24).reshape(3, 8) * 5, Ranks(dist.group.WORLD, ORDER)
    with torch.no_grad():
        want = Cut(Ranks(None, ORDER))(ids)
        model = copy.deepcopy(Cut(four))
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids)
    yield {"what": "compiled", "of": found.numel(), "differ": differing(found, want) + differing(model(ids), want)}

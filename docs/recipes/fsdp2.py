"""FSDP2: two processes train to the bits of one that takes their batches in turn; verify holds on shards."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

import isogemm.torch
from isogemm.torch import reductions

RANKS, TOKENS, STEPS = 2, 16, 2
CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
BATCHES = torch.randint(64, (STEPS, RANKS, 3, TOKENS), generator=torch.Generator().manual_seed(1))


def trained(rank: int | None) -> dict[str, torch.Tensor]:
    """The whole parameters after the steps: by this rank's batches, or, without a rank, by all."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(CONFIG)
    isogemm.torch.convert(model, strict=True)
    if rank is not None:
        for layer in (*model.model.layers, model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batches in BATCHES:
        for ids in batches if rank is None else batches[rank : rank + 1]:
            losses = reductions.cross_entropy(model(ids).logits[:, :-1], ids[:, 1:])
            scale = losses.numel() * (RANKS if rank is None else 1)  # FSDP halves the sum: no rounding
            (losses.sum() / scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isogemm.torch.verify(model)  # alone, in batches, padded, in chunks, token by token
    return {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(trained(rank), Path(folder, str(rank)))
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    torch.multiprocessing.start_processes(run, (folder,), RANKS, start_method="fork")
    found = [torch.load(Path(folder, str(rank))) for rank in range(RANKS)]
want = trained(None)
differ = {name for own in found for name, x in own.items() if not torch.equal(x, want[name])}
print(f"{len(differ)} of {len(want)} parameters differ between {RANKS} processes and one")
sys.exit(bool(differ))

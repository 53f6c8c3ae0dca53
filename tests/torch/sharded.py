"""Run by test_storage.py: models sharded over two processes by FSDP1 and FSDP2, converted and in a scope.

    python sharded.py FILE

FILE is where the processes meet. One rank alone would not do: FSDP1 shards nothing then, and resizes nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import isogemm
import isogemm.torch as igt
from isogemm.errors import OptionError

WORLD = 2
IDS = torch.tensor([[1, 2, 3], [4, 5, 8]])


def model(convert):
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.SiLU())
    made = torch.nn.Sequential(torch.nn.Embedding(9, 16), block, torch.nn.Linear(32, 9))
    if convert:
        igt.convert(made)
    return made


def fsdp2(made):
    mesh = init_device_mesh("cpu", (WORLD,))
    for child in made:
        fully_shard(child, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def fsdp1(made):
    policy = ModuleWrapPolicy({type(child) for child in made})
    return FullyShardedDataParallel(made, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True)


def train(made, scope):
    """Bits of three losses; the ranks have the same data, so the mean of their gradients is that of one."""
    optimizer, losses = torch.optim.SGD(made.parameters(), lr=0.1), []
    for _ in range(3):
        with scope():
            logits = made(IDS)
            loss = torch.nn.functional.cross_entropy(logits.view(-1, 9), IDS.view(-1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def refused(made):
    """Whether float32 buffers of shards are: layers would see other parameters, gathered for a call."""
    try:
        igt.use_main_grad(made)
    except OptionError as error:
        return "DTensor" in str(error) and not any(hasattr(p, "main_grad") for p in made.parameters())
    return False


WAYS = ((True, contextlib.nullcontext), (False, igt.invariant))


def check(rank, file, wanted):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    for (convert, scope), want in zip(WAYS, wanted, strict=True):
        for shard in (fsdp2, fsdp1):
            found = train(shard(model(convert)), scope)
            line = f"{shard.__name__}, {'converted' if convert else 'in a scope'}, rank {rank}: {found == want}\n"
            os.write(1, line.encode())  # at once, or lines of two processes would mix
    os.write(1, f"use_main_grad, rank {rank}: {refused(fsdp2(model(True)))}\n".encode())
    dist.destroy_process_group()


torch.set_num_threads(1)
isogemm.set_num_threads(1)
wanted = [train(model(convert), scope) for convert, scope in WAYS]
child = os.fork()  # what was imported and loaded is there in both; no thread has begun
check(int(child == 0), sys.argv[1], wanted)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

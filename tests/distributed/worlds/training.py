"""Steps of training by groups of every shape, against a process alone."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from tests.distributed.worlds.models import converted
from tests.distributed.worlds.parts import BF16, F32, ORDER, differing, meshes, part, random
from torch.distributed.optim import ZeroRedundancyOptimizer

import isogemm.torch as iso
from isogemm.torch import distributed as idist
from isogemm.torch.distributed import GradientTree, Ranks

TRAINED = (("Qwen3", BF16), ("Llama", F32))


def wrapped(rank):
    """DistributedDataParallel with the tree as its hook: gradients of four ranks, and of one process."""
    of, x = Ranks(dist.group.WORLD, ORDER), random(8, 32, seed=8)
    want = []
    for rows in x.chunk(4):
        alone = _small()
        alone(rows).square().sum().backward()
        want.append([p.grad.float() for p in alone.parameters()])
    total = [(first + second) + (third + fourth) for first, second, third, fourth in zip(*want, strict=True)]
    model = torch.nn.parallel.DistributedDataParallel(_small())
    model.register_comm_hook(of, idist.tree_hook)
    model(part(x, of, 0)).square().sum().backward()
    pairs = zip(model.parameters(), total, strict=True)
    yield {"what": "DDP", "differ": sum(differing(p.grad, (t / 4).to(p.dtype)) for p, t in pairs)}


def _small():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.SiLU(), torch.nn.Linear(48, 8))
    iso.convert(made)
    return made


@cache
def alone(family, dtype):
    """What a process alone trains: made once, before there are others, which find the kernels loaded too."""
    one = Ranks(None, ORDER)
    return _steps(family, dtype, one, one)


def training(rank):
    """Losses, gradients and weights of two steps of AdamW; micro-batches within a leaf."""
    shapes = meshes()
    for family, dtype in TRAINED:
        want = alone(family, dtype)
        for name, (dp, tp) in shapes.items():
            if name != "tp1":
                found = _steps(family, dtype, dp, tp, micro=2 if name == "dp2 tp2" else 1)
                yield from _compared(f"training {family} {dtype} {name}", found, want, tp)
    found = _steps(family, dtype, *shapes["dp4"], zero=True)  # of the last one
    yield from _compared("ZeRO-1", found, want, shapes["tp1"][1])


class _Branches(torch.nn.Module):
    """Parameters of one shape that torch's functions use, each for some rows alone."""

    def __init__(self):
        super().__init__()
        self.linear = iso.Linear(8, 8)
        self.even, self.odd, self.never = (torch.nn.Parameter(torch.ones(8)) for _ in range(3))
        self.linear.load_state_dict({"weight": random(8, 8, seed=1), "bias": random(8, seed=2)})

    def forward(self, x):
        return self.linear(x) * (self.even if int(x[0, 0]) % 2 == 0 else self.odd)


def _branch_gradients(ranks):
    model, x = _Branches(), random(ranks.leaves, 8, seed=3)
    x[:, 0] = torch.arange(ranks.leaves) >= ranks.leaves // 2  # the first ranks have the even rows, the last the odd
    tree = GradientTree(model, ranks)
    for leaf in tree.parts(x):
        model(leaf).sum().backward()
        tree.push()
    named = tree.collect()
    return {name: p.grad for name, p in model.named_parameters() if name in named}


def branches(rank):
    """Ranks that have gradients of other parameters than each other."""
    want = _branch_gradients(Ranks(None, ORDER))
    for name, (dp, _) in meshes().items():
        if name.startswith("dp"):
            found = _branch_gradients(dp)
            assert list(found) == list(want)
            yield from _compared(f"branches {name}", found, want, Ranks(None, ORDER))


def _compared(what, found, want, tp):
    """Gradients and weights with this rank's part of what a process alone has, and the first that differs."""
    differ, first = 0, ""
    for name, x in found.items():
        y = want[name]
        dim = next((d for d in range(x.dim()) if x.shape[d] != y.shape[d]), None)
        here = differing(x, y if dim is None else part(y, tp, dim))
        differ, first = differ + here, first or (name if here else "")
    yield {"what": what, "of": len(found), "first": first, "differ": differ}


def _steps(family, dtype, dp, tp, micro=1, zero=False):
    model = converted(family, dtype, tp)
    model.lm_head.gathered = False  # losses take the columns as they are
    tree = GradientTree(model, dp)
    named, options = list(model.named_parameters()), {"lr": 0.01, "foreach": False}
    parameters = [p for _, p in named]
    if zero:
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=dp.group, **options)
    else:
        optimizer = torch.optim.AdamW(parameters, **options)
    found = {}
    for step in range(2):
        ids = torch.randint(0, 128, (8, 7), generator=torch.Generator().manual_seed(step))
        for leaf in tree.parts(ids):
            for rows in leaf.chunk(micro):
                logits = model(rows[:, :-1]).logits.flatten(0, 1)
                (idist.token_losses(logits, rows[:, 1:].flatten(), tp).sum() / 48).backward()
            tree.push()
        tree.collect()
        found |= {f"gradient {step} of {name}": p.grad.clone() for name, p in named}
        optimizer.step()
        found |= {f"step {step} of {name}": p.detach().clone() for name, p in named}
        optimizer.zero_grad()
    return found

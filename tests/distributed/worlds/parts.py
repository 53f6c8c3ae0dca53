"""Groups of ranks, parts of tensors, and layers that are cut, for every comparison."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isogemm.torch as iso
from isogemm.torch.distributed import Ranks

ORDER = "tree4"
F32, BF16 = torch.float32, torch.bfloat16


def differing(x, y):
    """Elements of other bits; all of them where shapes or dtypes differ."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return max(x.numel(), y.numel(), 1)
    words = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return int((x.detach().contiguous().view(words) != y.detach().contiguous().view(words)).sum())


def meshes():
    """Groups of every shape that four processes have: (data-parallel, tensor-parallel), and their names."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    two, four, alone = Ranks(both["tp"], ORDER), Ranks(dist.group.WORLD, ORDER), Ranks(None, ORDER)
    halves = Ranks(both["dp"], ORDER)
    return {
        "tp1": (alone, alone),
        "tp2": (alone, two),
        "tp4": (alone, four),
        "dp2": (halves, alone),
        "dp4": (four, alone),
        "dp2 tp2": (halves, two),
    }


def random(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(kind, of, dtype, bias=True, **options):
    """A layer of the kind, with the same weights everywhere, cut between ranks."""
    made = iso.Linear(32, 48, bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(random(48, 32, seed=1))
        if bias:
            made.bias.copy_(random(48, seed=2))
    kind.adopt(made, of, "layer", set())
    for name, value in options.items():
        setattr(made, name, value)
    return made


def whole(dtype):
    return random(48, 32, seed=1, dtype=dtype), random(48, seed=2, dtype=dtype)


def part(x, of, dim):
    size = x.shape[dim] // of.size
    return x.narrow(dim, of.rank * size, size)


class Swapped(Ranks):
    """Two ranks change places."""

    def gather(self, x, what):
        first, second, third, fourth = super().gather(x, what)
        return [first, third, second, fourth]

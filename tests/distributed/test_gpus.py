"""Two GPUs, a process each: sums by NCCL and through mapped memory, eagerly and in graphs, against one GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ORDER, N, K = "tree8", 1024, 2048
ROWS = (1, 7, 64, 500, 2049)  # one shot, two, and products whose rows travel one rank's after the other's


@pytest.mark.gpu
def test_two_gpus_have_the_bits_of_one(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from torch.multiprocessing import get_context, spawn

    found = get_context("spawn").SimpleQueue()
    spawn(_rank, (f"file://{tmp_path}/store", found), nprocs=2)
    outcomes: dict[str, int] = {}
    while not found.empty():
        outcomes.update(found.get())
    assert len(outcomes) == 2 * 2 * len(ROWS) * 8 + 2
    assert {what: n for what, n in outcomes.items() if n} == {}


def _rank(rank: int, where: str, found: Any) -> None:
    import torch.distributed as dist

    from isogemm.torch.distributed import Ranks

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=100))
    for transport in ("collective", "symmetric"):
        ranks = Ranks(dist.group.WORLD, ORDER, transport)
        for rows in ROWS:
            for name, differing in _layers(rows, ranks):
                found.put({f"{transport}, {rows} rows, {name}, rank {rank}": differing})
    found.put({f"broken, rank {rank}": int(not _sees_a_swap(ranks))})
    dist.destroy_process_group()


def _random(*shape: int, seed: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def _made(kind: Any, ranks: Any, sequence: bool) -> Any:
    import isogemm.torch as iso

    layer = iso.Linear(K, N, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(_random(N, K, seed=1))
        layer.bias.copy_(_random(N, seed=2))
    kind.adopt(layer, ranks, "layer", set())
    layer.sequence = sequence
    return layer


def _layers(rows: int, ranks: Any) -> Any:
    from isogemm.torch.distributed import ColumnParallel, Ranks, RowParallel

    x, dy = _random(rows, K, seed=3), _random(rows, N, seed=4)
    alone = Ranks(None, ORDER)
    for kind, cut in ((RowParallel, 1), (ColumnParallel, 0)):
        own = _step(_made(kind, alone, False), x, dy)
        takes, gives = (lambda t: t, _part) if kind is ColumnParallel else (_part, lambda t: t)
        layer = _made(kind, ranks, False)
        made = _step(layer, takes(x), gives(dy))
        whole = [gives(own[0]), takes(own[1]), own[2].chunk(2, cut)[ranks.rank]]
        for what, one, other in zip(("y", "dx", "dw"), made, whole, strict=True):
            yield f"{kind.__name__} {what}", _differing(one, other)
        yield f"{kind.__name__} in a graph", _in_a_graph(layer, takes(x), gives(own[0]))


def _part(x: Any) -> Any:
    import torch.distributed as dist

    return x.chunk(2, -1)[dist.get_rank()].contiguous()


def _step(layer: Any, x: Any, dy: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def _in_a_graph(layer: Any, x: Any, want: Any) -> int:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        layer(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x)
        differing = 0
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
            differing += _differing(y, want)
    return differing


def _differing(x: Any, y: Any) -> int:
    words = torch.int32 if x.dtype is torch.float32 else torch.int16
    return int((x.contiguous().view(words) != y.contiguous().view(words)).sum()) if x.shape == y.shape else x.numel()


def _sees_a_swap(ranks: Any) -> bool:
    """A rank whose rows of the weight are another's must be seen."""
    from isogemm.torch.distributed import Ranks, RowParallel

    x = _random(7, K, seed=3)
    with torch.no_grad():
        want = _made(RowParallel, Ranks(None, ORDER), False)(x)
        layer = _made(RowParallel, ranks, False)
        layer.weight.copy_(layer.weight.roll(1, 0))
        return _differing(layer(_part(x)), want) > 0

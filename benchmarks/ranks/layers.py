"""One layer whose inputs are cut between GPUs: isogemm's row-parallel product against torch's mm and all_reduce.

``python -m benchmarks.ranks layers``: in CUDA graphs of several calls with weights of their own, interleaved; torch
sums by NCCL and by symmetric memory, in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from isogemm.lab import environment, row, verdict, write_json
from isogemm.study.bits import differing

from ..common import Out, Quick, ratio_text, repeated, results_path, selected
from ..gpu.engine import CudaEngine
from .launch import World, interleaved, launch

WIDE, SMALL = (4096, 14336), ((1024, 3072), (1024, 2048))  # N and K: of a layer, and of Qwen3-0.6B's two
ROWS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)
# Before a graph is captured: calls in so many turns, and seconds behind each, in which other kernels are compiled.
WARM, TURNS, PAUSE = 16, 4, 0.75
CALLS = 12  # of a graph
L2 = 400 << 20  # bytes of weights, so that a call finds none in the cache


class Layer:
    """A case: how many rows of which product, and the tree of its sum."""

    def __init__(self, order: str, m: int, n: int, k: int) -> None:
        self.order, self.m, self.n, self.k = order, m, n, k
        self.name = f"ranks layers {order} m={m} n={n} k={k}"
        self.words = tuple(self.name.split())

    @property
    def least(self) -> float:
        """The bar: least speed relative to the fastest of torch's ways."""
        return 1.0 if self.m <= 64 else 1 / 1.1


CASES = (
    *(Layer(order, m, *WIDE) for order in ("tree8", "tree2") for m in ROWS),
    *(Layer("tree8", m, *shape) for shape in SMALL for m in (1, 8, 64, 4096)),
)


def main(
    only: Annotated[str, typer.Option(help="Words that a case has to have: 'm=64 n=4096'.")] = "",
    out: Out = None,
    quick: Quick = False,
) -> None:
    """Time row-parallel products on two GPUs. Exits with 1 when a bit differs."""
    if not launch(2, "cuda", measure, tuple(selected(CASES, only)), quick, out, environment()):
        raise typer.Exit(1)


def measure(world: World, cases: tuple[Layer, ...], quick: bool, out: Path | None, stamp: dict[str, Any]) -> bool:
    """What each rank does, and whether no bit differed; the first prints and writes."""
    import torch

    name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    target = out or results_path("ranks-layers", name)
    facts = {"benchmark": "ranks layers", "device": f"{world.size} x {name}"}
    engine, rows, console = CudaEngine(), [], Console(width=200)
    for case in cases:
        rows.append(_timed(world, engine, case, quick))
        if world.rank == 0:
            write_json(target, rows, environment=stamp, **facts)
            console.print(_line(rows[-1]), highlight=False, soft_wrap=True)
    if world.rank == 0:
        console.print(table(rows))
        console.print(f"rows: {target}", soft_wrap=True)
    engine.synchronize()
    return not any(done["differing"] for done in rows)


def _timed(world: World, engine: CudaEngine, case: Layer, quick: bool) -> dict[str, Any]:
    import torch

    torch.manual_seed(world.rank)
    own = case.k // world.size
    copies = max(2, min(8, L2 // (case.n * own * 2)))
    weights = [torch.randn(case.n, own, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(case.m, own, device="cuda", dtype=torch.bfloat16)
    ways, runs = _ways(case, x), {}
    for name, call in ways.items():
        _warm(lambda i, call=call: call(weights[i % copies]), engine, PAUSE * name.startswith("isogemm, "))
        runs[name] = engine.capture([lambda call=call, i=i: call(weights[i % copies]) for i in range(CALLS)])
    wrong = differing(ways["isogemm, symmetric"](weights[0]), ways["isogemm, collective"](weights[0]))
    rounds = {"rounds": 3, "block_seconds": 1e-3} if quick else {"rounds": 15, "block_seconds": 3e-3}
    timings = interleaved(world, runs, **rounds)
    peer = min((t for name, t in timings.items() if name.startswith("torch, ")), key=lambda t: t.median)
    verdicts = [verdict(t, peer) for name, t in timings.items() if name.startswith("isogemm, ")]
    asked = verdict(timings["isogemm, symmetric"], peer)
    return row(
        case.name, command=repeated("ranks", ["layers", "--only", " ".join(case.words[1:])], quick=quick),
        timings=timings, verdicts=verdicts,
        bars=[{"bar": f"isogemm, symmetric ≥ {case.least:.3g} {peer.name}", "result": asked.against(case.least)}],
        differing=sum(world.together(wrong)), compared=case.m * case.n * world.size, seed=0, calls=CALLS,
        m=case.m, n=case.n, k=case.k, order=case.order, tp=world.size,
    )  # fmt: skip


def _warm(call: Callable[[int], Any], engine: CudaEngine, pause: float) -> None:
    """Call so often that what is chosen at run time is settled."""
    for _ in range(TURNS):
        for i in range(WARM):
            call(i)
            engine.synchronize()
        time.sleep(pause)


def _ways(case: Layer, x: Any) -> dict[str, Callable[[Any], Any]]:
    """What computes the sum of all ranks' products of x and a weight, by name."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    from isogemm.torch.distributed import Ranks, RowParallel
    from isogemm.torch.model.layers import Linear

    group = dist.group.WORLD
    shared = symmetric.empty((case.m, case.n), dtype=x.dtype, device=x.device)
    symmetric.rendezvous(shared, group.group_name)

    def ours(transport: str) -> Callable[[Any], Any]:
        layer = Linear(x.shape[1], case.n, bias=False, dtype=x.dtype, device=x.device)
        layer.__class__ = RowParallel
        layer.ranks, layer.label = Ranks(group, case.order, transport), "layer"

        def call(w: Any) -> Any:
            layer.weight.data = w
            with torch.no_grad():
                return layer(x)

        return call

    def by_nccl(w: Any) -> Any:
        y = x @ w.t()
        dist.all_reduce(y)
        return y

    def one_shot(w: Any) -> Any:
        torch.mm(x, w.t(), out=shared)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)

    def two_shot(w: Any) -> Any:
        torch.mm(x, w.t(), out=shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group.group_name)

    return {
        "isogemm, symmetric": ours("symmetric"), "isogemm, collective": ours("collective"),
        "torch, nccl": by_nccl, "torch, one-shot": one_shot, "torch, two-shot": two_shot,
        "torch.mm alone": lambda w: x @ w.t(),
    }  # fmt: skip


def _line(done: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {t['median'] * 1e6 / CALLS:.1f} us" for name, t in done["timings"].items())
    return f"{done['name']}: {times}; {done['differing']} of {done['compared']:,} differ"


def table(rows: list[dict[str, Any]]) -> Table:
    """Both of isogemm's ways beside torch's fastest."""
    found = Table(title="speed against torch's fastest way, with 95 % intervals", title_justify="left", pad_edge=False)
    for name in ("case", "candidate", "us", "/ torch", "torch's fastest", "bar"):
        found.add_column(name, no_wrap=True)
    for done in rows:
        for v in done["verdicts"]:
            us = done["timings"][v["ours"]]["median"] * 1e6 / CALLS
            bar = done["bars"][0]["result"] if v["ours"] == "isogemm, symmetric" else ""
            found.add_row(done["name"], v["ours"], f"{us:.1f}", ratio_text(v, 3), v["peer"], bar)
    return found

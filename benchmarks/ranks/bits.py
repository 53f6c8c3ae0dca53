"""Ranks on GPUs against one process, by bits: ``python -m benchmarks.ranks bits --hf FOLDER``.

Logits of tensor-parallel ranks by `isogemm.audit.compare_ranks`, and gradients of a training step of data-parallel
ones. With fewer GPUs than ranks these share them, and gloo carries what NCCL would: bits, and no times.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from isogemm.audit import compare_ranks, load
from isogemm.lab import environment, write_json

from ..common import Out, results_path

ORDER, SEQUENCES = "tree8", 8


def main(
    hf: Annotated[str, typer.Option(help="A folder with a model's config.json; weights are random.")],
    tp: Annotated[str, typer.Option(help="Numbers of tensor-parallel ranks.")] = "1,2,4,8",
    dp: Annotated[str, typer.Option(help="Numbers of data-parallel ranks.")] = "1,2,4",
    tokens: Annotated[int, typer.Option(help="Of each of two prompts.", min=1)] = 350,
    length: Annotated[int, typer.Option(help="Of each of eight sequences of a training step.", min=2)] = 65,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Of weights.")] = "bfloat16",
    out: Out = None,
) -> None:
    """Print and write one row for each number of ranks. Exits with 1 when a bit differs."""
    rows = [
        {"what": "logits", **asdict(found)}
        for found in compare_ranks(hf, _numbers(tp), random=True, dtype=dtype, device=device, tokens=tokens)
    ]
    rows += gradients(hf, _numbers(dp), length=length, device=device, dtype=dtype)
    for row in rows:
        print(row)
    path = write_json(out or results_path("ranks", rows[0]["device"].split(",")[0]), rows, environment=environment())
    print(path)
    if any(row["differing"] for row in rows):
        raise typer.Exit(1)


def gradients(hf: str, sizes: list[int], **options: Any) -> list[dict[str, Any]]:
    """One training step's gradients: elements, and those of other bits than one process' own."""
    import torch.multiprocessing as processes

    found = processes.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (max(sizes), f"file://{folder}/store", hf, sizes, options, found), nprocs=max(sizes))
        return [found.get() for _ in sizes]


def _rank(rank: int, world: int, where: str, hf: str, sizes: list[int], options: dict[str, Any], found: Any) -> None:
    import torch
    import torch.distributed as dist

    from isogemm.operands.tensors import words
    from isogemm.torch.distributed import Ranks

    device, dtype = options["device"], options["dtype"]
    there = torch.cuda.device_count() if device == "cuda" else 0
    carrier = "nccl" if there >= world else "gloo"
    if there:
        torch.cuda.set_device(rank % there)
    torch.set_num_threads(1)
    dist.init_process_group(carrier, init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    want = _step(load(hf, random=True, dtype=dtype, device=device), Ranks(None, ORDER), options["length"])
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            made = _step(load(hf, random=True, dtype=dtype, device=device), Ranks(group, ORDER), options["length"])
            pairs = zip(made, want, strict=True)
            differing = sum(int((words(x) != words(y)).sum()) for x, y in pairs)
            total = torch.tensor([differing, sum(x.numel() for x in made)], device=want[0].device)
            parts = Ranks(group, ORDER).gather(total, "the outcome")
            if rank == 0:
                place = f"{min(there, world)} x {torch.cuda.get_device_name()}" if there else "cpu"
                wrong, compared = (int(x) for x in torch.stack(list(parts)).sum(0))
                words = {"what": "gradients", "dp": size, "order": ORDER, "compared": compared, "differing": wrong}
                found.put({**words, "device": f"{place}, {carrier}"})
            del made
    dist.destroy_process_group()


def _step(model: Any, ranks: Any, length: int) -> list[Any]:
    """Gradients of the mean loss over all sequences, of which this rank has its share."""
    import torch

    from isogemm.torch import convert
    from isogemm.torch.distributed import GradientTree, Ranks, token_losses

    alone = Ranks(None, ORDER)
    convert(model.train(), tp=alone, grad_order="chain")
    tree = GradientTree(model, ranks)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, model.config.vocab_size, (SEQUENCES, length), generator=generator).to(model.device)
    for leaf in tree.parts(ids):
        logits = model(leaf[:, :-1]).logits.flatten(0, 1)
        (token_losses(logits, leaf[:, 1:].flatten(), alone).sum() / (SEQUENCES * (length - 1))).backward()
        tree.push()
    tree.collect()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]

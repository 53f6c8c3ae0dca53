"""The audit of a model over tensor-parallel ranks: logits of every number of ranks against those of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...base import arguments
from ...base.extras import require_extra
from ...errors import DeviceError, IsogemmError, OptionError
from ...operands.tensors import words
from .load import config_of, load

_TREES = (2, 4, 8, 16)
_TIMEOUT = 600.0  # seconds for a transfer, in which others load a model


@dataclass(frozen=True)
class RanksOutcome:
    """What one number of ranks gave.

    Attributes
    ----------
    tp : int
    order : str
        The tree of sums over ranks.
    logits, differing : int
        Elements that were compared, and those of other bits, on all ranks.
    first : str
        The first module, as they are called, whose output has other bits; empty where none has.
    device : str
        What ranks computed on, and what carried their sums.
    """

    tp: int
    order: str
    logits: int
    differing: int
    first: str
    device: str = "cpu, gloo"

    def __str__(self) -> str:
        where = f"; first in {self.first}" if self.first else ""
        return f"tp={self.tp} ({self.order}): {self.differing:,} of {self.logits:,} logits differ from tp=1{where}"


def compare_ranks(
    path: str,
    sizes: Sequence[int],
    *,
    random: bool = False,
    dtype: str = "",
    device: str = "",
    seed: int = 0,
    tokens: int = 67,
) -> list[RanksOutcome]:
    """Launch ranks on this machine, and hold their logits against one process'.

    Ranks are processes that import the script that calls this: the call stands under ``if __name__ == "__main__":``.

    Parameters
    ----------
    path : str
        A folder with a transformers model, as in `isogemm.audit.load`.
    sizes : sequence of int
        Numbers of ranks, each at most 16.
    random, dtype, seed
        As in `isogemm.audit.load`.
    device : {"", "cpu", "cuda"}
        Of all ranks, the CPU by default. With a GPU for each of them NCCL carries their sums; ranks that have to share
        GPUs hold them in gloo's place, through the host's memory: the same bits, at no speed to speak of.
    tokens : int
        Of each of two prompts.

    Returns
    -------
    list of RanksOutcome

    Raises
    ------
    OptionError
        No such folder or device, sizes that have no common tree, or heads that ranks cannot share. What a rank
        refuses, a model that it cannot cut for example, is raised here.
    DeviceError
        torch has no GPU that it can use.
    """
    require_extra("hf", "the audit of a model", "torch", "transformers")
    import torch
    import torch.multiprocessing as processes

    given = arguments.items(sizes) or []
    listed = given if all(isinstance(size, int) for size in given) else []
    most = max(listed, default=0)
    order = next((f"tree{n}" for n in _TREES if n >= most and all(size > 0 and n % size == 0 for size in listed)), "")
    if not order or not most:
        raise OptionError("--tp", limit="numbers of ranks, from 1, that divide 16", value=sizes, nearest="1,2,4")
    if device not in ("", "cpu", "cuda"):
        raise OptionError("--device", limit="cpu or cuda with --tp", value=device, nearest="cuda, for all GPUs")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device", limit="a GPU that torch can use", value="cuda, without one", nearest="cpu")
    from ...torch.distributed.models import check_heads

    for size in listed:
        check_heads(config_of(path), size)
    with tempfile.TemporaryDirectory() as folder:
        found = processes.get_context("spawn").SimpleQueue()
        options = {"random": random, "dtype": dtype, "device": device, "seed": seed}
        told = (most, f"file://{folder}/store", path, tuple(listed), order, options, tokens, found)
        try:
            processes.spawn(_rank, told, nprocs=most)
        except processes.ProcessRaisedException as error:
            raise _told(found) or error from None
        return [found.get() for _ in listed]


def _told(found: Any) -> IsogemmError | None:
    """The refusal that a rank has left in the queue, behind outcomes of sizes before."""
    while not found.empty():
        told = found.get()
        if isinstance(told, tuple):
            kind, words = told
            return kind(**words)  # type: ignore[no-any-return]
    return None


def _rank(rank: int, *given: Any) -> None:
    """One process; what it refuses goes into the queue, as words that can travel."""
    try:
        _outcomes(rank, *given)
    except IsogemmError as error:
        words = {name: str(getattr(error, name)) for name in ("what", "limit", "value", "nearest")}
        given[-1].put((type(error), words))
        raise


def _outcomes(
    rank: int,
    world: int,
    where: str,
    path: str,
    sizes: Sequence[int],
    order: str,
    options: Any,
    tokens: int,
    found: Any,
) -> None:
    """A process' part of every model, compared with the whole one."""
    import torch
    import torch.distributed as dist

    from ...torch import convert
    from ...torch.distributed import Ranks

    torch.set_num_threads(1)
    carrier, device = "gloo", "cpu, gloo"
    if options["device"] == "cuda" and torch.cuda.is_available():
        there = torch.cuda.device_count()
        torch.cuda.set_device(rank % there)
        carrier = "nccl" if there >= world else "gloo"
        device = f"{min(there, world)} x {torch.cuda.get_device_name()}, {carrier}"
    limit = timedelta(seconds=_TIMEOUT)
    dist.init_process_group(carrier, init_method=where, rank=rank, world_size=world, timeout=limit)
    whole = load(path, **options)
    convert(whole, tp=Ranks(None, order))
    ids = _prompts(whole, tokens).to(whole.device)
    want = outputs(whole, ids)
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            ranks = Ranks(group, order, timeout=_TIMEOUT)
            model = load(path, **options)
            convert(model, tp=ranks)
            outcome = compared(want, outputs(model, ids), rank).to(whole.device)
            outcomes = ranks.gather(outcome, "the audit's outcomes")
            if rank == 0:
                found.put(joined(size, order, list(want), outcomes, device))
    dist.destroy_process_group()


def _prompts(model: Any, tokens: int) -> Any:
    import torch

    return torch.randint(0, model.config.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(1))


def outputs(model: Any, ids: Any) -> dict[str, Any]:
    """Outputs of all modules that give one tensor, in the order of their ends; the logits are the last."""
    import torch

    found: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                found[name] = first

        return hook

    hooks = [child.register_forward_hook(keep(name)) for name, child in model.named_modules() if name]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return {**found, "logits": logits}


def compared(want: dict[str, Any], found: dict[str, Any], rank: int) -> Any:
    """(place of the first module of other bits, logits that differ, logits) as a tensor that can travel."""
    import torch

    differ = [_differing(x, found[name], rank) for name, x in want.items()]
    first = next((i for i, n in enumerate(differ) if n), -1)
    return torch.tensor([first, differ[-1], want["logits"].numel()])


def _differing(want: Any, found: Any, rank: int) -> int:
    """Elements of other bits; of a tensor that is cut along one dimension, this rank's part is compared."""
    for dim in range(want.dim()):
        if found.shape[dim] != want.shape[dim]:
            want = want.narrow(dim, rank * found.shape[dim], found.shape[dim])
    return int((words(want.contiguous()) != words(found.contiguous())).sum())


def joined(size: int, order: str, names: Sequence[str], outcomes: Sequence[Any], device: str = "") -> RanksOutcome:
    """The outcomes of all ranks as one."""
    places = [int(x[0]) for x in outcomes if int(x[0]) >= 0]
    first = names[min(places)] if places else ""
    return RanksOutcome(size, order, sum(int(x[2]) for x in outcomes), sum(int(x[1]) for x in outcomes), first, device)

"""A group of processes, the tree that its sums are made in, and transfers, whose errors name who is missing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...base.arguments import number, of_type
from ...contract.spec import Contract, as_contract
from ...errors import DeviceError, DTypeError, OptionError, RankError, ShapeError
from ..operator import Tensor
from . import symmetric

TRANSPORTS = ("auto", "collective", "symmetric")  # what carries partial sums

MARGIN = 2.0  # seconds beyond the timeout, in which the others of a broken group say that they are alive


@dataclass(frozen=True)
class Ranks:
    """The processes that share a sum, and its tree.

    Parameters
    ----------
    group : ProcessGroup or DeviceMesh of one dimension, optional
        Of torch.distributed; none is this process alone.
    order : str
        ``treeT``: the leaves of every sum that ranks share. The number of ranks divides T.
    transport : str
        ``collective``: torch.distributed's collectives, gloo on CPUs and NCCL on GPUs. ``symmetric``: memory that GPUs
        of one machine map of one another, over NVLink or PCIe. ``auto``: that where it can be, else collectives. The
        bits are the same.
    timeout : float
        Seconds that a transfer may take. The error about a rank that does not answer takes as long again. A kernel that
        waits for another rank's memory stops after it, and torch raises its error of a failed launch.

    Raises
    ------
    OptionError
        The order is no tree, its leaves cannot be shared by so many ranks, there is no such transport, or no time.
    DTypeError
        The group or the timeout is none.

    Determinism
    -----------
    Groups of every size that divides T leave the same bits, a process alone included.
    """

    group: Any = None
    order: str = "tree8"
    transport: str = "auto"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if hasattr(self.group, "get_group"):
            if self.group.ndim != 1:
                raise OptionError(
                    "mesh", limit="one dimension", value=self.group.ndim, nearest=f"mesh[{self.group.mesh_dim_names}]"
                )
            object.__setattr__(self, "group", self.group.get_group())
        if not isinstance(self.group, dist.ProcessGroup | None):
            limit, nearest = "a ProcessGroup, a DeviceMesh of one dimension, or None", "init_device_mesh"
            raise DTypeError("group of ranks", limit=limit, value=repr(self.group), nearest=nearest)
        if not number("timeout", self.timeout) > 0:
            raise OptionError("timeout", limit="more than 0 seconds", value=self.timeout, nearest=300.0)
        of_type("order", self.order, str, "treeT", "'tree8'")
        check_divides("number of ranks", self.size, self.order)
        if self.transport not in TRANSPORTS:
            limit = " or ".join(TRANSPORTS)
            raise OptionError("transport", limit=limit, value=self.transport, nearest="auto")

    def __deepcopy__(self, memo: Any) -> Ranks:
        """Itself: a copy of a model has the same processes."""
        return self

    @property
    def size(self) -> int:
        """Processes in the group."""
        return 1 if self.group is None else int(dist.get_world_size(self.group))

    @property
    def rank(self) -> int:
        """This process' place in the group, from 0."""
        return 0 if self.group is None else int(dist.get_rank(self.group))

    @property
    def leaves(self) -> int:
        """Leaves of the tree."""
        return leaves_of(self.order)

    @property
    def own_leaves(self) -> int:
        """Leaves of this rank's subtree."""
        return self.leaves // self.size

    def subtree(self, contract: Contract) -> str:
        """The contract of one rank's part of a sum over all ranks, whose whole contract has the tree."""
        return f"{contract.arithmetic}/{f'tree{self.own_leaves}' if self.own_leaves > 1 else 'chain'}"

    def part(self, what: str, length: int, block: int = 1) -> slice:
        """This rank's part of a dimension that a tree sums.

        Raises
        ------
        ShapeError
            A leaf would be no whole number of the arithmetic's blocks, so that ranks would cut where one process
            does not.
        """
        step = self.leaves * block
        if length % step:
            nearest = max(step, round(length / step) * step)
            limit = f"a multiple of {step}: {self.leaves} leaves of {self.order}, in blocks of {block}"
            raise ShapeError(what, limit=limit, value=length, nearest=nearest)
        return self.share(what, length)

    def share(self, what: str, length: int) -> slice:
        """This rank's part of a dimension that is cut, and not summed.

        Raises
        ------
        ShapeError
            The ranks do not divide it.
        """
        own, rest = divmod(length, self.size)
        if rest:
            raise ShapeError(what, limit=f"a multiple of {self.size} ranks", value=length, nearest=length - rest)
        return slice(self.rank * own, (self.rank + 1) * own)

    def maps(self, on: Any, shape: Sequence[int], what: str) -> bool:
        """Whether sums of that shape, on a device, go through memory that the ranks' GPUs map of one another.

        Raises
        ------
        DeviceError, ShapeError
            `transport` asks for that, and it cannot be.
        """
        if self.transport == "collective" or self.size == 1:
            return False
        reachable = on.type == "cuda" and symmetric.reaches(self.group)
        if reachable and shape[-1] % 8 == 0 and math.prod(shape) < 2**31:
            return True
        if self.transport == "symmetric":
            if not reachable:
                limit = "ranks with a GPU each, of one machine, that map one another's memory, and NCCL"
                raise DeviceError(f"transport of {what}", limit=limit, value=str(on), nearest="collective")
            limit = "columns in multiples of 8, fewer than 2**31 elements"
            raise ShapeError(f"sum of {what}", limit=limit, value=list(shape), nearest="transport='auto'")
        return False

    def shared(self, share: int = 0, results: int = 0) -> symmetric.Shared:
        """That memory, with room for bytes of partial sums from each rank, and of results."""
        return symmetric.shared(self.group, self.timeout, share, results)

    def _gathers(self, x: Tensor) -> bool:
        """Whether `x` of all ranks travels so: few bytes, in whole words."""
        if self.transport == "collective" or not x.is_cuda or not 0 < x.nbytes <= symmetric.gather_bytes():
            return False
        return x.nbytes % 8 == 0 and symmetric.reaches(self.group) and self.shared().gathers

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """`stacked`, one by one."""
        return [x] if self.size == 1 else list(self.stacked(x, what))

    def stacked(self, x: Tensor, what: str) -> Tensor:
        """`x` of every rank, in their order, along a new first dimension: bytes, whatever the dtype.

        Raises
        ------
        RankError
            A rank died, or did not answer within the timeout.
        """
        if self.size == 1:
            return x.unsqueeze(0)
        sent = x.detach().contiguous()
        out = sent.new_empty((self.size, *sent.shape))
        if self._gathers(sent):
            self.shared().box.gather(sent, out)
        else:
            self._transfer("all_gather", what, partial(_all_gather, _bytes(out), _bytes(sent), group=self.group))
        return out

    def exchange(self, parts: Tensor, what: str) -> Tensor:
        """Item j of `parts` goes to rank j; item i of the result is from rank i.

        Raises
        ------
        RankError
            As `gather`.
        """
        if self.size == 1:
            return parts
        sent = parts.detach().contiguous()
        out = torch.empty_like(sent)
        call = partial(dist.all_to_all_single, _bytes(out), _bytes(sent), group=self.group)
        self._transfer("all_to_all", what, call)
        return out

    def _transfer(self, operation: str, what: str, call: Callable[..., Any]) -> None:
        """A collective, waited for; one that a CUDA graph records is ordered by its stream, and has nobody to wait."""
        if symmetric.captures():
            call(async_op=False)
            return
        try:
            call(async_op=True).wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:  # torch's own type of a peer that closed, and of one that let the time pass
            raise self._broken(f"{operation} of {what}", error) from error

    def _broken(self, what: str, error: RuntimeError) -> RankError:
        """Who is missing: every rank that sees a transfer fail says so in the group's store, and the others do not."""
        silent = _silent(self.group, self.rank, self.size, self.timeout + MARGIN)
        named = ", ".join(map(str, silent)) or "no rank by name"
        return RankError(
            what, limit=f"an answer of all {self.size} ranks within {self.timeout:g} s",
            value=f"none from rank {named} of the group ({str(error).splitlines()[0][:160]})",
            nearest="start all ranks again: the group is not usable any more",
        )  # fmt: skip


def leaves_of(order: str) -> int:
    """Leaves of the tree ``treeT``. Raises OptionError: the order is no tree."""
    found = as_contract(f"fma/{order}").order
    if found.kind != "tree":
        raise OptionError("order of sums over ranks", limit="treeT", value=order, nearest="tree8")
    return found.size


def check_divides(name: str, size: int, order: str) -> None:
    """Raise OptionError unless so many ranks can share the leaves of a tree."""
    leaves = leaves_of(order)
    if leaves % size:
        nearest = max(n for n in range(1, min(size, leaves) + 1) if leaves % n == 0)
        raise OptionError(name, limit=f"a divisor of the {leaves} leaves of {order}", value=size, nearest=nearest)


# torch 2.13 gave it another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _silent(group: Any, rank: int, size: int, patience: float) -> list[int]:
    """Ranks of the group that did not report a broken transfer; all others where the store is gone."""
    others = [other for other in range(size) if other != rank]
    try:
        store, name = dist.distributed_c10d._get_default_store(), f"isogemm/{group.group_name}"
        store.set(f"{name}/{rank}", "alive")
        until = time.monotonic() + patience
        while others and time.monotonic() < until:
            others = [other for other in others if not store.check([f"{name}/{other}"])]
            time.sleep(0.05)
    except RuntimeError:  # the process that held the store is gone
        return [0]
    return others


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def as_ranks(tp: Any) -> Ranks:
    """`Ranks` from itself, a mesh, a process group, or 1: this process alone."""
    return tp if isinstance(tp, Ranks) else Ranks(None if tp is None or tp == 1 else tp)


def check_ranks(ranks: Any) -> Ranks:
    """`ranks`, if they are some; else a DTypeError."""
    found: Ranks = of_type("ranks", ranks, Ranks, "Ranks", "Ranks(group, order='tree8')")
    return found

"""Gradients over data-parallel ranks: leaves of tokens and a fixed tree, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from ...base import arguments
from ...errors import OptionError, ShapeError
from ..gemm.buffers import clear
from ..gemm.main_grad import main_grads, use_main_grad
from ..operator import Tensor
from .ranks import Ranks, check_ranks
from .sums import sum_over_ranks
from .tree import fixed_sum


class GradientTree:
    """The gradient of a batch as a tree over its parts, of which each rank computes some.

    The batch is cut along dimension 0 into as many leaves as the order of `ranks` has. Within a leaf gradients go to
    float32 buffers (`isogemm.torch.use_main_grad`), so its micro-batches leave the bits of the whole leaf; leaves meet
    in float32, in the tree, first those of a rank, then ranks; each gradient is rounded once to its parameter's dtype.

    Parameters
    ----------
    model : torch.nn.Module
        Converted; it may be cut between other ranks (``convert(model, tp=...)``).
    ranks : Ranks
        The data-parallel ones.

    Raises
    ------
    OptionError
        As `use_main_grad`.
    DTypeError
        `ranks` are none.

    Determinism
    -----------
    For losses that are sums over tokens: ranks of every number that divides the tree's leaves leave the same bits in
    ``.grad``, one rank included. So do micro-batches of whole leaves of ``grad_order`` within a leaf.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self.model, self.ranks = model, check_ranks(ranks)
        use_main_grad(model)
        self._waiting: list[tuple[int, dict[str, Tensor]]] = []  # (leaves, sums), of falling sizes
        self._pushed = 0

    def parts(self, batch: Tensor) -> list[Tensor]:
        """This rank's leaves of a batch, in order.

        Raises
        ------
        ShapeError
            Rows that the leaves do not divide.
        DTypeError
            The batch is no tensor.
        """
        arguments.of_type("batch", batch, torch.Tensor, "a tensor, cut along dimension 0", "parts of each tensor")
        if not batch.dim():
            raise ShapeError("dimensions of a batch", limit="at least 1", value=0, nearest=1)
        return list(batch[self.ranks.part("rows of a batch", len(batch))].chunk(self.ranks.own_leaves))

    def push(self) -> None:
        """What the buffers hold is the next leaf's gradient; they become zero.

        Raises
        ------
        OptionError
            All leaves of this rank are there already.
        """
        if self._pushed == self.ranks.own_leaves:
            limit = f"{self.ranks.own_leaves} leaves of this rank"
            raise OptionError("push", limit=limit, value=self._pushed + 1, nearest="collect()")
        size, sums = 1, self._taken()
        while self._waiting and self._waiting[-1][0] == size:  # order-critical: equals meet, the earlier on the left
            _, left = self._waiting.pop()
            size, sums = 2 * size, {name: _met(left.get(name), sums.get(name)) for name in {**left, **sums}}
        self._waiting.append((size, sums))
        self._pushed += 1

    def collect(self) -> list[str]:
        """Meet the other ranks' sums; every parameter's ``.grad`` is the whole batch's then.

        Returns
        -------
        list of str
            Names of the parameters.

        Raises
        ------
        OptionError
            A leaf of this rank is missing.
        RankError
            A rank died, or did not answer in time.
        """
        if self._pushed != self.ranks.own_leaves:
            limit = f"{self.ranks.own_leaves} leaves of this rank"
            raise OptionError("collect", limit=limit, value=self._pushed, nearest="push() behind each leaf's backward")
        sums, self._waiting, self._pushed = self._waiting[0][1], [], 0
        parameters = dict(self.model.named_parameters())
        for name, there in zip(parameters, self._anywhere(parameters, sums), strict=True):
            if there:
                p, what = parameters[name], f"the gradient of {name}"
                own = sums.pop(name) if name in sums else torch.zeros_like(p, dtype=torch.float32)
                p.grad = sum_over_ranks(own.reshape(-1, 1), None, p.dtype, self.ranks, what).reshape(p.shape)
        return [name for name, p in parameters.items() if p.grad is not None]

    def _anywhere(self, parameters: dict[str, Tensor], sums: dict[str, Tensor]) -> list[bool]:
        """Whether any rank has a gradient of each parameter: all of them meet the same ones."""
        own = [name in sums for name in parameters]
        if self.ranks.size == 1 or not own:
            return own
        flags = torch.tensor(own, dtype=torch.uint8, device=next(iter(parameters.values())).device)
        found: list[bool] = self.ranks.stacked(flags, "which gradients there are").any(0).tolist()
        return found

    def _taken(self) -> dict[str, Tensor]:
        """The float32 gradients that buffers and ``.grad`` hold, which become zero and None."""
        names = {id(p): name for name, p in self.model.named_parameters()}  # of a tied one the first module's
        found = {names[id(p)]: total.clone() for _, p, total in main_grads(self.model)}
        for name, p in self.model.named_parameters():
            if name not in found and p.grad is not None:
                found[name] = p.grad.float()
            p.grad = None
        buffers = [getattr(p, "main_grad", None) for p in self.model.parameters()]
        for child in self.model.modules():
            buffers.extend((getattr(child, "main_grads", None) or {}).values())
        clear([buffer for buffer in buffers if buffer is not None])
        return found


def _met(left: Tensor | None, right: Tensor | None) -> Tensor:
    """The sum of two subtrees; one that has no gradient at all is +0."""
    known = [x for x in (left, right) if x is not None]
    return fixed_sum([x if x is not None else torch.zeros_like(known[0]) for x in (left, right)])


def tree_hook(ranks: Ranks, bucket: Any) -> Any:
    """A communication hook for DistributedDataParallel: the mean over ranks in a fixed tree, rounded once.

    ``ddp.register_comm_hook(Ranks(group), tree_hook)``. A rank's gradient is one leaf, so the bits are those of any
    buckets, and of any transport, for one number of ranks; `GradientTree` has those of every number.
    """
    flat: Tensor = bucket.buffer()
    total = sum_over_ranks(flat.float().reshape(-1, 1), None, torch.float32, ranks, f"bucket {bucket.index()}")
    future: Any = torch.futures.Future()
    future.set_result((total.reshape(-1) / ranks.size).to(flat.dtype))
    return future


tree_hook.__annotations__.clear()  # DistributedDataParallel compares them with types, and here they are text

"""Losses of logits whose columns are on several ranks, with the bits of whole rows.

A softmax sums along the vocabulary in an order that shards would cut. So columns become rows: an all_to_all gives every
rank whole rows, as many as it had in parts, and a row is computed where it is, by `isogemm.torch.reductions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import ShapeError
from .. import reductions
from ..arguments import check_tensor
from ..operator import Tensor
from ..rows.entropy import check_classes
from ..rows.signature import integers
from .ranks import Ranks, check_ranks


def log_softmax(logits: Tensor, ranks: Ranks, *, out_dtype: Any = torch.float32) -> Tensor:
    """Whole rows of `isogemm.torch.reductions.log_softmax`: this rank's share of them.

    Parameters
    ----------
    logits : tensor [tokens, vocabulary / ranks]
        The columns of this rank.
    ranks : Ranks
    out_dtype : torch.dtype

    Returns
    -------
    tensor [ceil(tokens / ranks), vocabulary]
        Rows from ``rank * ceil(tokens / ranks)`` on; those behind the last token are of zeros.

    Raises
    ------
    RankError
        A rank died, or did not answer in time.
    DTypeError, ShapeError
        Logits that are no matrix, or no ranks.
    """
    _check_matrix(logits, ranks)
    return reductions.log_softmax(_Rows.apply(logits, ranks), out_dtype=out_dtype)


def token_losses(logits: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
    """``-log_softmax(logits)[targets]`` for each token, in float32 and on every rank; +0 where the target is -100.

    Parameters
    ----------
    logits : tensor [tokens, vocabulary / ranks]
    targets : tensor of integers [tokens]
        Of the whole vocabulary, the same on every rank.
    ranks : Ranks

    Returns
    -------
    float32 tensor [tokens]

    Raises
    ------
    RankError
        A rank died, or did not answer in time.
    DTypeError, ShapeError
        Logits that are no matrix, targets that are not one integer for each row, or no ranks.
    """
    _check_matrix(logits, ranks)
    integers("targets", targets, logits.device)
    if targets.shape != logits.shape[:1]:  # what is missing would be padded, and what is over left out
        limit = "[tokens], as logits have rows"
        raise ShapeError("shape of targets", limit=limit, value=list(targets.shape), nearest=list(logits.shape[:1]))
    if targets.is_cpu:  # what one rank refused, the others would wait for
        check_classes(targets, logits.shape[1] * ranks.size, -100)
    rows = _Rows.apply(logits, ranks)
    padded = torch.nn.functional.pad(targets, (0, len(rows) * ranks.size - len(targets)))
    own = padded[ranks.rank * len(rows) : (ranks.rank + 1) * len(rows)]
    return _GatherRows.apply(reductions.cross_entropy(rows, own, out_dtype=torch.float32), ranks)[: len(targets)]


def _check_matrix(logits: Any, ranks: Any) -> None:
    check_ranks(ranks)
    check_tensor("logits", logits)
    if logits.dim() != 2:
        nearest = "logits.flatten(0, -2)"
        raise ShapeError("dimensions of logits", limit="2: [tokens, columns]", value=logits.dim(), nearest=nearest)


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """Columns of all rows to all columns of some rows; backward the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(x)
        share = -(-len(x) // ranks.size)
        padded = torch.nn.functional.pad(x, (0, 0, 0, share * ranks.size - len(x)))
        found = ranks.exchange(padded.view(ranks.size, share, x.shape[1]), "columns of logits")
        return found.transpose(0, 1).flatten(1).clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        columns = dy.unflatten(1, (ctx.ranks.size, -1)).transpose(0, 1).contiguous()
        found = ctx.ranks.exchange(columns, "the gradient of logits")
        return found.reshape(-1, found.shape[-1])[: ctx.rows], None


class _GatherRows(torch.autograd.Function):  # type: ignore[misc]
    """Rows of all ranks; backward each rank keeps its own, since all have the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(x)
        return torch.cat(ranks.gather(x, "losses of tokens"))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy.narrow(0, ctx.ranks.rank * ctx.rows, ctx.rows), None

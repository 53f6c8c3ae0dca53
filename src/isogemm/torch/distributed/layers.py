"""Layers whose weights are cut between ranks: columns, rows, the vocabulary, and norms that heads share.

All hold the parameters of the layer that they stand for, cut; on one rank they are that layer with tree orders, so a
process alone is what groups are compared with.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from ...contract.spec import Contract
from ...errors import OptionError
from .. import reductions
from ..arguments import autocast, contract_text
from ..gemm.products import accumulate, linear, product, resolved, with_order
from ..gradient_buffers import asked_for
from ..model.layers import Converted, Embedding, Linear, RowNorm
from ..model.recognition import around, mixed
from ..operator import Tensor, forward_alone
from ..rows.signature import check_ids
from .compiled import linear_op, numbered, stacked_op
from .ranks import Ranks
from .sums import product_over_ranks
from .tree import finished, fixed_sum


class Parallel(Converted):
    """A layer with its part of the weights: mixed into the class of what it stands for.

    `cut` is the dimension of each parameter that the ranks share; parameters that are not in it are whole on each.
    """

    cut: ClassVar[dict[str, int]] = {}
    ranks: Ranks
    label: str = ""
    number: int  # by which compiled code knows the layer

    @classmethod
    def adopt(cls, layer: Any, ranks: Ranks, label: str, cut: set[int]) -> None:
        """Make `layer` one of this class, in place: its parameters keep this rank's part.

        `cut` has the ids of parameters that are cut already, since they serve another layer too.
        """
        for name, part in cls.parts(layer, ranks, label).items():
            p = getattr(layer, name)
            if p is not None and id(p) not in cut:
                cut.add(id(p))
                if ranks.size > 1:
                    p.data = p.data.narrow(cls.cut[name], part.start, part.stop - part.start).clone()
        layer.__class__ = cls
        layer.ranks, layer.label, layer.number = ranks, label, numbered(layer)

    @classmethod
    def parts(cls, layer: Any, ranks: Ranks, label: str) -> dict[str, slice]:
        """This rank's part of each parameter that is cut, after it was found to fit."""
        return {}

    def __setstate__(self, state: Any) -> None:
        """Copied or loaded: another layer, with a number of its own."""
        super().__setstate__(state)  # type: ignore[misc]
        self.number = numbered(self)

    def stacked(self, x: Tensor) -> Tensor:
        """`x` of every rank, along a new first dimension."""
        return stacked_op(x, self.number) if forward_alone() else self.ranks.stacked(x, self.label)


class ParallelLinear(Parallel, Linear):
    """A Linear whose products are parts of a tree: what columns and rows have in common."""

    @classmethod
    def parts(cls, layer: Any, ranks: Ranks, label: str) -> dict[str, slice]:
        """The cut dimension is summed by a tree: in the forward pass, or in the gradient of x."""
        length = (layer.out_features, layer.in_features)[cls.cut["weight"]]  # a table may have cut the weight
        block = resolved(contract_text(layer.contract), layer.weight, layer.weight).block
        part = ranks.part(f"{('rows', 'columns')[cls.cut['weight']]} of {label}.weight", length, block)
        return dict.fromkeys(cls.cut, part)

    @classmethod
    def adopt(cls, layer: Any, ranks: Ranks, label: str, cut: set[int]) -> None:
        """Cut it as every layer; its sizes become those of the part."""
        super().adopt(layer, ranks, label, cut)
        layer.out_features, layer.in_features = layer.weight.shape

    def forward(self, input: Any) -> Any:
        """input @ weight.T + bias, all of it or this rank's part."""
        x, w = autocast(input, self.weight)
        if forward_alone():
            return linear_op(x, w, self.bias, self.number)
        buffers = self._taking("weight", self.weight), self._taking("bias", self.bias)
        return _Product.apply(x, w, self.bias, self, *buffers)

    def computed(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Contract]:
        """The result, the rows that its product took, and their contract, outside the gradient's graph."""
        lead, x = self.shape_of(x), self.ahead(x)
        contract = resolved(contract_text(self.contract), x, w)
        y = self.forwards(x.reshape(-1, x.shape[-1]), w, bias, contract)
        return y.reshape(*lead, y.shape[-1]), x, contract

    def shape_of(self, x: Tensor) -> list[Any]:
        """Leading dimensions of the result for `x`."""
        return list(x.shape[:-1])

    def ahead(self, x: Tensor) -> Tensor:
        """The rows that this rank's product takes."""
        return x

    def forwards(self, x: Tensor, w: Tensor, bias: Tensor | None, contract: Contract) -> Tensor:
        """The product of rows, outside the gradient's graph."""
        raise NotImplementedError

    def backwards(self, dy: Tensor, w: Tensor, contract: Contract, dtype: Any) -> Tensor:
        """The gradient of rows, outside the gradient's graph."""
        raise NotImplementedError

    def behind(self, dy: Tensor) -> Tensor:
        """The rows of the gradient that belong to `ahead`'s."""
        return dy


class ColumnParallel(ParallelLinear):
    """A Linear of which each rank has some of the outputs: rows of the weight.

    Forward, an output sees one column of the weight, so the contract is that of a Linear. The gradient of x sums over
    all outputs: ``dx = dy @ w`` is the tree of `Ranks.order`, on one rank too.

    Attributes
    ----------
    gathered : bool
        Every rank gets all outputs, and not its part.
    sequence : bool
        Every rank has its share of the rows of x (dimension 0), and gathers them.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    gathered = False
    sequence = False

    def forward(self, input: Any) -> Any:
        """input @ weight.T + bias: this rank's columns, or all."""
        y = super().forward(input)
        if not self.gathered or self.ranks.size == 1:
            return y
        return _beside(self.stacked(y)) if forward_alone() else _GatherColumns.apply(y, self)

    def is_plain(self) -> bool:
        """Whether it is a Linear as any other: nothing travels."""
        return type(self).forward is ColumnParallel.forward and not (self.gathered or self.sequence)

    def shape_of(self, x: Tensor) -> list[Any]:
        """With the rows of the others."""
        if not self.sequence:
            return super().shape_of(x)
        first, *rest = x.shape[:-1]
        return [first * self.ranks.size, *rest]

    def ahead(self, x: Tensor) -> Tensor:
        """All rows, of the others too."""
        return torch.cat(self.ranks.gather(x, self.label)) if self.sequence else x

    def forwards(self, x: Tensor, w: Tensor, bias: Tensor | None, contract: Contract) -> Tensor:
        """A product of its own."""
        return linear(x, w, bias, str(contract), None)

    def backwards(self, dy: Tensor, w: Tensor, contract: Contract, dtype: Any) -> Tensor:
        """The sum over all columns, in the tree."""
        order = self.ranks.subtree(contract)
        if self.ranks.size == 1:
            return product(None, dy, w, 1.0, 0.0, order, dtype)
        return product_over_ranks(
            lambda rows: product(None, rows, w, 1.0, 0.0, order, torch.float32),
            dy, w.shape[1], None, dtype, self.ranks, f"the gradient of {self.label}", scatter=self.sequence,
        )  # fmt: skip


class RowParallel(ParallelLinear):
    """A Linear of which each rank has some of the inputs: columns of the weight.

    ``y = x @ w.T + bias`` under the contract with the tree of `Ranks.order`: a rank computes its subtree in float32,
    subtrees meet over ranks, the bias is added, and the sum is rounded once. The gradient of x is a Linear's: a chain.

    Attributes
    ----------
    sequence : bool
        Every rank gets its share of the rows of y (dimension 0), and not all of them.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 1}
    sequence = False

    def forwards(self, x: Tensor, w: Tensor, bias: Tensor | None, contract: Contract) -> Tensor:
        """The sum over all inputs, in the tree."""
        order = self.ranks.subtree(contract)
        if self.ranks.size == 1:
            return linear(x, w, bias, order, x.dtype)
        return product_over_ranks(
            lambda rows: linear(rows, w, None, order, torch.float32),
            x, len(w), bias, x.dtype, self.ranks, self.label, scatter=self.sequence,
        )  # fmt: skip

    def shape_of(self, x: Tensor) -> list[Any]:
        """Without the rows of the others."""
        if not self.sequence:
            return super().shape_of(x)
        first, *rest = x.shape[:-1]
        return [first // self.ranks.size, *rest]

    def behind(self, dy: Tensor) -> Tensor:
        """All rows, of the others too."""
        return torch.cat(self.ranks.gather(dy, f"the gradient of {self.label}")) if self.sequence else dy

    def backwards(self, dy: Tensor, w: Tensor, contract: Contract, dtype: Any) -> Tensor:
        """A chain over the outputs, all of which are here."""
        return product(None, dy, w, 1.0, 0.0, str(with_order(contract)), dtype)


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """x @ w.T + bias of a parallel layer; gradients of weight and bias are those of `isogemm.torch.linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, layer: Any, *buffers: Tensor | None) -> Tensor:
        ctx.shape = x.shape  # of this rank's rows; what is kept may have those of the others
        y, x, ctx.contract = layer.computed(x, w, bias)
        ctx.rows = str(with_order(ctx.contract, layer.grad_order))
        ctx.layer, ctx.buffers, ctx.bias = layer, buffers, None if bias is None else bias.dtype
        ctx.save_for_backward(x, w)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, w), layer = ctx.saved_tensors, ctx.layer
        dy = layer.behind(dy.resolve_neg())  # autograd negates some gradients lazily
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = layer.backwards(rows, w, ctx.contract, x.dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            dw = _over_rows(rows.mT, flat, asked_for(ctx, 1, ctx.buffers[0]), ctx.rows, w.dtype)
        if ctx.needs_input_grad[2]:
            buffer = asked_for(ctx, 2, ctx.buffers[1])
            buffer = None if buffer is None else buffer.unsqueeze(0)
            db = _over_rows(rows.new_ones(1, len(rows)), rows, buffer, ctx.rows, ctx.bias)
            db = None if db is None else db.reshape(-1)
        return dx, dw, db, None, None, None


def _over_rows(a: Tensor, b: Tensor, buffer: Tensor | None, contract: str, dtype: Any) -> Tensor | None:
    """a @ b, which sums over rows: a gradient, or nothing where the buffer takes it."""
    if buffer is None:
        return product(None, a, b, 1.0, 0.0, contract, dtype)
    accumulate(a, b, buffer, contract)
    return None


class _GatherColumns(torch.autograd.Function):  # type: ignore[misc]
    """Columns of all ranks side by side; backward each rank keeps its own, since all have the same gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: Any) -> Tensor:
        ctx.rank, ctx.width = layer.ranks.rank, y.shape[-1]
        return _beside(layer.stacked(y))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None


def _beside(stacked: Tensor) -> Tensor:
    """Columns of all ranks, side by side; one row is where it has to be already."""
    return stacked.movedim(0, -2).flatten(-2)


class VocabularyEmbedding(Parallel, Embedding):
    """An Embedding of which each rank has some of the rows; what is looked up is copied, bit for bit.

    Raises
    ------
    OptionError
        An id that is no row of the whole table, on a CPU; elsewhere it is torch's own assertion.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0}

    @classmethod
    def adopt(cls, layer: Any, ranks: Ranks, label: str, cut: set[int]) -> None:
        """Cut it as every layer; a class whose own forward method scales what it looks up keeps that method."""
        made_of = getattr(type(layer), "made_of", None)
        super().adopt(layer, ranks, label, cut)
        if made_of is not None:
            layer.__class__ = around(made_of[0], cls)

    @classmethod
    def parts(cls, layer: Any, ranks: Ranks, label: str) -> dict[str, slice]:
        """Rows are cut; nothing sums over them."""
        if not isinstance(layer, Embedding):
            found = type(layer).__name__
            raise OptionError(
                f"{label}, which the plan cuts", limit="isogemm.torch.Embedding", value=found, nearest="convert(model)"
            )
        return {"weight": ranks.share(f"rows of {label}.weight", layer.num_embeddings)}

    def forward(self, input: Any) -> Any:
        """Rows of the whole table."""
        if not (input.is_cuda or torch.compiler.is_compiling()):  # there torch's own lookups look at ids
            check_ids(input, self.num_embeddings)
        if self.ranks.size == 1:
            return super().forward(input)
        # Every rank looks up a row for every id, its own or another one: what is not its own is not taken.
        found, owner = self._rows(input % len(self.weight)), input // len(self.weight)
        rows = _taken(self.stacked(found), owner) if forward_alone() else _FromOwner.apply(found, owner, self)
        return self._unpadded(rows, input)


class _FromOwner(torch.autograd.Function):  # type: ignore[misc]
    """Each row from the rank that has it: a choice, no sum. Backward all ranks have the same gradient already.

    A row that is not here has a gradient of zeros, which adds nothing to a chain from +0.
    """

    @staticmethod
    def forward(ctx: Any, found: Tensor, owner: Tensor, layer: Any) -> Tensor:
        ctx.rank = layer.ranks.rank
        ctx.save_for_backward(owner)
        return _taken(layer.stacked(found), owner)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (owner,) = ctx.saved_tensors
        return dy.masked_fill((owner != ctx.rank).unsqueeze(-1), 0), None, None


def _taken(stacked: Tensor, owner: Tensor) -> Tensor:
    """Each row from the rank that has it."""
    places = owner.unsqueeze(-1).expand_as(stacked[0]).unsqueeze(0)
    return stacked.gather(0, places).squeeze(0)


class HeadNorm(Parallel, RowNorm):
    """An RMSNorm with one weight for all heads, of which each rank has some: [..., heads, width].

    The weight's gradient sums over rows and heads. Its leaves are groups of heads, as many as the tree has; within one
    it has the order of every norm, and the groups meet in the tree. A buffer of `use_main_grad` is one for each group,
    stacked: `main_grads` has what they meet in.
    """

    weight: Any

    @classmethod
    def adopt(cls, layer: Any, ranks: Ranks, label: str, cut: set[int]) -> None:
        """A RowNorm, whose formula stays what it was."""
        if not isinstance(layer, RowNorm):
            found = type(layer).__name__
            raise OptionError(
                label, limit="an RMSNorm of transformers, converted", value=found, nearest="convert(model)"
            )
        made: Any = layer
        _, norm, formula = type(made).made_of
        made.__class__ = mixed(cls, norm, **dict(formula))
        made.ranks, made.label, made.number = ranks, label, numbered(made)

    def buffer_shape(self, name: str) -> tuple[int, ...]:
        """One for each group of this rank's heads."""
        return self.ranks.own_leaves, *super().buffer_shape(name)

    def summed(self, name: str, buffer: Tensor) -> Tensor:
        """The tree over the groups of all ranks."""
        return over_leaves(list(buffer), self.ranks, f"the gradient of {self.label}")

    def is_whole(self) -> bool:
        """Whether no gradient of the weight is recorded."""
        return not (torch.is_grad_enabled() and self.weight.requires_grad)

    def forward(self, x: Any) -> Any:
        """``x / sqrt(mean(x**2) + eps) * weight``, rounded once."""
        if self.is_whole():
            return super().forward(x)
        weight, eps = self.weight, getattr(self, self.eps_name)
        dtype = x.dtype if self.offset else torch.promote_types(weight.dtype, x.dtype)
        groups = self.ranks.own_leaves
        self.ranks.part(f"heads of {self.label}", x.shape[-2] * self.ranks.size)
        aliases = _Leaves.apply(weight, groups, self.ranks, f"the gradient of {self.label}")
        buffers = self._taking("weight", weight)
        for alias, buffer in zip(aliases, [None] * groups if buffers is None else buffers, strict=True):
            alias.main_grad = buffer
        parts = zip(x.chunk(groups, -2), aliases, strict=True)
        options = {"out_dtype": dtype, "grad_order": self.grad_order}
        return torch.cat([reductions.rms_norm(y, self._scale(w), eps, **options) for y, w in parts], -2)


def over_leaves(own: list[Tensor], ranks: Ranks, what: str) -> Tensor:
    """The tree over all leaves, of which this rank has some, in float32."""
    return finished(fixed_sum(ranks.gather(fixed_sum(own), what)), None, torch.float32)


class _Leaves(torch.autograd.Function):  # type: ignore[misc]
    """The weight in float32 for each group of heads; backward the groups' gradients meet in the tree."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, groups: int, ranks: Ranks, what: str) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # groups whose gradients are in buffers
        ctx.ranks, ctx.what, ctx.dtype = ranks, what, weight.dtype
        return tuple(weight.detach().to(torch.float32, copy=True) for _ in range(groups))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own = [g for g in grads if g is not None]
        found = over_leaves(own, ctx.ranks, ctx.what).to(ctx.dtype) if own else None
        return found, None, None, None

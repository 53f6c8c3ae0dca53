"""Operations along rows as operators with a gradient: isogemm::rms_norm, isogemm::rms_norm_backward, and so on.

Compilers and traces call them where torch records gradients, and look into none. A gradient that is summed in a buffer
has an operator of its own, isogemm::rms_norm_backward_, whose schema says that it writes there. If one operator did
both, a compiler would copy the arguments of every call, unless it could see that nobody looks at them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...errors import OptionError
from ..gradient_buffers import asked_for, check_no_ddp, check_no_hooks, check_no_tree, written_between
from ..operator import apart, define, once
from .direct import direct
from .gradients import Grads, Recording, summing
from .signature import signature
from .table import differentiated, fake, schema, summed


def buffers_asked_for(ctx: Any, buffers: Grads, tensors: Sequence[Any]) -> Grads:
    """Of each operand the buffer, where a backward pass goes on to its parameter."""
    places = [sum(x is not None for x in tensors[:i]) for i in range(len(buffers))]
    return tuple([asked_for(ctx, i, buffer) for i, buffer in zip(places, buffers, strict=True)])


class WithGradient:
    """The operators of an operation of `ROWS` and of its gradient.

    Operands come first, then buffers, of those alone that may have one (`summed`), then options, and last the order of
    sums over rows, if there are any but those of a table. Where a buffer took a gradient, or nobody needs it, the
    gradient is empty: an operator has a tensor in every place.

    Parameters
    ----------
    kind : str
    forward : operator
        The same without a gradient.
    """

    def __init__(self, kind: str, forward: Any) -> None:
        about = signature(kind)
        self.kind, self.forward, self.count = kind, forward, len(about.operands)
        self.summed = summed(kind)
        self.end = self.count + len(self.summed)
        self.ordered = any(extent == "row" for _, extent in about.operands)
        # of operands that have a gradient
        self.places = [i for i, (_, extent) in enumerate(about.operands) if extent not in ("angles", "class")]
        operands, options = schema(kind)
        options += ", str grad_order" if self.ordered else ""
        results = "Tensor" if len(self.places) == 1 else f"({', '.join(['Tensor'] * len(self.places))})"
        given, rest = f"(Tensor dy, {operands}", f", bool[] needs{options}) -> {results}"
        buffers = [f"{about.operands[i].name}_buffer" for i in self.summed]
        read = "".join(f", Tensor? {name}" for name in buffers)
        written = "".join(f", Tensor({letter}!)? {name}" for letter, name in zip("abc", buffers, strict=False))
        pure, into = self._without_buffers, (self._gradients, self._shown_gradients)
        self.gradients = define(f"{kind}_backward", f"{given}{rest}", *map(pure, into))
        self.gradients_into: Any = define(f"{kind}_backward_", f"{given}{written}{rest}", *into) if buffers else None
        self.call = define(
            kind, f"({operands}{read}{options}) -> Tensor", self._direct, self._shown,
            setup=self._setup, backward=self._differentiate, forward=self._compiled,
        )  # fmt: skip

    def __call__(self, tensors: Grads, options: tuple[Any, ...], order: str) -> Tensor:
        """The result."""
        buffers, last = self.buffers(tensors, order), (order,) if self.ordered else ()
        found: Tensor = self.call(*tensors, *[buffers[i] for i in self.summed], *options, *last)
        return found

    def buffers(self, tensors: Grads, order: str) -> Grads:
        """Of each operand the float32 buffer that takes its gradient, or None.

        Raises
        ------
        OptionError
            One whose parameter has hooks, that is used inside of DistributedDataParallel, or that is to take a tree.
        """
        found = self._of_each([getattr(tensors[place], "main_grad", None) for place in self.summed])
        for tensor, buffer in zip(tensors, found, strict=True):
            if buffer is not None:
                check_no_ddp()
                check_no_hooks("main_grad", tensor)
                check_no_tree("main_grad", order)
        return found

    def check(self, needs: Sequence[bool], order: str) -> None:
        """Raise where the angles of a rotation want gradients, or there is no such order."""
        if self.kind == "rope" and any(needs[1:]):
            raise OptionError("cos and sin", limit="constants", value="requires_grad=True", nearest="cos.detach()")
        summing(order)

    def _split(self, given: Sequence[Any]) -> tuple[tuple[Any, ...], str]:
        """Options, and the order of sums."""
        return (tuple(given[:-1]), given[-1]) if self.ordered else (tuple(given), "chain")

    def _direct(self, *given: Any) -> Tensor:
        return direct(self.kind, given[: self.count], self._split(given[self.end :])[0])

    def _shown(self, *given: Any) -> Tensor:
        return fake(self.kind, given[: self.count], self._split(given[self.end :])[0])

    def _compiled(self, *given: Any) -> Any:
        return self.forward(*given[: self.count], *self._split(given[self.end :])[0])

    def _of_each(self, buffers: Sequence[Any]) -> Grads:
        """Buffers, one for each operand."""
        found: list[Any] = [None] * self.count
        for place, buffer in zip(self.summed, buffers, strict=True):
            found[place] = buffer
        return tuple(found)

    def _setup(self, ctx: Any, given: tuple[Any, ...], output: Tensor) -> None:
        ctx.buffers = self._of_each(given[self.count : self.end])
        ctx.options, ctx.order = self._split(given[self.end :])
        self.check(ctx.needs_input_grad[: self.count], ctx.order)
        written_between(*ctx.buffers)
        ctx.save_for_backward(*given[: self.count])

    def _differentiate(self, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[: self.count]
        found = self.back(ctx, dy, needs, ctx.buffers, ctx.options, ctx.order, by_operator=True)
        return *found, *[None] * (len(self.summed) + len(ctx.options) + self.ordered)

    def back(
        self, ctx: Any, dy: Tensor, needs: Sequence[bool], buffers: Grads, options: tuple[Any, ...], order: str, *,
        by_operator: bool,
    ) -> Grads:  # fmt: skip
        """The gradient of each operand that a context saved; None where nobody needs it or a buffer took it."""
        tensors = ctx.saved_tensors  # once: a checkpoint makes them anew
        asked = buffers_asked_for(ctx, buffers, tensors)
        if not by_operator:
            of = Recording(self.kind, options, asked, tuple(needs), order)
            return once(self.kind, differentiated(of, dy, *tensors), dy, *tensors)
        asked = tuple([buffer if need else None for buffer, need in zip(asked, needs, strict=True)])
        taken, last = [asked[i] for i in self.summed], (order,) if self.ordered else ()
        if any(buffer is not None for buffer in taken):
            found = self.gradients_into(dy, *tensors, *taken, list(needs), *options, *last)
        else:
            found = self.gradients(dy, *tensors, list(needs), *options, *last)
        found = once(self.kind, found if isinstance(found, tuple) else (found,), dy, *tensors)
        grads: list[Any] = [None] * self.count
        for place, grad in zip(self.places, found, strict=True):
            grads[place] = grad if needs[place] and asked[place] is None else None
        return tuple(grads)

    def _without_buffers(self, call: Any) -> Any:
        none = (None,) * len(self.summed)
        return lambda dy, *given: call(dy, *given[: self.count], *none, *given[self.count :])

    def _gradients(self, dy: Tensor, *given: Any) -> Any:
        tensors, needs = given[: self.count], tuple(given[self.end])
        buffers, rest = self._of_each(given[self.count : self.end]), self._split(given[self.end + 1 :])
        found = differentiated(Recording(self.kind, rest[0], buffers, needs, rest[1]), dy, *tensors)
        made: list[Tensor] = []
        for grad, need in ((found[place], needs[place]) for place in self.places):
            made.append(apart(grad, dy, *tensors, *made) if need and grad is not None else dy.new_empty(0))
        return made[0] if len(made) == 1 else tuple(made)

    def _shown_gradients(self, dy: Tensor, *given: Any) -> Any:
        needs, buffers = given[self.end], self._of_each(given[self.count : self.end])
        made = [
            given[place].new_empty(given[place].shape) if needs[place] and buffers[place] is None else dy.new_empty(0)
            for place in self.places
        ]
        return made[0] if len(made) == 1 else tuple(made)

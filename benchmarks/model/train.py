"""Forward and backward passes of a transformer's linear layers: plain torch, and isogemm's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isogemm.study.bits import differing

from ..common import words_of
from .build import Call, Step
from .cases import GRAD, MAIN_GRAD, TORCH, Case, Sizes

__all__ = ["Layers", "build", "micro_batches"]

FLOAT32_SUMS = "torch, float32 sums"


@dataclass(frozen=True, slots=True)
class Layers:
    """One candidate's layers, and the arguments of its steps.

    Attributes
    ----------
    module : torch.nn.Module
        Called with `inputs`, gives as many tensors as there are `gradients`.
    inputs, gradients : tuple of tensor [tokens, width]
    total : str
        The attribute of a weight where its gradient ends up.
    """

    module: Any
    inputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    total: str = "grad"

    def step(self) -> Call:
        """One forward and backward pass from no gradients at all, or onto the sums that are there."""
        import torch

        leaves = [*self.module.parameters(), *self.inputs]

        def call(i: int) -> None:
            for x in leaves:
                x.grad = None
            torch.autograd.backward(self.module(*self.inputs), self.gradients)

        return call

    def totals(self) -> list[Any]:
        """The weights' gradients."""
        return [getattr(p, self.total) for p in self.module.parameters()]


def build(case: Case, sizes: Sizes, device: str, seed: int) -> tuple[dict[str, Layers], dict[str, str]]:
    """The candidates of a case, and those that could not be made, with the reason. All have the same weights."""
    import torch

    torch.manual_seed(seed)
    dtype, shape = getattr(torch, sizes.dtype), sizes.train
    with torch.device(device):
        base = (_mlp if case.phase == "mlp" else _attention)(shape).to(dtype)
    ends: tuple[Sequence[int], Sequence[int]] = ((shape["hidden"],), (shape["hidden"],))
    if case.phase == "attention":
        ends = (shape["hidden"], shape["query"]), (shape["query"], shape["key"], shape["key"], shape["hidden"])
    inputs, gradients = (tuple(_normal(case.tokens, w, dtype, device) for w in widths) for widths in ends)
    found, absent = {}, {}
    for name, make in WAYS.items():
        module = copy.deepcopy(base)
        try:
            total = make(module, sizes)
        except Exception as error:
            absent[name] = words_of(error)
            continue
        found[name] = Layers(module, tuple(x.detach().requires_grad_() for x in inputs), gradients, total)
    return found, absent


def steps(layers: dict[str, Layers]) -> dict[str, Step]:
    """The calls of candidates."""
    return {name: Step(one.step()) for name, one in layers.items()}


def micro_batches(layers: Layers, parts: int) -> dict[str, int]:
    """Elements of the weights' gradients that differ between the whole batch and so many micro-batches."""
    whole, cut = _summed(layers, 1), _summed(layers, parts)
    found = sum(differing(x, y) for x, y in zip(whole, cut, strict=True))
    return {"differing": found, "checked": sum(x.numel() for x in whole)}


def _summed(layers: Layers, parts: int) -> list[Any]:
    import torch

    for p in layers.module.parameters():
        p.grad = None
        if layers.total != "grad":
            getattr(p, layers.total).zero_()
    batches = zip(*(x.detach().chunk(parts) for x in layers.inputs), strict=True)
    gradients = zip(*(g.chunk(parts) for g in layers.gradients), strict=True)
    for inputs, dy in zip(batches, gradients, strict=True):
        torch.autograd.backward(layers.module(*inputs), dy)
    return [x.clone() for x in layers.totals()]


def _normal(tokens: int, width: int, dtype: Any, device: str) -> Any:
    import torch

    return torch.randn(tokens, width, device=device).to(dtype)


def _mlp(shape: dict[str, int]) -> Any:
    import torch

    class Mlp(torch.nn.Module):
        """down(silu(gate(x)) * up(x))."""

        def __init__(self) -> None:
            super().__init__()
            hidden, width = shape["hidden"], shape["intermediate"]
            self.gate, self.up = (torch.nn.Linear(hidden, width, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(width, hidden, bias=False)

        def forward(self, x: Any) -> tuple[Any]:
            return (self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x)),)

    return Mlp()


def _attention(shape: dict[str, int]) -> Any:
    import torch

    class Projections(torch.nn.Module):
        """The four projections around attention, which is not there: the last one has an input of its own."""

        def __init__(self) -> None:
            super().__init__()
            hidden, query, key = shape["hidden"], shape["query"], shape["key"]
            self.q = torch.nn.Linear(hidden, query, bias=False)
            self.k, self.v = (torch.nn.Linear(hidden, key, bias=False) for _ in range(2))
            self.o = torch.nn.Linear(query, hidden, bias=False)

        def forward(self, x: Any, heads: Any) -> tuple[Any, Any, Any, Any]:
            return self.q(x), self.k(x), self.v(x), self.o(heads)

    return Projections()


def _plain(module: Any, sizes: Sizes) -> str:
    return "grad"


def _grad(module: Any, sizes: Sizes) -> str:
    import isogemm.torch

    isogemm.torch.convert(module, grad_order=sizes.leaf)
    return "grad"


def _main_grad(module: Any, sizes: Sizes) -> str:
    import isogemm.torch

    _grad(module, sizes)
    isogemm.torch.use_main_grad(module)
    return "main_grad"


def _float32_sums(module: Any, sizes: Sizes) -> str:
    """torch's own way to sum gradients in float32, as training frameworks do it: a product that adds to a buffer."""
    import torch

    class Summed(torch.autograd.Function):
        """x @ w.T, whose weight's gradient is added to ``w.main_grad``."""

        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return torch.nn.functional.linear(x, w)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> tuple[Any, None]:
            x, w = ctx.saved_tensors
            if dy.is_cuda:
                torch.addmm(w.main_grad, dy.t(), x, out_dtype=torch.float32, out=w.main_grad)
            else:  # torch has no such product on a CPU
                w.main_grad.addmm_(dy.t().float(), x.float())
            return dy @ w if ctx.needs_input_grad[0] else None, None

    for layer in module.children():
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        layer.forward = lambda x, w=layer.weight: Summed.apply(x, w)
    return "main_grad"


WAYS: dict[str, Callable[[Any, Sizes], str]] = {
    TORCH: _plain,
    GRAD: _grad,
    MAIN_GRAD: _main_grad,
    FLOAT32_SUMS: _float32_sums,
}

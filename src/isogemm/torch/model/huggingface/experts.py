"""Mixtures of experts of transformers: which modules they are, and what `convert` makes of them.

transformers' own experts are a choice of its configuration; by default they are one grouped product each for the two
projections, which its interface computes from a few attributes of the module. `Experts` computes the same from the same
attributes. The routers, and what a block computes besides, keep their own code (`own_code`).
"""

from __future__ import annotations

from typing import Any

import torch

from ....contract.spec import Contract
from ...arguments import contract_text
from ...gemm.products import resolved, with_order
from ...operator import Tensor
from ..layers import Converted
from ..names import below
from ..own_code import OwnBlock, OwnCode, own, unsafe
from ..recognition import PLAIN, Match, agrees, mixed, random, stand_in, touched
from .mixture import Sorting, combined, in_order, multiplied, sent, sorting

_FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config"}


class Experts(Converted):
    """The experts of a mixture: mixed into transformers' class.

    A token's sum is a chain in the order of the experts. The gradients of the weights are chains over an expert's
    rows, in the order of the tokens; those in buffers begin with a new block of the contract's at every leaf of tokens.
    """

    contract: Contract | None = None
    grad_order = "leaf4096"
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum over a token's experts of their results by their weights."""
        top_k_index, top_k_weights = in_order(top_k_index, top_k_weights)
        by = sorting(top_k_index, self.num_experts, *self._blocks())
        x = self._times("gate_up_proj" if self.has_gate else "up_proj", sent(hidden_states, by), by)
        known: Any = self
        with own(self.contract):
            x = known._apply_gate(x) if self.has_gate else known.act_fn(x)
        return combined(self._times("down_proj", x, by), top_k_weights, by).to(hidden_states.dtype)

    def _blocks(self) -> tuple[int, int]:
        """Rows that the contract adds at once, and tokens of a leaf where that matters, else 0."""
        parameters = vars(self)["_parameters"]
        if not torch.is_grad_enabled() or all(self._buffer(key, p) is None for key, p in parameters.items()):
            return 1, 0
        weight = parameters["down_proj"]
        found: tuple[int, int] = _blocks(contract_text(self.contract), self.grad_order, weight.device, weight.dtype)
        return found

    def _times(self, name: str, x: Tensor, by: Sorting) -> Tensor:
        parameters = vars(self)["_parameters"]
        weight, bias = parameters[name], parameters[f"{name}_bias"] if self.has_bias else None
        buffers = (None, None)
        if torch.is_grad_enabled():
            buffers = self._taking(name, weight), self._taking(f"{name}_bias", bias)
        contract = contract_text(self.contract)
        return multiplied(
            x.to(weight.dtype), weight, bias, by, contract=contract, transposed=self.is_transposed, buffers=buffers
        )


def _blocks(contract: str, order: str, device: Any, dtype: Any) -> tuple[int, int]:
    like = torch.empty(0, device=device, dtype=dtype)
    found = with_order(resolved(contract, like, like), order)
    return found.block, found.order.size if found.order.kind == "leaf" and found.block > 1 else 0


_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `isogemm.torch.quant.ops`


def mixtures(module: Any) -> dict[str, Match]:
    """What the experts, routers and blocks of the mixtures in `module` are, by their names."""
    found: dict[str, Match] = {}
    for name, block in module.named_modules():
        experts = {key for key, child in block._modules.items() if child is not None and _is_mixture(child)}
        for key in experts:
            child: Any = block._modules[key]
            why = touched(child) or _differs(child)
            found[below(name, key)] = Match.unless(why, "experts", Experts, type(child))
        if experts:
            routers = {key for key, child in block._modules.items() if _is_router(child)}
            found |= {below(name, key): _router(block._modules[key]) for key in routers}
            own_code = _block(block, routers)
            if own_code is not None:
                found[name] = own_code
    return found


def _is_mixture(child: Any) -> bool:
    """Whether transformers chooses by its configuration how this module's experts are computed."""
    named = type(child).__module__.startswith("transformers.") and not isinstance(child, Converted)
    return named and vars(child).keys() >= _FLAGS and hasattr(type(child).forward, "__wrapped__")


def _is_router(child: Any) -> bool:
    """Whether a module beside experts has weights of its own and is none that other parts are about."""
    if child is None or child._modules or isinstance(child, Converted) or type(child) is torch.nn.Linear:
        return False
    weight = child._parameters.get("weight")
    return type(child).__module__.startswith("transformers.") and weight is not None and weight.dim() == 2


def _differs(child: Any) -> str:
    """What experts have that `Experts` has not; empty where there is nothing."""
    name, first = type(child).__name__, "gate_up_proj" if child.has_gate else "up_proj"
    wanted = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if child.has_bias else set())
    if set(child._parameters) != wanted:
        return f"{name} has other parameters"
    count, k, n, twice = child.num_experts, 8, 6, 2 if child.has_gate else 1
    shapes: dict[str, tuple[int, ...]] = {first: (count, twice * n, k), "down_proj": (count, k, n)}
    if child.is_transposed:
        shapes = {key: (count, s[2], s[1]) for key, s in shapes.items()}
    if child.has_bias:
        shapes |= {f"{first}_bias": (count, twice * n), "down_proj_bias": (count, k)}
    values = {key: _weight(i, shape) for i, (key, shape) in enumerate(shapes.items())}
    theirs, ours = stand_in(child, **values), stand_in(child, **values)
    ours.__class__ = mixed(Experts, type(child))
    index = torch.tensor([[0, count - 1], [count - 1, count // 2], [count // 2, 0]], device="cpu")
    x, weights = random(3, k) * torch.tensor([[1.0], [10.0], [0.1]], **PLAIN), random(3, 2).abs()
    eager = type(child).forward.__wrapped__
    if not agrees(lambda *given: eager(theirs, *given), ours.forward, x, index, weights):
        return f"{name} computes something else than transformers' grouped experts"
    why = unsafe(ours.forward, x, index, weights)
    return f"{name} {why}" if why else ""


def _router(child: Any) -> Match:
    why = touched(child)
    if not why:
        probe = _probe(child)
        found = unsafe(probe.forward, random(5, child.weight.shape[1]))
        why = found and f"{type(child).__name__} {found}"
    return Match.unless(why, "experts", OwnCode, type(child))


def _weight(seed: int, shape: Any) -> Any:
    return torch.nn.Parameter(random(*shape, seed=seed), requires_grad=False)


def _probe(child: Any) -> Any:
    """A stand-in of the class that a router gets, with numbers of our own in its weights."""
    probe = stand_in(child)
    for i, (key, p) in enumerate(child._parameters.items()):
        probe.register_parameter(key, None if p is None else _weight(i, p.shape))
    for key, x in child._buffers.items():
        probe.register_buffer(key, None if x is None else torch.zeros(x.shape, dtype=x.dtype, device="cpu"))
    probe.__class__ = mixed(OwnCode, type(child))
    return probe


def _block(block: Any, routers: set[str]) -> Match | None:
    """What a block computes between its modules; None where nothing of it depends on an element's place."""
    if not type(block).__module__.startswith("transformers.") or isinstance(block, Converted):
        return None
    width = next((block._modules[key].weight.shape[1] for key in routers), 8)
    parts = {
        key: _Column() if isinstance(child, torch.nn.Linear) and child.out_features == 1 else First()
        for key, child in block._modules.items() if child is not None and key not in routers
    }  # fmt: skip
    probe = stand_in(block, **parts, **{key: _probe(block._modules[key]) for key in routers})
    x = random(1, 5, width)
    why = unsafe(probe.forward, x)
    if not why:
        return None
    probe.__class__ = mixed(OwnBlock, type(block))
    why = touched(block) or unsafe(probe.forward, x)
    return Match("experts", why=f"{type(block).__name__} {why}") if why else Match("experts", type(probe))


class First(torch.nn.Module):  # type: ignore[misc]
    """Stands in the place of a module that is looked at by itself, and gives what it was given first."""

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        return x


class _Column(torch.nn.Module):  # type: ignore[misc]
    """Stands in the place of a Linear with one result."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1]

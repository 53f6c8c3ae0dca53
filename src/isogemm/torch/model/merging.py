"""Blocks whose linears of one input are one product where no gradient is recorded."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ...errors import OptionError
from .. import operator, reductions
from ..arguments import contract_text
from ..gemm.merged import are_rows_of, merged_op
from ..operator import Tensor
from ..routing.scope import invariant
from .layers import Converted, Linear, has_hooks, inferred, is_awaited
from .own_code import own


class Merging(Converted):
    """A module with several Linear modules of one input, which may be one product where no gradient is recorded.

    The columns of a product do not see each other, so the bits are those of the products apart. `merge` puts the
    weights into one tensor; the parameters become views of it and stay what they are.
    """

    merges: ClassVar[tuple[str, ...]] = ()

    def merge(self) -> bool:
        """Merge, or merge again after the parameters got new memory. False where the layers do not fit.

        Weights without memory wait: they are merged when they get some, by ``module.to_empty`` or `load_shards`.
        """
        layers = self._layers()
        if not all(isinstance(layer, Linear) and layer.is_plain() for layer in layers):
            return False  # quantized ones, too
        if len({layer.contract for layer in layers}) > 1:
            return False
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
            return False
        if weights[0].is_meta:
            self.register_buffer("merged_weight", None, persistent=False)  # type: ignore[attr-defined]
            return False
        if len({b is None for b in biases}) > 1:
            return False
        for name, parts in (("weight", weights), ("bias", [b for b in biases if b is not None])):
            whole = torch.cat([p.detach() for p in parts]) if parts else None
            if whole is not None:
                for p, place in zip(parts, whole.split([len(p) for p in parts]), strict=True):
                    p.data = place
            self.register_buffer(f"merged_{name}", whole, persistent=False)  # type: ignore[attr-defined]
        return True

    def _layers(self) -> list[Any]:
        if torch.compiler.is_compiling():  # which sees by this, and not below, that a layer was replaced
            return [getattr(self, name) for name in self.merges]
        modules = vars(self)["_modules"]
        return [modules[name] for name in self.merges]

    def is_merged(self) -> bool:
        """Whether the layers are one product: nothing else than products, of one contract, with the merged tensors."""
        layers, buffers = self._layers(), vars(self)["_buffers"]
        return _are_alike(layers) and all(
            are_rows_of(buffers[f"merged_{name}"], [layer._parameters.get(name) for layer in layers])
            for name in ("weight", "bias")
        )

    def _products(self, x: Tensor) -> Any:
        """What each of the layers makes of x."""
        layers, buffers = self._layers(), vars(self)["_buffers"]
        whole, y = buffers.get("merged_weight"), None
        if not (whole is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)):
            if torch.compiler.is_compiling():
                y = _merged_later(x, layers, whole, buffers["merged_bias"])
            elif operator.is_plain(x) and self.is_merged():
                y = inferred(x, whole, buffers["merged_bias"], layers[0].contract)
        if y is None:
            return [layer(x) for layer in layers]
        return y.split([layer.out_features for layer in layers], -1)

    def __setstate__(self, state: Any) -> None:
        """Merge again what was copied or loaded."""
        super().__setstate__(state)  # type: ignore[misc]
        if vars(self)["_buffers"].get("merged_weight") is not None:
            self.merge()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Merge again what was moved or cast."""
        buffers = vars(self)["_buffers"]
        was = "merged_weight" in buffers
        buffers.pop("merged_weight", None)
        buffers.pop("merged_bias", None)
        found = super()._apply(fn, recurse)  # type: ignore[misc]
        if was:
            self.merge()
        return found


def _are_alike(layers: list[Any]) -> bool:
    """Whether layers are products and nothing else, of one contract."""
    contract = getattr(layers[0], "contract", None)
    for layer in layers:
        if not (isinstance(layer, Linear) and layer.is_plain() and layer.contract == contract):
            return False
        if is_awaited(layer):
            return False
    return True


def _merged_later(x: Tensor, layers: list[Any], whole: Tensor, bias: Tensor | None) -> Tensor | None:
    """The operator that looks, when it runs, where the parameters lie, which no compiler traces; None: not these."""
    if not _are_alike(layers):
        return None
    weights, biases = ([layer._parameters.get(name) for layer in layers] for name in ("weight", "bias"))
    for layer, w, b in zip(layers, weights, biases, strict=True):
        if w is None or len(w) != layer.out_features or (b is None) is not (bias is None):
            return None
    return merged_op(x, whole, bias, weights, [] if bias is None else biases, contract_text(layers[0].contract))


class GatedMLP(Merging):
    """A gated block of another library: ``down_proj(silu(gate_proj(x)) * up_proj(x))``.

    `act_name` is where its activation stands, a module that nobody calls but for its hooks.
    """

    merges = ("gate_proj", "up_proj")
    act_name: ClassVar[str] = "act_fn"
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Any) -> Any:
        """The gate is rounded once, behind its product with up_proj(x).

        Raises
        ------
        OptionError
            Hooks of the activation that change its result, or wait for its gradient.
        """
        gate, up = self._products(x)
        act = vars(self)["_modules"].get(self.act_name)
        if act is not None and ("forward" in vars(act) or has_hooks(act)) and not torch.compiler.is_compiling():
            self._show(act, gate.detach())
        return self.down_proj(reductions.silu_mul(gate, up))

    def _show(self, act: Any, gate: Tensor) -> None:
        """Call the activation, whose work the block does, for the hooks that wait for that: they may look at it.

        With our own silu, by which the block multiplies: torch's differs in last bits. What else a method calls is
        inside of a scope, as torch's elements are rounded by where they stand in a row.
        """
        with torch.no_grad(), invariant(), own():
            shown, plain = act(gate.clone()), type(act).forward(act, gate)
            kept = isinstance(shown, torch.Tensor) and torch.equal(shown.nan_to_num(), plain.nan_to_num())
        if not kept or act._backward_hooks or act._backward_pre_hooks:
            raise OptionError(
                f"{self.act_name} of a converted {type(self).__name__}", limit="hooks that look at its result",
                value="hooks that change it or wait for its gradient, or another forward method, since convert",
                nearest="the same before convert(model), which then leaves the block's code; or hooks of gate_proj",
            )  # fmt: skip


class GatedAct(Merging):
    """A gated block with an activation of its own: ``down_proj(act(gate_proj(x)) * up_proj(x))``.

    `act_name` is where the activation stands, a module that is converted, or left, by itself.
    """

    merges = ("gate_proj", "up_proj")
    act_name: ClassVar[str] = "act_fn"
    down_proj: Any

    def forward(self, x: Any) -> Any:
        """As the block's own code; the two products may be one."""
        gate, up = self._products(x)
        return self.down_proj(getattr(self, self.act_name)(gate) * up)

"""Layers with torch's parameters, initial values and state_dict, computed by isogemm.

Each is a subclass of the torch module that it stands for, so `convert` can change the class of a module and leave the
object as it is. Gradients of parameters go to ``.grad``, or to float32 buffers (`isogemm.torch.use_main_grad`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..contract.spec import Contract, ContractLike, as_contract
from . import functional, ops, reductions
from .ops import Tensor, with_order

__all__ = ["Converted", "Embedding", "GatedMLP", "LayerNorm", "Linear", "RMSNorm", "RowNorm", "SiLU", "checked"]


class Converted:
    """What every layer of isogemm's is: its part of a model, and where the gradients of its parameters go.

    A buffer is in the parameter's attribute ``main_grad``. Where a parameter serves several layers, each use needs a
    sum of its own: then it is in `main_grads` of the layer.
    """

    part: ClassVar[str] = ""
    main_grads: dict[str, Tensor] | None = None

    def _buffer(self, name: str, parameter: Tensor | None) -> Tensor | None:
        own = self.main_grads
        if own is not None and name in own:
            return own[name]
        return getattr(parameter, "main_grad", None)

    def _operand(self, name: str) -> Tensor | None:
        """A parameter as functions of rows take it, which look for its buffer in the tensor itself."""
        parameter = getattr(self, name)
        own = self.main_grads
        if own is None or name not in own or not torch.is_grad_enabled():
            return parameter
        alias = parameter.detach().requires_grad_()  # the same memory, with another buffer
        alias.main_grad = own[name]
        return alias


def checked(contract: ContractLike | None, grad_order: str) -> tuple[Contract | None, str]:
    """The contract as a value, after the gradient's order was found to fit it.

    Raises
    ------
    ContractError
        No such contract or order.
    """
    chosen = None if contract is None else as_contract(contract)
    with_order(chosen or Contract(), grad_order)
    return chosen, grad_order


class Linear(Converted, torch.nn.Linear):  # type: ignore[misc]
    """`torch.nn.Linear` computed by `isogemm.torch.linear`: the same parameters, initial values and state_dict.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in torch.nn.Linear.
    contract : Contract or str, optional
        Of the forward product; by default that of the device and dtype.
    grad_order : str
        Order of the rows' sum in the gradients of weight and bias.

    Raises
    ------
    ContractError
        No such contract or order.

    Determinism
    -----------
    As `isogemm.torch.linear`. A float32 buffer in the attribute ``main_grad`` of weight or bias (`use_main_grad`) takes
    that parameter's gradient.
    """

    part = "linear"
    contract: Contract | None = None
    grad_order = "leaf4096"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        contract: ContractLike | None = None,
        grad_order: str = "leaf4096",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.contract, self.grad_order = checked(contract, grad_order)

    def forward(self, input: Any) -> Any:
        """input @ weight.T + bias."""
        weight, bias, contract = self.weight, self.bias, self.contract
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type):
            return functional.linear(
                input,
                weight,
                bias,
                contract=contract,
                grad_order=self.grad_order,
                main_grad=self._buffer("weight", weight),
                bias_main_grad=self._buffer("bias", bias),
            )
        if not ops.is_plain(input, weight, bias):
            return functional.linear(input, weight, bias, contract=contract, grad_order=self.grad_order)
        # Inference: nothing to record, nothing that watches. The shortest way to the kernel.
        return ops.linear(input, weight, bias, "" if contract is None else str(contract), None)

    def extra_repr(self) -> str:
        """torch's, and the contract."""
        return f"{super().extra_repr()}, contract={self.contract or 'default'}, grad_order={self.grad_order}"


class RMSNorm(Converted, torch.nn.RMSNorm):  # type: ignore[misc]
    """`torch.nn.RMSNorm` over the last dimension, computed by `reductions.rms_norm`.

    An eps of None is float32's epsilon, as in torch.
    """

    part = "norm"

    def forward(self, x: Any) -> Any:
        """``x / sqrt(mean(x**2) + eps) * weight``."""
        eps = self.eps if self.eps is not None else torch.finfo(torch.float32).eps
        return reductions.rms_norm(x, self._operand("weight"), eps)


class LayerNorm(Converted, torch.nn.LayerNorm):  # type: ignore[misc]
    """`torch.nn.LayerNorm` over the last dimension, computed by `reductions.layer_norm`."""

    part = "norm"

    def forward(self, input: Any) -> Any:
        """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``."""
        return reductions.layer_norm(input, self._operand("weight"), self._operand("bias"), self.eps)


class Embedding(Converted, torch.nn.Embedding):  # type: ignore[misc]
    """`torch.nn.Embedding`, whose gradient adds rows in ascending order.

    Without max_norm, scale_grad_by_freq and sparse. The row of padding_idx has a gradient of zero, as in torch.
    """

    part = "embedding"

    def forward(self, input: Any) -> Any:
        """Rows of the table, copied."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return torch.nn.functional.embedding(input, self.weight)  # a copy has no order
        rows = reductions.embedding(input, self._operand("weight"))
        if self.padding_idx is None:
            return rows
        return torch.where((input == self.padding_idx).unsqueeze(-1), rows.detach(), rows)


class SiLU(Converted, torch.nn.SiLU):  # type: ignore[misc]
    """`torch.nn.SiLU` with the pinned exp of `reductions.silu_mul`."""

    part = "mlp"

    def forward(self, input: Any) -> Any:
        """``x / (1 + exp(-x))``."""
        return silu(input)


def silu(x: Tensor) -> Tensor:
    """``(x / (1 + exp(-x))) * 1``: the gate of nothing."""
    return reductions.silu_mul(x, x.new_ones(()).expand(x.shape))


class RowNorm(Converted):
    """An RMSNorm of another library: `convert` mixes this into its class. `eps_name` is where its eps stands."""

    part = "norm"
    eps_name: ClassVar[str] = "eps"

    def forward(self, hidden_states: Any) -> Any:
        """``x / sqrt(mean(x**2) + eps) * weight``, rounded once, in the dtype that torch promotes to."""
        weight = self._operand("weight")
        assert weight is not None
        both = None if weight.dtype == hidden_states.dtype else torch.promote_types(weight.dtype, hidden_states.dtype)
        return reductions.rms_norm(hidden_states, weight, getattr(self, self.eps_name), out_dtype=both)


class GatedMLP(Converted):
    """A gated block of another library: ``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    part = "mlp"
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Any) -> Any:
        """The gate is rounded once, behind its product with up_proj(x)."""
        return self.down_proj(reductions.silu_mul(self.gate_proj(x), self.up_proj(x)))

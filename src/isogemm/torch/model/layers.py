"""Layers with torch's parameters, initial values and state_dict, computed by isogemm.

Each is a subclass of the torch module that it stands for, so `convert` can change the class of a module and leave the
object as it is. Gradients of parameters go to ``.grad``, or to float32 buffers (`isogemm.torch.use_main_grad`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.modules import module as everywhere

from ...base import arguments
from ...contract.spec import Contract, ContractLike, as_contract
from ...errors import OptionError
from .. import functional, operator, reductions
from ..arguments import contract_text, is_uncast
from ..gemm import products
from ..gradient_buffers import check_no_hooks
from ..operator import Tensor


class Converted:
    """What every layer of isogemm's is, and where the gradients of its parameters go.

    A buffer is in the parameter's attribute ``main_grad``. Where a parameter serves several layers, each use needs a
    sum of its own: then it is in `main_grads` of the layer.
    """

    main_grads: dict[str, Tensor] | None = None

    def _buffer(self, name: str, parameter: Tensor | None) -> Tensor | None:
        """The buffer of this use of a parameter, if it has any.

        Those of the layer are for the parameter that they were made with: one that a copy of the model brings, a
        checkpoint (``assign=True``) or `torch.func.functional_call`, has none, and all of its gradient goes on.
        """
        first, own = getattr(parameter, "main_grad", None), self.main_grads
        return first if first is None or own is None or name not in own else own[name]

    def _taking(self, name: str, parameter: Tensor | None) -> Tensor | None:
        """The same for a call, which hands no gradient to the parameter's hooks then."""
        buffer = self._buffer(name, parameter)
        if buffer is not None:
            check_no_hooks("main_grad", parameter)
        return buffer

    def buffer_shape(self, name: str) -> tuple[int, ...]:
        """Of a buffer for the gradient of a parameter."""
        return tuple(self._parameters[name].shape)  # type: ignore[attr-defined]

    def zeros(self, name: str) -> Tensor:
        """Such a buffer, in the memory order that its product writes."""
        device = self._parameters[name].device  # type: ignore[attr-defined]
        return torch.zeros(self.buffer_shape(name), dtype=torch.float32, device=device)

    def summed(self, name: str, buffer: Tensor) -> Tensor:
        """The gradient that a buffer of this use holds."""
        return buffer

    def _operand(self, name: str) -> Tensor | None:
        """A parameter as functions of rows take it, which look for its buffer in the tensor itself."""
        parameter: Any = getattr(self, name, None)
        own = self.main_grads
        if own is None or name not in own or not torch.is_grad_enabled():
            return parameter
        buffer = self._taking(name, parameter)
        if buffer is None:
            return parameter
        alias = parameter.view_as(parameter)  # the same memory, with another buffer
        alias.main_grad = buffer
        return alias


def has_hooks(module: Any) -> bool:
    """Whether hooks of its own wait for a module's call."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_awaited(module: Any) -> bool:
    """Whether a module has to be called, and nothing else may do its work: for hooks, or a forward method of its own.

    Hooks of all modules count, too.
    """
    if "forward" in vars(module) or has_hooks(module):
        return True
    before, after = everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks
    return bool(before or after or everywhere._global_backward_pre_hooks or everywhere._global_backward_hooks)


def checked(contract: ContractLike | None, grad_order: str) -> tuple[Contract | None, str]:
    """The contract as a value, after the gradient's order was found to fit it; else a ContractError."""
    chosen = None if contract is None else as_contract(contract)
    arguments.of_type("grad_order", grad_order, str, "chain, leafL or treeN", "leaf4096")
    products.with_order(chosen or Contract(), grad_order)
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
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_uncast(input):
            return functional.linear(
                input,
                weight,
                bias,
                contract=contract,
                grad_order=self.grad_order,
                main_grad=self._taking("weight", weight),
                bias_main_grad=self._taking("bias", bias),
            )
        return inferred(input, weight, bias, contract)

    def is_plain(self) -> bool:
        """Whether the layer is its product and nothing else: no method around it, and no kind of its own."""
        return type(self).forward is Linear.forward

    def extra_repr(self) -> str:
        """torch's, and the contract."""
        return f"{super().extra_repr()}, contract={self.contract or 'default'}, grad_order={self.grad_order}"


class Transposed(Converted):
    """A Linear whose weight is [k, n], as in GPT-2: mixed into its class. x @ weight + bias, with Linear's bits."""

    contract: Contract | None = None
    grad_order = "leaf4096"
    weight: Any
    bias: Any

    def zeros(self, name: str) -> Tensor:
        """The gradient is that of weight.T, whose rows lie together."""
        if name != "weight":
            return super().zeros(name)
        return torch.zeros(self.weight.mT.shape, dtype=torch.float32, device=self.weight.device).mT

    def forward(self, x: Any) -> Any:
        """x @ weight + bias."""
        buffer = self._taking("weight", self.weight)
        return functional.linear(
            x,
            self.weight.mT,
            self.bias,
            contract=self.contract,
            grad_order=self.grad_order,
            main_grad=None if buffer is None else buffer.mT,
            bias_main_grad=self._taking("bias", self.bias),
        )


def inferred(x: Tensor, weight: Tensor, bias: Tensor | None, contract: Contract | None) -> Tensor:
    """x @ weight.T + bias where nothing is recorded: the shortest way to the kernel, unless something watches."""
    if torch.compiler.is_compiling() or not operator.is_plain(x, weight, bias):
        return functional.linear(x, weight, bias, contract=contract)
    return products.linear(x, weight, bias, contract_text(contract), None)


class AnyNorm(Converted):
    """A norm over the last dimension. `grad_order` is that of the rows' sums in the gradients of its parameters."""

    grad_order = "leaf4096"

    def extra_repr(self) -> str:
        """torch's, or that of the module's own class, and the order."""
        own: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (own, f"grad_order={self.grad_order}")))


class RMSNorm(AnyNorm, torch.nn.RMSNorm):  # type: ignore[misc]
    """`torch.nn.RMSNorm` over the last dimension, computed by `reductions.rms_norm`.

    An eps of None is float32's epsilon, as in torch.
    """

    def forward(self, x: Any) -> Any:
        """``x / sqrt(mean(x**2) + eps) * weight``."""
        eps = self.eps if self.eps is not None else torch.finfo(torch.float32).eps
        return reductions.rms_norm(x, self._operand("weight"), eps, grad_order=self.grad_order)


class LayerNorm(AnyNorm, torch.nn.LayerNorm):  # type: ignore[misc]
    """`torch.nn.LayerNorm` over the last dimension, computed by `reductions.layer_norm`."""

    def forward(self, input: Any) -> Any:
        """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``."""
        weight, bias = self._operand("weight"), self._operand("bias")
        return reductions.layer_norm(input, weight, bias, self.eps, grad_order=self.grad_order)


class Embedding(Converted, torch.nn.Embedding):  # type: ignore[misc]
    """`torch.nn.Embedding`, whose gradient adds rows in ascending order.

    Without max_norm, scale_grad_by_freq and sparse. The row of padding_idx has a gradient of zero, as in torch.
    """

    def forward(self, input: Any) -> Any:
        """Rows of the table, copied.

        Raises
        ------
        OptionError
            Since `convert` the module was given ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
        """
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            limit, nearest = "rows copied, with a dense gradient", "isogemm.torch.restore(module)"
            value = "max_norm, scale_grad_by_freq or sparse, set since convert"
            raise OptionError("a converted Embedding", limit=limit, value=value, nearest=nearest)
        return self._unpadded(self._rows(input), input)

    def _records(self) -> bool:
        return torch.is_grad_enabled() and bool(self.weight.requires_grad)

    def _rows(self, ids: Tensor) -> Tensor:
        """Rows of this module's weight."""
        if not self._records():
            return torch.nn.functional.embedding(ids, self.weight)  # a copy has no order
        return reductions.embedding(ids, self._operand("weight"))

    def _unpadded(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows of which that of padding has no gradient."""
        if self.padding_idx is None or not self._records():
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)


class AnySiLU(Converted):
    """SiLU, computed by `reductions.silu`: mixed into a class of another library."""

    def forward(self, input: Any) -> Any:
        """``x / (1 + exp(-x))``."""
        return reductions.silu(input)


class SiLU(AnySiLU, torch.nn.SiLU):  # type: ignore[misc]
    """`torch.nn.SiLU` computed by `reductions.silu`."""


class RowNorm(AnyNorm):
    """An RMSNorm of another library, with a weight or without: `convert` mixes this into its class.

    `eps_name` is where its eps stands. With `offset` it multiplies by ``1 + weight``, in float32.
    """

    eps_name: ClassVar[str] = "eps"
    offset: ClassVar[bool] = False

    def _operand(self, name: str) -> Tensor | None:
        """A parameter; not a buffer of that name, which the module's own forward method was seen to pass over."""
        operand = None if name in vars(self)["_buffers"] else super()._operand(name)
        return None if operand is None else self._scale(operand)

    def _scale(self, weight: Tensor) -> Tensor:
        """What a row is multiplied by."""
        if not self.offset:
            return weight
        scale = 1 + weight.float()  # the gradient of the weight is that of the sum
        if (buffer := getattr(weight, "main_grad", None)) is not None:
            check_no_hooks("main_grad", weight)
            scale.main_grad = buffer
        return scale

    def is_whole(self) -> bool:
        """Whether the gradient of the weight, if there is one, is a single sum over all rows."""
        return True

    def forward(self, hidden_states: Any) -> Any:
        """``x / sqrt(mean(x**2) + eps) * weight``, rounded once, in the dtype that torch promotes to.

        With ``1 + weight`` the result has the dtype of x.
        """
        weight = self._operand("weight")
        both = hidden_states.dtype if self.offset else None
        if weight is not None and not self.offset and weight.dtype != hidden_states.dtype:
            both = torch.promote_types(weight.dtype, hidden_states.dtype)
        eps = getattr(self, self.eps_name)
        return reductions.rms_norm(hidden_states, weight, eps, out_dtype=both, grad_order=self.grad_order)

"""Linear layers: a module of our own, and a whole model's turned into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..contract.spec import Contract, ContractLike, as_contract
from ..errors import DTypeError, OptionError
from . import functional
from .ops import with_order

__all__ = ["Conversion", "Linear", "convert", "use_main_grad"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Modules of torch that read the weights of Linear modules inside them and never call those.
_READS_WEIGHTS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class Linear(torch.nn.Linear):  # type: ignore[misc]
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
        self.contract, self.grad_order = _checked(contract, grad_order)

    def forward(self, input: Any) -> Any:
        """input @ weight.T + bias."""
        weight, bias = self.weight, self.bias
        return functional.linear(
            input,
            weight,
            bias,
            contract=self.contract,
            grad_order=self.grad_order,
            main_grad=getattr(weight, "main_grad", None),
            bias_main_grad=getattr(bias, "main_grad", None),
        )

    def extra_repr(self) -> str:
        """torch's, and the contract."""
        return f"{super().extra_repr()}, contract={self.contract or 'default'}, grad_order={self.grad_order}"


def _checked(contract: ContractLike | None, grad_order: str) -> tuple[Contract | None, str]:
    chosen = None if contract is None else as_contract(contract)
    with_order(chosen or Contract(), grad_order)
    return chosen, grad_order


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` did.

    Attributes
    ----------
    module : torch.nn.Module
        The model itself.
    converted : tuple of str
        Names of the Linear modules that are isogemm's now.
    left : dict of str to str
        Names of other modules with weights of two or more dimensions, and why they are as they were. Their products, if
        they make any, are torch's.
    """

    module: Any
    converted: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"converted {len(self.converted)} Linear modules, left {len(self.left)} modules with weights"]
        return "\n".join([*lines, *(f"  {name or '(the model)'}: {why}" for name, why in self.left.items())])


def convert(
    module: Any,
    *,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    leave: Sequence[str] = (),
) -> Conversion:
    """Turn every `torch.nn.Linear` of a model into `isogemm.torch.Linear`, in place, or change nothing and say why.

    A module changes its class and stays the object it is: parameters (tied ones too), buffers, hooks, the optimizer's
    references, training mode and modules used in several places all stay.

    Parameters
    ----------
    module : torch.nn.Module
    contract, grad_order
        As in `Linear`, for all of them.
    leave : sequence of str
        Patterns (``"lm_head"``, ``"encoder.*"``) of module names to leave as they are, with all inside them.

    Returns
    -------
    Conversion

    Raises
    ------
    OptionError
        A Linear that cannot be converted faithfully and is not in `leave`: a subclass, one with a forward method of its
        own or compiled, or one inside a torch module that reads its weights without calling it (MultiheadAttention,
        TransformerEncoderLayer). The message lists them all.
    DTypeError
        Weights of an unsupported dtype.
    ContractError
        No such contract or order.

    Determinism
    -----------
    Converted modules are as `Linear`. What a model does besides (attention, norms, `torch.matmul`, weights used
    directly) is torch's: the report lists modules, and cannot see functions.
    """
    chosen, order = _checked(contract, grad_order)
    found, refused, left = [], {}, {}
    names: dict[int, str] = {}
    for name, child, outer in _walk(module):
        why = _obstacle(child, outer)
        if any(fnmatchcase(part, pattern) for part in _prefixes(name) for pattern in leave):
            if _has_weights(child):
                left[name] = "in leave"
        elif why is not None:
            refused[name] = why
        elif type(child) is Linear:
            left[name] = "isogemm's already, as it is"
        elif isinstance(child, torch.nn.Linear):
            names.setdefault(id(child), name)
            found.append(child)
        elif _has_weights(child):
            left[name] = f"{type(child).__name__} is not a Linear"
    if refused:
        raise OptionError(
            "modules that cannot be converted",
            limit="torch.nn.Linear itself, called as a module",
            value="; ".join(f"{name or '(the model)'}: {why}" for name, why in refused.items()),
            nearest=f"leave={list(refused)}",
        )
    for child in found:
        if child.weight.dtype not in _DTYPES:
            raise DTypeError(
                f"dtype of {names[id(child)]}.weight",
                limit="float32, bfloat16 or float16",
                value=child.weight.dtype,
                nearest="torch.float32",
            )
    for child in found:
        child.__class__ = Linear
        child.contract, child.grad_order = chosen, order
    return Conversion(module, tuple(names.values()), left)


def _walk(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, the outermost module around it that reads weights itself) of all, each once."""
    outer: dict[str, Any] = {}
    for name, child in module.named_modules():
        parents = [outer[part] for part in _prefixes(name)[1:] if part in outer]
        if isinstance(child, _READS_WEIGHTS):
            outer[name] = child
        yield name, child, parents[0] if parents else None


def _prefixes(name: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a`` and the root."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _has_weights(module: Any) -> bool:
    return any(p is not None and p.dim() >= 2 for p in module._parameters.values())


def _obstacle(child: Any, outer: Any) -> str | None:
    """Why a module cannot be converted faithfully; None where it can, or where there is nothing to convert."""
    if isinstance(child, torch.jit.ScriptModule):
        return "a scripted module, which cannot be looked into"
    if isinstance(child, _READS_WEIGHTS):
        return f"{type(child).__name__} reads weights without calling the modules inside it"
    if not isinstance(child, torch.nn.Linear) or type(child) is Linear:
        return None
    if outer is not None:
        return f"inside a {type(outer).__name__}, which reads its weights without calling it"
    if type(child) is not torch.nn.Linear:
        return f"a subclass of Linear, {type(child).__module__}.{type(child).__qualname__}"
    if "forward" in vars(child):
        return "its forward method was replaced"
    if getattr(child, "_compiled_call_impl", None) is not None:
        return "it was compiled before"
    return None


def use_main_grad(module: Any) -> list[str]:
    """Give the weight and bias of every `Linear` of a model a float32 buffer of zeros, ``main_grad``, for its gradient.

    The backward pass continues its sums from the buffers. An optimizer step is then, for each such parameter p,
    ``p.grad = p.main_grad.to(p.dtype)`` (or the buffer itself for a float32 master copy), the step, and
    ``p.main_grad.zero_()``. Called again, it sets the buffers to zero.

    Returns
    -------
    list of str
        Names of the parameters that have a buffer now; the others get ``.grad`` as always.

    Raises
    ------
    OptionError
        There is no `Linear` in the model.
    """
    layers = [(name, child) for name, child in module.named_modules() if isinstance(child, Linear)]
    if not layers:
        raise OptionError("main_grad", limit="isogemm.torch.Linear modules", value="none", nearest="convert(module)")
    found = []
    for prefix, layer in layers:
        for name, p in layer.named_parameters(prefix, recurse=False):
            if p.requires_grad:
                p.main_grad = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
                p.main_grad.requires_grad_(False)
                found.append(name)
    return found

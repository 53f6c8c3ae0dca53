"""Arguments as torch's operators take them: contracts and orders as text, torch's dtypes, what autocast casts."""

from __future__ import annotations

from typing import Any

import torch

from ..base import arguments
from ..contract.spec import ContractLike
from ..errors import DTypeError
from ..operands.tensors import stacked
from .device import DTYPES
from .operator import Tensor
from .rows.signature import dtype_of


def contract_text(contract: ContractLike | None) -> str:
    """The contract's name; empty for the device's default."""
    return contract if isinstance(contract, str) else "" if contract is None else str(contract)


def options(contract: ContractLike | None, grad_order: Any, out_dtype: Any) -> tuple[str, str, Any]:
    """What every product has: the contract's name, the order of gradients, torch's name of a result's dtype."""
    arguments.of_type("grad_order", grad_order, str, "chain, leafL or treeN", "leaf4096")
    return contract_text(contract), grad_order, None if out_dtype is None else dtype_of(None, out_dtype)


def autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands as autocast wants them for a product: float32 and half types in its dtype, others as they are."""
    kind = operands[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple([x.to(dtype) if x.dtype in DTYPES else x for x in operands])


def is_uncast(x: Any) -> bool:
    """Whether `x` is a tensor of a CPU or a CUDA device that autocast leaves as it is."""
    if not isinstance(x, torch.Tensor) or not (x.is_cpu or x.is_cuda):
        return False
    return not torch.is_autocast_enabled(x.device.type)


def check_tensor(name: str, x: Any, nearest: str = "torch.as_tensor") -> None:
    """Raise unless `x` is a tensor."""
    if not isinstance(x, torch.Tensor):
        tensors = isinstance(x, list | tuple) and x and isinstance(x[0], torch.Tensor)
        value, nearest = (f"{type(x).__name__} of tensors", stacked(name.split()[0])) if tensors else (
            type(x).__name__, nearest
        )  # fmt: skip
        raise DTypeError(name, limit="a tensor", value=value, nearest=nearest)

"""The short paths for torch tensors, which `isogemm.api` asks before it goes the long way."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .backends import cpu
from .backends.cuda import front
from .contract.spec import Contract
from .interop import to_tensor
from .problem import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["KINDS", "call", "learn"]

KINDS = front.KINDS
_CHAIN = Contract()
_SMALL = 2**26  # elements; results below are allocated without asking how much memory there is


def call(kind: str, a: Any, b: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """The product, or None where the long way has to look; `a` is a tensor of a type in `KINDS`."""
    if a.get_device() >= 0:
        return front.call(kind, a, b, bias, out, options)
    accumulate, contract, other, *more = options
    if (
        accumulate is False
        and contract is None
        and other is None
        and not more
        and type(b) in KINDS
        and bias is None
        and out is None
    ):
        return _host(kind, a, b)
    return None


def learn() -> None:
    """Somebody has passed a tensor: from now on the short paths are asked."""
    torch = sys.modules["torch"]
    front.learn(torch)
    _DTYPES.update({torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16})


_DTYPES: dict[Any, np.dtype[Any]] = {}


def _host(kind: str, a: Any, b: Any) -> Any:
    """Two CPU matrices and nothing else."""
    dtype = _DTYPES.get(a.dtype) if a.dtype is b.dtype else None
    if dtype is None or a.dim() != 2 or b.dim() != 2:
        return None
    torch = sys.modules["torch"]
    if a.requires_grad or b.requires_grad:
        if torch.is_grad_enabled():
            return None
        a, b = a.detach(), b.detach()
    try:
        if dtype is BFLOAT16:  # NumPy has no name for it: the same bits as uint16
            xa, xb = a.view(torch.uint16).numpy().view(dtype), b.view(torch.uint16).numpy().view(dtype)
        else:
            xa, xb = a.numpy(), b.numpy()
    except (RuntimeError, TypeError):  # a lazy negation, another device, no plain memory
        return None
    if kind == "linear":
        xb = xb.T
    (m, k), (rows, n) = xa.shape, xb.shape
    if k != rows or not 0 < m * n <= _SMALL or not (xa.flags.aligned and xb.flags.aligned):
        return None
    result = np.empty((m, n), dtype)
    cpu.gemm(xa, xb, result, contract=_CHAIN)
    return to_tensor(result)

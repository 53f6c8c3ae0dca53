"""What operations along rows ask of their operands, in the same words on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.dtypes import BFLOAT16, FLOAT16, FLOAT32, as_dtype, supported
from ...errors import DeviceError, DTypeError, LayoutError, OptionError, ShapeError
from ...operands.tensors import check_tensor

__all__ = [
    "check_eps",
    "check_row",
    "check_rows",
    "check_same",
    "check_table",
    "dtype_of",
    "integers",
    "tensor",
]


def tensor(name: str, x: Any) -> Tensor:
    """`x`, if it is a torch tensor."""
    if not isinstance(x, Tensor):
        raise DTypeError(name, limit="a torch tensor", value=type(x).__name__, nearest=f"torch.as_tensor({name})")
    return x


def check_on(name: str, x: Any, device: torch.device) -> Tensor:
    """A dense tensor of a supported dtype in the memory of `device`, a CUDA device."""
    x = tensor(name, x)
    if x.device != device:
        raise DeviceError(
            f"device of {name}", limit=f"that of x, {device}", value=x.device, nearest=f"{name}.to({device})"
        )
    check_tensor(name, x.detach())
    if x.is_neg():
        raise LayoutError(
            name, limit="a tensor with plain memory", value="a lazy negation", nearest=f"{name}.resolve_neg()"
        )
    return x


def check_rows(name: str, x: Any, device: torch.device | None = None) -> Tensor:
    """`check_on` of a tensor with a last dimension, on its own device or on `device`."""
    x = check_on(name, x, tensor(name, x).device if device is None else device)
    if x.dim() == 0:
        raise ShapeError(f"dimensions of {name}", limit="at least 1", value=0, nearest=f"{name}.reshape(1)")
    return x


def check_row(name: str, x: Any, of: Tensor) -> None:
    """Nothing, or one row that all rows of `of` share."""
    if x is None:
        return
    shape = tuple(of.shape[-1:])
    if tuple(check_on(name, x, of.device).shape) != shape:
        raise ShapeError(f"shape of {name}", limit="that of a row of x", value=tuple(x.shape), nearest=shape)


def check_same(name: str, x: Any, of: Tensor) -> None:
    """A tensor of the shape of `of`."""
    if check_on(name, x, of.device).shape != of.shape:
        raise ShapeError(f"shape of {name}", limit="that of x", value=tuple(x.shape), nearest=tuple(of.shape))


def check_table(name: str, x: Any, of: Tensor) -> None:
    """Angles for the pairs of a row, broadcast to the rows of `of`."""
    shape = (*of.shape[:-1], of.shape[-1] // 2)
    given = tuple(check_rows(name, x, of.device).shape)
    fits = len(given) <= len(shape) and given[-1] == shape[-1]
    if not fits or any(a not in (1, b) for a, b in zip(given[::-1], shape[::-1], strict=False)):
        raise ShapeError(f"shape of {name}", limit=f"one that broadcasts to {shape}", value=given, nearest=shape)


def check_eps(eps: Any) -> None:
    """A number of at least 0."""
    if not eps >= 0:
        raise OptionError("eps", limit="a number of at least 0", value=eps, nearest=1e-6)


def dtype_of(x: Tensor, out_dtype: Any) -> torch.dtype:
    """The dtype of a result: that of `x`, or what `out_dtype` names."""
    if isinstance(out_dtype, torch.dtype) and out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        return out_dtype
    wanted = as_dtype(out_dtype)
    if wanted is None:
        return x.dtype
    if wanted not in (FLOAT32, BFLOAT16, FLOAT16):
        raise DTypeError("out_dtype", limit=supported(wanted.name), value=wanted.name, nearest="float32")
    found: torch.dtype = getattr(torch, wanted.name)
    return found


def integers(name: str, x: Any, device: torch.device) -> Tensor:
    """A tensor of integers on `device`."""
    integral = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(x, Tensor) or x.dtype not in integral:
        value = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(name, limit="a tensor of integers", value=value, nearest="torch.int64")
    if x.device != device:
        limit = "this host's memory" if device.type == "cpu" else f"that of weight, {device}"
        raise DeviceError(f"device of {name}", limit=limit, value=x.device, nearest=f"{name}.to('{device}')")
    return x

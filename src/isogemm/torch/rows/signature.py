"""What operations along rows ask of their operands, in the same words on every device.

`isogemm.contract.rows.OPERATIONS` says which operands an operation has and where they lie; a `Signature` is what calls
need of that. A way of looking at an operand, the host's or a device's, gives something with a shape and a dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base import arguments
from ...base.dtypes import DTYPES, DType, as_dtype, supported
from ...contract.rows import OPERATIONS, RowOperand
from ...errors import DeviceError, DTypeError, LayoutError, OptionError, ShapeError
from ...operands.tensors import check_tensor
from ...operands.views import array
from ...problem.settings import check_operand

MOST_OPERANDS = 3  # that the host's kernels take
# The option besides ``out_dtype`` as schemas have it.
OPTION_TYPES = {"": "", "eps": ", float eps", "keepdim": ", bool keepdim", "interleaved": ", bool interleaved"}


class Signature(NamedTuple):
    """Operands; the one option besides ``out_dtype``, or ""; whether a row becomes one number; whose dtype that has."""

    operands: tuple[RowOperand, ...]
    option: str
    reduces: bool
    like: int


@cache
def signature(kind: str) -> Signature:
    """That of an operation of the table, or of ``embedding``, which copies rows and computes nothing.

    Raises OptionError: there is no such operation, or it has more operands or another option than a call can hand on.
    """
    if kind == "embedding":
        return Signature((RowOperand("weight"), RowOperand("ids", "class")), "", False, 0)
    if kind not in OPERATIONS:
        raise OptionError("operation along rows", limit=sorted(OPERATIONS), value=kind, nearest="rms_norm")
    operation = OPERATIONS[kind]
    result, count = operation.results[0], len(operation.operands)
    if count > MOST_OPERANDS:
        raise OptionError(f"operands of {kind}", limit=f"at most {MOST_OPERANDS}", value=count, nearest=MOST_OPERANDS)
    option = next((name for name in operation.options if name != "dtype"), "keepdim" if result.width else "")
    if option not in OPTION_TYPES:
        raise OptionError(f"option of {kind}", limit=list(OPTION_TYPES)[1:], value=option, nearest="eps")
    like = next(i for i, operand in enumerate(operation.operands) if operand.name == result.like)
    return Signature(operation.operands, option, result.width is not None, like)


def looked_at(kind: str, tensors: Sequence[Any], options: Sequence[Any], look: Callable[..., Any]) -> list[Any]:
    """Each operand as `look` shows it, after it was found to fit; None for one that is not there."""
    about = signature(kind)
    name = about.operands[0].name
    x = look(name, tensors[0], tensors[0])
    if not x.shape:
        raise ShapeError(f"dimensions of {name}", limit="at least 1", value=0, nearest=f"{name}.reshape(1)")
    if about.option == "eps":
        check_eps(options[0])
    found = [x]
    for (name, extent), t in zip(about.operands[1:], tensors[1:], strict=True):
        if t is None and extent == "row":
            found.append(None)
            continue
        name = "residual" if kind == "add" else name  # a part of add_rms_norm, whose words they are
        other = look(name, t, tensors[0])
        if other.shape != (x.shape[-1:] if extent == "row" else x.shape) or extent == "angles":
            check_extent(name, extent, tuple(other.shape), tuple(x.shape))
        found.append(other)
    return found


def check_extent(name: str, extent: str, shape: tuple[int, ...], of: tuple[int, ...]) -> None:
    """Raise unless an operand has the shape of x, of a row of it, or of angles for the pairs of its rows."""
    if extent == "angles":
        if of[-1] % 2:
            raise ShapeError("last dimension of x", limit="an even number", value=of[-1], nearest=of[-1] + 1)
        wanted = (*of[:-1], of[-1] // 2)
        fits = 0 < len(shape) <= len(wanted) and shape[-1] == wanted[-1]
        if not fits or any(a not in (1, b) for a, b in zip(shape[::-1], wanted[::-1], strict=False)):
            raise ShapeError(f"shape of {name}", limit=f"one that broadcasts to {wanted}", value=shape, nearest=wanted)
    elif shape != (wanted := of[-1:] if extent == "row" else of):
        limit = "that of a row of x" if extent == "row" else "that of x"
        raise ShapeError(f"shape of {name}", limit=limit, value=shape, nearest=wanted)


def check_eps(eps: Any) -> None:
    """A number of at least 0."""
    if not arguments.number("eps", eps) >= 0:
        raise OptionError("eps", limit="a number of at least 0", value=eps, nearest=1e-6)


def on_host(name: str, x: Any, first: Any) -> Any:
    """An operand in the host's memory, as an array."""
    if not isinstance(x, Tensor):
        raise _no_tensor(name, x)
    found = array(name, x)
    check_operand(name, found)
    return found


def on_device(name: str, x: Any, first: Tensor) -> Tensor:
    """A dense tensor of a supported dtype in the memory of the first operand's device."""
    if not isinstance(x, Tensor):
        raise _no_tensor(name, x)
    device = first.device
    if x.device != device:
        limit = f"that of x, {device}"
        raise DeviceError(f"device of {name}", limit=limit, value=x.device, nearest=f"{name}.to({device})")
    check_tensor(name, x.detach())
    if x.is_neg():
        raise LayoutError(
            name, limit="a tensor with plain memory", value="a lazy negation", nearest=f"{name}.resolve_neg()"
        )
    return x


def _no_tensor(name: str, x: Any) -> DTypeError:
    return DTypeError(name, limit="a torch tensor", value=type(x).__name__, nearest=f"torch.as_tensor({name})")


def dtype_of(x: Tensor | None, out_dtype: Any) -> torch.dtype:
    """torch's dtype of a result: that of `x`, or what `out_dtype` names."""
    if isinstance(out_dtype, torch.dtype) and out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        return out_dtype
    if out_dtype is None:
        return x.dtype  # type: ignore[union-attr]
    found: torch.dtype = getattr(torch, named(out_dtype).name)
    return found


def named(out_dtype: Any) -> DType:
    """NumPy's dtype of what `out_dtype` names."""
    wanted = as_dtype(out_dtype)
    if wanted not in DTYPES:
        name = "None" if wanted is None else wanted.name
        raise DTypeError("out_dtype", limit=supported(name), value=name, nearest="float32")
    return wanted


def integers(name: str, x: Any, device: torch.device) -> Tensor:
    """A tensor of integers on `device`."""
    integral = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(x, Tensor) or x.dtype not in integral:
        value = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(name, limit="a tensor of integers", value=value, nearest="torch.int64")
    if x.layout is not torch.strided:
        raise LayoutError(name, limit="a dense tensor", value=str(x.layout), nearest=f"{name}.to_dense()")
    if x.device != device:
        limit = "this host's memory" if device.type == "cpu" else str(device)
        raise DeviceError(f"device of {name}", limit=limit, value=x.device, nearest=f"{name}.to('{device}')")
    return x


def check_ids(ids: Tensor, rows: int) -> None:
    """Raise OptionError unless ids, which are waited for, are those of a table's rows."""
    if not ids.numel():
        return
    least, most, last = int(ids.min()), int(ids.max()), rows - 1
    if least < 0 or most > last:
        bad = least if least < 0 else most
        raise OptionError("ids", limit=f"0 to {last}", value=bad, nearest=min(max(bad, 0), last))

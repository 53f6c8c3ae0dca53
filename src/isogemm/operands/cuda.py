"""CUDA operands as device arrays, results as the caller's kind: torch, DLPack, ``__cuda_array_interface__``; no copies.

torch owns the allocator and the streams: operands of other libraries become torch tensors over the same memory, and the
work happens on torch's current stream of their device. What another library wrote is waited for on the device:

- DLPack: the producer is given torch's stream and orders its writes before it.
- ``__cuda_array_interface__``: torch's stream waits for the stream that the interface names. After the product that
  stream waits for torch's, so that the owner sees `out` written and reuses no memory that is still read.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import FLOAT16, FLOAT32, TORCH, supported
from ..errors import DeviceError, DTypeError, LayoutError, LimitError
from .device_array import DeviceId, device_array, holder_of
from .dlpack import exported, handed_over
from .tensors import check_tensor, is_tensor

Array = NDArray[Any]

_INTERFACE_TYPES = {"<f4": FLOAT32, "<f2": FLOAT16}
_LEGACY = 1  # the handle that DLPack and the interface reserve for the default stream


def from_tensor(name: str, x: Any, read_only: bool = False, stream: int | None = None) -> tuple[Array, DeviceId]:
    """A device array of a torch CUDA tensor.

    Raises LayoutError: not strided, no memory behind it, or a lazy negation. Raises OptionError or DTypeError: as
    `isogemm.operands.tensors.check_tensor`.
    """
    check_tensor(name, x)
    dtype = TORCH[str(x.dtype)]
    place, item = DeviceId("cuda", x.get_device()), dtype.itemsize
    try:
        address = x.data_ptr()
    except RuntimeError as error:  # a tensor of a function transform has no address
        raise _no_memory(name, type(x).__name__) from error
    if x.is_neg() or (not address and x.numel()):
        raise _no_memory(name, "a lazily negated tensor" if x.is_neg() else "a tensor whose storage was freed")
    strides = tuple([s * item for s in x.stride()])
    return device_array(
        address, tuple(x.shape), strides, dtype, place, owner=x, read_only=read_only, stream=stream
    ), place  # fmt: skip


def _no_memory(name: str, value: str) -> LayoutError:
    return LayoutError(f"{name}", limit="a tensor with plain memory", value=value, nearest=f"{name}.clone()")


def from_protocols(name: str, x: Any) -> tuple[Array, DeviceId]:
    """A device array of any other library's CUDA array.

    The interface with a stream comes first, since only it says whom to wait for; then DLPack, which has bfloat16 too;
    then an interface without a stream, which by its rules needs no waiting. Raises DeviceError: there is no torch for
    CUDA here, or the memory is not on a CUDA device. Raises DTypeError or LayoutError.
    """
    interface = getattr(x, "__cuda_array_interface__", None)
    if not _has_cuda():
        device = tuple(int(v) for v in x.__dlpack_device__()) if interface is None else "__cuda_array_interface__"
        raise DeviceError(
            f"device of {name}", limit="a CUDA device that torch can use", value=device, nearest="torch with CUDA"
        )
    known = interface is not None and interface.get("typestr") in _INTERFACE_TYPES
    if interface is None or (hasattr(x, "__dlpack__") and not (known and interface.get("stream") is not None)):
        return _from_dlpack(name, x)
    return _from_interface(name, x, interface)


@functools.cache
def _has_cuda() -> bool:
    try:
        return bool(_torch().cuda.is_available())
    except ImportError:
        return False


def _torch() -> Any:
    import torch

    return torch


def _from_dlpack(name: str, x: Any) -> tuple[Array, DeviceId]:
    place = DeviceId("cuda", int(x.__dlpack_device__()[1]))
    e = exported(name, x, stream=current_stream(place) or _LEGACY)
    wrapped = _Interface(e.address, e.shape, e.strides, e.dtype, e.capsule)
    return from_tensor(name, _wrapped(name, wrapped, e.dtype, place), e.read_only)


def _from_interface(name: str, x: Any, interface: dict[str, Any]) -> tuple[Array, DeviceId]:
    typestr, (address, read_only) = interface["typestr"], interface["data"]
    if typestr not in _INTERFACE_TYPES:
        nearest = "float32; bfloat16 through DLPack"
        raise DTypeError(
            f"dtype of {name}", limit=supported(np.dtype(typestr).name), value=np.dtype(typestr).name, nearest=nearest
        )
    if interface.get("mask") is not None:
        raise DTypeError(f"{name}", limit="an array without a mask", value="a masked array", nearest="its values")
    dtype, stream = _INTERFACE_TYPES[typestr], interface.get("stream")
    wrapped = _Interface(address, tuple(interface["shape"]), interface.get("strides"), dtype, x)
    viewed = _wrapped(name, wrapped, dtype, None)
    place = DeviceId("cuda", viewed.get_device())
    if stream is not None and (0 if stream == _LEGACY else int(stream)) == current_stream(place):
        stream = None
    if stream is not None:
        _torch().cuda.current_stream(place.ordinal).wait_stream(_external(stream, place))
    return from_tensor(name, viewed, read_only, stream)


class _Interface:
    """Memory of another library for `torch.as_tensor`, with its owner; 16-bit types as int16, which both sides know."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any], owner: Any
    ) -> None:
        self.owner, self.strides = owner, strides
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": shape,
            "strides": strides,
            "typestr": "<f4" if dtype is FLOAT32 else "<i2",
            "data": (address, False),
        }


def _wrapped(name: str, wrapped: _Interface, dtype: np.dtype[Any], place: DeviceId | None) -> Any:
    """A torch tensor over the memory; torch asks the driver which device an address belongs to."""
    strides, torch = wrapped.strides, _torch()
    if strides is not None and any(s < 0 or s % dtype.itemsize for s in strides):
        limit, nearest = "whole elements, not negative, on a CUDA device", "a contiguous copy"
        raise LayoutError(f"strides of {name}", limit=limit, value=f"{list(strides)} bytes", nearest=nearest)
    try:
        viewed = torch.as_tensor(wrapped, device=None if place is None else str(place))
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"memory of {name}", limit="a CUDA device's", value=str(error), nearest="a torch tensor"
        ) from error
    return viewed.view(_torch_dtype(dtype))


def _torch_dtype(dtype: np.dtype[Any]) -> Any:
    return getattr(_torch(), dtype.name)


def current_stream(place: DeviceId) -> int:
    """The raw handle of torch's current stream on a device."""
    return int(_torch()._C._cuda_getCurrentRawStream(place.ordinal))


def _external(stream: int, place: DeviceId) -> Any:
    torch = _torch()
    if stream == _LEGACY:
        return torch.cuda.default_stream(place.ordinal)
    return torch.cuda.ExternalStream(stream, device=place.ordinal)


def give_back(stream: int, place: DeviceId) -> None:
    """Let a library's stream wait for what torch's current stream was given."""
    _external(stream, place).wait_stream(_torch().cuda.current_stream(place.ordinal))


def total_memory(place: DeviceId) -> int:
    """Bytes of a device's memory."""
    return int(_torch().cuda.get_device_properties(place.ordinal).total_memory)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], place: DeviceId) -> Array:
    """A device array over new memory from torch's allocator, contiguous. Raises LimitError: there is not enough."""
    torch = _torch()
    try:
        made = torch.empty(shape, dtype=_torch_dtype(dtype), device=str(place))
    except torch.OutOfMemoryError as error:
        raise LimitError(
            f"memory for the result on {place}", limit="what is free", value=list(shape), nearest="fewer rows"
        ) from error
    return from_tensor("out", made)[0]


def tensor(x: Array) -> Any:
    """A torch tensor over the memory of a device array: its owner, where it is the whole of it."""
    holder = holder_of(x)
    owner, item = holder.owner, x.itemsize
    strides = tuple(s // item for s in x.strides)
    if any(s < 0 for s in strides):
        raise LayoutError("a torch tensor", limit="strides of at least 0", value=list(strides), nearest="ascending")
    if owner is None:
        made = _Interface(x.ctypes.data, x.shape, x.strides, x.dtype, None)
        return _wrapped("pointer", made, x.dtype, holder.place)
    if owner.shape == x.shape and owner.stride() == strides:
        return owner
    first = (x.ctypes.data - owner.data_ptr()) // item if x.size else 0
    return owner.as_strided(x.shape, strides, owner.storage_offset() + first)


def as_kind(x: Array, operand: Any) -> Any:
    """A result as the kind of an operand: a device array, a tensor, or an array of its library through DLPack.

    Where that library does not take it (it has no ``from_dlpack``, or no such element type), a torch tensor.
    """
    if isinstance(operand, np.ndarray):
        return x
    made = tensor(x)
    return made if is_tensor(operand) else handed_over(made, operand)

"""Arrays in and out without copies: NumPy, torch, DLPack, the array and buffer protocols. Imports none of their owners.

Every operand becomes an ndarray over the caller's memory, or is refused; nothing is copied or converted. Memory of a
CUDA device becomes a `isogemm.operands.device_array.Ghost`, by `isogemm.operands.cuda`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import BFLOAT16, FLOAT16, FLOAT32, TORCH, supported
from ..errors import DeviceError, DTypeError, IsogemmError, LayoutError, OptionError
from . import memory as views
from .device_array import HOST, Device, Ghost, holder_of

__all__ = [
    "array",
    "check_tensor",
    "check_untraced",
    "exported",
    "from_dlpack",
    "is_tensor",
    "is_traced",
    "memory",
    "to_tensor",
    "view",
]

Array = NDArray[Any]

_NO_ARRAYS = (list, tuple, str, bytes, bool, int, float, complex, np.generic)
_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost: page-locked host memory
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_READ_ONLY = 1  # flag of a versioned DLPack tensor


def array(name: str, x: Any) -> Array:
    """An ndarray over the memory of `x`, which has to be the host's; for code that reads what it gets.

    Raises
    ------
    DeviceError
        The memory is not this host's.
    DTypeError, LayoutError, OptionError
        As `view`.
    """
    viewed, place = view(name, x)
    if place is not HOST:
        raise _foreign_device(name, str(place))
    return viewed


def view(name: str, x: Any) -> tuple[Array, Device]:
    """An ndarray over the memory of `x`, and where that memory is; a `Ghost` where it is not the host's.

    Raises
    ------
    DTypeError
        Not an array (a list, a scalar, None), a masked array, or an element type that no product takes.
    DeviceError
        The memory is on a device that no backend serves.
    LayoutError
        The memory cannot be viewed without a copy.
    OptionError
        A torch tensor that requires grad while torch records gradients.
    """
    if type(x) is np.ndarray:
        return x, HOST
    if isinstance(x, Ghost):
        return x, holder_of(x).place
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{name}", limit="an array without a mask", value="a masked array", nearest="x.filled(0)")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray), HOST
    if x is None or isinstance(x, _NO_ARRAYS):
        raise _no_array(name, x)
    if is_tensor(x):
        if x.device.type == "cuda":
            from . import cuda as interop_cuda

            return interop_cuda.from_tensor(name, x)
        return _from_tensor(name, x), HOST
    device = x.__dlpack_device__() if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") else None
    if hasattr(x, "__cuda_array_interface__") or (device is not None and int(device[0]) in _CUDA_DEVICES):
        from . import cuda as interop_cuda

        return interop_cuda.from_protocols(name, x)
    return (_from_protocols(name, x) if device is None else from_dlpack(name, x)), HOST


def _no_array(name: str, x: Any) -> DTypeError:
    limit, nearest = "an array", f"np.asarray({name}, dtype=np.float32)"
    if isinstance(x, list | tuple):
        limit = "an array (a list would be copied silently)"
    elif x is None or isinstance(x, str | bytes):
        nearest = "an array of float32, bfloat16 or float16"
    return DTypeError(name, limit=limit, value="None" if x is None else type(x).__name__, nearest=nearest)


def _from_protocols(name: str, x: Any) -> Array:
    """`x` through the buffer protocol, ``__array_interface__`` or ``__array__``."""
    if hasattr(x, "panels") or hasattr(x, "facts"):  # a packed weight, by what it has: this layer knows no backend
        raise DTypeError(
            name, limit="an array: linear takes packed weights", value=repr(x), nearest="linear(x, packed)"
        )
    try:
        viewed = np.asarray(x, copy=False)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"{name}", limit="memory that NumPy can view", value=type(x).__name__, nearest=f"np.asarray({name})"
        ) from error
    if viewed.dtype.hasobject:
        raise DTypeError(f"{name}", limit="an array of numbers", value=type(x).__name__, nearest="an array of float32")
    return viewed.view(np.ndarray)


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor. Never imports torch: who has none of its modules has no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_traced() -> bool:
    """Whether torch records the calls of this thread, to run them again: by torch.jit.trace, or by make_fx.

    Either sees torch's operators alone. What is computed behind their back would be a constant of what was recorded.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch._C._get_tracing_state() is not None:
        return True
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return bool(torch._C._len_torch_dispatch_stack()) and torch._C._get_dispatch_mode(proxy) is not None


def check_untraced(name: str) -> None:
    """Raise where a result would become a constant of a trace.

    Raises
    ------
    OptionError
    """
    if is_traced():
        raise OptionError(
            f"{name} under torch.jit.trace or make_fx",
            limit="eager code: the result would be a constant of the trace",
            value="a trace",
            nearest="functions and layers of isogemm.torch, which are operators there; or torch.compile",
        )


def check_tensor(name: str, x: Any) -> None:
    """Raise unless a torch tensor is dense, outside the gradient's graph and any trace, and of a supported dtype.

    Raises
    ------
    LayoutError, OptionError, DTypeError
    """
    torch = sys.modules["torch"]
    if x.layout is not torch.strided:
        raise LayoutError(f"{name}", limit="a dense tensor", value=str(x.layout), nearest=f"{name}.to_dense()")
    if x.requires_grad and torch.is_grad_enabled():
        raise OptionError(
            f"{name}",
            limit="a tensor outside the gradient's graph",
            value="requires_grad=True",
            nearest=f"{name}.detach(), torch.no_grad(), or isogemm.torch.linear, which records gradients",
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise DTypeError(
            f"dtype of {name}",
            limit=supported(str(x.dtype)),
            value=str(x.dtype),
            nearest="torch.float32",
        )
    watched = torch._C  # most calls look no further
    if watched._get_tracing_state() is not None or watched._len_torch_dispatch_stack():
        check_untraced(name)


def _from_tensor(name: str, x: Any) -> Array:
    torch = sys.modules["torch"]
    if x.device.type != "cpu":
        raise _foreign_device(name, str(x.device))
    check_tensor(name, x)
    dtype = TORCH[str(x.dtype)]
    viewed = _plain(x, dtype) if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else _unwrapped(x)
    if viewed is None:
        raise _no_memory(name, x)
    return viewed


def memory(name: str, x: Any) -> Array:
    """An ndarray over a CPU tensor of any element type that NumPy has: indices, masks, sums to be written.

    Raises
    ------
    LayoutError
        The tensor has no memory that could be viewed.
    """
    viewed = _plain(x, np.dtype(str(x.dtype).removeprefix("torch.")))
    if viewed is None:
        raise _no_memory(name, x)
    return viewed


def _no_memory(name: str, x: Any) -> LayoutError:
    value, nearest = type(x).__name__, f"{name}.contiguous()"
    if sys.modules["torch"]._C._functorch.is_legacy_batchedtensor(x):
        value, nearest = "a batch of gradients", "vectorize=False, one gradient at a time, or torch.func.jacrev"
    return LayoutError(f"{name}", limit="a tensor with plain memory", value=value, nearest=nearest)


def _plain(x: Any, dtype: np.dtype[Any]) -> Array | None:
    viewed = views.view(x, dtype)
    if viewed is None:  # what a finished transform of torch.func has left behind, torch's operators see through
        try:
            return views.view(x.detach(), dtype)
        except RuntimeError:
            return None
    return viewed


def _unwrapped(x: Any) -> Array | None:
    """The memory of a wrapper around other tensors, which says itself what that is, or has none."""
    torch = sys.modules["torch"]
    try:
        x = x.detach()
        if x.dtype is torch.bfloat16:  # NumPy has no name for it: the same bits as uint16
            words: Array = x.view(torch.uint16).numpy()
            return words.view(BFLOAT16)
        viewed: Array = x.numpy()
    except (RuntimeError, TypeError):
        return None
    return viewed


def to_tensor(x: Array) -> Any:
    """A torch tensor over the memory of an array that this package made: torch's own, where `memory` made it."""
    torch = sys.modules["torch"]
    found = views.tensor_of(x)
    if found is not None:
        return found
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h; the unversioned struct begins with the DLTensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Prototypes of our own: setting argtypes on ctypes.pythonapi would change them for the whole process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Memory:
    """Owner of a DLPack capsule, which is never marked as consumed: dropping it runs the producer's deleter."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule, self.__array_interface__ = capsule, interface


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_TYPES = {(2, 32, 1): ("<f4", FLOAT32), (2, 16, 1): ("<f2", FLOAT16), (4, 16, 1): ("<u2", BFLOAT16)}


class Exported(NamedTuple):
    """What a DLPack capsule says; the memory lives as long as the capsule."""

    capsule: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    typestr: str
    dtype: np.dtype[Any]
    read_only: bool


def from_dlpack(name: str, x: Any) -> Array:
    """An ndarray over a DLPack producer's host memory, bfloat16 (which `numpy.from_dlpack` refuses) included.

    Raises
    ------
    DeviceError, DTypeError, LayoutError
    """
    if int(x.__dlpack_device__()[0]) not in _CPU_DEVICES:
        raise _foreign_device(name, f"DLPack device {tuple(int(v) for v in x.__dlpack_device__())}")
    e = exported(name, x)
    if 0 in e.shape:
        return np.empty(e.shape, e.dtype)
    interface = {
        "version": 3,
        "shape": e.shape,
        "typestr": e.typestr,
        "data": (e.address, e.read_only),
        "strides": e.strides,
    }
    return np.asarray(_Memory(e.capsule, interface)).view(e.dtype)


def exported(name: str, x: Any, **options: Any) -> Exported:
    """The capsule of a DLPack producer, read; `options` (a stream) go to its ``__dlpack__``.

    Raises
    ------
    DTypeError, LayoutError
    """
    capsule = _capsule(name, x, options)
    tensor, read_only = _parse(name, capsule)
    key = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if key not in _DLPACK_TYPES:
        raise DTypeError(
            f"dtype of {name}",
            limit=supported("int8" if key[0] != 6 and key[1] <= 8 else ""),
            value=_CODES.get(key[0], "") + f"{key[1]} (DLPack code {key[0]} with {key[1]} bits and {key[2]} lanes)",
            nearest="float32",
        )
    typestr, dtype = _DLPACK_TYPES[key]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    return Exported(capsule, int(tensor.data or 0) + tensor.byte_offset, shape, strides, typestr, dtype, read_only)


def _capsule(name: str, x: Any, options: dict[str, Any]) -> Any:
    try:
        try:
            return x.__dlpack__(max_version=(1, 1), copy=False, **options)
        except TypeError:  # a producer from before DLPack 1.0
            return x.__dlpack__(**options)
    except IsogemmError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{name}", limit="memory that DLPack can export", value=str(error), nearest=f"np.asarray({name})"
        ) from error


def _parse(name: str, capsule: Any) -> tuple[_Tensor, bool]:
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major == 1:
            return versioned.tensor, bool(versioned.flags & _READ_ONLY)
        value = f"version {versioned.major}.{versioned.minor}"
    elif _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_get_pointer(capsule, b"dltensor")), False
    else:
        value = "an unknown capsule"
    raise LayoutError(f"DLPack capsule of {name}", limit="version 0 or 1", value=value, nearest=f"np.asarray({name})")


def _foreign_device(name: str, device: str) -> DeviceError:
    """The refusal of memory that no backend serves, or that this call does not."""
    return DeviceError(f"device of {name}", limit="this host's memory", value=device, nearest=f"{name}.cpu()")

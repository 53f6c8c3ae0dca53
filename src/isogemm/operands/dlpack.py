"""DLPack's capsules read: the memory, shape, strides and type that a producer exports, bfloat16 included.

NumPy's own reader refuses bfloat16. A capsule is never marked as consumed: dropping it runs the producer's deleter.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, supported
from ..errors import DTypeError, IsogemmError, LayoutError
from .device_array import HOST, device_array, foreign_device

Array = NDArray[Any]

_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost: page-locked host memory
_READ_ONLY = 1  # flag of a versioned DLPack tensor


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


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_TYPES = {(2, 32, 1): FLOAT32, (2, 16, 1): FLOAT16, (4, 16, 1): BFLOAT16}
_WITH_INTEGERS = _DLPACK_TYPES | {(0, 8, 1): INT8, (0, 32, 1): INT32}


class Exported(NamedTuple):
    """What a DLPack capsule says; the memory lives as long as the capsule."""

    capsule: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    read_only: bool


def from_dlpack(name: str, x: Any) -> Array:
    """An ndarray over a DLPack producer's host memory, bfloat16 (which `numpy.from_dlpack` refuses) included.

    Raises DeviceError, DTypeError or LayoutError.
    """
    if int(x.__dlpack_device__()[0]) not in _CPU_DEVICES:
        raise foreign_device(name, f"DLPack device {tuple(int(v) for v in x.__dlpack_device__())}")
    e = exported(name, x, integers=True)
    held = device_array(e.address, e.shape, e.strides, e.dtype, HOST, owner=e.capsule, read_only=e.read_only)
    return held.view(np.ndarray)  # the host's, which may be read


def exported(name: str, x: Any, *, integers: bool = False, **options: Any) -> Exported:
    """The capsule of a DLPack producer, read; `options` (a stream) go to its ``__dlpack__``.

    `integers`: it may be of int8 and int32, as on the CPU. Raises DTypeError or LayoutError.
    """
    capsule = _capsule(name, x, options)
    tensor, read_only = _parse(name, capsule)
    known = _WITH_INTEGERS if integers else _DLPACK_TYPES
    key = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if key not in known:
        raise DTypeError(
            f"dtype of {name}",
            limit=supported("int8" if key[0] != 6 and key[1] <= 8 else ""),
            value=_CODES.get(key[0], "") + f"{key[1]} (DLPack code {key[0]} with {key[1]} bits and {key[2]} lanes)",
            nearest="float32",
        )
    dtype = known[key]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    return Exported(capsule, int(tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, read_only)


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


def handed_over(made: Any, operand: Any) -> Any:
    """A result as an array of an operand's library; as it is where that library does not take it.

    It has no ``from_dlpack`` then, or no such element type (NumPy exports no bfloat16).
    """
    library: Any = sys.modules.get(type(operand).__module__.partition(".")[0])
    if not hasattr(library, "from_dlpack") and hasattr(operand, "__array_namespace__"):
        library = operand.__array_namespace__()
    try:
        return library.from_dlpack(made) if hasattr(library, "from_dlpack") else made
    except (BufferError, RuntimeError, TypeError, ValueError):
        return made

"""Arrays in and out without copies: NumPy, torch, DLPack, the array and buffer protocols. Imports none of their owners.

Every operand becomes an ndarray over the caller's memory, or is refused; nothing is copied or converted. Memory of a
CUDA device becomes a `isogemm.operands.device_array.DeviceArray`, by `isogemm.operands.cuda`; arrays of a backend's own
class say what they are by ``__isogemm_view__(name)``, which returns a `DeviceArray`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import CASTABLE, FLOAT32
from ..base.rounding import ieee_defaults
from ..errors import DTypeError, LayoutError, OptionError
from . import cuda, memory
from .device_array import HOST, DeviceArray, DeviceId, foreign_device, holder_of
from .dlpack import from_dlpack
from .prepared import MatrixList, Weight
from .tensors import from_tensor, is_tensor, stacked

Array = NDArray[Any]

_NO_ARRAYS = (list, tuple, str, bytes, bool, int, float, complex, np.generic)
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


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
        raise foreign_device(name, str(place))
    return viewed


def _are_numbers(x: Any) -> bool:
    """Whether an array holds real numbers: None, and texts that say some, would become float32 without a word."""
    return x.dtype.kind in "biufV" or (
        x.dtype.kind == "O" and all(isinstance(v, Real | np.bool_ | Decimal) for v in x.flat)
    )


def to_float32(name: str, x: Any, cast: str) -> Any:
    """A copy in float32 of float64 elements or of a list of numbers; anything else as it is.

    Elements are rounded once, from what NumPy makes of a list: integers beside floats are float64 first.

    Raises OptionError: `cast` is not ``float32``. Raises DTypeError: a list of anything but numbers, or of rows of
    different lengths.
    """
    if not isinstance(cast, str) or cast != "float32":
        limit = "'float32', to which it rounds float64 and lists of numbers"
        raise OptionError("cast", limit=limit, value=repr(cast), nearest="cast='float32'")
    if isinstance(x, list | tuple):
        try:
            found = np.asarray(x)
            if not _are_numbers(found):
                raise TypeError
            with ieee_defaults():
                return found.astype(np.float32)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: of torch's
            raise DTypeError(
                name, limit="numbers in rows of one length", value=f"a {type(x).__name__}", nearest="an array"
            ) from None
    if str(getattr(x, "dtype", "")).removeprefix("torch.") != "float64":
        return x
    with ieee_defaults():
        if not is_tensor(x):
            return x.astype(np.float32)
        torch = sys.modules["torch"]
        if type(x) is torch.Tensor and x.is_cpu and not x.requires_grad:
            wide = memory.view(x, np.dtype(np.float64))
            if wide is not None:
                found, out = memory.empty(wide.shape, FLOAT32)  # torch's threads may round otherwise than this one
                out[...] = wide
                return found
        return x.to(torch.float32)


def view(name: str, x: Any) -> tuple[Array, DeviceId]:
    """An ndarray over the memory of `x`, and where that memory is; a `DeviceArray` where it is not the host's.

    Raises DTypeError: not an array (a list, a scalar, None), a masked array, or an element type that no product takes.
    Raises DeviceError: the memory is on a device that no backend serves. Raises LayoutError: the memory cannot be
    viewed without a copy. Raises OptionError: a torch tensor that requires grad while torch records gradients.
    """
    if type(x) is np.ndarray:
        return x, HOST
    if isinstance(x, DeviceArray):
        return x, holder_of(x).place
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{name}", limit="an array without a mask", value="a masked array", nearest="x.filled(0)")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray), HOST
    if x is None or isinstance(x, _NO_ARRAYS):
        raise _no_array(name, x)
    if is_tensor(x):
        return cuda.from_tensor(name, x) if x.device.type == "cuda" else (from_tensor(name, x), HOST)
    if hasattr(type(x), "__isogemm_view__"):
        viewed: Array = x.__isogemm_view__(name)
        return viewed, holder_of(viewed).place
    device = x.__dlpack_device__() if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") else None
    if hasattr(x, "__cuda_array_interface__") or (device is not None and int(device[0]) in _CUDA_DEVICES):
        return cuda.from_protocols(name, x)
    return (_from_protocols(name, x) if device is None else from_dlpack(name, x)), HOST


def _no_array(name: str, x: Any) -> DTypeError:
    limit, nearest = "an array", f"np.asarray({name}, dtype=np.float32)"
    if isinstance(x, list | tuple):
        limit = "an array (a list would be copied silently)"
        if x and is_tensor(x[0]):
            return DTypeError(name, limit=limit, value=f"{type(x).__name__} of tensors", nearest=stacked(name))
        nearest += '; cast="float32" of matmul and linear copies' if name in CASTABLE else ""
    elif x is None or isinstance(x, str | bytes):
        nearest = "an array of float32, bfloat16 or float16"
    return DTypeError(name, limit=limit, value="None" if x is None else type(x).__name__, nearest=nearest)


def _from_protocols(name: str, x: Any) -> Array:
    """`x` through the buffer protocol, ``__array_interface__`` or ``__array__``."""
    if isinstance(x, Weight):
        raise x.refused(name)
    if isinstance(x, MatrixList):
        raise DTypeError(name, limit="an array: gemm_batched takes lists", value=repr(x), nearest="gemm_batched(a, b)")
    try:
        viewed = np.asarray(x, copy=False)
    except (TypeError, ValueError) as error:
        nearest = f"np.asarray({name})"
        if hasattr(x, "weight"):  # a layer
            nearest = f"{name}.weight"
        elif isinstance(x, Iterable) and not hasattr(x, "__array__"):
            nearest = f"np.asarray(list({name}), dtype=np.float32)"
        limit = "an array or a tensor"
        raise LayoutError(f"{name}", limit=limit, value=type(x).__name__, nearest=nearest) from error
    if viewed.dtype.hasobject:
        raise DTypeError(f"{name}", limit="an array of numbers", value=type(x).__name__, nearest="an array of float32")
    return viewed.view(np.ndarray)

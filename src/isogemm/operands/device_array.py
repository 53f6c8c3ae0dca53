"""Memory of a device as arrays that are never read: shapes, strides and addresses for the code that checks a product.

A device array is an ndarray over a device address. Validation, broadcasting, transposition, aliasing and merging only
ever ask for shapes, strides and addresses, so one implementation of them serves every device. Reading an element on the
host is an invalid access: what is asked of the array itself (printing included, as debuggers and error reporters do),
arithmetic and comparisons are refused. An index of one element, and NumPy's functions that copy, are not: they end the
process, as reading that address does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import BFLOAT16
from ..errors import DeviceError

__all__ = ["HOST", "DeviceArray", "DeviceId", "device_array", "holder_of"]

# The array protocol has no bfloat16: the same bits. Integers are the host's alone.
_TYPESTR = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "|i1", "int32": "<i4"}


class DeviceId(NamedTuple):
    """Where memory is."""

    kind: str
    ordinal: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


HOST = DeviceId("cpu")


class DeviceArray(np.ndarray[Any, Any]):
    """An ndarray over a device address; see this module's text."""

    __array_ufunc__ = None  # type: ignore[assignment]  # arithmetic and comparisons raise TypeError

    def __repr__(self) -> str:
        place = holder_of(self).place
        return f"DeviceArray({self.dtype.name} {list(self.shape)}, strides {list(self.strides)} bytes, on {place})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{self!r} cannot be read on the host")

    astype = copy = item = tolist = tobytes = tofile = dump = dumps = fill = _refuse
    argmax = argmin = argpartition = argsort = byteswap = choose = compress = cumprod = cumsum = dot = _refuse
    flatten = nonzero = partition = prod = put = repeat = searchsorted = sort = sum = take = trace = _refuse
    __reduce__ = __reduce_ex__ = __copy__ = __deepcopy__ = _refuse
    __setitem__ = __bool__ = __float__ = __int__ = __contains__ = _refuse


class Holder:
    """What keeps a device array's memory alive, and where that is; the ndarray's base, so that every view has it.

    The owner is the tensor or array whose memory it is; None where the caller keeps it alive. The stream is a raw
    handle of that on which the owner's library works, where it is not torch's current one.
    """

    __slots__ = ("__array_interface__", "owner", "place", "stream")

    def __init__(self, interface: dict[str, Any], place: DeviceId, owner: Any, stream: int | None) -> None:
        self.__array_interface__ = interface
        self.place, self.owner, self.stream = place, owner, stream


def device_array(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    place: DeviceId,
    *,
    owner: Any = None,
    read_only: bool = False,
    stream: int | None = None,
) -> NDArray[Any]:
    """An array over device memory.

    Parameters
    ----------
    address : int
        Of the element with index 0 in every dimension; anything where there are no elements.
    strides : tuple of int or None
        In bytes; None for C order.
    dtype : numpy.dtype
        float32, bfloat16 or float16.
    """
    interface = {
        "version": 3,
        "shape": shape,
        "typestr": _TYPESTR[dtype.name],
        "data": (address or dtype.itemsize, read_only),
        "strides": strides,
    }
    plain = np.asarray(Holder(interface, place, owner, stream))
    return (plain.view(BFLOAT16) if dtype is BFLOAT16 else plain).view(DeviceArray)


def holder_of(x: Any) -> Holder:
    """The holder of a device array, through any number of views."""
    while not isinstance(x, Holder):
        x = x.base  # ndarrays, and the stand-in that numpy's as_strided leaves
    return x


def foreign_device(name: str, device: str) -> DeviceError:
    """The refusal of memory that no backend serves, or that this call does not."""
    return DeviceError(f"device of {name}", limit="this host's memory", value=device, nearest=f"{name}.cpu()")

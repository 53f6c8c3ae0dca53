"""Arrays of addresses, as BLAS's batched calls take them: validated once, used often."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import DTYPES, as_dtype, supported
from ...errors import DeviceError, DTypeError, LayoutError, ShapeError
from ...operands.device_array import DeviceId, device_array
from ...operands.prepared import MatrixList
from ...operands.views import view
from .driver.facts import Pointer, pointer

Array = NDArray[Any]


class PointerArray(MatrixList):
    """Matrices of one shape on one CUDA device by their addresses, for `isogemm.gemm_batched`.

    Item i's element (r, c) lies at ``addresses[i] + (r * strides[0] + c * strides[1]) * itemsize``. Everything is
    checked here, so that a call launches nothing that could leave its memory. The addresses are read once (an array on
    the device is waited for); what is written into it later is not seen. The caller keeps the matrices alive.

    Parameters
    ----------
    addresses : array of int64 [batch], or sequence of int
        A torch tensor or a CuPy array, on the device or not, a NumPy array, or a list.
    shape : (int, int)
        Rows and columns.
    dtype : dtype
        float32, bfloat16 or float16, by any name.
    strides : (int, int), optional
        Elements between rows and between columns; by default rows are contiguous and adjacent.

    Attributes
    ----------
    addresses : tuple of int
    shape, strides : tuple of int
    dtype : numpy.dtype
    views : list of ndarray
        The matrices, for the calls.
    facts : tuple
        What a call's key says of them.
    span, common : int
        Bytes from the first to behind the last element of a matrix; the bits that are set in any address.

    Raises
    ------
    DeviceError
        An address is not of a CUDA device (the host's, or nobody's), or not of the device of item 0.
    LayoutError
        An address is null or misaligned, or a matrix leaves its allocation. The message names the item.
    DTypeError, ShapeError
        Addresses are not integers in one dimension; an element type that no product takes.
    """

    def __init__(
        self, addresses: Any, shape: tuple[int, int], dtype: Any = "float32", *, strides: Sequence[int] | None = None
    ) -> None:
        found = as_dtype(dtype)
        if found not in DTYPES:
            raise DTypeError("dtype of pointers", limit=supported(str(dtype)), value=repr(dtype), nearest="float32")
        for name, given in (("shape", shape), ("strides", strides)):
            if given is not None and len(given) != 2:
                raise ShapeError(
                    f"{name} of pointers", limit="two: rows, columns", value=given, nearest=(*given, 1)[:2]
                )
        rows, columns = (_size(x) for x in shape)
        self.shape, self.dtype = (rows, columns), found
        self.strides = (columns, 1) if strides is None else (operator.index(strides[0]), operator.index(strides[1]))
        if min(self.strides) < 0:
            raise LayoutError("strides of pointers", limit="at least 0", value=self.strides, nearest=(columns, 1))
        self.addresses = _integers(addresses)
        self._owners: tuple[Any, ...] = ()
        self.place = _checked(self.addresses, self.shape, self.strides, found.itemsize)
        steps = tuple(s * found.itemsize for s in self.strides)
        self.facts = (self.shape, self.strides, found, self.place, len(self.addresses))
        self.span = sum((d - 1) * s for d, s in zip(self.shape, steps, strict=True)) + found.itemsize
        self.common = 0
        for address in self.addresses:
            self.common |= address
        self.views: list[Array] = [device_array(x, self.shape, steps, found, self.place) for x in self.addresses]

    @classmethod
    def of(cls, matrices: Sequence[Any]) -> PointerArray:
        """The addresses of a list of CUDA matrices of one shape, strides and dtype, which are kept alive.

        Raises
        ------
        ShapeError
            The list is empty, or an item differs from item 0.
        """
        views = [view(f"matrices[{i}]", x)[0] for i, x in enumerate(matrices)]
        for i, x in enumerate(views):
            first = views[0]
            if x.ndim != 2 or (x.shape, x.strides, x.dtype) != (first.shape, first.strides, first.dtype):
                raise ShapeError(
                    f"matrices[{i}]",
                    limit="2-D, with the shape, strides and dtype of matrices[0]",
                    value=f"{x.dtype.name} {list(x.shape)}, strides {list(x.strides)} bytes",
                    nearest="a list of arrays, which may differ",
                )
        if not views:
            raise ShapeError("matrices", limit="at least one", value=0, nearest="an empty list instead")
        first = views[0]
        strides = [s // first.itemsize for s in first.strides]
        made = cls([x.ctypes.data for x in views], first.shape, first.dtype, strides=strides)
        made._owners = tuple(matrices)
        return made

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"PointerArray({len(self)} x [{rows}, {columns}], {self.dtype.name}, {self.place})"


def _integers(addresses: Any) -> tuple[int, ...]:
    if not isinstance(addresses, list | tuple | np.ndarray):
        if hasattr(addresses, "__dlpack__") and not hasattr(addresses, "tolist"):
            import torch

            addresses = torch.from_dlpack(addresses)
        addresses = addresses.tolist() if hasattr(addresses, "tolist") else addresses
    if isinstance(addresses, np.ndarray):
        addresses = addresses.tolist()
    try:
        return tuple(operator.index(x) for x in addresses)
    except TypeError as error:
        raise DTypeError(
            "addresses", limit="integers in one dimension", value=type(addresses).__name__, nearest="an int64 tensor"
        ) from error


def _checked(addresses: Sequence[int], shape: tuple[int, int], strides: tuple[int, int], item: int) -> DeviceId:
    """The device of all addresses."""
    place: DeviceId | None = None
    known = Pointer("unknown", -1, 0, 0)
    span = sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) * item + item
    for i, address in enumerate(addresses):
        if not 0 < address < 2**63 or address % item:
            raise LayoutError(
                f"address of item {i}",
                limit=f"a multiple of {item}, not null",
                value=hex(address),
                nearest="the address of a matrix",
            )
        if not 0 <= address - known.start < known.nbytes:
            known = pointer(address)
        if known.kind not in ("device", "managed"):
            raise DeviceError(
                f"address of item {i}",
                limit="a CUDA device's memory",
                value=f"{hex(address)}: {known.kind}",
                nearest="the address of a CUDA array",
            )
        place = place or DeviceId("cuda", known.ordinal)
        if place.ordinal != known.ordinal:
            raise DeviceError(
                f"address of item {i}",
                limit=f"memory of {place}, as item 0",
                value=f"{hex(address)} of cuda:{known.ordinal}",
                nearest="one pointer array for each device",
            )
        stop = known.start + known.nbytes
        if 0 not in shape and address + span > stop:
            raise LayoutError(
                f"matrix of item {i}",
                limit=f"inside its allocation, {hex(known.start)} to {hex(stop)}",
                value=f"{hex(address)} to {hex(address + span)}",
                nearest="an earlier address or smaller strides",
            )
    return place or DeviceId("cuda", 0)


def _size(x: Any) -> int:
    size = operator.index(x)
    if size < 0:
        raise ShapeError("shape of pointers", limit="at least 0", value=size, nearest=0)
    return size

"""Arrays on a WebGPU device: `isogemm.webgpu.array` makes them, products take and return them, `numpy` copies back."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import check_dtype
from ...errors import OptionError
from ...operands.device_array import DeviceId, device_array, holder_of
from ...operands.prepared import PreparedWeight
from .adapter import DeviceBuffer, open_adapter

Array = NDArray[Any]


class WebGpuArray:
    """An array whose elements are in a buffer of an adapter.

    Attributes
    ----------
    shape, strides : tuple of int
        Strides in bytes.
    dtype : numpy.dtype
        float32, float16 or bfloat16.
    device : str
    """

    def __init__(self, view: Array) -> None:
        self._view = view
        self.shape, self.strides, self.dtype = view.shape, view.strides, view.dtype
        self.device = str(holder_of(view).place)

    def __isogemm_view__(self, name: str) -> Array:
        """What every product asks: address, shape, strides and type."""
        return self._view

    @property
    def T(self) -> WebGpuArray:
        """The transposed view of the same memory."""
        return WebGpuArray(self._view.T)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: NumPy's own functions would read memory that is not the host's."""
        raise OptionError(
            "WebGpuArray as an array of NumPy's", limit="memory of the host", value=self.device, nearest="x.numpy()"
        )

    def reshape(self, *shape: Any) -> WebGpuArray:
        """The same memory in another shape: its extents, or a tuple of them.

        Raises
        ------
        OptionError
            A shape of other elements, or that takes a copy.
        """
        try:
            return WebGpuArray(self._view.reshape(*shape, copy=False))
        except ValueError:
            raise OptionError(
                f"shape of a view of {list(self.shape)}", limit="the same elements, without a copy", value=list(shape),
                nearest="isogemm.webgpu.array(x.numpy().reshape(...))",
            ) from None  # fmt: skip

    def __getitem__(self, index: Any) -> WebGpuArray:
        """A view of some elements: slices, whole numbers, ``None`` and ``...``, never a copy.

        Raises
        ------
        OptionError
            Another index, which would have to read elements.
        """
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not (part is None or part is ... or isinstance(part, slice | int | np.integer)) or isinstance(
                part, bool
            ):
                raise OptionError(
                    "index of an array on a device", limit="slices and whole numbers", value=repr(part),
                    nearest="x.numpy()[...]",
                )  # fmt: skip
        whole = parts if ... in parts else (*parts, ...)  # a view, where an element alone would be read
        return WebGpuArray(self._view[whole])

    def __len__(self) -> int:
        return len(self._view)

    def numpy(self) -> Array:
        """The elements in the host's memory: a copy, after all work before it is done."""
        buffer, (start, stop) = buffer_of(self._view), span(self._view)
        raw = open_adapter(holder_of(self._view).place.ordinal).read(buffer, start, stop)
        first = offset_of(self._view) - start
        found: Array = np.ndarray(self.shape, self.dtype, raw.tobytes(), first, self.strides)
        return found.copy()

    def __repr__(self) -> str:
        return f"WebGpuArray({self.dtype.name} {list(self.shape)} on {self.device})"


class WebGpuWeight(PreparedWeight):
    """A weight [n, k] on a device: a reference, as kernels read weights as they lie."""

    __slots__ = ("_array", "dtype", "shape")

    def __init__(self, view: Array) -> None:
        self._array, self.dtype = WebGpuArray(view), view.dtype
        self.shape = view.shape[0], view.shape[1]

    @property
    def place(self) -> DeviceId:
        """The weight's device."""
        return holder_of(self._array._view).place

    @property
    def array(self) -> WebGpuArray:
        """The weight."""
        return self._array

    def __repr__(self) -> str:
        return f"WebGpuWeight({self.n} x {self.k}, {self.dtype.name} on {self.place})"


def buffer_of(view: Array) -> DeviceBuffer:
    """The buffer that a view's elements are in."""
    owner: DeviceBuffer = holder_of(view).owner
    return owner


def offset_of(view: Array) -> int:
    """Bytes from the start of its buffer to a view's element with index 0 in every dimension."""
    return int(view.ctypes.data) - buffer_of(view).address


def span(view: Array) -> tuple[int, int]:
    """First byte of a view in its buffer, and the one behind its last."""
    start = stop = offset_of(view)
    if not view.size:
        return 0, 0
    for extent, stride in zip(view.shape, view.strides, strict=True):
        start, stop = start + min(0, (extent - 1) * stride), stop + max(0, (extent - 1) * stride)
    return start, stop + view.itemsize


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], place: DeviceId) -> Array:
    """A view of new memory in C order."""
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    buffer = open_adapter(place.ordinal).allocate(nbytes)
    return device_array(buffer.address, shape, None, dtype, place, owner=buffer)


def uploaded(x: Array, place: DeviceId) -> Array:
    """A view of a copy of a host's array on a device.

    Raises DTypeError: another element type than float32, float16 and bfloat16. Raises LimitError: it does not fit into
    a buffer of the adapter.
    """
    data = np.ascontiguousarray(x).reshape(np.shape(x))
    check_dtype("array", data.dtype)
    buffer = open_adapter(place.ordinal).upload(data.view(np.uint8).reshape(-1) if data.size else np.empty(0, np.uint8))
    return device_array(buffer.address, data.shape, None, data.dtype, place, owner=buffer)

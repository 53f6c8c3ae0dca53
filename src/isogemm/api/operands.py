"""A device as the public calls see it: who computes there, where results are allocated, which bits are the default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..backends import cpu
from ..base.dtypes import name_of
from ..base.limits import physical_memory
from ..contract.spec import Contract
from ..errors import DeviceError, LimitError
from ..operands import memory as views
from ..operands import views as interop
from ..operands.device_array import HOST, Device, holder_of
from . import short as tensors

__all__ = ["Operands", "Space"]

Array = NDArray[Any]


class Backend(Protocol):
    """What computes validated products on views."""

    @property
    def gemm(self) -> Callable[..., None]: ...
    @property
    def gemm_batched(self) -> Callable[..., None]: ...
    @property
    def gemm_items(self) -> Callable[..., None]: ...


class Space(Protocol):
    """One device."""

    @property
    def place(self) -> Device: ...
    @property
    def backend(self) -> Backend: ...

    def default(self, dtype_a: np.dtype[Any], dtype_b: np.dtype[Any]) -> Contract:
        """The contract of a product for which none was asked."""
        ...

    def memory(self) -> int:
        """Bytes that this device could hold."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """New memory; `LimitError` where there is not enough."""
        ...

    def contiguous(self, x: Array) -> Array:
        """`x` in C order: itself, or a copy."""
        ...

    def assign(self, out: Array, x: Array) -> None:
        """out[...] = x."""
        ...

    def returned(self, x: Array, operands: tuple[Any, ...]) -> Any:
        """A result as the caller's kind."""
        ...


class _Host:
    """This machine's memory and processors."""

    place = HOST
    backend: Backend = cpu

    def default(self, dtype_a: np.dtype[Any], dtype_b: np.dtype[Any]) -> Contract:
        return _CHAIN

    def memory(self) -> int:
        return physical_memory()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise LimitError(
                "memory for the result", limit="what is free", value=list(shape), nearest="fewer rows"
            ) from error

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def assign(self, out: Array, x: Array) -> None:
        out[...] = x

    def returned(self, x: Array, operands: tuple[Any, ...]) -> Any:
        if any(interop.is_tensor(operand) for operand in operands):
            if not tensors.KINDS:
                tensors.learn()
            return interop.to_tensor(x)
        return x


class _HostTensors(_Host):
    """The same memory, allocated by torch: a storage of anybody else's can never be resized."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return views.empty(shape, dtype)[1]


class _Cuda:
    """A CUDA device; torch allocates."""

    def __init__(self, place: Device) -> None:
        from ..backends.cuda.gemm import execute
        from ..operands import cuda as interop_cuda

        self.place, self.arrays, self.execute = place, interop_cuda, execute
        self.backend: Backend = execute.Executor(place)

    def default(self, dtype_a: np.dtype[Any], dtype_b: np.dtype[Any]) -> Contract:
        name = name_of(dtype_a) if dtype_a == dtype_b else "float32"
        return self.execute.default_contract(self.place.ordinal, name)

    def memory(self) -> int:
        return self.arrays.total_memory(self.place)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.arrays.empty(shape, dtype, self.place)

    def contiguous(self, x: Array) -> Array:
        if x.flags.c_contiguous:
            return x
        copied = self.empty(x.shape, x.dtype)
        self.assign(copied, x)
        return copied

    def assign(self, out: Array, x: Array) -> None:
        self.arrays.tensor(out).copy_(self.arrays.tensor(x))

    def returned(self, x: Array, operands: tuple[Any, ...]) -> Any:
        tensors = [operand for operand in operands if interop.is_tensor(operand)]
        return self.arrays.as_kind(x, tensors[0] if tensors else operands[0])


_CHAIN = Contract()
_HOST, _HOST_TENSORS = _Host(), _HostTensors()


class Operands:
    """The operands of one call: their views, which have to lie on one device, and that device.

    Attributes
    ----------
    place : Device
        That of the operands seen so far.
    """

    __slots__ = ("_first", "_space", "_streams", "_tensors", "place")

    def __init__(self) -> None:
        self.place: Device = HOST
        self._first = ""
        self._space: Space | None = None
        self._tensors = False
        self._streams: set[int] = set()

    def view(self, name: str, x: Any) -> Array:
        """An ndarray over the memory of `x`.

        Raises
        ------
        DeviceError
            It lies on another device than the operands before it.
        DTypeError, LayoutError, OptionError
            As `isogemm.operands.views.view`.
        """
        if type(x) is np.ndarray and self.place is HOST:  # most calls, in as few steps as there can be
            self._first = self._first or name
            return x
        viewed, place = interop.view(name, x)
        self.note(name, place)
        if place is HOST:
            self._tensors = self._tensors or interop.is_tensor(x)
        else:
            stream = holder_of(viewed).stream
            if stream is not None:
                self._streams.add(stream)
        return viewed

    def note(self, name: str, place: Device) -> None:
        """Take notice of where an operand lies."""
        if not self._first:
            self._first, self.place = name, place
        elif place != self.place:
            raise DeviceError(
                f"devices of {self._first} and {name}",
                limit="one device",
                value=f"{self.place} and {place}",
                nearest=f"{name}.to('{self.place}')" if place.kind == "cpu" else f"{self._first}.to('{place}')",
            )

    def optional(self, name: str, x: Any) -> Array | None:
        """The same for an operand that may be missing."""
        return None if x is None else self.view(name, x)

    @property
    def space(self) -> Space:
        """The device of the operands."""
        if self._space is None:
            here = _HOST_TENSORS if self._tensors else _HOST
            self._space = here if self.place is HOST else _Cuda(self.place)
        return self._space

    def result(self, x: Array, out: Any, *operands: Any) -> Any:
        """What a call returns: `out` where it was given, else the new array as the operands' kind."""
        self.done()
        return out if out is not None else self.space.returned(x, operands)

    def results(self, group: list[Array], out: Any, *operands: Any) -> Any:
        """The same for a list."""
        self.done()
        return out if out is not None else [self.space.returned(x, operands) for x in group]

    def public(self, x: Array, operand: Any) -> Any:
        """A view for the caller: an ndarray on the host, else as the kind of an operand (of a list, its first)."""
        if self.place is HOST:
            return x
        return self.space.returned(x, tuple(operand[:1]) if isinstance(operand, list | tuple) else (operand,))

    def done(self) -> None:
        """The work is enqueued: other libraries' streams wait for `out`, and before they reuse what it reads."""
        for stream in self._streams:
            from ..operands import cuda as interop_cuda

            interop_cuda.give_back(stream, self.place)

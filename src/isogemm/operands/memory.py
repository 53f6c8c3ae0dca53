"""Memory of CPU tensors as arrays, and new tensors with arrays over them. Imports no torch of its own.

`Tensor.numpy` marks a storage as one that is never resized again, and so does a tensor made of an array; FSDP frees
and restores storages by resizing them. So addresses are taken, as on a CUDA device, and torch allocates what it gets.
An array keeps its tensor alive, but not the storage's memory, which its owner may resize: arrays last for one call.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import DTYPES, INT32
from ..errors import LimitError

Array = NDArray[Any]


class _Memory(ctypes.c_char * sys.maxsize):  # type: ignore[misc]
    """Memory from an address on, with the tensor whose it is; NumPy asks no more of it than a sufficient length."""

    __slots__ = ("owner",)


_at = _Memory.from_address
_ndarray = np.ndarray
# No memory of a process begins below on common systems: only there is the storage asked whether it has any.
_LOW = 2**40
_ANYWHERE = 64  # an address for no elements


def view(x: Any, dtype: np.dtype[Any]) -> Array | None:
    """The memory of a CPU tensor of torch's own types; None where it has none, or none that can be read as it is.

    The tensor has this dtype, and is no wrapper around another one.
    """
    try:
        address = x.data_ptr()
        if x.is_neg():  # lazily: the memory holds the opposite
            return None
        if address < _LOW and _is_nowhere(x, address, dtype.itemsize):
            if x.numel() or x.is_meta:
                return None
            address = _ANYWHERE
        memory = _at(address)
        memory.owner = x
        if x.is_contiguous():
            return _ndarray(tuple(x.shape), dtype, memory)
        item, steps = dtype.itemsize, x.stride()
        if len(steps) == 2:  # most of them, in half the time
            return _ndarray(tuple(x.shape), dtype, memory, 0, (steps[0] * item, steps[1] * item))
        return _ndarray(tuple(x.shape), dtype, memory, 0, [step * item for step in steps])
    except RuntimeError:  # sparse, nested, or a function transform's
        return None


def _is_nowhere(x: Any, address: int, item: int) -> bool:
    """Whether the storage is empty or was freed: the address is that of an offset from nothing."""
    return address == 0 or bool(address == x.storage_offset() * item)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, Array]:
    """A new contiguous CPU tensor, and an array over it. Raises LimitError: there is not enough memory."""
    if not _KINDS:
        _learn()
    try:
        made = _strided(shape, _steps(shape), _KINDS[dtype])
    except RuntimeError as error:
        raise LimitError(
            "memory for the result", limit="what is free", value=list(shape), nearest="fewer rows"
        ) from error
    address = made.data_ptr() or _ANYWHERE
    memory = _at(address)
    memory.owner = made
    array = _ndarray(shape, dtype, memory)
    if array.nbytes >= _LARGE:
        _ask_for_huge_pages(address, array.nbytes)
    return made, array


def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return shape[1] or 1, 1
    steps, step = [1] * len(shape), 1
    for i in range(len(shape) - 1, 0, -1):
        step *= shape[i] or 1
        steps[i - 1] = step
    return tuple(steps)


_KINDS: dict[np.dtype[Any], Any] = {}  # torch's names of the types, once it is here


def _learn() -> None:
    """How to allocate: by what torch's compiled code calls, which no mode intercepts and which takes half the time."""
    global _strided
    torch = sys.modules["torch"]
    _strided = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", _strided)
    # In one step: another thread that finds some of them looks no further.
    _KINDS.update({dtype: getattr(torch, dtype.name) for dtype in (*DTYPES, INT32)})


def _strided(shape: tuple[int, ...], steps: tuple[int, ...], kind: Any) -> Any:
    return sys.modules["torch"].empty_strided(shape, steps, dtype=kind, device="cpu")


def tensor_of(x: Array) -> Any:
    """The tensor over whose memory an array of this module lies, in the array's shape; None for other arrays."""
    memory: Any = x.base
    while isinstance(memory, _ndarray):
        memory = memory.base
    if type(memory) is not _Memory:
        return None
    owner, item = memory.owner, x.itemsize
    if owner.shape == x.shape and x.flags.c_contiguous and owner.is_contiguous():
        return owner
    first = (x.ctypes.data - owner.data_ptr()) // item if x.size else 0
    return owner.as_strided(x.shape, [step // item for step in x.strides], owner.storage_offset() + first)


_LARGE = 2**22  # bytes; NumPy's own limit, for the same reason: memory that is new is written four times as fast
_PAGE, _HUGE = 4096, 14  # MADV_HUGEPAGE


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Ask for them as NumPy does for what it allocates; a system that has none says so, and nothing is lost."""
    if sys.platform == "linux":
        first = -(-address // _PAGE) * _PAGE
        _advise(first, nbytes - (first - address), _HUGE)


if sys.platform == "linux":
    # A prototype of our own: setting argtypes on a library's function would change them for the whole process.
    _advise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(
        ("madvise", ctypes.CDLL(None))
    )

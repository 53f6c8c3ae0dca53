"""The bench that kernels are tried on: operands among poison, results between margins, and the first wrong bit.

What lies around and between operands is no number, so that reading it shows. What lies around and between results has
to stay as it is, so that writing there shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..contract.compare import bits

__all__ = [
    "MARGIN",
    "POISON",
    "Bench",
    "Buffer",
    "Machine",
    "Output",
    "among_poison",
    "beside",
    "difference",
    "words_of",
]

Array = NDArray[Any]
POISON = {1: 1, 2: 0x7FC1, 4: 0x7FC00BAD}  # NaNs, in bfloat16 as in float32, that no kernel returns; of bytes, true
MARGIN = 256  # elements around results; a multiple of every alignment that is part of a case


class Buffer(Protocol):
    """Memory of a device."""

    address: int

    def read(self) -> Array:
        """What it holds now, after everything enqueued."""
        ...


class Machine(Protocol):
    """A device as trials and tuning need it; tests bring their own."""

    device: int

    def stamp(self) -> Mapping[str, str]:
        """Everything that could change a kernel's bits besides its own source."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is captured into a graph: nothing may be run, compared or waited for."""
        ...

    def put(self, flat: Array) -> Buffer:
        """Copy bits to the device."""
        ...

    def stream(self) -> int:
        """The raw handle of the current stream."""
        ...


class Output:
    """Poisoned memory for a result of a kernel, and the margins that it must not touch.

    Parameters
    ----------
    machine : Machine
    shape : sequence of int
    itemsize : int
        2 or 4 bytes of an element.
    strides : sequence of int, optional
        In elements; contiguous where absent.
    shift : int
        Elements that the result begins beyond the margin: no better aligned than that.
    held : array of words, optional
        What the result holds before the kernel runs, instead of poison.
    """

    def __init__(
        self, machine: Machine, shape: Sequence[int], itemsize: int, *, strides: Sequence[int] | None = None,
        shift: int = 0, held: Array | None = None,
    ) -> None:  # fmt: skip
        self._place = tuple(shape), None if strides is None else tuple(strides), MARGIN + shift
        count = int(np.prod(shape)) if strides is None else _extent(shape, strides)
        flat = np.full(count + shift + 2 * MARGIN, POISON[itemsize], f"u{itemsize}")
        if held is not None:
            self._inside(flat)[...] = held.view(flat.dtype).reshape(self._place[0])
        self.buffer = machine.put(flat)
        self.address: int = self.buffer.address + itemsize * (MARGIN + shift)

    def read(self) -> tuple[Array, int]:
        """The words of the result, in its shape, and how many beside them were written."""
        flat = self.buffer.read().copy()
        inside = self._inside(flat)
        found, poison = inside.copy(), POISON[flat.itemsize]
        inside[...] = poison
        return found, int(np.count_nonzero(flat != poison))

    def compare(self, name: str, want: Array) -> str:
        """The first element that differs from `want` (numbers or words), or what was written beside it."""
        found, stray = self.read()
        return difference(name, found, want) or beside(name, stray)

    def _inside(self, flat: Array) -> Array:
        shape, strides, begin = self._place
        if strides is None:
            return flat[begin : len(flat) - MARGIN].reshape(shape)
        return np.lib.stride_tricks.as_strided(flat[begin:], shape, [s * flat.itemsize for s in strides])


class Bench:
    """A device with what trials do on it.

    Attributes
    ----------
    machine : Machine
    plain : Family or None
        The family that others are compared with where a device's arithmetic has no definition.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.plain: Any = None

    @property
    def device(self) -> int:
        """The device's number."""
        return self.machine.device

    def stream(self) -> int:
        """The raw handle of the current stream."""
        return self.machine.stream()

    def put(self, x: Array | None) -> Buffer | None:
        """Words, or numbers as their words, on the device; None stays None."""
        return None if x is None else self.machine.put(words_of(np.ascontiguousarray(x)).reshape(-1))

    def output(self, shape: Sequence[int], itemsize: int, **more: Any) -> Output:
        """`Output` on this device."""
        return Output(self.machine, shape, itemsize, **more)


def words_of(x: Array) -> Array:
    """The same memory as unsigned words."""
    return x if x.dtype.kind == "u" else x.view(f"u{x.itemsize}")


def among_poison(x: Array, strides: Sequence[int], begin: int = 0) -> tuple[Array, Array]:
    """Words in flat memory among poison, and the view of them that an operand is.

    Parameters
    ----------
    x : array of words
    strides : sequence of int
        In elements. Where places coincide, the last one written stays.
    begin : int
        Elements before the first.
    """
    flat = np.full(begin + 1 + _extent(x.shape, strides) + MARGIN, POISON[x.itemsize], x.dtype)
    view = np.lib.stride_tricks.as_strided(flat[begin:], x.shape, [s * x.itemsize for s in strides])
    view[...] = x
    return flat, view


def difference(what: str, got: Array, want: Array) -> str:
    """The first element whose bits differ, and how many do; empty where none does.

    Parameters
    ----------
    what : str
        Name of the result.
    got : array of words
        Read from a device.
    want : array
        Numbers or words, of the same shape and item size.
    """
    words = want if want.dtype.kind == "u" else bits(np.ascontiguousarray(want))
    found = got.view(words.dtype).reshape(words.shape)
    unequal = found != words
    if not unequal.any():
        return ""
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
    digits = 2 + 2 * words.itemsize
    pair = f"{int(found[at]):#0{digits}x} for {int(words[at]):#0{digits}x}"
    return f"{int(unequal.sum())} of {unequal.size} differ, first {what}{list(at)} {pair}"


def beside(name: str, stray: int) -> str:
    """What is said of words that were written beside a result; empty where there are none."""
    return f"{stray} words beside {name} were written" if stray else ""


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one."""
    return 0 if 0 in shape else 1 + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))

"""The operands of a call: where they lie, and what its results become."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import copied, open_device
from ..errors import DeviceError
from ..operands import views
from ..operands.device_array import HOST, DeviceId, holder_of
from ..operands.tensors import is_tensor, wrote
from ..planner.device import Device

Array = NDArray[Any]


class Operands:
    """The operands of one call: their views, which have to lie on one device, and that device."""

    __slots__ = ("_device", "_first", "_streams", "_tensors", "place")

    def __init__(self) -> None:
        self.place: DeviceId = HOST  # that of the operands seen so far
        self._first = ""
        self._device: Device | None = None
        self._tensors = False
        self._streams: set[int] = set()

    def view(self, name: str, x: Any) -> Array:
        """An ndarray over the memory of `x`.

        Raises DeviceError: it lies on another device than the operands before it. Raises DTypeError, LayoutError or
        OptionError: as `isogemm.operands.views.view`.
        """
        if type(x) is np.ndarray and self.place is HOST:  # most calls, in as few steps as there can be
            self._first = self._first or name
            return x
        viewed, place = views.view(name, x)
        self.note(name, place)
        if place is HOST:
            self._tensors = self._tensors or is_tensor(x)
        else:
            stream = holder_of(viewed).stream
            if stream is not None:
                self._streams.add(stream)
        return viewed

    def note(self, name: str, place: DeviceId, *, moves: bool = False) -> None:
        """Take notice of where an operand lies; `moves`: its method ``to`` knows every device."""
        if not self._first:
            self._first, self.place = name, place
        elif place != self.place:
            here, there = (name, self.place) if place is HOST else (self._first, place)
            raise DeviceError(
                f"devices of {self._first} and {name}",
                limit="one device",
                value=f"{self.place} and {place}",
                nearest=f"{name}.to('{there}')" if moves and here is name else copied(here, there),
            )

    def optional(self, name: str, x: Any) -> Array | None:
        """The same for an operand that may be missing."""
        return None if x is None else self.view(name, x)

    @property
    def device(self) -> Device:
        """The device of the operands."""
        if self._device is None:
            self._device = open_device(self.place, self._tensors)
        return self._device

    def result(self, x: Array, out: Any, *operands: Any) -> Any:
        """What a call returns: `out` where it was given, else the new array as the operands' kind."""
        self.done()
        wrote(out)
        return out if out is not None else self.device.result(x, operands)

    def results(self, group: list[Array], out: Any, *operands: Any) -> Any:
        """The same for a list."""
        self.done()
        wrote(out)
        return out if out is not None else [self.device.result(x, operands) for x in group]

    def public(self, x: Array, operand: Any) -> Any:
        """A view for the caller: an ndarray on the host, else as the kind of an operand (of a list, its first)."""
        if self.place is HOST:
            return x
        return self.device.result(x, tuple(operand[:1]) if isinstance(operand, list | tuple) else (operand,))

    def done(self) -> None:
        """Let the streams of other libraries wait for the enqueued work, which writes `out` and reads operands."""
        for stream in self._streams:
            self.device.release(stream)

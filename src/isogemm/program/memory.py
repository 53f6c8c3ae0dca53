"""The one allocation of a layout, its tensors as arrays, and the canaries around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.cpu import steps as kernels
from ..errors import LayoutError
from ..formats.blocks import FORMATS

PATTERN = 0xC5


class ProgramMemory:
    """Tensors of a layout that was checked, in one block of bytes."""

    def __init__(self, layout: Mapping[str, Any]) -> None:
        room = np.zeros(layout["bytes"] + layout["align"], np.uint8)
        first = -room.ctypes.data % layout["align"]
        self.bytes: NDArray[np.uint8] = room[first : first + layout["bytes"]]
        self.tensors = {entry["name"]: entry for entry in layout["tensors"]}
        self.names = list(self.tensors)
        self._place = {name: i for i, name in enumerate(self.names)}
        self._address = self.bytes.ctypes.data
        self._spans = np.array([self._span(entry, layout) for entry in layout["tensors"]], np.int64)
        kernels.arm(self._spans, self.some(self.names), PATTERN)

    def _span(self, entry: Mapping[str, Any], layout: Mapping[str, Any]) -> tuple[int, int, int, int]:
        begin, size, align = self._address + entry["offset"], entry["bytes"], layout["align"]
        end = begin + -(-size // align) * align + layout["canary"]
        return begin - layout["canary"], begin, begin + size, end

    def array(self, name: str) -> NDArray[Any]:
        """A tensor; of a quantized weight the rows of its blocks."""
        entry = self.tensors[name]
        part = self.bytes[entry["offset"] : entry["offset"] + entry["bytes"]]
        if entry["dtype"] in FORMATS:
            return np.asarray(part.reshape(entry["shape"][0], -1))
        return np.asarray(part.view(entry["dtype"]).reshape(entry["shape"]))

    def strided(self, view: Any) -> NDArray[Any]:
        """A tensor as a kernel sees it."""
        if self.tensors[view.name]["dtype"] in FORMATS:
            return self.array(view.name)
        flat = self.array(view.name).reshape(-1)
        strides = tuple(step * flat.itemsize for step in view.strides)
        return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides)

    def some(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Tensors by number, as `arm` and `check` take them."""
        return np.array([self._place[name] for name in names], np.int64)

    def arm(self, which: NDArray[np.int64]) -> None:
        """Write the canaries of tensors whose lives begin."""
        kernels.arm(self._spans, which, PATTERN)

    def check(self, which: NDArray[np.int64], phase: str, operation: str) -> None:
        """Look at the canaries of tensors.

        Raises LayoutError of one that has changed, with the tensor, the phase, the operation after which that was seen
        and the byte.
        """
        number, address = kernels.broken(self._spans, which, PATTERN)
        if number >= 0:
            _, begin, end, _ = (int(x) for x in self._spans[number])
            where = f"byte {address - end} behind its end" if address >= end else f"byte {begin - address} before it"
            raise LayoutError(
                f"canary of {self.names[number]}, phase {phase}, operation {operation}", limit="nobody writes to it",
                value=f"{where} changed, {address - self._address} of the allocation",
                nearest="the operations up to there",
            )  # fmt: skip

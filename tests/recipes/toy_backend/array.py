"""The toy's arrays: memory that isogemm sees by its address, and nobody but the toy reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogemm.operands.device_array import DeviceId, device_array

__all__ = ["TOY", "ToyArray"]

TOY = DeviceId("toy")


class ToyArray:
    """An array on the toy, over the memory of a NumPy array."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data

    def __isogemm_view__(self, name: str) -> np.ndarray[Any, Any]:
        """What every product asks: address, shape, strides and type."""
        x = self.data
        read_only = not x.flags.writeable
        return device_array(x.ctypes.data, x.shape, x.strides, x.dtype, TOY, owner=x, read_only=read_only)

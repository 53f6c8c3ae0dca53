"""The backends behind torch's tensors, by the kind of their device; nothing here names one."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..backends import open_device
from ..operands.device_array import DeviceId

__all__ = ["column"]


@cache
def column(name: str, kind: str) -> Any:
    """The module of one column, such as ``rows``, for tensors on a kind of device; see `isogemm.planner.device`.

    Raises
    ------
    DeviceError
        There is none.
    """
    return open_device(DeviceId(kind)).column(name)

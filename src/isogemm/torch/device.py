"""The backends behind torch's tensors, by the kind of their device, and the dtypes that they have; none is named."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..backends import open_device
from ..operands.device_array import DeviceId

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def column(name: str, kind: str) -> Any:
    """The module of one column, such as ``rows``, for tensors on a kind of device; see `isogemm.planner.device`.

    Raises DeviceError: there is none.
    """
    return open_device(DeviceId(kind)).column(name)

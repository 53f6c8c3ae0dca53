"""Quantized weights on CUDA devices: where a device is, and the copy of a matrix there."""

from __future__ import annotations

import functools
from typing import Any

from ...errors import DeviceError
from ...ghost import HOST, Device

__all__ = ["place_of"]


def place_of(device: Any) -> Device:
    """The place that a device's name, number or torch's object stands for.

    Raises
    ------
    DeviceError
        There is none, or torch cannot use it.
    """
    if isinstance(device, Device):
        kind, index = device.kind, str(device.ordinal)
    elif type(device) is int:
        kind, index = "cuda", str(device)
    else:
        kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return HOST
    count = _count() if kind == "cuda" else 0
    if kind != "cuda" or not (index.isdecimal() or not index) or int(index or 0) >= count:
        raise DeviceError(
            "device of a quantized matrix", limit=f"cpu, or one of {count} CUDA devices that torch can use",
            value=str(device), nearest="'cuda'" if count else "'cpu'",
        )  # fmt: skip
    if not index:
        import torch

        return Device("cuda", torch.cuda.current_device())
    return Device("cuda", int(index))


@functools.cache
def _count() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0

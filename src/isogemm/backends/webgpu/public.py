"""`isogemm.webgpu`: arrays on any GPU, which the products of isogemm take and return.

w = isogemm.webgpu.array(weights)          # uploaded once
y = isogemm.linear(isogemm.webgpu.array(x), w).numpy()
"""

from __future__ import annotations

from typing import Any

from ...base.arguments import whole
from ...errors import DeviceError
from ...operands import views
from ...operands.device_array import DeviceId
from .. import find
from .adapter import open_adapter
from .array import WebGpuArray, uploaded
from .choose import Crossovers
from .device import open_device
from .measure import measured

__all__ = ["Crossovers", "WebGpuArray", "array", "device", "measure"]


def device(ordinal: int = 0) -> str:
    """The name of a device, for `array` and `isogemm.plan`: ``webgpu:0``.

    Raises
    ------
    OptionError
        wgpu is not installed.
    DTypeError
        No whole number.
    DeviceError
        There is no such adapter, or no driver.
    """
    return str(open_adapter(whole("number of a WebGPU device", ordinal)).place)


def array(x: Any, device: str | None = None) -> WebGpuArray:
    """A copy of an array on a WebGPU device.

    Parameters
    ----------
    x : array
        float32, float16 or bfloat16, any shape; a torch tensor, or what speaks DLPack, in the host's memory too.
    device : str, optional
        By default the preferred one.

    Raises
    ------
    DTypeError
        Another element type, or no array.
    LayoutError, OptionError
        A tensor that is sparse or lazily negated, or that records gradients.
    LimitError
        It does not fit into a buffer of the device.
    OptionError
        wgpu is not installed.
    DeviceError
        There is no such device, it is not WebGPU's, there is no driver, or `x` is on another device.
    """
    return WebGpuArray(uploaded(views.array("x", x), _webgpu_device(device)))


def measure(device: str | None = None) -> Crossovers:
    """Time the kernels of a device against each other, use what was found and keep it for later processes.

    Returns
    -------
    Crossovers
        Rows and columns from which one kernel is faster than another; they never change a bit.

    Raises
    ------
    OptionError, DeviceError
        As `array` has them.
    """
    there = open_device(_webgpu_device(device))
    there.crossovers = measured(there.admissions)
    return there.crossovers


def _webgpu_device(device: str | None) -> DeviceId:
    """The device of that name, or the preferred one; a DeviceError where it is another backend's."""
    found = find("webgpu" if device is None else device)
    if found.kind != "webgpu":
        raise DeviceError("device of a WebGPU array", limit="webgpu or webgpu:N", value=device, nearest="'webgpu'")
    return found

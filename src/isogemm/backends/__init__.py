"""The backends, one line each; a backend is loaded when something of its is first asked for.

A backend's module has a `isogemm.planner.device.Device` for each of its devices. Nothing above this folder names one:
operands say where they lie, and `open_device` opens that.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError
from ..operands.device_array import HOST, DeviceId
from ..planner.device import Device

if TYPE_CHECKING:
    from .cpu.gemm.plan import Plan as Plan
    from .cpu.work import WorkPlan as WorkPlan
    from .cuda.plans.plan import DevicePlan as DevicePlan

__all__ = ["BACKENDS", "accelerator", "backend", "copied", "find", "of_tensor", "open_device", "planner"]

BACKENDS = {
    "cpu": "isogemm.backends.cpu.device",
    "cuda": "isogemm.backends.cuda.device",
    "webgpu": "isogemm.backends.webgpu.device",
}
_ACCELERATOR = "cuda"
_COPIES = {"webgpu": "isogemm.webgpu.array({}, '{}')"}  # what copies an array there; elsewhere arrays have a method


@cache
def backend(kind: str) -> Any:
    """The module of a backend: a `isogemm.planner.device.Backend`.

    Raises
    ------
    DeviceError
        There is none of that name.
    """
    if kind not in BACKENDS:
        raise DeviceError("device", limit=" or ".join(BACKENDS), value=kind, nearest=str(HOST))
    return import_module(BACKENDS[kind])


def accelerator() -> Any:
    """The module of the backend whose devices torch numbers: torch has one such kind in a process."""
    return backend(_ACCELERATOR)


def open_device(place: DeviceId, tensors: bool = False) -> Device:
    """The device of a call; `tensors`: results are to lie in memory that torch allocates."""
    found: Device = backend(place.kind).open_device(place, tensors)
    return found


def planner(device: str) -> Any:
    """Who plans for a device: one that is here, or a GPU of that name, in any case of letters, which need not be.

    Raises
    ------
    DeviceError, OptionError
        No such device.
    """
    device = device.lower()
    kind = device.partition(":")[0]
    return open_device(find(device)) if kind in BACKENDS and kind != _ACCELERATOR else accelerator().planner(device)


def copied(name: str, place: DeviceId) -> str:
    """The expression that copies an array of that name to a device."""
    return _COPIES.get(place.kind, "{}.to('{}')").format(name, place)


def of_tensor(x: Any) -> DeviceId:
    """Where a torch tensor lies."""
    return HOST if x.get_device() < 0 else DeviceId(_ACCELERATOR, x.get_device())


def find(device: Any, what: str = "device") -> DeviceId:
    """The device that a name, a number or torch's object stands for.

    Raises
    ------
    DeviceError
        There is none, or it cannot be used.
    OptionError
        The package that it needs is not installed; the error names the extra.
    """
    if isinstance(device, DeviceId):
        kind, index = device.kind, str(device.ordinal)
    elif type(device) is int:
        kind, index = _ACCELERATOR, str(device)
    else:
        kind, _, index = str(device).partition(":")
    if kind == HOST.kind:
        return HOST
    known = kind if kind in BACKENDS else _ACCELERATOR
    count = backend(known).usable()
    if kind == known != _ACCELERATOR and not count:
        open_device(DeviceId(kind, 0))  # its error says what is missing: a package, or a driver
    if kind != known or not (index.isdecimal() or not index) or int(index or 0) >= count:
        limit = f"{HOST}, or one of {count} {known.upper()} devices that can be used here"
        raise DeviceError(what, limit=limit, value=str(device), nearest=repr(known if count else str(HOST)))
    return DeviceId(kind, int(index) if index else backend(kind).current())

"""Facts about GPUs, streams and addresses, and the stamp of everything that could change a kernel's bits or speed."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from ctypes import c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ....errors import DeviceError
from .libcuda import Driver, context, driver

MULTIPROCESSORS, L2_BYTES, MAJOR, MINOR, MAX_SHARED, MEMORY_KHZ, BUS_BITS = (
    16,
    38,
    75,
    76,
    97,
    36,
    37,
)  # CUdevice_attribute
MEMORY_TYPE, ORDINAL, RANGE_START, RANGE_SIZE = 2, 9, 11, 12  # CUpointer_attribute
KINDS = {1: "host", 2: "device", 4: "managed"}


@dataclass(frozen=True)
class DeviceFacts:
    """A GPU."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    max_shared: int  # bytes of shared memory that a block may have
    memory: float  # GB/s that the memory's bus could carry; 0 where the driver does not say
    driver: str | None  # version of the kernel driver, as "580.159.04"; None where the system does not say

    @property
    def arch(self) -> str:
        """What compilers call it, as "sm_90a": with its own instructions where there are any."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def overlaps(self) -> bool:
        """Whether a launch may begin while the one before it ends: from Hopper on."""
        return self.capability >= (9, 0)


def count() -> int:
    """How many GPUs there are; 0 without a CUDA driver, or with one that cannot start."""
    try:
        return driver().integer("cuDeviceGetCount", doing="counting devices")
    except DeviceError:
        return 0


@functools.cache
def device(ordinal: int) -> DeviceFacts:
    """Facts of one GPU."""
    on = driver()
    doing = f"reading the facts of device {ordinal}"
    number = on.integer("cuDeviceGet", ordinal, doing=doing)
    name = ctypes.create_string_buffer(256)
    on.call("cuDeviceGetName", name, len(name), number, doing=doing)
    wanted = (MAJOR, MINOR, MULTIPROCESSORS, L2_BYTES, MAX_SHARED, MEMORY_KHZ, BUS_BITS)
    major, minor, processors, l2_bytes, shared, khz, bits = (on.device_attribute(x, number) for x in wanted)
    memory = 2 * khz * bits / 8e6  # two transfers a clock
    said = name.value.decode()
    return DeviceFacts(ordinal, said, (major, minor), processors, l2_bytes, shared, memory, kernel_driver())


@functools.cache
def kernel_driver() -> str | None:
    """Version of the kernel driver."""
    try:
        found = re.search(r"Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found.group(1) if found else _asked_of_tool()


def _asked_of_tool() -> str | None:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


@functools.cache
def stamp(ordinal: int) -> dict[str, Any]:
    """Everything beside our own source that could change a kernel's bits or speed, as JSON-ready values.

    Returns
    -------
    dict
        ``device``, ``capability``, ``multiprocessors``, ``l2_bytes``; ``driver`` (kernel driver), ``cuda`` (what the
        driver speaks); versions of ``torch``, ``cuda_torch``, ``triton``, ``nvrtc``, ``cublaslt``; None where absent.
    """
    import torch

    facts = device(ordinal)
    version = driver().integer("cuDriverGetVersion", doing="asking for the version")
    return {
        "device": facts.name,
        "capability": "{}.{}".format(*facts.capability),
        "multiprocessors": facts.multiprocessors,
        "l2_bytes": facts.l2_bytes,
        "driver": facts.driver,
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "torch": str(torch.__version__),
        "cuda_torch": torch.version.cuda,
        "triton": package_version("triton"),
        "nvrtc": nvrtc_version(),
        "cublaslt": cublaslt_version(),
    }


def package_version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def nvrtc_version() -> str | None:
    """Version of the NVRTC that is loaded, with its build where a distribution states it."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return None
    build = package_version("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}")
    return build if build and build.startswith(f"{major}.{minor}.") else f"{major}.{minor}"


@functools.cache
def cublaslt_version() -> int | None:
    """Version of the cuBLASLt that is loaded, as it numbers itself."""
    try:
        from nvmath.bindings import cublasLt

        return int(cublasLt.get_version())
    except (ImportError, RuntimeError):
        return None


@functools.cache
def stream_getter() -> Callable[[int], int]:
    """Torch's function from a device's ordinal to the raw handle of its current stream in this thread."""
    import torch

    getter: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return getter


def current_stream(ordinal: int) -> int:
    """Raw handle of torch's current stream of a device in this thread; 0 is the default stream."""
    return stream_getter()(ordinal)


def is_capturing(ordinal: int | None = None) -> bool:
    """Whether torch's current stream of a device (of the current one) is being captured into a CUDA graph."""
    import torch

    if ordinal is None or torch.cuda.current_device() == ordinal:
        return _capture_getter()()
    with torch.cuda.device(ordinal):
        return _capture_getter()()


@functools.cache
def _capture_getter() -> Callable[[], bool]:
    import torch

    getter: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return getter


@dataclass(frozen=True)
class Pointer:
    """What the driver knows about an address."""

    # device, host, managed or unknown: not from CUDA, or null. A kernel can read managed and registered host memory too
    kind: str
    ordinal: int  # the device it belongs to; -1 when unknown
    # start, nbytes: the allocator's memory around the address, which may hold many tensors
    start: int
    nbytes: int


def pointer(address: int, on: Driver | None = None) -> Pointer:
    """Ask the driver about an address, in one call; never an error for a foreign or null one.

    Takes microseconds: over many addresses, ask again only outside the allocation that the last answer names.
    """
    on = on or driver()
    kind, ordinal, start, nbytes = c_uint(), c_int(-1), c_void_p(), c_uint64()
    wanted = (c_int * 4)(MEMORY_TYPE, ORDINAL, RANGE_START, RANGE_SIZE)
    places = (c_void_p * 4)(*[ctypes.addressof(x) for x in (kind, ordinal, start, nbytes)])
    with context(0, on):
        on.call("cuPointerGetAttributes", 4, wanted, places, address, doing="asking about an address")
    if kind.value not in KINDS:
        return Pointer("unknown", -1, 0, 0)
    return Pointer(KINDS[kind.value], ordinal.value, start.value or 0, nbytes.value)

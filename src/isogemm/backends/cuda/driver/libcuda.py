"""libcuda through ctypes: a checked table of functions, contexts and the capture mode."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from ....errors import DeviceError

_Pointer = POINTER(c_void_p)
_Int, _Size = POINTER(c_int), POINTER(c_size_t)
# Versioned names are the ones that cuda.h maps the plain names to.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_Int,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (_Int, c_int),
    "cuDeviceGetCount": (_Int,),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (_Int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_Pointer, c_int),
    "cuCtxGetCurrent": (_Pointer,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_Pointer,),
    "cuThreadExchangeStreamCaptureMode": (_Int,),
    "cuStreamCreate": (_Pointer, c_uint),
    "cuModuleLoadData": (_Pointer, c_void_p),
    "cuModuleGetFunction": (_Pointer, c_void_p, c_char_p),
    "cuFuncLoad": (c_void_p,),
    "cuFuncGetAttribute": (_Int, c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, _Size, _Size),
    "cuPointerGetAttributes": (c_uint, c_void_p, c_void_p, c_uint64),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, c_uint64, *[c_void_p] * 4, *[c_int] * 4),
}

CAPTURE_RELAXED = 2
NON_BLOCKING = 1
INVALID_CONTEXT = 201  # a CUresult


class DriverError(DeviceError):
    """The CUDA driver refused a call.

    Attributes
    ----------
    code : int
        The CUresult.
    """

    def __init__(self, code: int, name: str, text: str, doing: str) -> None:
        self.code = code
        super().__init__(
            f"the CUDA driver refused {doing}", limit=text, value=f"{name} ({code})", nearest="what the driver accepts"
        )


class Driver:
    """The functions of a libcuda, with their results checked.

    Parameters
    ----------
    library : object
        Anything with libcuda's functions as attributes (ctypes function objects); tests bring their own.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.functions: dict[str, Any] = {}
        for name, argtypes in SIGNATURES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = argtypes, c_int
                self.functions[name] = function
        # Without argtypes ctypes passes prepared arguments (byref, from_param) on as they are.
        self.launch = library.cuLaunchKernelEx
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self.call("cuInit", 0, doing="initialisation")

    def has(self, name: str) -> bool:
        """Whether this driver is new enough to know a function."""
        return name in self.functions

    def call(self, name: str, *arguments: Any, doing: str) -> None:
        """Call a function; raise `DriverError`, which says what was being done, unless it succeeds."""
        if name not in self.functions:
            raise DeviceError(
                f"this CUDA driver cannot do {doing}", limit=f"needs {name}", value="absent", nearest="a newer driver"
            )
        code = self.functions[name](*arguments)
        if code:
            raise self.error(code, doing)

    def error(self, code: int, doing: str) -> DriverError:
        """The error for a CUresult, in the driver's own words."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            self.functions[name](code, byref(text))
            words.append((text.value or b"unknown").decode())
        return DriverError(code, words[0], words[1], doing)

    def integer(self, name: str, *arguments: Any, doing: str) -> int:
        """The result of a function whose first parameter is an int to fill."""
        value = c_int()
        self.call(name, byref(value), *arguments, doing=doing)
        return value.value

    def handle(self, name: str, *arguments: Any, doing: str) -> int:
        """The result of a function whose first parameter is a handle to fill; 0 for none."""
        value = c_void_p()
        self.call(name, byref(value), *arguments, doing=doing)
        return value.value or 0

    def device_attribute(self, attribute: int, device: int) -> int:
        """A CUdevice_attribute."""
        return self.integer(
            "cuDeviceGetAttribute", attribute, device, doing=f"reading attribute {attribute} of device {device}"
        )

    def primary(self, device: int) -> int:
        """The primary context of a device; retained once and never released."""
        with self._lock:
            if device not in self._contexts:
                handle = self.handle("cuDevicePrimaryCtxRetain", device, doing=f"taking the context of device {device}")
                self._contexts[device] = handle
            return self._contexts[device]

    def entered(self) -> int:
        """A device whose primary context is retained, or else the first."""
        with self._lock:
            return next(iter(self._contexts), 0)


@functools.cache
def driver() -> Driver:
    """The machine's CUDA driver.

    Raises
    ------
    DeviceError
        Where there is none.
    """
    try:
        # A CDLL, not a PyDLL: a launch may wait for the GPU, and a callback that the GPU waits for may need the GIL.
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            "no CUDA driver", limit="libcuda.so.1 can be loaded", value=str(error), nearest='device "cpu"'
        ) from error
    return Driver(library)


@contextmanager
def context(device: int, on: Driver | None = None) -> Iterator[None]:
    """Make the primary context of `device` current in this thread, for a while."""
    on = on or driver()
    wanted = on.primary(device)
    current = on.handle("cuCtxGetCurrent", doing="asking for the current context")
    if current == wanted:
        yield
    elif not current and device == 0:
        # A new thread: this is what its first call of the CUDA runtime would do, for good.
        on.call("cuCtxSetCurrent", wanted, doing="entering the context of device 0")
        yield
    else:
        on.call("cuCtxPushCurrent_v2", wanted, doing=f"entering the context of device {device}")
        try:
            yield
        finally:
            on.handle("cuCtxPopCurrent_v2", doing=f"leaving the context of device {device}")


@contextmanager
def relaxed(on: Driver | None = None) -> Iterator[None]:
    """Let this thread load modules and allocate while some stream is being captured."""
    on = on or driver()
    mode = c_int(CAPTURE_RELAXED)
    on.call("cuThreadExchangeStreamCaptureMode", byref(mode), doing="relaxing the capture mode")
    try:
        yield
    finally:
        on.call("cuThreadExchangeStreamCaptureMode", byref(mode), doing="restoring the capture mode")

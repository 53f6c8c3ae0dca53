"""A libcuda of Python: C callbacks that record what a launch would have run with."""

from __future__ import annotations

import ctypes
import struct
import threading
from ctypes import c_char_p, c_int, c_uint, c_uint64, c_void_p
from typing import Any

from isogemm.backends.cuda.driver import libcuda

CONFIG = struct.Struct("<7I4xQQI4x")


def peek(address: int | None, kind: Any) -> Any:
    return ctypes.cast(address or 0, ctypes.POINTER(kind))


class FakeCuda:
    """libcuda's functions as C callbacks into Python; records what a launch would have run with."""

    contexts = (0xC0, 0xC1)

    def __init__(self, sizes: tuple[int, ...] = (8, 8, 8, 4, 8, 8), **missing: None) -> None:
        self.sizes, self.launches, self.attributes = sizes, [], {}
        self.local = threading.local()
        self.modes: list[int] = []
        self.result = 0
        self.pause: Any = None
        self.maps: list[tuple[Any, ...]] = []
        self.known: dict[int, tuple[int, int, int, int]] = {}
        table = {name: getattr(self, "_" + name, None) for name in (*libcuda.SIGNATURES, "cuLaunchKernelEx")}
        for name, function in table.items():
            if function is None or name in missing:
                continue
            argtypes = libcuda.SIGNATURES.get(name, (c_void_p,) * 4)
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *argtypes)(function))
        self.cuLaunchKernelEx.argtypes = None

    def stack(self) -> list[int]:
        if not hasattr(self.local, "stack"):
            self.local.stack = [0]
        return self.local.stack

    def _cuInit(self, flags: int) -> int:
        return 0

    def _cuGetErrorName(self, code: int, out: Any) -> int:
        self.words = {1: b"CUDA_ERROR_INVALID_VALUE", 201: b"CUDA_ERROR_INVALID_CONTEXT", 700: b"CUDA_ERROR_ILLEGAL"}
        out[0] = c_char_p(self.words[code])
        return 0

    def _cuGetErrorString(self, code: int, out: Any) -> int:
        self.text = c_char_p(b"text of %d" % code)
        out[0] = self.text
        return 0

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        out[0] = 232448
        return 0

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> int:
        out[0] = self.contexts[device]
        return 0

    def _cuCtxGetCurrent(self, out: Any) -> int:
        out[0] = self.stack()[-1]
        return 0

    def _cuCtxSetCurrent(self, handle: int) -> int:
        self.stack()[-1] = handle
        return 0

    def _cuCtxPushCurrent_v2(self, handle: int) -> int:
        self.stack().append(handle)
        return 0

    def _cuCtxPopCurrent_v2(self, out: Any) -> int:
        out[0] = self.stack().pop()
        return 0

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        before = getattr(self.local, "mode", 0)
        self.local.mode, mode[0] = mode[0], before
        self.modes.append(self.local.mode)
        return 0

    def _cuModuleLoadData(self, out: Any, image: int) -> int:
        assert image
        assert self.local.mode == 2, "loading while a stream is captured"
        out[0] = 0x300000001
        return 0

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> int:
        assert module == 0x300000001
        out[0] = 0x400000001
        return 0

    def _cuFuncLoad(self, function: int) -> int:
        return 0

    def _cuFuncGetAttribute(self, out: Any, attribute: int, function: int) -> int:
        out[0] = {0: 1024, 1: 1024}[attribute]
        return 0

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        self.attributes[attribute] = value
        return 0

    def _cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        if index >= len(self.sizes):
            return 1
        size[0] = self.sizes[index]
        return 0

    def _cuLaunchKernelEx(self, config: int, function: int, params: int, extra: int | None) -> int:
        if self.stack()[-1] != self.contexts[0]:
            return 201
        head = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        attributes = [ctypes.string_at(head[8] + 72 * i, 72) for i in range(head[9])]
        if self.pause:
            self.pause()
        pointers = peek(params, c_void_p)
        values = [ctypes.string_at(pointers[i], size) for i, size in enumerate(self.sizes)]
        self.launches.append((head[:7], head[7], values, attributes, function, extra))
        return self.result

    def _cuTensorMapEncodeTiled(self, out: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        sizes, steps, box, ones, *options = rest
        assert out % 64 == 0
        if self.stack()[-1] not in self.contexts:
            return 201
        assert [peek(ones, c_uint)[i] for i in range(rank)] == [1] * rank
        ints = [
            list(peek(p, t)[:n])
            for p, t, n in ((sizes, c_uint64, rank), (steps, c_uint64, rank - 1), (box, c_uint, rank))
        ]
        self.maps.append((kind, address, *ints, tuple(options)))
        ctypes.memset(out, len(self.maps), 128)
        return 0

    def _cuPointerGetAttributes(self, count: int, wanted: int, places: int, address: int) -> int:
        assert list(peek(wanted, c_int)[:count]) == [2, 9, 11, 12]
        if address in self.known:
            for i, (kind, value) in enumerate(
                zip((c_uint, c_int, c_uint64, c_uint64), self.known[address], strict=True)
            ):
                peek(peek(places, c_void_p)[i], kind)[0] = value
        else:
            peek(peek(places, c_void_p)[0], c_uint)[0] = 0
        return 0

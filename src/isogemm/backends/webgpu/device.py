"""An adapter as isogemm sees it: memory, and products by kernels whose bits were admitted."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import FLOAT32, name_of
from ...operands.device_array import DeviceId
from ...planner.device import Device
from ...problem.settings import Settings
from . import elements
from .adapter import Adapter, adapters, open_adapter
from .admission import AdapterAdmissions
from .array import WebGpuArray, WebGpuWeight, buffer_of, empty
from .choose import case_of, check_contract, choices
from .launch import KernelCall, run
from .measure import recalled

Array = NDArray[Any]


class WebGpuDevice(Device):
    """One adapter: products under ``fma/chain`` and ``fma/lanes32``, and ``int32/chain`` of quantized weights."""

    columns: ClassVar = {"quant": "isogemm.backends.webgpu.quant"}

    def __init__(self, adapter: Adapter) -> None:
        self.place, self.adapter = adapter.place, adapter
        self.admissions, self.crossovers = AdapterAdmissions(adapter), recalled(adapter.name)

    def memory(self) -> int:
        return self.adapter.limits.buffer

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return empty(shape, dtype, self.place)

    def assign(self, out: Array, x: Array) -> None:
        elements.copy(self.adapter, out, np.broadcast_to(x, out.shape, subok=True))

    def result(self, x: Array, operands: tuple[Any, ...]) -> WebGpuArray:
        return WebGpuArray(x)

    def pack(self, w: Array) -> WebGpuWeight:
        return WebGpuWeight(w)

    def gemm(
        self, a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
    ) -> None:
        check_contract(self.place, asked.contract)
        types = name_of(a.dtype), name_of(b.dtype)
        self.serve(asked.contract.order.kind, types, KernelCall(a, b, out, asked.accumulate), asked, c=c, bias=bias)

    def plan(self, *checked: Any) -> Any:
        from .plan import plan

        return plan(self.adapter, self.crossovers, *checked)

    def serve(
        self, order: str, types: tuple[str, str], walk: KernelCall, asked: Settings, *, c: Array | None = None,
        bias: Array | None = None,
    ) -> None:  # fmt: skip
        """The walk over K by the kernel that is chosen, then what follows it."""
        a, b, out = walk[:3]
        if not out.size:
            return
        plain = out.dtype == FLOAT32 and asked.alpha == 1 and bias is None and (c is None or asked.accumulate)
        here = plain and buffer_of(out) not in (buffer_of(a), buffer_of(b))
        acc = out if here else self.empty(out.shape, FLOAT32)
        if asked.accumulate and c is not None and c is not acc:
            elements.copy(self.adapter, acc, c)
        case = case_of(self.adapter, types, a, b, acc, self.crossovers)
        name, code = self.admissions.first(choices(order, case), types, case.across, walk.start)
        run(self.adapter, name, code, walk._replace(out=acc))
        if not here:
            elements.follow(self.adapter, acc, out, asked, None if asked.accumulate else c, bias)


@cache
def _device(place: DeviceId) -> WebGpuDevice:
    return WebGpuDevice(open_adapter(place.ordinal))


def open_device(place: DeviceId, tensors: bool = False) -> WebGpuDevice:
    """The device, which keeps its admissions for the process."""
    return _device(place)


def trace(kernel: str, shape: tuple[int, int, int], thread: tuple[int, int, int], dtype: str = "") -> Any:
    """What one thread of a kernel does, for ``isogemm trace``; needs no adapter."""
    from .trace import trace as traced

    return traced(kernel, shape, thread, dtype)


def count() -> int:
    """Adapters that wgpu finds."""
    return len(adapters())


def usable() -> int:
    """As many as wgpu finds."""
    return count()


def current() -> int:
    """The number of the adapter that wgpu prefers."""
    return 0

"""A CUDA device: memory from torch's allocator, kernels of this folder on torch's current stream.

What chooses kernels loads late: it brings tables and trials, which nobody on a CPU waits for.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...base import seen
from ...base.dtypes import name_of
from ...contract.spec import Contract
from ...operands import cuda as arrays
from ...operands.device_array import DeviceId
from ...operands.tensors import is_tensor
from ...planner.device import LISTS, Device
from . import calls
from .driver import facts
from .gemm import list_calls
from .gemm.execute import Executor

Array = NDArray[Any]
COLUMNS = {
    "quant": "quant.products",
    "rows": "rows.run",
    "attention": "attention.run",
    "row_sums": "rows.sums",
    "attention_steps": "attention.steps",
    "attention_gradients": "attention.gradient.run",
    "grouped": "gemm.grouped.run",
    "ranks": "ranks.mailbox",
    "plans": "plans.work",
}

recall, recall_items = calls.call, list_calls.call


class CudaDevice(Executor, Device):
    """One CUDA device during one call, of which it keeps the launches."""

    columns: ClassVar = {name: f"isogemm.backends.cuda.{module}" for name, module in COLUMNS.items()}

    def memory(self) -> int:
        return arrays.total_memory(self.place)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return arrays.empty(shape, dtype, self.place)

    def assign(self, out: Array, x: Array) -> None:
        arrays.tensor(out).copy_(arrays.tensor(x))

    def result(self, x: Array, operands: tuple[Any, ...]) -> Any:
        tensors = [operand for operand in operands if is_tensor(operand)]
        return arrays.as_kind(x, tensors[0] if tensors else operands[0])

    def release(self, stream: int) -> None:
        arrays.give_back(stream, self.place)

    def default(self, dtype_a: np.dtype[Any], dtype_b: np.dtype[Any]) -> Contract:
        from .gemm import choose

        return choose.default_contract_of(self.place.ordinal, name_of(dtype_a) if dtype_a == dtype_b else "float32")

    def pack(self, w: Array) -> calls.DeviceWeight:
        weight = arrays.tensor(w).detach()
        return calls.DeviceWeight(w.shape, weight, (weight.shape, weight.stride(), weight.dtype, weight.get_device()))

    def remember(self, kind: str, operands: tuple[Any, ...], options: tuple[Any, ...], result: Any) -> None:
        table: Any = list_calls if kind in LISTS else calls
        table.remember(kind, operands, options, result, self)

    @property
    def chooser(self) -> Any:
        from .gemm import choose

        return choose.chooser(self.place.ordinal)

    @property
    def facts(self) -> facts.DeviceFacts:
        return facts.device(self.place.ordinal)

    def stream(self) -> int:
        return arrays.current_stream(self.place)


def open_device(place: DeviceId, tensors: bool = False) -> CudaDevice:
    """A device for one call; its results are torch's memory always."""
    return CudaDevice(place)


def planner(name: str) -> Any:
    """Plans for ``cuda``, ``cuda:1``, or a GPU that is described."""
    return import_module(CudaDevice.columns["plans"]).GpuPlanner(name)


def reload() -> None:
    """Forget choosers, verdicts and calls seen before, so that new tables and records are read."""
    from .driver import machine
    from .gemm import choose

    choose.forget()
    machine.forget()
    seen.forget()


def count() -> int:
    """GPUs that the driver knows."""
    return facts.count()


@functools.cache
def usable() -> int:
    """GPUs that torch can use."""
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def current() -> int:
    """torch's current device."""
    import torch

    return int(torch.cuda.current_device())

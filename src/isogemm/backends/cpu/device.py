"""The host as a device: NumPy's memory, or torch's where operands are its tensors, and the kernels of this folder."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...base.limits import physical_memory
from ...errors import LimitError
from ...operands import memory, tensors
from ...operands.device_array import HOST, DeviceId
from ...operands.dlpack import handed_over
from ...planner.device import Device
from .gemm import execute
from .gemm.facts import learn_facts
from .gemm.packed import PackedWeight, prepare
from .short import recall

__all__ = ["HostDevice", "count", "current", "open_device", "recall", "usable"]

Array = NDArray[Any]
COLUMNS = {
    "quant": "quant.products",
    "rows": "rows.run",
    "attention": "attention.run",
    "row_gradients": "rows.gradients",
}


class HostDevice(Device):
    """This machine's memory and processors."""

    place, packed = HOST, PackedWeight
    columns: ClassVar = {name: f"isogemm.backends.cpu.{module}" for name, module in COLUMNS.items()}
    gemm = staticmethod(execute.gemm)
    again, learn = staticmethod(execute.again), staticmethod(execute.learn)
    gemm_batched = staticmethod(execute.gemm_batched)
    gemm_stack, gemm_items = staticmethod(execute.gemm_stack), staticmethod(execute.gemm_items)
    learn_facts = staticmethod(learn_facts)

    def memory(self) -> int:
        return physical_memory()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise LimitError(
                "memory for the result", limit="what is free", value=list(shape), nearest="fewer rows"
            ) from error

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def assign(self, out: Array, x: Array) -> None:
        out[...] = x

    def result(self, x: Array, operands: tuple[Any, ...]) -> Any:
        if any(tensors.is_tensor(operand) for operand in operands):
            tensors.learn()
            return tensors.to_tensor(x)
        foreign = next((o for o in operands if not isinstance(o, np.ndarray) and hasattr(o, "__dlpack__")), None)
        return x if foreign is None else handed_over(x, foreign)

    def plan(self, *checked: Any) -> Any:
        from .gemm.plan import plan

        return plan(*checked)

    def plan_work(self, form: str, *checked: Any, **about: Any) -> Any:
        from ...base.threads import get_num_threads
        from .work import MAKERS

        *product, threads = checked
        return MAKERS[form](*product, threads or get_num_threads(), **about)

    def pack(self, w: Array) -> PackedWeight:
        return prepare(w)


class TensorHost(HostDevice):
    """The same memory, allocated by torch: a storage of anybody else's can never be resized."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return memory.empty(shape, dtype)[1]


_HOST, _TENSORS = HostDevice(), TensorHost()


def open_device(place: DeviceId, tensors: bool = False) -> Device:
    """The host, which keeps nothing of a call."""
    return _TENSORS if tensors else _HOST


def count() -> int:
    """One."""
    return 1


def usable() -> int:
    """One."""
    return 1


def current() -> int:
    """The only one."""
    return 0

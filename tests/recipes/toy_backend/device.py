"""The toy as isogemm sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.recipes.toy_backend.array import TOY, ToyArray
from tests.recipes.toy_backend.kernel import chain

from isogemm.contract.reference import epilogue
from isogemm.errors import ContractError
from isogemm.operands.device_array import DeviceId
from isogemm.planner.device import Device
from isogemm.problem.settings import Settings

__all__ = ["count", "current", "open_device", "usable"]

Array = np.ndarray[Any, Any]


class ToyDevice(Device):
    """A device with products by ``fma/chain``, and nothing else."""

    place = TOY

    def memory(self) -> int:
        return 2**30

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return ToyArray(np.empty(shape, dtype)).__isogemm_view__("out")

    def assign(self, out: Array, x: Array) -> None:
        _read(out)[...] = _read(x)

    def result(self, x: Array, operands: tuple[Any, ...]) -> ToyArray:
        return ToyArray(_read(x))

    def gemm(
        self, a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
    ) -> None:
        if str(asked.contract) != "fma/chain":
            raise ContractError("contract on the toy", limit="fma/chain", value=asked.contract, nearest="fma/chain")
        start = _read(c) if asked.accumulate and c is not None else np.zeros(out.shape, np.float32)
        total = chain(_read(a), _read(b), start)
        _read(out)[...] = epilogue(
            total, alpha=asked.alpha, beta=asked.beta, c=None if asked.accumulate or c is None else _read(c),
            bias=None if bias is None else _read(bias), out_dtype=out.dtype,
        )  # fmt: skip


def _read(x: Array) -> Array:
    return x.view(np.ndarray)


def open_device(place: DeviceId, tensors: bool) -> ToyDevice:
    return ToyDevice()


def count() -> int:
    return 1


def usable() -> int:
    return 1


def current() -> int:
    return 0

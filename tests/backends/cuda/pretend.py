"""A CUDA device that is not there: the host's side of the backend runs, on host memory, and kernels are the reference.

Operands are device arrays. Those of `at_home` lie over real host memory, which the pretended kernels read by the
addresses and strides that a launch is given; those of `nowhere` lie where any read would end the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.planner.fakes import compute, view

from isogemm.backends.cuda import calls
from isogemm.backends.cuda.gemm import choose, execute
from isogemm.backends.cuda.gemm import list_calls as front_items
from isogemm.base.dtypes import BFLOAT16
from isogemm.base.seen import Seen
from isogemm.operands import cuda as interop_cuda
from isogemm.operands.device_array import DeviceId, device_array, holder_of
from isogemm.planner.relay import Relay
from isogemm.problem.numeric import default_contract
from isogemm.problem.product import Addresses, Product

FIRST = DeviceId("cuda", 0)
NOWHERE = 0x7F0000000000
STREAM = 7


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """NaNs at a multiple of 512 bytes, as CUDA's allocators give memory."""
    dtype = np.dtype(dtype)
    room = np.empty(int(np.prod(shape)) * dtype.itemsize + 512, np.uint8)
    first = -room.ctypes.data % 512
    made = room[first : len(room) - 512 + first].view(dtype).reshape(shape)
    made[...] = np.nan
    return made


def at_home(x: np.ndarray, place: DeviceId = FIRST) -> np.ndarray:
    """A device array over the memory of `x`."""
    torch = pytest.importorskip("torch")
    owner = None
    if all(s >= 0 for s in x.strides):
        plain = device_array(x.ctypes.data, x.shape, x.strides, x.dtype, place, owner=x).view(np.ndarray)  # writable
        half = x.dtype == BFLOAT16
        owner = torch.from_numpy(plain.view(np.uint16)).view(torch.bfloat16) if half else torch.from_numpy(plain)
    return device_array(
        x.ctypes.data, x.shape, x.strides, x.dtype, place, owner=owner, read_only=not x.flags.writeable
    )  # fmt: skip


def nowhere(x: np.ndarray, place: DeviceId = FIRST) -> np.ndarray:
    """A device array with the layout of `x`, as far from others as `x` is from other arrays, and unreadable."""
    address = NOWHERE + x.ctypes.data % 2**40
    return device_array(address, x.shape, x.strides, x.dtype, place, owner=x, read_only=not x.flags.writeable)


def read(x: Any) -> np.ndarray:
    """The values of a device array over host memory."""
    return np.asarray(x).view(np.ndarray).copy()


class PretendedLaunch:
    """The reference, reading and writing at the addresses of a launch."""

    def __init__(self, product: Product, device: int) -> None:
        self.product, self.device = product, device

    def __call__(self, at: Addresses, stream: int) -> None:
        p = self.product
        assert stream == STREAM
        assert all(x % p.align == 0 for x in at)
        assert (at.c != 0, at.bias != 0) == (p.c is not None, p.dtype_bias is not None)
        view(at.out, p.out, (p.batch, p.m, p.n), p.dtype_out)[...] = compute(p, at)


class Pretended:
    """What was asked of the device.

    Attributes
    ----------
    chosen : list of Product
    allocated : list of shapes
    """

    def __init__(self) -> None:
        self.chosen: list[Product] = []
        self.allocated: list[tuple[int, ...]] = []

    def choose(self, product: Product, device: int) -> Relay:
        self.chosen.append(product)
        return Relay(PretendedLaunch(product, device))

    def empty(self, shape: tuple[int, ...], dtype: Any, place: DeviceId) -> np.ndarray:
        self.allocated.append(shape)
        return at_home(aligned(shape, dtype), place)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a pretended device in the place of CUDA's."""
    device = Pretended()
    monkeypatch.setattr(execute, "choose", device.choose)
    monkeypatch.setattr(execute, "current_stream", lambda place: STREAM)
    of = lambda device, dtype: default_contract("cuda", dtype)  # noqa: E731
    monkeypatch.setattr(choose, "default_contract_of", of)
    monkeypatch.setattr(execute, "runner", lambda items: execute.run_loop)
    monkeypatch.setattr(front_items, "_entries", Seen(512))
    monkeypatch.setattr(interop_cuda, "empty", device.empty)
    monkeypatch.setattr(interop_cuda, "total_memory", lambda place: 2**37)
    monkeypatch.setattr(calls, "_entries", Seen(8192))
    return device


__all__ = [
    "FIRST",
    "STREAM",
    "Pretended",
    "PretendedLaunch",
    "aligned",
    "at_home",
    "holder_of",
    "nowhere",
    "pretended",
    "read",
]

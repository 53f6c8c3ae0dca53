"""Every relation of the audit holds on the device: what surrounds a row, and how it is asked for, changes no bit."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from isogemm import audit, gemm, gemm_batched, gemm_strided_batched, linear, pack
from isogemm.audit.providers import LibraryCalls, LibraryProvider
from isogemm.backends.webgpu.public import WebGpuArray, array
from isogemm.lab.models import LinearShape
from isogemm.operands.device_array import device_array, holder_of

N, K = 24, 40


def there(x: Any) -> Any:
    """A host's array on the device, as it lies: strides, and where it begins in a line of 64 bytes."""
    if isinstance(x, list):
        return [there(item) for item in x]
    if not isinstance(x, np.ndarray):
        return x
    low, high = np.lib.array_utils.byte_bounds(x)
    low -= low % 64
    lines = (ctypes.c_uint8 * (-(-(high - low) // 64) * 64)).from_address(low)
    copy = array(np.frombuffer(lines, np.float32)).__isogemm_view__("x")
    address, held = copy.ctypes.data + x.ctypes.data - low, holder_of(copy)
    return WebGpuArray(device_array(address, x.shape, x.strides, x.dtype, held.place, owner=held.owner))


def on_the_device(contract: str) -> LibraryProvider:
    """`isogemm`'s own calls, with operands there."""

    def there_and_back(call: Any, **options: Any) -> Any:
        def called(*operands: Any) -> Any:
            found = call(*map(there, operands), **options, contract=contract)
            return [x.numpy() for x in found] if isinstance(found, list) else found.numpy()

        return called

    def listed(x: Any, blocks: Any) -> Any:
        return there_and_back(gemm_batched, trans_b="T")([x] * len(blocks), list(blocks))

    def packed(x: Any, w: Any) -> Any:
        return linear(there(x), pack(there(w)), contract=contract).numpy()

    def accumulate(total: Any, dy: Any, x: Any) -> Any:
        start = there(np.zeros((dy.shape[1], x.shape[1]), np.float32) if total is None else total)
        return there_and_back(gemm, trans_a="T", out=start, accumulate=True)(dy, x)

    linears, stacks = there_and_back(linear), there_and_back(gemm_strided_batched)
    return LibraryProvider(
        "webgpu", LibraryCalls(linears, stacks, listed, packed, None if "lanes" in contract else accumulate)
    )


@pytest.mark.parametrize("contract", ["fma/chain", "fma/lanes32"])
def test_every_relation_holds(device, contract):
    sweep = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128]
    report = audit.run(
        [on_the_device(contract)], [LinearShape("drawn", N, K)], require=[], sweep=sweep, speed=False,
        relations=list(audit.RELATIONS), dtype="float16",
    )  # fmt: skip
    (result,) = report.providers.values()
    assert not result.reason
    status = {name: found.status for name, found in result.relations.items()}
    absent = {name for name, what in status.items() if what == "n/a"}
    # Queues have one stream, and no graphs; lanes have no running total.
    assert absent == {"stream", "graph"} | ({"accumulation"} if contract == "fma/lanes32" else set())
    assert {what for name, what in status.items() if name not in absent} == {"held"}

"""Memory on a device that is none: workspaces, arrays of pointers, alignment, and whose capture is asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.backends.cuda.pretend import FIRST, STREAM, nowhere, pretended  # noqa: F401
from tests.products import F32, assert_same, poisoned, stacked, values

import isogemm
from isogemm.api import dispatch
from isogemm.api import short as tensors
from isogemm.backends.cuda import calls, pointers
from isogemm.backends.cuda.driver import workspace
from isogemm.backends.cuda.driver.facts import Pointer
from isogemm.errors import DeviceError, LayoutError, ShapeError
from isogemm.operands.device_array import device_array

pytestmark = pytest.mark.usefixtures("pretended")


def test_a_workspace_that_does_not_fit_is_a_typed_error(monkeypatch):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(workspace, "_made_of", lambda device: (full, None, None, MemoryError))
    with pytest.raises(isogemm.errors.LimitError, match="4096 bytes"):
        workspace.workspace(4096, 0)


def test_pointer_arrays_without_a_driver(pretended, monkeypatch):  # noqa: F811
    torch = pytest.importorskip("torch")
    a, b, out = values((3, 4, 9), seed=1), values((3, 9, 5), seed=2), poisoned((3, 4, 5))
    homes = [Pointer("device", 0, x.ctypes.data, x.nbytes) for x in (a, b, out)]

    def pointer(address):
        return next((p for p in homes if 0 <= address - p.start < p.nbytes), Pointer("unknown", -1, 0, 0))

    monkeypatch.setattr(pointers, "pointer", pointer)
    monkeypatch.setitem(tensors.KINDS, torch.Tensor, None)
    monkeypatch.setattr(calls, "_grad_enabled", torch.is_grad_enabled)
    monkeypatch.setattr(calls, "_raw_stream", lambda device: STREAM)
    PointerArray = isogemm.PointerArray
    pa = PointerArray(np.array([x.ctypes.data for x in a]), (4, 9))
    pb = PointerArray([x.T.ctypes.data for x in b], (5, 9), strides=(1, 5))
    po = PointerArray(torch.tensor([x.ctypes.data for x in out]), (4, 5))
    for turn in range(2):
        if turn:
            monkeypatch.setattr(dispatch, "items", lambda *_: pytest.fail("the long way"))
        out[...] = np.nan
        assert isogemm.gemm_batched(pa, pb, trans_b="T", out=po) is po
        assert_same(out, stacked(a, b))
    monkeypatch.undo()
    monkeypatch.setattr(pointers, "pointer", pointer)
    first = a.ctypes.data
    for bad, error, words in (
        (0, LayoutError, "not null"),
        (first + 2, LayoutError, "multiple of 4"),
        (first + 4, LayoutError, "inside its allocation"),
        (0x1230, DeviceError, "unknown"),
        (first - 2**64, LayoutError, "not null"),
        (first + 2**64, LayoutError, "not null"),
    ):
        with pytest.raises(error, match=f"item 1.*{words}"):
            PointerArray([first, bad], (3 * 4, 9))
    with pytest.raises(isogemm.errors.DTypeError):
        PointerArray([1.5], (4, 9))
    with pytest.raises(isogemm.errors.DTypeError):
        PointerArray([first], (4, 9), "int8")
    with pytest.raises(LayoutError, match="at least 0"):
        PointerArray([first + 36], (2, 9), strides=(-9, 1))
    homes[1] = replace(homes[1], ordinal=1)
    with pytest.raises(DeviceError, match=r"item 1.*cuda:1"):
        PointerArray([first, b.ctypes.data], (4, 9))


def test_misaligned_memory():
    odd = device_array(0x7F0000000001, (2, 3), (12, 4), F32, FIRST)
    with pytest.raises(LayoutError, match="unaligned"):
        isogemm.matmul(odd, nowhere(values((3, 2))))


@pytest.mark.parametrize(("shape", "strides"), [((4,), None), ((4, 8, 2), None), ((4, 8), (8,)), ((), None)])
def test_pointers_to_what_is_no_matrix_are_refused(shape, strides):
    with pytest.raises(ShapeError, match="two: rows, columns"):
        isogemm.PointerArray([4096], shape, strides=strides)


def test_capture_is_asked_of_the_device_that_is_meant(monkeypatch):
    torch = pytest.importorskip("torch")
    from isogemm.backends.cuda.driver import facts as device

    current = [0]

    class Switch:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            self.before, current[0] = current[0], self.ordinal

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Switch)
    monkeypatch.setattr(device, "_capture_getter", lambda: lambda: current[0] == 1)
    assert [device.is_capturing(), device.is_capturing(0), device.is_capturing(1)] == [False, False, True]
    assert current == [0]

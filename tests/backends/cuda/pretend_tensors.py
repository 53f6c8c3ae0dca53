"""Tensors of the host that say they are on a device, for the calls that take the short path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.pretend import FIRST, STREAM, pretended  # noqa: F401
from tests.products import BF16

from isogemm.api import short as tensors
from isogemm.backends.cuda import calls
from isogemm.base.dtypes import as_dtype
from isogemm.operands import cuda as interop_cuda
from isogemm.operands import views

__all__ = ["Tensors", "bits", "on_device"]


class Tensors:
    """Tensors of the host that say they are on device 0, and the short path made to believe them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pretended: Any) -> None:  # noqa: F811
        torch = pytest.importorskip("torch")

        class OnDevice(torch.Tensor):
            __torch_function__ = torch._C._disabled_torch_function_impl

            def get_device(self):
                return 0

        def made(shape, strides, dtype, device):
            found = interop_cuda.tensor(pretended.empty(tuple(shape), as_dtype(dtype), FIRST))
            assert found.stride() == strides
            return found

        self.torch, self.type = torch, OnDevice
        monkeypatch.setitem(tensors.KINDS, OnDevice, None)
        monkeypatch.setattr(calls, "_grad_enabled", torch.is_grad_enabled)
        monkeypatch.setattr(tensors, "_trace", torch._C._get_tracing_state)
        monkeypatch.setattr(tensors, "_depth", torch._C._len_torch_dispatch_stack)
        monkeypatch.setattr(calls, "_empty_strided", made)
        monkeypatch.setattr(calls, "_raw_stream", lambda device: STREAM)
        seen = views.view
        monkeypatch.setattr(
            views, "view", lambda name, x: from_tensor(name, x) if type(x) is OnDevice else seen(name, x)
        )
        monkeypatch.setattr(interop_cuda, "tensor", lambda x: tensor(x).as_subclass(OnDevice))

    def __call__(self, x: np.ndarray) -> Any:
        if x.dtype == BF16:
            return self.torch.from_numpy(x.view(np.uint16)).view(self.torch.bfloat16).as_subclass(self.type)
        return self.torch.from_numpy(x).as_subclass(self.type)


from_tensor, tensor = interop_cuda.from_tensor, interop_cuda.tensor


@pytest.fixture
def on_device(monkeypatch, pretended):  # noqa: F811
    return Tensors(monkeypatch, pretended)


def bits(x: Any) -> np.ndarray:
    return views.array("x", x.as_subclass(pytest.importorskip("torch").Tensor))

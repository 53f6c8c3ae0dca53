"""An adapter for these tests: a GPU's, or Mesa's lavapipe, which computes in software."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("wgpu", reason="wgpu is not installed: pip install 'isogemm[webgpu]'")

from isogemm.backends.webgpu import adapter as adapters
from isogemm.backends.webgpu.device import WebGpuDevice, open_device
from isogemm.operands.device_array import DeviceId


@pytest.fixture(scope="session")
def device() -> WebGpuDevice:
    """The preferred adapter."""
    if not adapters.adapters():
        pytest.skip("no adapter for WebGPU here: on Debian, apt install mesa-vulkan-drivers libvulkan1")
    return open_device(DeviceId("webgpu"))


@pytest.fixture
def launched(device: WebGpuDevice, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What every launch was given, in order."""
    found: list[tuple[Any, ...]] = []
    launch = device.adapter.launch
    monkeypatch.setattr(device.adapter, "launch", lambda *given: (found.append(given), launch(*given)))
    return found

"""Devices by their names, numbers and torch's objects."""

from __future__ import annotations

import pytest

from isogemm.backends import find
from isogemm.backends.cuda import device
from isogemm.errors import DeviceError

torch = pytest.importorskip("torch")


def test_a_device_is_found_by_its_names(monkeypatch):
    monkeypatch.setattr(device, "usable", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    names = ("cpu", "cuda", "cuda:0", 0, torch.device("cuda", 1), torch.device("cpu"))
    assert [str(find(d)) for d in names] == ["cpu", "cuda:1", "cuda:0", "cuda:0", "cuda:1", "cpu"]
    for wrong in ("cuda:2", "cuda:x", "meta", 7, "mps:0", None):
        with pytest.raises(DeviceError):
            find(wrong)

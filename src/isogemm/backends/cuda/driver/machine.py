"""A GPU as trials and tuning see it, by way of torch: put bits there, read them back, know its stamp."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.disk import cache_folder
from ....planner.admission import Admissions
from ....planner.records import Records
from .facts import current_stream, is_capturing, stamp

_admissions: dict[int, Admissions] = {}
_lock = threading.Lock()


def admissions(device: int) -> Admissions:
    """The verdicts on kernels of every kind on a device, made at first use."""
    found = _admissions.get(device)
    if found is None:
        with _lock:
            found = _admissions.get(device) or _admissions.setdefault(device, _made(device))
    return found


def forget() -> None:
    """Look at records anew."""
    _admissions.clear()


def _made(device: int) -> Admissions:
    return Admissions(TorchMachine(device), Records(cache_folder("admissions")))


class Memory:
    """A tensor of words; `read` waits for the stream that it was made on."""

    def __init__(self, flat: NDArray[Any], device: int) -> None:
        import torch

        signed = np.ascontiguousarray(flat).view(f"i{flat.itemsize}")
        self.dtype = flat.dtype
        self.tensor = torch.from_numpy(signed).to(torch.device("cuda", device))
        self.address: int = self.tensor.data_ptr()

    def read(self) -> NDArray[Any]:
        """What it holds now."""
        words: NDArray[Any] = self.tensor.cpu().numpy()
        return words.view(self.dtype)


class TorchMachine:
    """One GPU."""

    def __init__(self, device: int) -> None:
        self.device = device

    def stamp(self) -> Mapping[str, str]:
        """The device's stamp, as text; parts that are absent are left out."""
        return {name: str(value) for name, value in stamp(self.device).items() if value is not None}

    def capturing(self) -> bool:
        """Whether torch's current stream is captured."""
        return is_capturing(self.device)

    def put(self, flat: NDArray[Any]) -> Memory:
        """Copy words to the GPU."""
        return Memory(flat, self.device)

    def stream(self) -> int:
        """torch's current stream."""
        return current_stream(self.device)

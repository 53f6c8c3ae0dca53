"""The verdicts of each device on kernels of attention and along rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TypeVar

from ...planner.kernel_admission import Candidate, KernelAdmissions

__all__ = ["admissions", "first_admitted", "forget"]

T = TypeVar("T")
NEAREST = "the CPU, which has the same bits"
_found: dict[int, KernelAdmissions] = {}
_lock = threading.Lock()


def admissions(device: int) -> KernelAdmissions:
    """Those of a device, made at first use; they share the folder of the products' records."""
    found = _found.get(device)
    if found is None:
        with _lock:
            found = _found.get(device) or _found.setdefault(device, _made(device))
    return found


def first_admitted(what: str, candidates: Iterable[Candidate[T]], device: int) -> T:
    """`KernelAdmissions.first` of a device."""
    return admissions(device).first(what, candidates, nearest=NEAREST)


def forget() -> None:
    """Look at records anew."""
    _found.clear()


def _made(device: int) -> KernelAdmissions:
    from ...base.disk import cache_folder
    from ...planner.records import Records
    from .driver.machine import TorchMachine

    return KernelAdmissions(TorchMachine(device), Records(cache_folder("admissions")))

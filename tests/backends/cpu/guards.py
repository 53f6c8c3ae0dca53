"""Outputs in guarded memory: poisoned inside, canaries around, and a record of the schedules that calls really got."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.products import BF16, F16, F32, assert_same, product

from isogemm.backends.cpu.gemm import execute, tasks
from isogemm.backends.cpu.gemm.packed import PackedWeight
from isogemm.backends.cpu.gemm.schedule import Schedule, schedule
from isogemm.base.seen import Seen
from isogemm.contract import Contract, compare
from isogemm.problem.settings import Settings

CHAIN = Contract()
MIXES = {
    "f32": (F32, F32, F32),
    "bf16": (BF16, BF16, BF16),
    "f16": (F16, F16, F16),
    "f32 x bf16": (F32, BF16, F32),
    "f32 x f16": (F32, F16, F16),
    "bf16 x f16": (BF16, F16, F32),
    "f16 x f32": (F16, F32, BF16),
}
# NaNs that no kernel writes: the one NaN of every contract has other bits.
_CANARY = {4: 0x7FC0BEEF, 2: 0x7FBE}
_MARGIN = 40


class Guarded:
    """A matrix of canaries inside a larger buffer of canaries; `layout` is c, f, stepped or reversed."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any], layout: str = "c", margin: int = _MARGIN) -> None:
        rows, columns = shape[::-1] if layout == "f" else shape
        step = 2 if layout == "stepped" else 1
        self.room = np.empty((rows + 2, 2 * margin + columns * step), dtype)
        self._bits = compare.bits(self.room)
        self._bits[...] = _CANARY[self.room.itemsize]
        self._inside = np.s_[1 : rows + 1, margin : margin + columns * step : step]
        view = self.room[self._inside]
        self.view = view.T if layout == "f" else view[:, ::-1] if layout == "reversed" else view

    def check(self, want: np.ndarray) -> None:
        """The matrix has these bits and no byte around it was written."""
        assert_same(np.ascontiguousarray(self.view), want)
        around = np.ones(self.room.shape, np.bool_)
        around[self._inside] = False
        assert (self._bits[around] == _CANARY[self.room.itemsize]).all(), "memory around the output was written"


def check_gemm(
    a: np.ndarray,
    b: np.ndarray | PackedWeight,
    dtype: np.dtype[Any] = F32,
    layout: str = "c",
    *,
    chosen: Schedule | None = None,
    want: np.ndarray | None = None,
    **options: Any,
) -> None:
    """`execute.gemm` into guarded memory has the reference's bits."""
    plain = b.unpack().T if isinstance(b, PackedWeight) else b
    if want is None:
        want = product(a, plain, out_dtype=dtype, **options)
    out = Guarded(want.shape, dtype, layout)
    asked, read = as_asked(**options)
    execute.gemm(a, b, out.view, asked, chosen=chosen, **read)
    out.check(want)


def as_asked(c: Any = None, bias: Any = None, **scalars: Any) -> tuple[Settings, dict[str, Any]]:
    """The options of `product` as `execute` takes them: settings, and what is read besides a and b."""
    return Settings(CHAIN, **scalars), {"c": c, "bias": bias}


class Record(list[Schedule]):
    """Schedules in the order in which calls got them."""

    @property
    def walks(self) -> set[tuple[str, str, str]]:
        """Strategy, and how A and B are walked."""
        return {(s.strategy, s.a_mode, s.b_mode) for s in self}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Record:
    """The schedules that the backend asks for during a test."""
    record = Record()

    def recorded(*args: Any) -> Schedule:
        record.append(schedule(*args))
        return record[-1]

    monkeypatch.setattr(tasks, "schedule", recorded)
    monkeypatch.setattr(tasks, "_tasks", Seen(1024))
    return record

"""Admission: a kernel serves on an adapter only after its bits were seen to be right there, at its first use.

A trial multiplies golden operands, which hold every kind of number, into memory full of NaN with margins around the
result, and compares every bit with the reference. The device's own ``fma`` is tried first; where it rounds twice, or
drops what is too small, the kernel is tried with the one that is made of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import FLOAT32, NUMPY
from ...contract import golden, reference
from ...contract.compare import bits, first_mismatch
from ...contract.spec import Contract, Order
from ...errors import ContractError
from ...operands.device_array import DeviceId, device_array
from .adapter import Adapter
from .array import buffer_of
from .kernels import KERNELS, LANES, code_of
from .launch import Walk, run

__all__ = ["ORDERS", "Admissions", "Verdict", "trial"]

Array = NDArray[Any]
ORDERS = {"chain": Order(), "lanes": Order("lanes", LANES)}
POISON = np.uint32(0x7FC0DEAD)
MARGIN = 3
# (m, n, k): less than a tile, and several ragged ones; K shorter than the lanes, and with a tail of them.
SHAPES = ((3, 5, 7), (67, 133, 333))


class Verdict(NamedTuple):
    """What a trial said: empty where every bit was right."""

    refused: str


@dataclass
class Admissions:
    """Verdicts of this process on one adapter."""

    adapter: Adapter

    def __post_init__(self) -> None:
        self._known: dict[str, Verdict] = {}

    def code(self, name: str, types: tuple[str, str], across: bool) -> str:
        """The admitted code of a kernel.

        Raises
        ------
        ContractError
            No form of it has the contract's bits on this adapter.
        """
        made: list[Verdict] = []
        for fused in (True, False):
            if fused and name != "gemv_naive" and not self._fuses(types):
                continue
            code = code_of(name, types, across=across, subgroup=self.adapter.subgroup, fused=fused)
            made.append(self.verdict(name, types, code))
            if not made[-1].refused:
                return code
        raise ContractError(
            f"{name} on {self.adapter.name}", limit=f"the bits of fma/{ORDERS[KERNELS[name].order]}",
            value=made[-1].refused, nearest="the CPU, which has them",
        )  # fmt: skip

    def verdict(self, name: str, types: tuple[str, str], code: str) -> Verdict:
        """Of a kernel's code: known, or by a trial now."""
        if code not in self._known:
            self._known[code] = Verdict(trial(self.adapter, name, types, code))
        return self._known[code]

    def _fuses(self, types: tuple[str, str]) -> bool:
        """Whether the device's own fma is exact for these operands, as the plainest kernel shows."""
        code = code_of("gemv_naive", types, across=False, subgroup=self.adapter.subgroup, fused=True)
        return not self.verdict("gemv_naive", types, code).refused


def trial(adapter: Adapter, name: str, types: tuple[str, str], code: str) -> str:
    """Run a kernel's code on golden operands: empty where every bit was right, else what was wrong."""
    order = ORDERS[KERNELS[name].order]
    for m, n, k in SHAPES:
        for lines in (True, False):
            started = lines and order.kind == "chain"
            found = _differs(adapter, name, types, code, (m, n, k), lines, started)
            if found:
                return f"{order} over k {k}, {m} x {n}: {found}"
    return ""


def _differs(
    adapter: Adapter, name: str, types: tuple[str, str], code: str, extents: tuple[int, int, int], lines: bool,
    started: bool,
) -> str:  # fmt: skip
    m, n, k = extents
    case = golden.GoldenCase(Order(), k, started)
    a, b = (x.view(NUMPY[dtype]) for x, dtype in zip(golden.operands(case, *types), types, strict=True))
    c = golden.start(case).view(np.float32) if started else None
    wide = [x.astype(np.float32) for x in (a, b)] if types[0] != types[1] else [a, b]
    want = reference.evaluate(*wide, Contract("fma", ORDERS[KERNELS[name].order]), c)
    rows, columns = np.arange(m) % case.rows, np.arange(n) % case.columns
    room = np.full((m + 2 * MARGIN, n + 2 * MARGIN), POISON, np.uint32).view(np.float32)
    inside = slice(MARGIN, -MARGIN)
    if c is not None:
        room[inside, inside] = c[rows][:, columns]
    out = _placed(adapter, room)
    right = b[:, columns]
    weight = _placed(adapter, np.ascontiguousarray(right.T)).T if lines else _placed(adapter, right)
    run(adapter, name, code, Walk(_placed(adapter, a[rows]), weight, out[inside, inside], started))
    expected = np.full(room.shape, POISON, np.uint32).view(np.float32)
    expected[inside, inside] = want[rows][:, columns]
    got = adapter.read(buffer_of(out), 0, room.nbytes).view(np.float32)
    mismatch = first_mismatch(got.reshape(room.shape), expected)
    return "" if mismatch is None else str(mismatch)


def _placed(adapter: Adapter, x: Array) -> Array:
    """A contiguous array of the host on the adapter under trial."""
    data = np.ascontiguousarray(x)
    buffer = adapter.upload(data.view(np.uint8).reshape(-1))
    return device_array(buffer.address, data.shape, None, data.dtype, DeviceId("webgpu"), owner=buffer)

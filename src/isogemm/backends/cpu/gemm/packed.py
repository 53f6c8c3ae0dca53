"""Weights prepared once: panels [ceil(n / NR)][k][NR], read as one stream by every kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....operands.prepared import PreparedWeight
from ..emit.target import target

ALIGN = 64


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class PackedWeight(PreparedWeight):
    """A weight w [n, k] laid out for this CPU's kernels; a copy of w, in w's dtype.

    Attributes
    ----------
    shape : (int, int)
        n and k.
    panels : ndarray [ceil(n / NR), k, NR]
        Element (p, kk, j) is w[p * NR + j, kk]; columns behind n are zero.
    lines : ndarray [ceil(n / NR) * k, NR]
        The same memory, as every call wants it.
    """

    shape: tuple[int, int]
    panels: NDArray[Any]
    lines: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", self.panels.reshape(-1, self.panels.shape[2]))

    def __reduce__(self) -> tuple[Any, ...]:
        """The weight itself: another processor, which may load it, has other panels."""
        return prepare, (self.unpack(),)

    def __repr__(self) -> str:
        return f"PackedWeight({self.n} x {self.k}, {self.dtype.name})"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the weight."""
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.panels.nbytes

    def unpack(self) -> NDArray[Any]:
        """The weight [n, k] again, bit for bit."""
        panels, k, nr = self.panels.shape
        return np.ascontiguousarray(self.panels.transpose(0, 2, 1).reshape(panels * nr, k)[: self.n])


def prepare(w: NDArray[Any]) -> PackedWeight:
    """The panels of a validated weight [n, k]."""
    n, k = w.shape
    nr = target().nr
    panels = -(-n // nr)
    store = np.zeros(panels * k * nr * w.itemsize + ALIGN, np.uint8)
    first = -store.ctypes.data % ALIGN
    packed = store[first : first + panels * k * nr * w.itemsize].view(w.dtype).reshape(panels, k, nr)
    whole = n // nr
    packed[:whole] = w[: whole * nr].reshape(whole, nr, k).transpose(0, 2, 1)
    if whole < panels:
        packed[whole, :, : n - whole * nr] = w[whole * nr :].T
    return PackedWeight((n, k), packed)

"""Operands that a backend looked at once for many calls; the public calls take them beside arrays."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..errors import DTypeError
from .device_array import HOST, DeviceId


class Weight:
    """What `isogemm.linear` takes as w, and no other product: neither an array nor an operand of ``@``."""

    __slots__ = ()
    __array_ufunc__ = None  # so that NumPy's @ asks below, and does not look for numbers in it

    def refused(self, name: str) -> DTypeError:
        """The error of a product that takes arrays alone."""
        limit = "an array: such a weight is for isogemm.linear alone"
        return DTypeError(name, limit=limit, value=repr(self), nearest="isogemm.linear(x, w), which is x @ w.T")

    def __matmul__(self, other: Any) -> Any:
        raise self.refused("left of @")

    def __rmatmul__(self, other: Any) -> Any:
        raise self.refused("right of @")


class PreparedWeight(Weight):
    """A weight [n, k] as `isogemm.pack` returns it.

    Attributes
    ----------
    shape : (int, int)
    dtype : dtype
    """

    __slots__ = ()
    shape: tuple[int, int]

    @property
    def n(self) -> int:
        """Rows of w: columns of the product."""
        return self.shape[0]

    @property
    def k(self) -> int:
        """Columns of w."""
        return self.shape[1]

    @property
    def place(self) -> DeviceId:
        """The weight's device."""
        return HOST

    @property
    def array(self) -> Any:
        """The weight as an array, where products read it as one; None where they take the prepared weight itself."""
        return None


class MatrixList:
    """Matrices of one shape by their addresses, for `isogemm.gemm_batched`."""

    place: DeviceId
    views: list[NDArray[Any]]  # list of arrays [rows, columns]

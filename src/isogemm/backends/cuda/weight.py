"""A weight on a device, looked at once for many products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DeviceWeight"]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class DeviceWeight:
    """A weight w [n, k] on a CUDA device: a reference, not a copy.

    The kernels read weights as checkpoints store them, so there is nothing to rearrange; what is prepared is all that
    a call would ask the tensor. Values written into `w` later are seen; `w` may not be resized.

    Attributes
    ----------
    tensor : torch.Tensor
        The weight, detached.
    facts : tuple
        What a call's key says of the weight.
    """

    tensor: Any
    facts: tuple[Any, ...]

    def __repr__(self) -> str:
        n, k = self.shape
        return f"DeviceWeight({n} x {k}, {self.dtype}, {self.tensor.device})"

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.tensor.shape
        return n, k

    @property
    def n(self) -> int:
        """Rows of w: columns of the product."""
        return self.shape[0]

    @property
    def k(self) -> int:
        """Columns of w."""
        return self.shape[1]

    @property
    def dtype(self) -> Any:
        """Element type of the weight."""
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return int(self.tensor.nbytes)

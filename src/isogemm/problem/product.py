"""A product on the device as kernels see it: what selects and compiles a kernel, apart from the addresses.

Planners, kernel families and tables of calls speak of a `Product`. What a caller asked for besides operands is a
`isogemm.problem.settings.Settings`; the key of tuning tables, without M, a `isogemm.problem.numeric.NumericKey`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ..base.dtypes import ITEMSIZE
from ..contract.spec import Contract


class Strides(NamedTuple):
    """Steps in elements between rows, columns and batch items; 0 broadcasts."""

    row: int
    col: int
    batch: int = 0


class Addresses(NamedTuple):
    """Device addresses of one call; `c` and `bias` are 0 where a product has none."""

    a: int
    b: int
    out: int
    c: int = 0
    bias: int = 0


def alignment(*addresses: int, most: int = 128) -> int:
    """The largest power of two up to `most`, itself one, that divides every address, or every step between them."""
    common = most
    for address in addresses:
        common |= address
    return common & -common


@dataclass(frozen=True, slots=True)
class Product:
    """out = alpha * A[m, k] @ B[k, n] + beta * C + bias, once or for each item of a strided batch."""

    # m, n, k, batch: ``m`` counts the rows that a caller batches (tokens); nothing that reaches the bits may look at m,
    # n or batch
    m: int
    n: int
    k: int
    dtype_a: str
    dtype_b: str
    dtype_out: str
    contract: Contract
    # a, b, out: A[i, p] lies at ``a.row * i + a.col * p + a.batch * item`` elements, B[p, j] at ``b.row * p + b.col * j
    # + ...``
    a: Strides
    b: Strides
    out: Strides
    batch: int = 1
    # None unless C is read: beta != 0, or `accumulate`, where the walk over K starts from the float32 C
    c: Strides | None = None
    dtype_c: str | None = None
    dtype_bias: str | None = None
    bias_stride: int = 1  # elements between values of the bias, which is indexed by column
    # alpha, beta: values of float32
    alpha: float = 1.0
    beta: float = 0.0
    accumulate: bool = False
    # the largest power of two up to 128 that divides every address of the operands and of out, in bytes
    align: int = 128

    @property
    def plain(self) -> bool:
        """The product alone: no alpha, C or bias."""
        return self.alpha == 1 and self.c is None and self.dtype_bias is None

    def aligned(self, nbytes: int = 16) -> bool:
        """Whether every row of A, B and out starts at a multiple of `nbytes` (the contiguous axis has stride 1)."""
        if self.align < nbytes:
            return False
        pairs = ((self.a, self.dtype_a), (self.b, self.dtype_b), (self.out, self.dtype_out))
        return all(s * ITEMSIZE[dtype] % nbytes == 0 or s == 1 for x, dtype in pairs for s in x)

    def sums(self, batch: int, pitch: int = 0) -> Product:
        """The float32 sums alone of `batch` items, one after the other, rows `pitch` apart: what a tree meets."""
        row = pitch or self.n
        return replace(
            self, dtype_out="float32", out=Strides(row, 1, self.m * row), batch=batch, c=None, dtype_c=None,
            dtype_bias=None, alpha=1.0, beta=0.0,
        )  # fmt: skip

    def with_m(self, m: int) -> Product:
        """The same product over another number of rows."""
        return replace(self, m=m)


class Launch(Protocol):
    """A compiled kernel bound to a product: everything but the addresses and the stream is fixed."""

    def __call__(self, at: Addresses, stream: int) -> None:
        """Enqueue on `stream` (a raw handle). No synchronisation, no allocation but torch's caching one."""
        ...

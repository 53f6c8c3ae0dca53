"""An attention but for its addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ....contract.attention import LEAF, factor
from ..driver import facts

MOST_SUMS = 2**28  # bytes of leaves' sums


class Strided(NamedTuple):
    """q, k or v: [batch, heads, tokens, size]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class AttentionCase:
    """An attention but for its addresses."""

    operands: tuple[Strided, ...]  # q, k, v
    mask: tuple[int, ...] | None  # strides over [b, hq, tq, tk]
    dtype: str
    dtype_out: str
    dtype_mask: str | None
    c: float
    offset: int | None  # of the causal rule
    # starts, stops: whether there are such
    starts: bool
    stops: bool
    arithmetic: str  # ``fma``, or that of the device's tensor cores; ``tensor_core:native`` where it has no definition
    aligned: bool  # addresses of q, k and v are multiples of 16 bytes
    stats: bool = True  # whether m and l are wanted; without, their address is 0
    device: int = 0

    @property
    def fma(self) -> bool:
        """Whether products are fused multiply-adds."""
        return self.arithmetic == "fma"

    @property
    def batch(self) -> int:
        return self.operands[0].shape[0]

    @property
    def heads(self) -> int:
        return self.operands[0].shape[1]

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // self.operands[1].shape[1]

    @property
    def tq(self) -> int:
        return self.operands[0].shape[2]

    @property
    def tk(self) -> int:
        return self.operands[1].shape[2]

    @property
    def d(self) -> int:
        return self.operands[0].shape[3]

    @property
    def dv(self) -> int:
        return self.operands[2].shape[3]

    @property
    def rows(self) -> int:
        """Queries that share a key head."""
        return self.tq * self.group

    @property
    def leaves(self) -> int:
        return -(-self.tk // LEAF)

    @property
    def masks(self) -> int:
        """0 none, 1 bool, 2 added."""
        return 0 if self.dtype_mask is None else 1 if self.dtype_mask == "bool" else 2

    @property
    def y_strides(self) -> tuple[int, int, int]:
        """Steps from item to item, head to head and token to token of the result."""
        return self.heads * self.tq * self.dv, self.tq * self.dv, self.dv

    @property
    def sums(self) -> int:
        """Bytes of the sums of all leaves: o, m and l of each."""
        return 4 * self.batch * self.heads * self.leaves * self.tq * (self.dv + 2)

    @property
    def alike_keys(self) -> int:
        """Another number of keys, whose leaves meet by the same code."""
        return 300 if self.leaves <= 8 else 1100 if self.leaves <= 16 else 17 * LEAF + 20

    @property
    def boxes(self) -> bool:
        """Whether the tensor copy engine can bring operands, for kernels with rows of up to 128 elements."""
        steps = [s * 2 % 16 == 0 and s > 0 for x in self.operands for s in steps_of(x)[:3]]
        sizes = self.d % 8 == 0 and self.dv % 8 == 0 and max(self.d, self.dv) <= 128
        return self.tensor_cores and self.aligned and sizes and all(steps) and self.leaves > 0

    @property
    def tensor_cores(self) -> bool:
        """Whether kernels of tensor cores can compute this."""
        return not self.fma and self.dtype != "float32"

    @property
    def hopper(self) -> bool:
        """Whether Hopper's own kernels can."""
        return self.on.capability[0] == 9 and self.boxes

    @property
    def on(self) -> facts.DeviceFacts:
        """The device."""
        return facts.device(self.device)

    @property
    def short(self) -> bool:
        """Whether a block for each leaf is likely the fastest.

        A block of ``few`` takes 64 rows: measured on an H200 at 8192 keys and 32 heads, 35 us for that many rows of 8
        key heads and 209 us for 512, where ``hopper`` takes 150 us whatever they are up to 128 queries.
        """
        programs = self.batch * self.heads * -(-self.tq // 128)
        many = self.rows <= (128 if self.hopper else 1024) and programs < 96 and self.leaves >= 8
        return self.sums <= MOST_SUMS and (self.rows <= 64 or many)

    def made(self, sizes: tuple[int, ...], *, bounds: bool, stats: bool, offset: int, pad: int) -> AttentionCase:
        """The case of other sizes (batch, key heads, tq, group, tk, d, dv), for trials.

        Operands are contiguous, or with `pad` of tokens outside of heads, which are so much longer.
        """
        b, shared, tq, group, tk, d, dv = sizes
        operands = []
        for heads, t, size in ((shared * group, tq, d), (shared, tk, d), (shared, tk, dv)):
            row = size + pad
            steps = (heads * t * row, row, heads * row, 1) if pad else (heads * t * row, t * row, row, 1)
            operands.append(Strided((b, heads, t, size), steps))
        line = tk if pad else -(-tk // 16) * 16  # masks with and without aligned rows
        mask = None if self.mask is None else (shared * group * tq * line, tq * line, line, 1)
        return replace(
            self, operands=tuple(operands), mask=mask, offset=None if self.offset is None else offset, starts=bounds,
            stops=bounds, stats=stats, c=float(factor(None, d)),
        )  # fmt: skip


def steps_of(x: Strided) -> tuple[int, ...]:
    """A step that is never taken gets the one of a contiguous tensor of 8 columns."""
    return tuple(8 if size == 1 else step for size, step in zip(x.shape, x.strides, strict=True))

"""A grouped product but for its addresses."""

from __future__ import annotations

from dataclasses import dataclass

from .....contract.spec import Contract
from ..hopper.config import HopperConfig, HopperSide

ENDS = 2  # `GroupedCase.lengths` of int32 offsets; of int32 and int64 counts: 0 and 1


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """A call but for its addresses."""

    groups: int
    rows: int
    depth: int  # K of ``x @ w.T``; 0 of ``a.T @ b``
    x: HopperSide  # weights, an item a group; or `a`
    y: HopperSide  # rows; or `b`
    dtype: str
    dtype_out: str
    contract: Contract
    # out_step, out_batch: elements from line to line and from group to group
    out_step: int
    out_batch: int = 0
    columns: bool = True  # lines of out are the columns of D = X @ Y.T, as those of ``x @ w.T`` are
    dtype_bias: str | None = None
    bias_step: int = 1
    bias_batch: int = 0
    accumulate: bool = False  # walks start from out, of float32
    lengths: int = 1  # how they are written; see `ENDS`

    @property
    def outer(self) -> bool:
        """Whether K are rows."""
        return self.depth == 0

    @property
    def mean(self) -> float:
        """Rows of a group."""
        return self.rows / self.groups

    def tiles(self, c: HopperConfig) -> tuple[int, int, int]:
        """Tiles along X and, where groups have equally many, along Y; and in all, at most."""
        x, y = -(-self.x.size // c.rows), -(-self.y.size // c.cols)
        if self.outer:
            return x, y, x * y * self.groups
        return x, 0, x * (self.rows // c.cols + min(self.groups, self.rows) + 1)

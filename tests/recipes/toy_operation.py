"""An operation along rows, as CONTRIBUTING tells to add one: a formula, its row, and a kernel for each device."""

from __future__ import annotations

from typing import Any

from isogemm.backends.cpu.rows.loops import _scratch
from isogemm.contract.rows import Operation


def cube(row: Any) -> Any:
    """``(x * x) * x`` for each element, each product rounded."""
    return row * row * row


ROW = Operation(cube, kernels="each")


def loop(scratch, n, epsilon, weighted, biased):
    """The CPU's."""
    _, row, _, _, _ = _scratch(scratch, n)
    for i in range(n):
        row[i] = row[i] * row[i] * row[i]


# CUDA's, in rows/each.cu: a name, and what it computes.
EACH = {
    "SILU_MUL_BACK };": "SILU_MUL_BACK, CUBE };",
    "  return add(x, y);": "  if (OP == CUBE) return mul(mul(x, x), x);\n  return add(x, y);",
}


def gradient(of: Any, dy: Any, x: Any) -> Any:
    """torch's: of the operand."""
    return ((dy.float() * 3 * x.float() * x.float()).to(x.dtype),)

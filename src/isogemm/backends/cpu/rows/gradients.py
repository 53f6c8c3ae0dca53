"""Gradients of operations along rows, by the kernels of a training step: of float32 arrays that lie dense."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .. import steps
from ..emit.entries import address_of
from ..pool import run_task
from .run import cut


def run(kind: str, arrays: list[NDArray[Any]], rows: int, n: int, eps: float = 0.0) -> None:
    """A kernel of `isogemm.backends.cpu.steps`, by rows (norms) or by elements; the last arrays are results."""
    total, width = (rows, n) if kind.endswith("norm_back") else (rows * n, 1)
    if not total * width:
        return
    per_chunk, chunks = cut(total, width)
    task = steps.task_of(total, per_chunk, n, eps, arrays)
    run_task(address_of(steps.KERNELS[kind]), task, chunks, steps.scratch_bytes(n))

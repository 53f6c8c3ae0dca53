"""What a product takes on a GPU, by the way a kernel cuts it into tiles: one model for the families of tensor cores.

A block works through its tiles, wave by wave; each tile walks K, a stage at a time, and is then stored. Meanwhile all
blocks together take their operands from the second-level cache, and that takes each of them once from memory. The three
go on side by side: their times add like ``(x**q + y**q + z**q) ** (1 / q)``, between the largest and the sum.

Measured on an H200 (driver 580, CUDA 13.0, November 2026), bf16 and fp16, CUDA graphs, weights rotated past L2: some
3,000 timings of 85 products that were drawn at random; `tools.time_kernels` times them again, and docs/design/0011 says
how far the first kernel by the model is from the fastest. Bytes from the second-level cache decide more than anything
else between tiles of a like area.
"""

from __future__ import annotations

from typing import NamedTuple

from ....base.dtypes import ITEMSIZE
from ....problem.product import Product
from ..driver import facts

CYCLES = 1900.0  # of a microsecond: an H200 under load
POWER = 2.87
L2 = 4520.0 / 132  # bytes a cycle, for each multiprocessor
MEMORY = 3820.0 / 4917  # bytes a cycle, for each GB/s that the bus could carry
WAITING = 0.25  # power of `intake` with which bytes from the second-level cache slow down
ENOUGH = 32  # multiprocessors that could take in what memory gives
# Where the next launch waits: the power of the share of multiprocessors with a tile that `intake` is, and microseconds.
LATE, WAIT = 1 / 3, 0.5
BEGUN = 1.2  # microseconds of a kernel that no walk goes on in
LAUNCH, COPIED = 2.0, 700.0  # of a copy: microseconds; bytes a microsecond for each GB/s of the bus
JOINED = 1.5  # microseconds of a kernel that meets sums


class Gpu(NamedTuple):
    """What the model needs of a device: multiprocessors, and the bus's GB/s."""

    multiprocessors: int
    memory: float


H200 = Gpu(132, 4917.0)


class Tiling(NamedTuple):
    """How a kernel cuts a product."""

    # tiles, waves: tiles in all, and one after the other on the busiest multiprocessor
    tiles: int
    waves: int
    lines: float  # rows of A and of B (its columns) whose values a tile takes from the second-level cache
    work: float  # cycles of a tile for 64 of K: its instructions, or the way into shared memory
    stage: float  # cycles for 64 of K that a block waits for its stages
    store: float  # cycles of a tile's epilogue
    stores: int  # epilogues that nothing hides
    late: bool = False  # the next launch's blocks come when these have all of their operands
    room: int = 0  # blocks that run at once, where that is not the number of multiprocessors: in clusters
    depth: int = 64  # of K that a stage has; what the last one has beyond K is walked as well
    power: float = POWER  # of times that overlap: the larger, the more wholly they do


def microseconds(p: Product, cut: Tiling, gpu: Gpu) -> float:
    """Time of a product on a GPU."""
    steps = -(-p.k // cut.depth) * cut.depth / 64
    walks = cut.waves * steps * together(cut.work, cut.stage, power=cut.power) + cut.stores * cut.store
    cached = cut.tiles * cut.lines * steps * 128 / (L2 * gpu.multiprocessors)
    a, b = ITEMSIZE[p.dtype_a] * p.m * p.k, ITEMSIZE[p.dtype_b] * p.n * p.k
    moved = p.batch * (a + b + ITEMSIZE[p.dtype_out] * p.m * p.n) / (MEMORY * gpu.memory)
    share = intake(cut, gpu)
    begun = BEGUN + WAIT * cut.late
    return begun + together(walks, cached / share**WAITING, moved / share, power=cut.power) / CYCLES


def intake(cut: Tiling, gpu: Gpu) -> float:
    """The share of what the GPU could take in that a launch does take in, where it follows its like.

    It is not the share of its multiprocessors: few blocks take in nearly as much as many, if they lie evenly. Those of
    a launch that begins early do where two launches fit beside one another, or nearly.
    """
    share = min(1.0, cut.tiles / (cut.waves * gpu.multiprocessors))
    if cut.late:
        return float(share**LATE)
    room = cut.room or gpu.multiprocessors
    if cut.waves == 1 and cut.tiles <= room:
        return room // cut.tiles * share * min(1.0, cut.tiles / ENOUGH)
    return share


def together(*cycles: float, power: float = POWER) -> float:
    """Times that overlap, but not wholly."""
    return float(sum(x**power for x in cycles) ** (1 / power))


def copying(nbytes: int, gpu: Gpu) -> float:
    """Time of a kernel that reads and writes `nbytes` in all."""
    return LAUNCH + nbytes / (COPIED * gpu.memory)


def joining(p: Product, leaves: int, gpu: Gpu) -> float:
    """Time of the kernel that meets the sums of leaves, whose launch hides behind theirs."""
    nbytes = p.batch * p.m * p.n * (4 * leaves + ITEMSIZE[p.dtype_out])
    return JOINED + nbytes / (COPIED * gpu.memory)


def gpu_of(device: int | Gpu) -> Gpu:
    """A device as the model sees it: by its number, or one that is not here."""
    if isinstance(device, Gpu):
        return device
    found = facts.device(device)
    return Gpu(found.multiprocessors, found.memory or H200.memory)

"""What one thread of a kernel does: which outputs, which k, which bytes of the weight, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...base.arguments import one_of
from ...base.dtypes import ITEMSIZE
from ...errors import OptionError, ShapeError
from .kernels import KERNELS, LANES, WgslKernel

Output = tuple[int, int]
GROUP = 32  # threads of what a chapter on Metal calls a SIMD group


@dataclass(frozen=True, slots=True)
class ThreadTrace:
    """The work of one thread on y[m, n] = x[m, k] @ w[n, k].T."""

    kernel: str
    # the row of workgroups, the group of 32 threads along that row, and the lane within it
    thread: tuple[int, int, int]
    outputs: tuple[Output, ...]  # (i, j) to whose sums it adds
    walks: tuple[range, ...]  # the k that it adds, a range for each of its lanes
    writes: tuple[Output, ...]  # (i, j) that it writes
    # row_bytes, itemsize: of the weight
    row_bytes: int
    itemsize: int

    @property
    def steps(self) -> int:
        """Multiply-adds for each output."""
        return sum(len(walk) for walk in self.walks)

    def rows(self) -> list[tuple[str, str]]:
        """The trace as (name, value) lines."""
        row, group, lane = self.thread
        lines = [("thread", f"row {row} of workgroups, group {group}, lane {lane} of {self.kernel}")]
        if not self.outputs:
            return [*lines, ("outputs", "none: it lies beyond the result")]
        lines.append(("outputs", _listed([f"y[{i}, {j}]" for i, j in self.outputs])))
        for walk in self.walks:
            lines.append(("k", f"{_listed([str(k) for k in walk])}: {len(walk)} steps"))
        first = [self.row_bytes * self.outputs[0][1] + self.itemsize * walk[0] for walk in self.walks if walk]
        if first:
            step = self.itemsize * self.walks[0].step
            lines.append(("bytes", f"{self.itemsize} at {_listed([str(x) for x in first])} of w, then every {step}"))
        return [*lines, ("writes", _listed([f"y[{i}, {j}]" for i, j in self.writes]) or "nothing: lane 0 does")]

    def __str__(self) -> str:
        return "\n".join(f"{name:<8} {value}" for name, value in self.rows())


def trace(
    kernel: str, shape: tuple[int, int, int], thread: tuple[int, int, int], dtype: str = "float16"
) -> ThreadTrace:
    """What a thread does for m, n, k = `shape`; weights stored [n, k].

    Raises
    ------
    OptionError
        No kernel of that name, or none whose threads walk K element by element; no such lane; no type of weights.
    ShapeError
        An extent below 1.
    """
    one_of("kernel to trace", kernel, tuple(KERNELS), "gemv_simd")
    one_of("dtype to trace", dtype, tuple(ITEMSIZE), "float16")
    if min(shape) < 1:
        raise ShapeError("shape to trace", limit="M, N and K of at least 1", value=shape, nearest=(1, 1, 1))
    row, group, lane = thread
    if not 0 <= lane < GROUP or min(row, group) < 0:
        raise OptionError(
            "thread to trace", limit="ROW,GROUP,LANE with a lane below 32", value=thread,
            nearest=f"{max(0, row)},{max(0, group)},{min(max(0, lane), 31)}",
        )  # fmt: skip
    m, n, k = shape
    made = KERNELS[kernel]
    outputs, walks, writes = _WAYS[made.file](made, group * GROUP + lane, k)
    there = [[(row * made.rows + i, j) for i, j in group_of] for group_of in (outputs, writes)]
    kept = [tuple(x for x in group_of if x[0] < m and x[1] < n) for group_of in there]
    return ThreadTrace(kernel, thread, kept[0], walks, kept[1], k * ITEMSIZE[dtype], ITEMSIZE[dtype])


Work = tuple[list[Output], tuple[range, ...], list[Output]]


def _alone(kernel: WgslKernel, index: int, k: int) -> Work:
    """A thread for an output."""
    return [(0, index)], (range(k),), [(0, index)]


def _together(kernel: WgslKernel, index: int, k: int) -> Work:
    """Some adjacent lanes of a group's outputs; the first thread writes them."""
    group, thread = divmod(index, kernel.threads)
    columns = kernel.constants.get("OUTPUTS", 1)
    outputs = [(i, group * columns + j) for i in range(kernel.rows) for j in range(columns)]
    first = thread * kernel.lanes
    walks = tuple(range(lane, k, LANES) for lane in range(first, first + kernel.lanes))
    return outputs, walks, [] if thread else outputs


def _tiled(kernel: WgslKernel, index: int, k: int) -> Work:
    """4 x 4 outputs of a tile of 64 x 64."""
    tile, local = divmod(index, kernel.workgroup)
    outputs = [(local // 16 * 4 + i, tile * 64 + local % 16 * 4 + j) for i in range(4) for j in range(4)]
    return outputs, (range(k),), outputs


def _fragments(kernel: WgslKernel, index: int, k: int) -> Work:
    """Two neighbours of an 8 x 8 fragment."""
    tile, local = divmod(index, kernel.workgroup)
    fragment, thread = divmod(local, GROUP)
    column = tile * kernel.columns + fragment % 2 * 8 + 2 * (thread % 4)
    outputs = [(fragment // 2 * 8 + thread // 4, column + j) for j in range(2)]
    return outputs, (range(k),), outputs


def _listed(items: list[str]) -> str:
    return ", ".join(items) if len(items) <= 4 else f"{', '.join(items[:3])}, ..., {items[-1]}"


_WAYS: Mapping[str, Callable[[WgslKernel, int, int], Work]] = {
    "gemv_naive": _alone,
    "gemv_transposed": _alone,
    "gemv_simd": _together,
    "gemv_simd_multi": _together,
    "gemv_wide": _together,
    "gemv_batched": _together,
    "gemm_tiled": _tiled,
    "gemm_simdgroup": _fragments,
}

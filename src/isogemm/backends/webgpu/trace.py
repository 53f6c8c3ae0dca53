"""What one thread of a kernel does: which outputs, which k, which bytes of the weight, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...base.arguments import one_of
from ...base.dtypes import ITEMSIZE
from ...errors import OptionError, ShapeError
from ...formats.blocks import format_of
from .kernels import FORMATS, KERNELS, LANES, VECTORS, WgslKernel, kernel_of, meetings
from .planes import WHOLE, begun

Output = tuple[int, int]
GROUP = 32  # threads of what a chapter on Metal calls a SIMD group
RUN = 32  # elements of a block that one thread takes at once
SHOWN = 8  # lines of k


@dataclass(frozen=True, slots=True)
class ThreadTrace:
    """The work of one thread on y[m, n] = x[m, k] @ w[n, k].T."""

    kernel: str
    # the row of workgroups, the group of 32 threads along that row, and the lane within it
    thread: tuple[int, int, int]
    outputs: tuple[Output, ...]  # (i, j) to whose sums it adds
    walks: tuple[range, ...]  # the k that it adds, a range for each of its lanes
    writes: tuple[Output, ...]  # (i, j) that it writes
    # row_bytes, itemsize: of the weight as it lies on the device; of blocks, what a row begins with (`planes.laid`)
    row_bytes: int
    itemsize: int
    block: int = 1  # elements of one item

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
        steps = [("k", f"{_listed([str(k) for k in walk]) or 'none'}: {len(walk)} steps") for walk in self.walks]
        lines += steps if len(steps) <= SHOWN else [*steps[:2], ("", f"... {len(steps) - 3} more"), steps[-1]]
        begun = self.row_bytes * self.outputs[0][1]
        first = dict.fromkeys(str(begun + self.itemsize * (walk[0] // self.block)) for walk in self.walks if walk)
        if first:
            step = self.itemsize * self.walks[0].step // self.block
            lines.append(("bytes", f"{self.itemsize} at {_listed(list(first))} of w, then every {step}"))
        nothing = "nothing: a thread that shares its outputs does"
        return [*lines, ("writes", _listed([f"y[{i}, {j}]" for i, j in self.writes]) or nothing)]

    def __str__(self) -> str:
        return "\n".join(f"{name:<8} {value}" for name, value in self.rows())


def trace(kernel: str, shape: tuple[int, int, int], thread: tuple[int, int, int], dtype: str = "") -> ThreadTrace:
    """What a thread does for m, n, k = `shape`; weights stored [n, k], float16 or Q4_0 where no `dtype` is given.

    Raises
    ------
    OptionError
        No kernel of that name; no such lane; no type of weights, or not one of the kernel's.
    ShapeError
        An extent below 1, or a K that is no whole number of the kernel's vectors or blocks.
    """
    one_of("kernel to trace", kernel, (*KERNELS, *VECTORS), "gemv_simd")
    known = FORMATS if kernel_of(kernel).order == "integers" else tuple(ITEMSIZE)
    usual = "Q4_0" if known is FORMATS else "float16"
    dtype = one_of("dtype to trace", dtype or usual, known, usual)
    if min(shape) < 1:
        raise ShapeError("shape to trace", limit="M, N and K of at least 1", value=shape, nearest=(1, 1, 1))
    row, group, lane = thread
    if not 0 <= lane < GROUP or min(row, group) < 0:
        raise OptionError(
            "thread to trace", limit="ROW,GROUP,LANE with a lane below 32", value=thread,
            nearest=f"{max(0, row)},{max(0, group)},{min(max(0, lane), 31)}",
        )  # fmt: skip
    m, n, k = shape
    made, stored = _of_type(kernel, dtype, k), _stored(dtype, k)
    outputs, walks, writes = _WAYS[made.file](made, group * GROUP + lane, k)
    there = [[(row * made.rows + i, j) for i, j in group_of] for group_of in (outputs, writes)]
    kept = [tuple(x for x in group_of if x[0] < m and x[1] < n) for group_of in there]
    return ThreadTrace(kernel, thread, kept[0], walks, kept[1], *stored)


def _of_type(name: str, dtype: str, k: int) -> WgslKernel:
    """A kernel's row; where it is for vectors, with the lanes and columns that these have of a type."""
    kernel = kernel_of(name)
    if not kernel.words:
        return kernel
    each = 4 * kernel.words // ITEMSIZE[dtype]
    if k % each:
        limit = f"K in multiples of {each}, its vectors of {dtype}"
        raise ShapeError(f"K to trace {name}", limit=limit, value=k, nearest=k + -k % each)
    return replace(kernel, lanes=each, columns=kernel.columns_of(dtype)) if kernel.order == "lanes" else kernel


def _stored(dtype: str, k: int) -> tuple[int, int, int]:
    """Of a weight on the device: bytes of a row, bytes of an item of it, elements of an item."""
    if dtype in ITEMSIZE:
        return k * ITEMSIZE[dtype], ITEMSIZE[dtype], 1
    form = format_of(dtype)
    return -(-form.row_bytes(k) // WHOLE) * WHOLE, begun(form), form.block


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


def _shared(kernel: WgslKernel, index: int, k: int) -> Work:
    """As `_together`; of outputs that two threads share each writes half, where there is more than one."""
    outputs, walks, _ = _together(kernel, index, k)
    thread, at = index % kernel.threads, meetings(len(outputs), kernel.lanes)
    first, writes = 0, True
    for level in range(at["LEVELS"]):
        half, up = at[f"HALVED_{level}"] // kernel.lanes, thread & at[f"MASK_{level}"]
        first, writes = first + (half if up else 0), writes and (half > 0 or not up)
    return outputs, walks, outputs[first : first + at["LEFT"]] if writes else []


def _tiled(kernel: WgslKernel, index: int, k: int) -> Work:
    """4 x 4 outputs of a tile of 64 x 64."""
    tile, local = divmod(index, kernel.workgroup)
    outputs = [(local // 16 * 4 + i, tile * 64 + local % 16 * 4 + j) for i in range(4) for j in range(4)]
    return outputs, (range(k),), outputs


def _registers(kernel: WgslKernel, index: int, k: int) -> Work:
    """REG_M x REG_N outputs of a tile, in fours: threads side by side have neighbouring fours."""
    at, (tile, local) = kernel.constants, divmod(index, kernel.workgroup)
    ty, tx = divmod(local, kernel.columns // at["REG_N"])
    down, side = 4 * kernel.rows // at["REG_M"], 4 * kernel.columns // at["REG_N"]
    rows = [group * down + ty * 4 + c for group in range(at["REG_M"] // 4) for c in range(4)]
    columns = [tile * kernel.columns + four * side + tx * 4 + c for four in range(at["REG_N"] // 4) for c in range(4)]
    outputs = [(i, j) for i in rows for j in columns]
    return outputs, (range(k),), outputs


def _runs(kernel: WgslKernel, index: int, k: int) -> Work:
    """Runs of a block for OUTPUTS columns and all rows; the first threads walk the blocks of an output each."""
    at, (tile, local) = kernel.constants, divmod(index, kernel.workgroup)
    side, thread = divmod(local, at["ALONG"])
    first = tile * kernel.columns + side * at["OUTPUTS"]
    outputs = [(i, first + j) for i in range(kernel.rows) for j in range(at["OUTPUTS"])]
    walks = tuple(range(RUN * thread + e, k, RUN * at["ALONG"]) for e in range(RUN))
    row, column = divmod(local, kernel.columns)
    return outputs, walks, [(row, tile * kernel.columns + column)] if row < kernel.rows else []


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
    "gemv_vector": _shared,
    "gemm_vector": _registers,
    "gemv_q4_0": _runs,
}

"""Products of groups of rows in one launch, their lengths read on the device: nothing is waited for.

Rows of all groups stand in one matrix. Of group g with the rows i up to j, a kernel computes

- ``out[i:j] = x[i:j] @ w[g].T + bias[g]``, an order of K as any product's, zeros behind the last group; or
- ``out[g] = a[i:j].T @ b[i:j]``, whose K are the rows, blocks and leaves counted from i; or continues that from out.

The contract is that of Hopper's products, whose device code it is (grouped.cu and `isogemm.backends.cuda.gemm.hopper`).
Configurations are texts as there. The first operand, 64 rows to an instruction, are the weights (or `a`, transposed);
a tile's columns are rows of x, so that few rows of a group waste little. Which tile serves is chosen by the mean of
rows a group has, which the host knows, and cannot reach a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .....base.dtypes import CODE, ITEMSIZE
from .....planner.bench import Bench
from ...driver import facts
from ...driver.kernel import Bound, ints, longs
from ...driver.nvrtc import function_of
from ...driver.tensormap import Encoder, encoder
from ...driver.wgmma import mma
from ..hopper.config import OPERANDS, SHARED, HopperConfig, HopperSide, resident, turned
from .case import GroupedCase
from .trial import try_grouped

MOST = 1024  # groups: their tables lie in shared memory, beside the ring
LARGEST = 2**30  # of an extent, and of all tiles: the kernel counts in 32 bits

# By rows a group, on the average; the first that holds, then the others. Timed on an H200: docs/design/0006.
ROWS = {
    12.0: "64x32x128 s6",
    27.0: "128x32x128 s5",
    80.0: "128x64x64 s8 pp",
    float(LARGEST): "128x128x64 s6 pp",
}
OUTER = {200.0: "128x256x64 s4", float(LARGEST): "128x128x64 s6 pp"}
CONTINUED = {float(LARGEST): "128x128x64 s6"}  # sums to start from take registers


class Grouped:
    """The family; see the text of this module."""

    name, home = "grouped", "backends/cuda/gemm/grouped"

    def configs(self, case: GroupedCase) -> Sequence[str]:
        """The one for so many rows a group, then the others."""
        if not _served(case):
            return ()
        table = CONTINUED if case.accumulate else OUTER if case.outer else ROWS
        best = next(config for limit, config in table.items() if case.mean <= limit)
        if case.outer:  # another one, where 3 in 100 elements less stand beside the matrices
            best = min(table.values(), key=lambda config: _beyond(case, config) * (1.0 if config == best else 1.03))
        return tuple(dict.fromkeys((best, *table.values())))

    def supports(self, case: GroupedCase, config: str) -> bool:
        """Whether a configuration is legal: contract, types, layouts, shared memory, registers."""
        c = HopperConfig.parse(config)
        return c is not None and _served(case) and _fits(case, c)

    def code(self, case: GroupedCase, config: str) -> str:
        """The macros, and the instruction's type."""
        defines = " ".join(f"{key}={int(v)}" for key, v in _defines(case, _parsed(config)).items())
        return f"{case.contract.arithmetic} {case.dtype} {defines}"

    def trial(self, bench: Bench, case: GroupedCase, config: str) -> str:
        """See `isogemm.backends.cuda.gemm.grouped.trial`."""
        return try_grouped(bench, self, case, config)

    def bind(self, case: GroupedCase, config: str, device: int, blocks: int = LARGEST) -> Bound:
        """``launch(stream, x, y, counts, out, bias)`` with addresses; `blocks`, the most, is for trials."""
        c, (tiles_x, tiles_y, tiles) = _parsed(config), case.tiles(_parsed(config))
        kernel = function_of(
            "gemm/grouped/grouped.cu", "grouped", device, _defines(case, c),
            before=mma(OPERANDS[case.dtype], c.cols, x_across=case.x.across, y_across=case.y.across),
        )  # fmt: skip
        bias = ITEMSIZE[case.dtype_bias] * case.bias_batch if case.dtype_bias else 0
        steps = case.out_step, case.out_batch, case.bias_step, bias
        leaf = case.contract.order.size // c.depth
        iters = -(-case.depth // c.depth)
        sizes = case.x.size, case.y.size, case.rows, case.groups, iters, leaf, tiles_x, tiles_y, case.lengths
        count = min(blocks, tiles, resident(c, facts.device(device).multiprocessors))
        bound = kernel.bind(
            [*["map"] * 4, *["ptr"] * 3, *longs(*steps), *ints(*sizes)],
            grid=(count,), block=(c.threads,), pdl=True, shared=_shared(case, c),
        )  # fmt: skip
        depth, items = case.depth or case.rows, 1 if case.outer else case.groups
        sides = (case.x, items, c.rows), (case.y, 1, c.cols)
        # Of a stage's rows of K and, where those are a group's, of sixteen.
        whole = [_encoder(case.dtype, side, depth, n, rows, 64) for side, n, rows in sides]
        few = [_encoder(case.dtype, side, depth, n, rows, 16) for side, n, rows in sides] if case.outer else whole
        (map_x, map_y), (few_x, few_y) = whole, few

        def launch(stream: int, x: int, y: int, counts: int, out: int, bias: int) -> None:
            bound(stream, map_x(x), map_y(y), few_x(x), few_y(y), counts, out, bias)

        return launch


def _beyond(case: GroupedCase, config: str) -> float:
    """Elements of an outer product's tiles to those of its matrices."""
    c, (x, y, _) = _parsed(config), case.tiles(_parsed(config))
    return x * c.rows * y * c.cols / (case.x.size * case.y.size)


def _parsed(config: str) -> HopperConfig:
    found = HopperConfig.parse(config)
    assert found is not None, config
    return found


def _served(case: GroupedCase) -> bool:
    order, names = case.contract.order, (case.dtype_out, case.dtype_bias or "float32")
    if case.contract.arithmetic != "tensor_core:sm90" or order.kind not in ("chain", "leaf"):
        return False
    if order.kind == "leaf" and not case.outer:
        return False
    if case.dtype not in OPERANDS or any(name not in CODE for name in names):
        return False
    if case.accumulate and (not case.outer or case.dtype_out != "float32"):
        return False
    if not 1 <= case.groups <= MOST or not all(1 <= n < LARGEST for n in (case.rows, case.x.size, case.y.size)):
        return False
    lines = case.depth or case.rows
    return all(_readable(side, lines) for side in (case.x, case.y)) and (case.y.across == case.outer)


def _readable(side: HopperSide, k: int) -> bool:
    """The copy engine steps by multiples of 16 bytes, from line to line and from item to item."""
    least = side.size if side.across else k
    return side.step % 8 == 0 and side.batch % 8 == 0 and least <= side.step < 2**38 and 0 <= side.batch < 2**38


def _fits(case: GroupedCase, c: HopperConfig) -> bool:
    if c.swapped or c.stages < 2 or c.depth % 64 or c.cluster > 1:
        return False
    if c.rows not in ((64, 128) if c.pingpong else (64, 128, 192, 256)) or c.cols % 8 or not 8 <= c.cols <= 256:
        return False
    if (c.occupancy > 1 and c.warpgroups > 1) or c.accumulators > {1: 160, 2: 160, 3: 96}[c.warpgroups] // c.occupancy:
        return False
    if case.outer and (c.warpgroups < 2 or c.depth != 64 or c.stages > 32):  # as the warp that zeroes rows has it
        return False
    if case.contract.order.size % c.depth:
        return False
    if case.tiles(c)[2] >= LARGEST:
        return False
    return c.occupancy * (_shared(case, c) + 1024) <= SHARED + 1024


def _ring(case: GroupedCase, c: HopperConfig) -> int:
    cols = -(-c.cols // 64) * 64 if case.y.across else c.cols
    return c.stages * c.depth * 2 * (c.rows + cols)


def _shared(case: GroupedCase, c: HopperConfig) -> int:
    """Bytes of dynamic shared memory: the ring, at a multiple of 1024, what turns results, two tables of the groups."""
    turns = case.columns and ITEMSIZE[case.dtype_out] == 2
    return 1024 + _ring(case, c) + turned(c.warpgroups, c.cols) * turns + 8 * (case.groups + 2)


def _defines(case: GroupedCase, c: HopperConfig) -> dict[str, Any]:
    size = ITEMSIZE[case.dtype_out]
    return {
        "BN": c.cols, "KS": c.depth // 64, "STAGES": c.stages, "WARPGROUPS": c.warpgroups, "MW": c.blocks,
        "PINGPONG": c.pingpong, "CM": 1, "CN": 1, "X_MN": case.x.across, "Y_MN": case.y.across,
        "TILE_ROWS": c.rows, "X_ROWS": c.rows, "X_WHOLE": False, "Y_WHOLE": False, "COLUMNS": case.columns,
        "LEAF": 0, "TOTALS": 0, "ACCUMULATE": case.accumulate,
        "EPILOGUE": case.dtype_bias is not None, "C_KIND": 0 if case.accumulate else -1,
        "BIAS_KIND": CODE[case.dtype_bias] if case.dtype_bias else -1, "BIAS_ROWS": 1, "OUT": CODE[case.dtype_out],
        "VECTOR": case.out_step * size % 16 == 0 and case.out_batch * size % 16 == 0, "OCCUPANCY": c.occupancy,
        "PRODUCER_REGISTERS": 32 if c.warpgroups == 3 else 40,
        "CONSUMER_REGISTERS": 160 if c.warpgroups == 3 else 232, "X_POLICY": c.evict, "Y_POLICY": 2 * c.evict,
        "OUTER": case.outer, "LEAVES": case.contract.order.kind == "leaf",
    }  # fmt: skip


def _encoder(dtype: str, side: HopperSide, depth: int, items: int, rows: int, of_k: int) -> Encoder:
    """The map of an operand: items, rows, K; or items, K, rows where rows are contiguous, `of_k` at a time."""
    lines, inner = (depth, side.size) if side.across else (side.size, depth)
    box = (1, of_k, 64) if side.across else (1, rows, 64)
    strides = (side.batch or side.step * lines, side.step, 1)
    return encoder(dtype, sizes=(items, lines, inner), strides=strides, box=box, swizzle=128)

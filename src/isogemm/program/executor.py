"""Walks a plan: every call is bound once to its memory, its kernel and its chunks, and a step is a walk over them.

Nothing here chooses: who computes what is in the plan, where it lies in the layout. The pool's threads claim the chunks
that the plan has cut.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.cpu import steps as kernels
from ..backends.cpu.attention import loops as attention
from ..backends.cpu.emit.entries import address_of
from ..backends.cpu.gemm.launch import Batch, launch_single
from ..backends.cpu.gemm.schedule import Schedule
from ..backends.cpu.gemm.tasks import Epilogue, float32_bits, task_for
from ..backends.cpu.pool import pool, run_chunks
from ..backends.cpu.quant import loops, pack
from ..backends.cpu.quant.launch import complete, panels_task, point, quantizing_task
from ..backends.cpu.quant.layout import COLUMNS
from ..backends.cpu.rows import loops as rows
from ..backends.cpu.rows.run import task_of
from ..base.arguments import items, number
from ..base.dtypes import CODE_OF
from ..contract.attention import factor
from ..contract.spec import Contract
from ..errors import OptionError
from ..formats.blocks import FORMATS
from ..problem.settings import PLAIN, Settings
from .lowering import Lowered, PlannedCall
from .memory import ProgramMemory

CANARIES = "canaries"  # what `times` calls their writing and reading

Array = NDArray[Any]
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class AdamW:
    """Rates of the optimizer, named as torch's.

    Raises
    ------
    DTypeError, OptionError
        One that is no number, below 0 or infinite; betas that are not two numbers from 0 to below 1.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= number(name, getattr(self, name)) < np.inf:
                usual = AdamW.__dataclass_fields__[name].default
                raise OptionError(name, limit="at least 0", value=getattr(self, name), nearest=usual)
        betas = items(self.betas)
        if betas is None or len(betas) != 2 or not all(0 <= number("betas", beta) < 1 for beta in betas):
            limit = "two numbers from 0 to below 1"
            raise OptionError("betas", limit=limit, value=self.betas, nearest=(0.9, 0.999))


def scalars(rates: AdamW, step: int) -> NDArray[np.float32]:
    """What `kernels.adamw` reads in step 1, 2, ...: computed in float64 and rounded once.

    ``m = m * b1 + g * (1 - b1)``, ``v = v * b2 + (g * g) * (1 - b2)`` and
    ``w = w * (1 - lr * decay) - lr / (1 - b1**step) * (m / (sqrt(v) / sqrt(1 - b2**step) + eps))``, each product, sum,
    quotient and root rounded by itself.
    """
    b1, b2 = rates.betas
    numbers = (
        1 - rates.lr * rates.weight_decay, b1, 1 - b1, b2, 1 - b2, (1 - b2**step) ** 0.5, rates.eps,
        rates.lr / (1 - b1**step),
    )  # fmt: skip
    return np.array(numbers, np.float32)


@dataclass(slots=True)
class _Bound:
    """A call with everything it needs: what runs, whose canaries are written before and looked at behind it."""

    name: str
    phase: str
    run: Step
    born: Any
    dead: Any
    boundary: Any = None


class ProgramExecutor:
    """A plan that was checked, bound to memory.

    `canaries`: look at them; they are there in any case.
    """

    def __init__(
        self, lowered: Lowered, plan: Mapping[str, Any], layout: Mapping[str, Any], *, canaries: bool = True
    ) -> None:
        self.memory = ProgramMemory(layout)
        self._keep: list[Any] = []  # task arrays and tables of addresses, which kernels read
        live = {entry["name"]: (entry["first_op"], entry["last_op"]) for entry in layout["tensors"]}
        end = max((last for _, last in live.values()), default=0)
        born, dead = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
        for name, (first, last) in live.items():
            if first or last != end:  # nothing is written or looked at of what lives throughout
                born[first].append(name)
            if last != end:
                dead[last].append(name)
        self.calls = [
            self._bound(call, entry, born[i], dead[i])
            for i, (call, entry) in enumerate(zip(lowered.calls, plan["ops"], strict=True))
        ]
        self.canaries = canaries
        self.times: list[tuple[str, str, float, float]] | None = None  # what a trace is made of, when it is a list
        for i, (call, after) in enumerate(zip(self.calls, [*self.calls[1:], None], strict=True)):
            if after is None or after.phase != call.phase:
                there = [name for name, (first, last) in live.items() if first <= i <= last]
                call.boundary = self.memory.some(there)

    def run(self, *phases: str) -> None:
        """The calls of the phases that begin with one of these names, in the plan's order.

        Raises LayoutError: a canary was found changed.
        """
        walk = self._walk if self.times is None else self._timed
        for call in self.calls:
            if call.phase.startswith(phases):
                walk(call)

    def _walk(self, call: _Bound) -> None:
        self._arm(call)
        call.run()
        self._look(call)

    def _arm(self, call: _Bound) -> None:
        if call.born is not None:
            self.memory.arm(call.born)

    def _look(self, call: _Bound) -> None:
        if self.canaries:
            if call.dead is not None:
                self.memory.check(call.dead, call.phase, call.name)
            if call.boundary is not None:
                self.memory.check(call.boundary, call.phase, call.name)

    def _timed(self, call: _Bound) -> None:
        """`_walk`, whose three parts are added to `times`."""
        parts: tuple[tuple[str, Step], ...] = (
            (CANARIES, lambda: self._arm(call)), (call.name, call.run), (CANARIES, lambda: self._look(call)),
        )  # fmt: skip
        began = time.perf_counter()
        for name, part in parts:
            part()
            ended = time.perf_counter()
            if self.times is not None:
                self.times.append((name, call.phase, began, ended))
            began = ended

    def _bound(self, call: PlannedCall, entry: Mapping[str, Any], born: list[str], dead: list[str]) -> _Bound:
        some = self.memory.some
        arrays = [self.memory.strided(view) for view in call.operands]
        bind = BINDERS.get(call.kernel, _rows if call.kernel.startswith("rows.") else _kernel)
        if "format" in call.options:
            bind = _quantized_linear if call.kernel.startswith("gemm") else _quantize
        run = bind(self._keep, call, entry, arrays)
        return _Bound(call.name, call.phase, run, some(born) if born else None, some(dead) if dead else None)


def _chunks(call: PlannedCall, entry: Mapping[str, Any]) -> tuple[int, int, int]:
    """(threads, extent of a chunk, chunks), as the plan has cut it."""
    dispatch = entry["dispatch"]
    tile = dispatch["tile_n" if call.axis == "n" else "tile_m"]
    return dispatch["threads"], tile, -(-call.extent // tile)


def _launch(keep: list[Any], entry_point: int, task: Array, scratch: int, threads: int, chunks: int) -> Step:
    keep.append(task)
    place, threads = task.ctypes.data, min(threads, chunks)
    return lambda: pool().run(run_chunks, scratch, threads, entry_point, place, chunks)


def _kernel(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """A kernel of `kernels.KERNELS`."""
    threads, tile, chunks = _chunks(call, entry)
    options, name, n = call.options, call.kernel, call.shape[1]
    number = options.get("eps", options.get("number", 0.0))
    if name == "attention_steps":
        number = float(factor(None, options["width"]))
    task = kernels.task_of(call.extent, tile, n, number, arrays, options.get("first", 0), options.get("second", 0))
    return _launch(keep, address_of(kernels.KERNELS[name]), task, kernels.scratch_bytes(n), threads, chunks)


def _move(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """Rows in another order: `take`, or `spread` where they go apart, with their numbers in a table of the call's."""
    source, out = arrays
    threads, tile, chunks = _chunks(call, entry)
    kernel, apart = (kernels.take, source) if out.flags.c_contiguous else (kernels.spread, out)
    index = np.zeros(apart.shape[:-1], np.int64)
    for axis, step in enumerate(apart.strides[:-1]):
        shape = [-1 if i == axis else 1 for i in range(index.ndim)]
        index += np.arange(apart.shape[axis]).reshape(shape) * (step // (apart.itemsize * apart.shape[-1]))
    index = np.ascontiguousarray(index.reshape(-1))
    keep.append(index)
    task = np.zeros(kernels.WORDS, np.int64)
    task[kernels.TOTAL], task[kernels.PER_CHUNK], task[kernels.WIDTH] = call.extent, tile, call.shape[1]
    task[kernels.ADDRESSES : kernels.ADDRESSES + 3] = source.ctypes.data, index.ctypes.data, out.ctypes.data
    return _launch(keep, address_of(kernel), task, kernels.scratch_bytes(0), threads, chunks)


def _rows(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """An operation along rows of the CPU's column."""
    threads, tile, chunks = _chunks(call, entry)
    *operands, out = arrays
    start, kernel = rows.addresses(call.kernel.removeprefix("rows."))
    epsilon = call.options.get("eps", 0.0)
    task = task_of(kernel, call.extent, tile, out, *operands, epsilon=epsilon, tables=keep)
    return _launch(keep, start, task, rows.scratch_bytes(operands[0].shape[-1]), threads, chunks)


def _gemm(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """One product, in the plan's tiles and blocks."""
    a, b, *bias, out = arrays
    kernel, dispatch, (m, n, _) = dict(entry["isogemm"]["kernel"]), entry["dispatch"], call.shape
    grid = -(-m // dispatch["tile_m"]), -(-n // dispatch["tile_n"])
    if kernel.pop("swapped"):
        grid = grid[::-1]
    chosen = Schedule(**kernel, grid_m=grid[0], grid_n=grid[1], threads=dispatch["threads"])
    epilogue = Epilogue(PLAIN, bias=bias[0]) if bias else _epilogue(call)
    task = task_for(a, b, out, epilogue, dispatch["threads"], chosen)
    keep.append(arrays)
    return lambda: launch_single(task, a, b, out, epilogue)


def _gemm_batched(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """Products of one shape, `tile_m` of them to a chunk."""
    a, b, out = arrays
    threads, tile, _ = _chunks(call, entry)
    epilogue = _epilogue(call)
    first = a[0], b[0], out[0]
    task = task_for(*first, epilogue, 1)
    batch = Batch(len(out), tile, a.strides[0], b.strides[0], out.strides[0], 0, threads)
    keep.append(arrays)
    return lambda: launch_single(task, *first, epilogue, batch)


def _epilogue(call: PlannedCall) -> Epilogue | None:
    alpha = call.options.get("alpha", 1.0)
    return None if alpha == 1.0 else Epilogue(Settings.checked(Contract(), alpha=alpha))


def _attention(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """Maxima and powers of leaves, or leaves meeting."""
    _, shared, groups, t, d = call.options["sizes"]
    threads, tile, chunks = _chunks(call, entry)
    task = np.zeros(attention.WORDS, np.int64)
    if call.kernel == "attention.leaves":
        products, powers, m, total = arrays[-4:]
        function, scratch, keys = attention.run_leaves, 4 * attention.LANES, products.shape[-1]
        masks = arrays[1:-4]  # by which a decoded token's sequence sees keys; else token i sees i + 1
        task[attention.PRODUCTS : attention.HEADS + 1] = (
            products.ctypes.data, keys, powers.ctypes.data, CODE_OF[powers.dtype], float32_bits(float(factor(None, d))),
            keys if masks else 1, 1, shared,
        )  # fmt: skip
        for mask in masks:
            steps = (mask.strides[0], 0, 0, mask.strides[1])
            task[attention.MASK : attention.MASK_KEY + 1] = (mask.ctypes.data, attention.BOOLEAN, *steps)
    else:
        parts, m, total, y, out_m, out_l = arrays
        function, scratch = attention.run_meeting, 4 * d
        task[attention.PARTS : attention.ALL_TOKENS + 1] = (
            parts.ctypes.data, d, y.ctypes.data, CODE_OF[y.dtype], out_m.ctypes.data, out_l.ctypes.data, t,
        )  # fmt: skip
    task[attention.HEADS_ROWS : attention.LEAF_L + 1] = (
        call.extent, tile, groups * t, t, 0, m.shape[1], m.ctypes.data, total.ctypes.data,
    )  # fmt: skip
    return _launch(keep, address_of(function), task, scratch, threads, chunks)


def _quantize(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """Activations into the records of `backends.cpu.quant.pack`, row by row."""
    (x, out), (m, k, _), fmt = arrays, call.shape, call.options["format"]
    threads, tile, chunks = _chunks(call, entry)
    task = quantizing_task(fmt, m, k, x.dtype, tile * (k // FORMATS[fmt].block))
    task[pack.X], task[pack.X_ROW], task[pack.X_COLUMN], task[pack.OUT] = x.ctypes.data, *x.strides, out.ctypes.data
    return _launch(keep, address_of(pack.quantize_rows), task, pack.SCRATCH, threads, chunks)


def _quantized_linear(keep: list[Any], call: PlannedCall, entry: Mapping[str, Any], arrays: list[Array]) -> Step:
    """Records times a weight's own blocks, 16 rows of them at a time."""
    (x, w, *biases, out), (m, n, k), fmt = arrays, call.shape, call.options["format"]
    threads, tile, chunks = _chunks(call, entry)
    task = panels_task(fmt, m, n, k, threads)[0].copy()
    task[2, loops.PER_CHUNK], task[2, loops.LANES] = -(-tile // COLUMNS), threads
    point(task, x, w, out, biases[0] if biases else None)
    complete(task, fmt, w.strides[0])
    return _launch(keep, address_of(loops.run_panels), task, loops.SCRATCH, threads, chunks)


BINDERS: dict[str, Callable[[list[Any], PlannedCall, Mapping[str, Any], list[Array]], Step]] = {
    "gemm": _gemm, "gemm_batched": _gemm_batched, "move": _move,
    "attention.leaves": _attention, "attention.meeting": _attention,
}  # fmt: skip

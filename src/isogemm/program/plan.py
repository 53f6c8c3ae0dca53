"""Who computes what: the execution plan ``ck.train.exec.v1`` of a lowered graph, from choices that reach no bit.

Fields of the schema are the source's; what it cannot say stands under ``isogemm``: who reads and writes what, the
kernel's blocks, the contract. Numbers are a function of the graph and the length of a leaf alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..backends.cpu.gemm.plan import plan as product_plan
from ..base.jit import source_stamp
from ..base.threads import get_num_threads
from .lowering import Lowered, PlannedCall

SCHEMA = "ck.train.exec.v1"
CHUNK = 2**15  # elements below which waking a thread costs more than it saves
ITEM_WORK = 48 * 1024  # fused multiply-adds, likewise
# Of a core: GFLOP/s of products, GB/s that other kernels read and write; medians of a training step, Zen 4.
GFLOPS, GBYTES = 83.0, 6.0


NUMBERS = ("model", "phase", "batch", "tokens", "attention_leaf", "quantize")  # and leaf: what bits are a function of


@dataclass(frozen=True, slots=True)
class Choices:
    """What a planner chooses.

    Attributes
    ----------
    threads : int
    mode : {"deterministic", "fast"}
    groups : mapping of str to int
        Leaves of a weight's gradient that are computed side by side; without an entry one, `deterministic`'s choice.
    dispatch : mapping of str to dict
        Of calls by name: ``tile_m``, ``tile_n``, ``threads`` and ``barrier``, each by default the planner's.
    """

    threads: int = 0
    mode: str = "deterministic"
    groups: Mapping[str, int] = field(default_factory=dict)
    dispatch: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def digest(data: Any) -> str:
    """Hash over plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def make_plan(lowered: Lowered, choices: Choices, about: Mapping[str, Any]) -> dict[str, Any]:
    """The plan, as plain data.

    `about` is what else belongs to it: the model, sizes, how often the phases of a micro-batch run.
    """
    threads = choices.threads or get_num_threads()
    numbers = {name: about[name] for name in NUMBERS} | {"leaf": lowered.leaf}
    ops = [_entry(i, call, choices, threads, lowered) for i, call in enumerate(lowered.calls)]
    phases = list(dict.fromkeys(call.phase for call in lowered.calls))
    return {
        "schema": SCHEMA,
        "runtime": {"threads": threads, "mode": choices.mode},
        "phases": phases,
        "ops": ops,
        "isogemm": dict(about) | {"leaf": lowered.leaf, "kernels": source_stamp(), "numbers": digest(numbers)},
    }


def choices_of(plan: Mapping[str, Any]) -> Choices:
    """The choices that a plan was made of."""
    groups, dispatch = {}, {}
    for op in plan["ops"]:
        dispatch[op["name"]] = op["dispatch"] | {"barrier": op["barrier"]}
        if op["kernel_id"] == "columns" and op["name"].endswith("/meet0"):
            groups[op["isogemm"]["of"]] = op["shape"]["k"]
    return Choices(plan["runtime"]["threads"], plan["runtime"]["mode"], groups, dispatch)


def _entry(number: int, call: PlannedCall, choices: Choices, threads: int, lowered: Lowered) -> dict[str, Any]:
    m, n, k = call.shape
    given = choices.dispatch.get(call.name, {})
    kernel, dispatch = _product(call, given, threads) if call.axis == "mn" else _ranges(call, given, threads)
    kind, buffer, order = call.reduction or ("none", None, None)
    return {
        "op_id": number,
        "name": call.name,
        "phase": call.phase,
        "kernel_id": call.kernel,
        "shape": {"m": m, "n": n, "k": k},
        "dispatch": dispatch,
        "reduction": {"type": kind, "partial_buffer": buffer, "order": order},
        "barrier": bool(given.get("barrier", True)),
        "isogemm": {
            "of": call.of, "reads": list(call.reads), "writes": list(call.writes), "kernel": kernel,
            "contract": _contract(call), "expected_us": _expected_us(call, dispatch, lowered),
        },
    }  # fmt: skip


def _expected_us(call: PlannedCall, dispatch: Mapping[str, Any], lowered: Lowered) -> float:
    """Time on cores like the one that was measured, which share the work where there is some for each."""
    (m, n, _), chunks, threads = call.shape, 1, int(dispatch["threads"])
    for axis, tile, extent in (("m", dispatch["tile_m"], m), ("n", dispatch["tile_n"], n)):
        chunks *= -(-(extent if call.axis == "mn" else call.extent) // tile) if axis in dispatch["split_axis"] else 1
    if dispatch["split_axis"] not in ("none", "m", "n", "mn"):
        chunks = -(-call.extent // dispatch["tile_m"])
    work = call.flops / GFLOPS
    if not call.kernel.startswith("gemm"):
        work = sum(lowered.values[name].size for name in {*call.reads, *call.writes}) / GBYTES
    return round(work / min(chunks, threads) / 1e3, 3)


def _contract(call: PlannedCall) -> str:
    """What a call's numbers are."""
    if "format" in call.options:
        return "int32/chain"
    return "fma/chain" if call.kernel.startswith("gemm") else "rows"


def _product(call: PlannedCall, given: Mapping[str, Any], threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Blocks of a product's kernel, and its tiles."""
    m, n, k = call.shape
    wanted = int(given.get("threads", threads))
    trans = "".join("N" if view.strides[-1] == 1 else "T" for view in call.operands[:2])
    found = product_plan((m, n, k), ("float32",) * 3, trans, False, None, wanted)
    kernel = asdict(found.schedule) | {"swapped": found.swapped}
    grid = kernel.pop("grid_m"), kernel.pop("grid_n")
    chosen = kernel.pop("threads")
    grid_m, grid_n = grid[::-1] if found.swapped else grid
    tile_m, tile_n = int(given.get("tile_m", -(-m // grid_m))), int(given.get("tile_n", -(-n // grid_n)))
    cut = "".join(axis for axis, tile, extent in (("m", tile_m, m), ("n", tile_n, n)) if tile < extent)
    return kernel, _dispatch(cut or "none", tile_m, tile_n, int(given.get("threads", chosen)))


def _ranges(call: PlannedCall, given: Mapping[str, Any], threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranges of rows, columns, elements, heads or leaves."""
    m, n, k = call.shape
    work, least = m * n * k, CHUNK
    if call.kernel == "gemm_batched":
        work, least = work * call.extent, ITEM_WORK
    some = 1 if call.axis == "none" else max(1, min(threads, call.extent, work // least))
    if "threads" in given:
        some = int(given["threads"])
    part = "tile_n" if call.axis == "n" else "tile_m"
    unit = call.options.get("unit", 1)
    tile = int(given.get(part, min(call.extent, -(-call.extent // (some * unit)) * unit)))
    other = n if part == "tile_m" else m
    cut = call.axis if tile < call.extent else "none"
    tiles = (tile, other) if part == "tile_m" else (other, tile)
    return {}, _dispatch(cut, *tiles, some)


def _dispatch(axis: str, tile_m: int, tile_n: int, threads: int) -> dict[str, Any]:
    schedule = "serial" if threads == 1 or axis == "none" else "claimed"
    return {"split_axis": axis, "tile_m": tile_m, "tile_n": tile_n, "threads": threads, "schedule": schedule}

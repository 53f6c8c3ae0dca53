"""Why a batch is faster or slower than a loop: how kernels fill the machine, and whether operands stay in the cache.

From a profiler of launches come grid, block, registers and shared memory; what a multiprocessor holds of them follows
from its limits. Utilization of pipes and caches and the reasons of stalls are counters, which ncu reads where it is
installed and the driver lets it; else the page says why not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..charts import bars, number, points
from ..declare import Figure, Row, Study, StudyCase, Ways
from ..site import Site
from .four_methods import method_case

__all__ = ["STUDY", "resident"]

K = 16
METHODS = ("loop", "strided")
WARP, REGISTERS_AT_ONCE = 32, 256  # threads of a warp; a warp's registers come in such pieces


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """k = 16, N = 1024 and 4096, as a loop and as a batch."""
    on_gpu = site.device == "cuda"
    sizes = ((1024, 4096) if on_gpu else (128, 256)) if quick or on_gpu else (512, 1024)
    k, modes = (K if on_gpu or not quick else 4), (("fp32", "tf32") if on_gpu else ("fp32",))
    found = [
        method_case(n, k, mode, methods=METHODS, clocks=("device",), inspect=on_gpu) for n in sizes for mode in modes
    ]
    return [_with_limits(case) for case in found]


def _with_limits(case: StudyCase) -> StudyCase:
    """The case, whose row also has what the machine can hold."""

    def make(site: Site, seed: int) -> Ways:
        made = case.make(site, seed)
        return replace(made, facts={**made.facts, "limits": _limits(site), "cache": site.cache})

    return replace(case, make=make)


def _limits(site: Site) -> dict[str, int]:
    """What one multiprocessor holds, and how many there are; nothing on a CPU."""
    if site.device == "cpu":
        return {}
    import torch

    facts = torch.cuda.get_device_properties(0)
    return {
        "multiprocessors": facts.multi_processor_count,
        "threads": facts.max_threads_per_multi_processor,
        "registers": facts.regs_per_multiprocessor,
        "shared": facts.shared_memory_per_multiprocessor,
        "blocks": 32,
    }


def resident(launch: Mapping[str, Any], limits: Mapping[str, int]) -> tuple[int, str]:
    """How many blocks of a launch one multiprocessor holds, and what keeps it from more."""
    threads = math.prod(launch["block"])
    warps = -(-threads // WARP)
    registers = -(-launch["registers"] * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * warps
    shared = launch["shared"] + 1024  # a block's own, that the system keeps
    fits = {
        "threads": limits["threads"] // (warps * WARP),
        "registers": limits["registers"] // max(1, registers),
        "shared memory": limits["shared"] // shared,
        "blocks": limits["blocks"],
    }
    least = min(fits, key=fits.__getitem__)
    return fits[least], least


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Share of the roofline, operands beside the cache, and how kernels fill the machine."""
    launched = _launches([row for row in rows if row.get("launches")])
    return [_roofline(rows), _cache(rows), *([launched] if launched else []), _counters(rows)]


def _roofline(rows: Sequence[Row]) -> Figure:
    data = [
        point | {"case": row["name"], "share": row["timings"][point["way"]].get("roofline", 0.0)}
        for row in rows
        for point in points([row])
    ]
    top = max(data, key=lambda point: point["share"])
    title = f"{top['way']} reaches {100 * top['share']:.3g} % of the roofline at {top['case']}"
    chart = bars(data, "case", "share", titles=("", "share of the roofline"))
    return Figure(title, chart, "The roofline is what was measured here: a copy, and the rate of a large product.")


def _cache(rows: Sequence[Row]) -> Figure:
    table = []
    for row in rows:
        facts = row["facts"]
        one, cache = 12 * facts["N"] ** 2, facts["cache"]
        table.append(
            {
                "case": row["name"],
                "one product": f"{number(one / 2**20, 4)} MiB",
                "all": f"{number(facts['k'] * one / 2**20, 4)} MiB",
                "last cache": f"{number(cache / 2**20, 4)} MiB",
                "of the loop": "stays" if one <= cache else "does not fit",
                "of the batch": "stays" if facts["k"] * one <= cache else "does not fit",
            }
        )
    small = sum(line["of the batch"] == "stays" for line in table)
    title = f"The whole batch fits the last cache in {small} of {len(table)} cases"
    return Figure(title, None, "Two operands and a result of 4 bytes an element; what fits is not read again.", table)


def _launches(rows: Sequence[Row]) -> Figure | None:
    table = []
    for row in rows:
        limits = row["facts"]["limits"]
        for way, found in row["launches"].items():
            for launch in found:
                blocks, limiter = resident(launch, limits)
                grid = math.prod(launch["grid"])
                table.append(
                    {
                        "case": row["name"],
                        "way": way,
                        "grid": " x ".join(map(str, launch["grid"])),
                        "block": " x ".join(map(str, launch["block"])),
                        "launches": launch["count"],
                        "registers": launch["registers"],
                        "shared KiB": f"{launch['shared'] / 1024:.4g}",
                        "blocks on a multiprocessor": blocks,
                        "limited by": limiter,
                        "waves": f"{grid / (blocks * limits['multiprocessors']):.3g}" if blocks else "",
                        "occupancy": f"{100 * blocks * math.prod(launch['block']) / limits['threads']:.3g} %",
                        "kernel": launch["name"][:60],
                    }
                )
    if not table:
        return None
    part = sum(float(line["waves"] or 0) < 1 for line in table)
    title = f"{part} of {len(table)} kinds of launch leave a part of the multiprocessors idle"
    return Figure(title, None, "Below one wave a kernel has fewer blocks than the machine holds at once.", table)


def _counters(rows: Sequence[Row]) -> Figure:
    """What ncu read, or why it did not."""
    table = [
        {"case": row["name"], "way": way, **{name: number(value) for name, value in values.items()}}
        for row in rows
        for way, values in row.get("counters", {}).items()
    ]
    if not table:
        return _no_counters(rows)
    heads = list(dict.fromkeys(name for line in table for name in line))
    table = [{name: line.get(name, "") for name in heads} for line in table]
    top = max(table, key=lambda line: float(line.get("HBM %") or 0))
    title = f"Memory is busiest, at {top.get('HBM %', '?')} %, with {top['way']} at {top['case']}"
    return Figure(
        title, None, "Means over a way's kernels; stalls are warps waiting for each instruction issued.", table
    )


def _no_counters(rows: Sequence[Row]) -> Figure:
    title = "Pipes, caches and stalls: not measured"
    why = next((row["no_counters"] for row in rows if "no_counters" in row), "")
    if why:
        return Figure(title, None, f"{why}. None is emulated.")
    if any(row["facts"]["limits"] for row in rows):
        return Figure(title, None, "A quick run does not start ncu, which replays every kernel some tens of times.")
    return Figure(title, None, "On a CPU there is no launch configuration, and its counters are not read.")


STUDY = Study("why", "Why is a batch faster than a loop for small products and not for large ones?", cases, figures)

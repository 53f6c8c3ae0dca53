"""A program in words: tables of phases and memory, what is odd in a plan, and what two plans differ in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from ..base.disk import write_whole
from .plan import NUMBERS

__all__ = ["advice", "busy", "differences", "explain", "trace"]


def busy(m: int, n: int, tile_m: int, tile_n: int, threads: int) -> int:
    """How many of `threads` threads have a tile at all: ``min(threads, ceil(m / tile_m) * ceil(n / tile_n))``."""
    return min(threads, -(-m // tile_m) * -(-n // tile_n))


def advice(plan: Mapping[str, Any]) -> list[str]:
    """Operations of a ``ck.train.exec.v1`` plan, ours or another's, whose tiles leave threads without work."""
    found = []
    runtime = plan["runtime"]["threads"]
    for op in plan["ops"]:
        shape, dispatch = op["shape"], op["dispatch"]
        threads, axis = dispatch.get("threads", runtime), dispatch.get("split_axis", "none")
        tiles = [dispatch.get(f"tile_{x}") if x in axis else shape[x] for x in "mn"]
        if axis not in ("m", "n", "mn") or None in tiles:
            continue
        working = busy(shape["m"], shape["n"], tiles[0], tiles[1], threads)
        if working < threads:
            found.append(
                f"op {op['op_id']} ({op['kernel_id']}): tiles of {tiles[0]} x {tiles[1]} on "
                f"{shape['m']} x {shape['n']} keep {working} of {threads} threads busy"
            )
    return found


def explain(program: Any) -> str:
    """Phases with their operations, memory by section, and what is odd."""
    plan, layout = program.plan, program.layout
    about, lines = plan["isogemm"], []
    lines.append(
        f"{plan['schema']}: {about['phase']}, {about['batch']} sequences of {about['tokens']} tokens in "
        f"{about['micro_batches']} parts, {plan['runtime']['threads']} threads, "
        f"{plan['runtime']['mode']}, leaf {about['leaf']}"
    )
    lines += ["", f"{'phase':<18} {'operations':>10} {'products':>9} {'GFLOP':>9} {'threaded':>9} {'expected us':>12}"]
    flops = {call.name: call.flops for call in program.lowered.calls}
    for phase in plan["phases"]:
        ops = [op for op in plan["ops"] if op["phase"] == phase]
        products = sum(op["kernel_id"].startswith("gemm") for op in ops)
        gflop = sum(flops[op["name"]] for op in ops) / 1e9
        threaded = sum(op["dispatch"]["schedule"] != "serial" for op in ops)
        us = sum(op["isogemm"]["expected_us"] for op in ops)
        lines.append(f"{phase:<18} {len(ops):>10} {products:>9} {gflop:>9.4f} {threaded:>9} {us:>12.0f}")
    lines += ["", f"{'section':<18} {'tensors':>10} {'bytes':>12} {'offset':>12}"]
    for section in layout["sections"]:
        count = sum(entry["section"] == section["name"] for entry in layout["tensors"])
        shared = "  shared" if section["shared"] else ""
        lines.append(f"{section['name']:<18} {count:>10} {section['bytes']:>12} {section['offset']:>12}{shared}")
    least = layout["lower_bound"]
    lines.append(f"{'allocation':<18} {len(layout['tensors']):>10} {layout['bytes']:>12}")
    lines.append(f"{layout['bytes'] / least:.3f} of the {least} bytes that live at once")
    return "\n".join([*lines, *(["", *found] if (found := advice(plan)) else [])])


def differences(one: Any, other: Any) -> tuple[list[str], list[str]]:
    """(what differs in who computes and where, what differs in the numbers): without the second bits cannot differ."""
    ours, theirs = one.plan["isogemm"], other.plan["isogemm"]
    numbers, found = (
        [f"{name}: {ours[name]} and {theirs[name]}" for name in names if ours[name] != theirs[name]]
        for names in ((*NUMBERS, "leaf"), ("micro_batches", "recompute"))
    )
    ops = [{op["name"]: op for op in program.plan["ops"]} for program in (one, other)]
    found += _changed("only in one plan", ops[0].keys() ^ ops[1].keys())
    both = [name for name in ops[0] if name in ops[1]]
    for field in ("split_axis", "tile_m", "tile_n", "threads", "schedule"):
        found += _changed(
            f"dispatch.{field}", [x for x in both if ops[0][x]["dispatch"][field] != ops[1][x]["dispatch"][field]]
        )
    places = [{entry["name"]: entry["offset"] for entry in program.layout["tensors"]} for program in (one, other)]
    found += _changed("offsets", [x for x in places[0] if x in places[1] and places[0][x] != places[1][x]])
    return found, numbers


def _changed(what: str, names: Iterable[str]) -> list[str]:
    some = sorted(names)
    return [f"{what}: {len(some)}, as of {', '.join(some[:3])}"] if some else []


def trace(times: Iterable[tuple[str, str, float, float]], path: Path) -> Path:
    """Write what an executor's `times` have as a Chrome trace, which Perfetto opens.

    Events lie in each other: a step, its phases one after the other, and in each its operations and canaries.
    """
    spans = list(times)
    start = min(begin for *_, begin, _ in spans)

    def event(name: str, kind: str, begin: float, end: float) -> dict[str, Any]:
        times = {"ts": round(1e6 * (begin - start), 3), "dur": round(1e6 * (end - begin), 3)}
        return {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": 0, **times}

    events = [event("step", "step", start, max(end for *_, end in spans))]
    for phase, found in groupby(spans, lambda span: span[1]):
        some = list(found)
        events.append(event(phase, "phase", some[0][2], some[-1][3]))
        events += [event(name, phase, begin, end) for name, _, begin, end in some]
    return write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")

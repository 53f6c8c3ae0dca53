"""Static checks of a plan and a layout: nothing is run, and the first thing that is wrong is named by its field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.arguments import shown
from ..base.jit import source_stamp
from ..errors import OptionError
from .graph import SECTIONS
from .layout import ALIGN, CANARY, lifetimes, make_layout, section, span
from .lowering import Lowered
from .plan import choices_of, make_plan

# Fields of an operation that a planner may choose; everything else follows from the graph.
FREE = ("tile_m", "tile_n", "threads")
MOST_TILE = 2**62  # a tile that begins at 0 ends within 64 bits
MOST_US = 1e18  # thirty thousand years


def check(lowered: Lowered, plan: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raise the first thing that is wrong: an OptionError with the field, what it should be and what it is."""
    check_plan(lowered, plan)
    check_races(plan)
    check_layout(lowered, plan, layout)


def check_plan(lowered: Lowered, plan: Mapping[str, Any]) -> None:
    """The plan is one of its graph: what a planner may choose is in range, and all else is as the graph has it."""
    stamp, kernels = source_stamp(), plan["isogemm"].get("kernels")
    if kernels != stamp:  # first: these may have other blocks, too
        limit = f"{stamp}, the kernels that are here"
        _refuse("isogemm.kernels", limit, f"{kernels}, of another version", "lower, which writes the plan again")
    limit = plan["runtime"]["threads"]
    for i, op in enumerate(plan["ops"]):
        for name in FREE:
            value = op["dispatch"][name]
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TILE:
                near = MOST_TILE if isinstance(value, int) and value > MOST_TILE else 1
                _refuse(f"ops[{i}].dispatch.{name}", f"a whole number from 1 to {MOST_TILE}", shown(value), near)
        if op["dispatch"]["threads"] > limit:
            _refuse(f"ops[{i}].dispatch.threads", f"at most runtime.threads, {limit}", op["dispatch"]["threads"], limit)
    _same("ops", [call.name for call in lowered.calls], [op["name"] for op in plan["ops"]])
    for i, (call, op) in enumerate(zip(lowered.calls, plan["ops"], strict=True)):
        if call.axis == "none" and (op["dispatch"]["tile_m"] < call.extent or op["dispatch"]["threads"] > 1):
            limit = f"one chain of {call.extent} rows, by one thread"
            _refuse(f"ops[{i}].dispatch", limit, op["dispatch"], {"tile_m": call.extent, "threads": 1})
        unit, tile = call.options.get("unit", 1), op["dispatch"]["tile_n"]
        if tile % unit and tile < call.extent:
            limit = f"a multiple of {unit}, the columns of a panel"
            _refuse(f"ops[{i}].dispatch.tile_n", limit, tile, -(-tile // unit) * unit)
    wanted = make_plan(
        lowered, choices_of(plan), {k: v for k, v in plan["isogemm"].items() if k not in ("leaf", "kernels", "numbers")}
    )
    for i, (one, other) in enumerate(zip(wanted["ops"], plan["ops"], strict=True)):
        us = other["isogemm"].get("expected_us")  # nobody computes with it
        if not isinstance(us, int | float) or not 0 <= us <= MOST_US:
            limit = f"a number from 0 to {MOST_US:.0e}"
            _refuse(f"ops[{i}].isogemm.expected_us", limit, shown(us), one["isogemm"]["expected_us"])
        one["isogemm"]["expected_us"] = us
    _same("", wanted, plan)
    for i, op in enumerate(plan["ops"]):
        kernel = op["isogemm"]["kernel"]
        if kernel.get("strategy") in ("gemv", "stream"):
            tile, extent = ("tile_n", op["shape"]["n"]) if kernel["swapped"] else ("tile_m", op["shape"]["m"])
            if op["dispatch"][tile] < extent:
                _refuse(f"ops[{i}].dispatch.{tile}", f"{extent}: this kernel takes all", op["dispatch"][tile], extent)


def _same(path: str, wanted: Any, found: Any) -> None:
    """Raise at the first field that differs."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for name in wanted:
            if name not in found:
                _refuse(f"{path}.{name}".lstrip("."), "a field", "none", wanted[name])
            _same(f"{path}.{name}".lstrip("."), wanted[name], found[name])
        for name in found:
            if name not in wanted:
                _refuse(f"{path}.{name}".lstrip("."), "no such field", found[name], sorted(wanted))
    elif isinstance(wanted, list) and isinstance(found, list):
        for i, (one, other) in enumerate(zip(wanted, found, strict=False)):
            _same(f"{path}[{i}]", one, other)
        if len(wanted) != len(found):
            _refuse(path, f"{len(wanted)} entries", len(found), len(wanted))
    elif type(wanted) is not type(found) or wanted != found:
        _refuse(path, "what the graph and the choices say", repr(found), repr(wanted))


def check_races(plan: Mapping[str, Any]) -> None:
    """Operations without a barrier between them may run at once, so none may write what another reads or writes."""
    group: list[tuple[int, Mapping[str, Any]]] = []
    for i, op in enumerate(plan["ops"]):
        reads, writes = set(op["isogemm"]["reads"]), set(op["isogemm"]["writes"])
        for j, other in group:
            if op["phase"] != other["phase"]:
                _refuse(f"ops[{j}].barrier", f"a barrier at the end of phase {other['phase']}", "none", True)
            theirs = set(other["isogemm"]["reads"]), set(other["isogemm"]["writes"])
            shared = sorted((writes & (theirs[0] | theirs[1])) | (reads & theirs[1]))
            if shared:
                _refuse(
                    f"ops[{j}].barrier", f"a barrier before ops[{i}], which shares {shared[0]} with it", "none", True
                )
        group = [] if op["barrier"] else [*group, (i, op)]


def check_layout(lowered: Lowered, plan: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Every value has its place, aligned and within bounds, with canaries, apart from all that live when it does."""
    entries = {}
    for i, entry in enumerate(layout["tensors"]):
        if entry["name"] in entries:
            _refuse(f"tensors[{i}].name", "each tensor once", entry["name"], "drop it")
        if entry["name"] not in lowered.values:
            _refuse(f"tensors[{i}].name", "a value of the program", entry["name"], "drop it")
        entries[entry["name"]] = (i, entry)
    for name in lowered.values:
        if name not in entries:
            _refuse("tensors", "every value of the program", f"no {name}", name)
    lives = lifetimes(lowered.values, plan["ops"])
    wanted = make_layout(lowered.values, plan["ops"])
    for want in wanted["tensors"]:
        i, entry = entries[want["name"]]
        _same(f"tensors[{i}]", want | {"offset": entry["offset"]}, entry)
        if entry["offset"] % ALIGN:
            _refuse(f"tensors[{i}].offset", f"a multiple of {ALIGN}", entry["offset"], entry["offset"] // ALIGN * ALIGN)
        begin, end = span(entry)
        if begin < 0 or end > layout["bytes"]:
            limit = f"within the {layout['bytes']} bytes, canaries included"
            _refuse(f"tensors[{i}].offset", limit, entry["offset"], CANARY)
    _check_apart(layout, lives, {name: i for name, (i, _) in entries.items()})
    for name in ("schema", "align", "canary", "lower_bound"):
        _same(name, wanted[name], layout[name])
    places = {name: entry["offset"] - CANARY for name, (_, entry) in entries.items()}
    _same("sections", sorted(SECTIONS), sorted(each["name"] for each in layout["sections"]))
    for i, each in enumerate(layout["sections"]):
        _same(f"sections[{i}]", section(each["name"], lowered.values, places), each)
    last = max(each["offset"] + each["bytes"] for each in layout["sections"])
    if layout["bytes"] != last:
        _refuse("bytes", "the end of the last tensor", layout["bytes"], last)


def _check_apart(layout: Mapping[str, Any], lives: Mapping[str, tuple[int, int]], place: Mapping[str, int]) -> None:
    """No two tensors that live at once overlap, canaries included."""
    spans = sorted((*span(entry), entry["name"]) for entry in layout["tensors"])
    active: list[tuple[int, int, str]] = []
    for begin, end, name in spans:
        active = [other for other in active if other[1] > begin]
        for _, other_end, other in active:
            first, last = max(lives[name][0], lives[other][0]), min(lives[name][1], lives[other][1])
            if first <= last:
                limit = f"apart from {other}, which lives too in operations {first} to {last}"
                _refuse(f"tensors[{place[name]}].offset", limit, begin + CANARY, other_end + CANARY)
        active.append((begin, end, name))


def _refuse(where: str, limit: object, value: object, nearest: object) -> None:
    raise OptionError(where, limit=limit, value=value, nearest=nearest)

"""Where everything lies: one allocation, six sections, 64-byte alignment, and a canary before and after every tensor.

Weights, their gradients and the optimizer's state are there for the whole step. Activations, their gradients and
temporaries share memory by their lifetimes: the largest first, each at the lowest place that is free while it lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .graph import SECTIONS, Value

SCHEMA = "ck.train.layout.v1"
ALIGN = 64
CANARY = 64  # bytes before every tensor, and at least as many behind it
SHARED = ("activations", "grad_activations", "temporaries")


def lifetimes(values: Mapping[str, Value], ops: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """First and last operation of every value; what is given lives from the start, and what is kept to the end."""
    found: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        for name in (*op["isogemm"]["reads"], *op["isogemm"]["writes"]):
            found.setdefault(name, [i, i])[1] = i
    last, lives = len(ops) - 1, {}
    for name, value in values.items():
        first, end = found.get(name, [0, last])
        whole = value.given or value.section in ("weights", "grad_weights", "optimizer")
        lives[name] = (0 if whole else first, last if value.kept or whole else end)
    return lives


def slot(size: int) -> int:
    """Bytes of a tensor with its canaries."""
    return CANARY + -(-size // ALIGN) * ALIGN + CANARY


def span(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Where a tensor of a layout begins and ends, canaries included."""
    begin = entry["offset"] - CANARY
    return begin, begin + slot(entry["bytes"])


def lower_bound(values: Mapping[str, Value], lives: Mapping[str, tuple[int, int]]) -> int:
    """The most bytes of tensors that live at once: no layout can do with less."""
    change: dict[int, int] = {}
    for name, (first, last) in lives.items():
        change[first] = change.get(first, 0) + values[name].size
        change[last + 1] = change.get(last + 1, 0) - values[name].size
    most = now = 0
    for at in sorted(change):
        now += change[at]
        most = max(most, now)
    return most


def make_layout(values: Mapping[str, Value], ops: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The layout of the values of a plan's operations, as plain data; offsets count from the allocation's start."""
    lives = lifetimes(values, ops)
    order = [v for name in SECTIONS if name not in SHARED for v in values.values() if v.section == name]
    places: dict[str, int] = {}
    end = 0
    for value in order:
        places[value.name] = end
        end += slot(value.size)
    shared = sorted((v for v in values.values() if v.section in SHARED), key=lambda v: (-v.size, lives[v.name]))
    placed: list[tuple[int, int, int, int]] = []
    base, total = end, end
    for value in shared:
        places[value.name] = at = _put(placed, lives[value.name], slot(value.size), base)
        placed.append((at, at + slot(value.size), *lives[value.name]))
        total = max(total, at + slot(value.size))
    return {
        "schema": SCHEMA,
        "bytes": total,
        "align": ALIGN,
        "canary": CANARY,
        "lower_bound": lower_bound(values, lives),
        "sections": [section(name, values, places) for name in SECTIONS],
        "tensors": [_tensor(value, places[value.name] + CANARY, lives[value.name]) for value in values.values()],
    }


def _put(placed: list[tuple[int, int, int, int]], life: tuple[int, int], size: int, base: int) -> int:
    """The lowest place that is free while a tensor lives."""
    at = base
    for begin, end in sorted((b, e) for b, e, first, last in placed if first <= life[1] and life[0] <= last):
        if begin - at >= size:
            return at
        at = max(at, end)
    return at


def section(name: str, values: Mapping[str, Value], places: Mapping[str, int]) -> dict[str, Any]:
    """Where a section begins and ends; those that share memory overlap."""
    some = [(places[v.name], places[v.name] + slot(v.size)) for v in values.values() if v.section == name]
    begin, end = min((b for b, _ in some), default=0), max((e for _, e in some), default=0)
    return {"name": name, "offset": begin, "bytes": end - begin, "shared": name in SHARED}


def _tensor(value: Value, offset: int, life: tuple[int, int]) -> dict[str, Any]:
    return {
        "name": value.name, "section": value.section, "dtype": value.dtype, "shape": list(value.shape),
        "offset": offset, "bytes": value.size, "first_op": life[0], "last_op": life[1],
    }  # fmt: skip

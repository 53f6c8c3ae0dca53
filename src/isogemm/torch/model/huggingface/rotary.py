"""Rotary embeddings of transformers: how much of a head they turn, and whether they are a table of cos and sin."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...operator import Tensor
from ..recognition import PLAIN, agrees, differs, on_cpu, touched
from ..traced import Formula
from .modules import Rotary, tables

_ANGLES: Formula = dict.fromkeys(["bmm", "cos", "mm", "mul", "sin"], ())
_JOINED: Formula = dict.fromkeys(["ones_like", "polar"], ())
_FIXED = ("default", "linear", "llama3", "yarn")  # kinds whose frequencies never change


def widths(module: Any) -> frozenset[int]:
    """How many elements of a head the rotary embeddings in a module turn."""
    buffers = [child._buffers.get("inv_freq") for child in module.modules()]
    return frozenset(2 * w.shape[-1] for w in buffers if w is not None and w.dim())


def halved(module: Any) -> str:
    """Why tables of rotary embeddings are no halves twice, which `RotaryAttention` takes; empty where they are."""
    for child in module.modules():
        if "inv_freq" in child._buffers and not touched(child) and not isinstance(child, Rotary):
            try:
                twice = _is_twice(child)
            except Exception:  # it takes something else, or is on the meta device
                continue
            if not twice:
                return f"tables of {type(child).__name__} are others than cos and sin of the same angles twice"
    return ""


def _is_twice(child: Any) -> bool:
    probe, half = on_cpu(child), child.inv_freq.shape[-1]
    with torch.no_grad():
        found = probe.forward(torch.zeros(1, 3, 1, **PLAIN), torch.tensor([[0, 1, 5]], device="cpu"))
    return all(t.shape[-1] != 2 * half or torch.equal(t[..., :half], t[..., half:]) for t in found)


def turns_otherwise(child: Any, way: str = "twice") -> str:
    """Why a rotary embedding cannot be a table, with each half twice, once or joined; empty where it can."""
    name, kind = type(child).__name__, vars(child).get("rope_type", "default")
    if list(inspect.signature(type(child).forward).parameters) != ["self", "x", "position_ids"]:
        return f"the forward method of {name} takes other arguments"
    if kind not in _FIXED:
        return f"rope of kind {kind!r}, whose frequencies depend on the lengths in the batch"
    if child.inv_freq.is_meta:
        return "on the meta device, where there are no frequencies to make tables from"
    if child.inv_freq.dim() != 1 or not isinstance(vars(child).get("max_seq_len_cached"), int):
        return f"{name} has no frequencies in one dimension, or no number of positions"
    probe = on_cpu(child)
    w, scale = probe.inv_freq.float(), float(getattr(child, "attention_scaling", 1.0))
    positions, x = torch.tensor([[0, 1, 5], [7, 1000, 4095]], device="cpu"), torch.zeros(2, 3, 1, **PLAIN)

    def call(empty: Any) -> None:
        for rows, tokens in ((1, 1), (2, 3), (1, 4096)):
            probe.forward(empty(rows, tokens, 8), empty(rows, tokens, dtype=torch.int64))

    def formula(x: Tensor, positions: Tensor) -> Any:
        angles = positions[..., None].float() * w
        both = torch.cat((angles,) * (2 if way == "twice" else 1), -1)
        cos, sin = both.cos() * scale, both.sin() * scale
        return torch.stack((cos, sin), -1) if way == "joined" else (cos, sin)

    def theirs(x: Tensor, positions: Tensor) -> Any:
        found = probe.forward(x, positions)
        return torch.view_as_real(found) if way == "joined" else found

    operators: Formula = {**_ANGLES, "mul": (scale,), **(_JOINED if way == "joined" else {})}
    why = differs(probe, operators, call, lambda: agrees(theirs, formula, x, positions))
    return f"{name} is not cos and sin: {why}" if why else ""


def prepare(child: Any, halves: bool) -> None:
    """Give a `Rotary` its table."""
    scale = float(getattr(child, "attention_scaling", 1.0))
    table = tables(child.inv_freq, scale, vars(child)["max_seq_len_cached"])
    child.register_buffer("table", table, persistent=False)  # a buffer: graphs read it where it lies
    vars(child)["halves"] = halves

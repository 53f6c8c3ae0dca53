"""Triton's kernels, for any strides and head sizes to 256: one leaf to a program, or all of them; attention/tile.py."""

from __future__ import annotations

import functools
from typing import Any

from ....base.dtypes import CODE, TRITON
from ..driver.triton_build import Built, build
from .case import MOST_SUMS, AttentionCase, steps_of
from .family import Attention, mask_defines, named_steps, padded, terms
from .meet import meet_defines, met
from .trial import Run

TypesAndValues = tuple[
    dict[str, str], dict[str, Any], tuple[str, ...], dict[str, Any], dict[str, float]
]  # of parameters, constants, what is a multiple of 16, options, and values that are fixed


class WalkAttention(Attention):
    """All leaves in one program. The plainest kernel of tensor cores."""

    name = "attention walk"
    index = 2  # WALK of attention/tile.py

    def rank(self, case: AttentionCase) -> int | None:
        return 3

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return triton_text(case, triton_facts(case, self.index, _rows_of(case)))

    def launch(self, case: AttentionCase) -> Run:
        block = _rows_of(case)
        built, values = _built(case, self.index, block)
        tiles = -(-case.rows // block) * (1 if self.index else case.leaves)
        walk = built.bind(case.device, (tiles, case.heads // case.group, case.batch), values)
        return met(case, walk, not self.index)


class LeafAttention(WalkAttention):
    """The only leaf, in one program, without sums in memory."""

    name = "attention leaf"
    index = 1
    plain = WalkAttention()

    def supports(self, case: AttentionCase, config: str = "") -> bool:
        return case.tensor_cores and case.leaves == 1

    def rank(self, case: AttentionCase) -> int | None:
        return 2


class SplitAttention(WalkAttention):
    """One leaf to a program, sums to memory, then their meeting."""

    name = "attention split"
    index = 0
    plain = WalkAttention()

    def supports(self, case: AttentionCase, config: str = "") -> bool:
        return case.tensor_cores and case.leaves > 0

    def rank(self, case: AttentionCase) -> int | None:
        first = case.short and not case.hopper and case.leaves > 1
        return None if case.sums > MOST_SUMS else 0 if first else 5

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return super().defines(case) | meet_defines(case, True)


def _rows_of(case: AttentionCase) -> int:
    """Rows of a Triton tile."""
    return 16 if case.rows <= 16 else 64  # tiles of 32 rows have not shown their bits on a device


def triton_facts(case: AttentionCase, walk: int, block: int) -> TypesAndValues:
    """What the compiler and a launch take, for tiles of `block` rows."""
    q, k, v = (steps_of(x)[:3] for x in case.operands)
    steps = named_steps(q=q, k=k, v=v, mask=case.mask or (0, 0, 0, 0), y=case.y_strides)
    sizes = {"tq": case.tq, "tk": case.tk, "d": case.d, "dv": case.dv, "heads": case.heads, "group": case.group,
             "pack": case.group, "offset": case.offset or 0}  # fmt: skip
    dtype = f"*{TRITON[case.dtype]}"
    mask = TRITON.get(case.dtype_mask or "", "i8")
    types = {"q": dtype, "k": dtype, "v": dtype, "mask": f"*{mask}", "start": "*i32", "stop": "*i32",
             "y": f"*{TRITON[case.dtype_out]}", "stats": "*fp32", "sums": "*fp32"}  # fmt: skip
    types |= dict.fromkeys(steps, "i64") | dict.fromkeys(sizes, "i32") | {"c": "fp32"}
    d, dv = padded(case.d), padded(case.dv)
    constants: dict[str, Any] = {
        "ROWS": block, "D": d, "DV": dv, "TERMS": terms(case.dtype), "MASK": case.masks,
        "CAUSAL": case.offset is not None, "STARTS": case.starts, "STOPS": case.stops,
        "WALK": walk, "EVEN_D": d == case.d, "EVEN_DV": dv == case.dv,
        "STATS": case.stats, "PDL": case.on.overlaps,
    }  # fmt: skip
    hints = ["y", "stats", "sums"] + (["q", "k", "v"] if case.aligned else [])
    hints += [key for key, step in steps.items() if step % 16 == 0] + [
        key for key in ("d", "dv") if not sizes[key] % 16
    ]
    options: dict[str, Any] = {"num_warps": 8 if max(d, dv) >= 128 else 4, "num_stages": 1}
    return types, constants, tuple(hints), options, {**steps, **sizes, "c": case.c}


def triton_text(case: AttentionCase, found: TypesAndValues) -> dict[str, Any]:
    """All that selects code; coefficients follow from the dtype, WALK is the kernel's name."""
    _, constants, hints, options, _ = found
    chosen = {key: value for key, value in constants.items() if key not in ("TERMS", "WALK")} | options
    kinds = {"KIND": CODE[case.dtype], "MASK_KIND": mask_defines(case)["MASK_KIND"], "OUT": CODE[case.dtype_out]}
    return chosen | kinds | {"HINTS": ",".join(hints)}


def compiled_by_triton(function: Any, case: AttentionCase, found: TypesAndValues) -> Built:
    """A kernel of Triton's, for the case's device."""
    types, constants, hints, options, _ = found
    pdl, capability = constants["PDL"], case.on.capability
    return build(function, types, constants, aligned=hints, capability=capability, launch_pdl=pdl, **options)


@functools.lru_cache(maxsize=256)
def _built(case: AttentionCase, walk: int, block: int) -> tuple[Built, dict[str, float]]:
    """The Triton kernel, and the values of its parameters that are fixed."""
    from .tile import attention

    found = triton_facts(case, walk, block)
    return compiled_by_triton(attention, case, found), found[-1]

"""The steps of attention's gradients run on small operands and are compared with the formula, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.floating import ieee_defaults
from ....contract.attention import EXP2_LEAST, EXP2_SHIFT, EXP2_TERMS
from ....contract.reference import canonical
from ....planner.kernel_admission import difference
from ....planner.trials import Machine
from . import steps as attention_backward
from .trial import MARGIN, _inside, _target, dtype_of

__all__ = ["expected", "try_steps"]

Array = NDArray[Any]
SHAPES = ((2, 3, 1), (3, 5, 1300))  # items, rows, keys; a block owns 1024 keys
C = 0.18033688


def try_steps(machine: Machine, dtype: str) -> str:
    """Empty where every bit of p and ds was right, else the first difference."""
    for shape in SHAPES:
        drawn = _drawn(shape)
        for masked, back, want_p in ((True, True, True), (False, True, False), (True, False, True)):
            given = drawn | ({} if masked else {"hidden": None, "added": None})
            given |= {} if back else {"dp": None, "delta": None}
            want = expected(given, dtype)
            *got, stray = _outputs(machine, given, dtype, want_p)
            pairs = zip(("p", "ds"), got, want, strict=True)
            wrong = [difference(name, x, y) for name, x, y in pairs if x is not None and y is not None]
            wrong.append(f"{stray} words beside the results were written" if stray else "")
            for found in filter(None, wrong):
                return f"{list(shape)}{' masked' if masked else ''}: {found}"
    return ""


def _drawn(shape: tuple[int, ...]) -> dict[str, Any]:
    """Scores and what the forward pass kept of them; one row saw no key, one holds what is no number."""
    random = np.random.default_rng(list(shape))
    n, rows, keys = shape
    s, dp = (random.standard_normal(shape).astype(np.float32) * size for size in (60, 1))
    m, total, delta = random.standard_normal((3, n, rows)).astype(np.float32)
    m, total = np.ceil(m * 10 + 30), np.abs(total)
    m[0, 1], total[0, 1] = -np.inf, 0
    s[1, 2, keys // 2], s[-1, 0, 0], dp[-1, 1, keys // 3] = np.nan, -np.inf, np.inf
    hidden = random.random((rows, keys)) < 0.3
    added = random.standard_normal((n, 1, keys)).astype(np.float32)
    return {"s": s, "dp": dp, "m": m, "total": total, "delta": delta, "hidden": hidden, "added": added}


def expected(given: dict[str, Any], dtype: str) -> tuple[Array, Array | None]:
    """(p, ds) by the formula of `attention_backward.steps`, every step rounded by itself."""
    with ieee_defaults(), np.errstate(all="ignore"):
        t = given["s"] * np.float32(C)
        if given["added"] is not None:
            t = t + given["added"]
        if given["hidden"] is not None:
            t = np.where(given["hidden"], np.float32(-np.inf), t)
        m, total = given["m"][..., None], given["total"][..., None]
        x = t - np.where(m == -np.inf, np.float32(0), m)
        x = np.where(x < EXP2_LEAST, EXP2_LEAST, x)
        k = x + EXP2_SHIFT
        r = x - (k - EXP2_SHIFT)
        first, *terms = EXP2_TERMS["float32"]
        y = np.full_like(r, first)
        for term in terms:
            y = y * r + term
        y = y * (k.view(np.uint32) << np.uint32(23)).view(np.float32)
        p = y * np.where(total == 0, np.float32(0), np.float32(1) / total)
        out = dtype_of(dtype)
        if given["dp"] is None:
            return canonical(p.astype(out)), None
        return canonical(p.astype(out)), canonical(((given["dp"] - given["delta"][..., None]) * p).astype(out))


def _outputs(
    machine: Machine, given: dict[str, Any], dtype: str, want_p: bool
) -> tuple[Array | None, Array | None, int]:
    """Bits of p and ds, and how many words beside them were written."""
    shape = given["s"].shape
    keys, count = shape[-1], given["s"].size
    words = np.dtype(np.uint16 if dtype_of(dtype).itemsize == 2 else np.uint32)
    held = [
        None if x is None else machine.put(np.ascontiguousarray(x).view(np.uint8 if x.dtype == bool else np.uint32))
        for x in (given[name] for name in ("s", "dp", "m", "total", "delta", "hidden", "added"))
    ]
    outs = [_target(machine, count, words)[0] if w else None for w in (want_p, given["dp"] is not None)]
    hidden = (0, 0, 0) if given["hidden"] is None else (0, keys, 1)
    added = (0, 0, 0) if given["added"] is None else (keys, 0, 1)
    run = attention_backward.bound(shape, hidden, added, C, dtype, machine.device)
    places = [0 if x is None else x.address for x in held]
    run(machine.stream(), *places, *[0 if x is None else x.address + MARGIN * words.itemsize for x in outs])
    found = [(None, 0) if x is None else _inside(x, count) for x in outs]
    p, ds = (None if x is None else canonical(x.view(dtype_of(dtype))).reshape(shape) for x, _ in found)
    return p, ds, sum(stray for _, stray in found)

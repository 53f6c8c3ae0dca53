"""Functions with a mistake of the bank in them: what `examine` is tested with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.progress import Tell
from .bank import MISTAKES
from .case import Array, GemmCall
from .examine import examine
from .results import call_of
from .selftest import planted, raced

SIGNATURE_OF = {
    "stride-a": "a[i], b[i]", "stride-b": "a[i], b[i]", "stride-c": "a[i], b[i]", "pointer-offset": "a[i], b[i]",
    "alpha-type": "a, b, c, alpha, beta", "beta-type": "a, b, c, alpha, beta", "beta-garbage": "a, b, c, alpha, beta",
    "bias-axis": "x, w, bias", "bias-twice": "x, w, bias", "gqa-mapping": "a[h], b[h // group]",
}  # fmt: skip
FORMAT_OF = {
    "nibble-order": "Q4_0", "row-stride": "Q4_1", "neighbour-scale": "Q8_0",
    "zero-point": "Q4_0", "signedness": "Q8_0", "sub-block-scale": "Q4_K",
}  # fmt: skip
INSISTS: dict[str, Callable[[Array, Array], bool]] = {
    "nothing": lambda a, b: True,
    "multiples of 16": lambda a, b: not any(x % 16 for x in (*a.shape[-2:], *b.shape[-2:])),
    "n of 256": lambda a, b: 256 in b.shape[-2:],
    "float16": lambda a, b: a.dtype == np.float16,
}

NONE = {"float16": ("tf32-rounding", "fp16-rounding")}  # operands of float16 are as they are


def faulty(name: str, choice: float, insists: str = "nothing") -> tuple[Callable[..., Array], dict[str, str]]:
    """A function that makes mistake `name` of the bank, and what `examine` has to be told of it.

    `choice`, from 0 to 1, is which of the mistake's ways is taken, wherever a call allows it; `insists` is what it
    refuses all else than, see `INSISTS`.
    """
    signature, fmt = SIGNATURE_OF.get(name, "a, b"), FORMAT_OF.get(name, "")
    signature = "x, blocks" if fmt else signature
    rng = np.random.default_rng()  # memory that nobody wrote, and races: other ones in each run

    def function(a: Array, b: Array, *rest: Any) -> Array:
        if not INSISTS[insists](a, b):
            raise ValueError(f"{insists}, please")
        case, shape = _case(signature, fmt, a, b, *rest)
        if name == "race":
            return raced(case, rng).reshape(shape)
        if name == "other-order":
            order = rng.permutation(a.shape[1])
            return (a[:, order].astype(np.float32) @ b[order].astype(np.float32)).astype(a.dtype)
        ways = list(MISTAKES[name].variants(case))
        return planted(ways[int(choice * len(ways))].case if ways else case, rng).reshape(shape)

    return function, {"signature": signature, "format": fmt}


def _case(signature: str, fmt: str, a: Array, b: Array, *rest: Any) -> tuple[GemmCall, tuple[int, ...]]:
    """The call that was meant, and the shape of its result."""
    n = len(b) if signature.startswith("x") else b.shape[-1]
    out = np.zeros((*a.shape[:-1], n), a.dtype)
    said: dict[str, Any] = {"trans_b": "T"} if "w" in signature else {"format": fmt}
    if "bias" in signature:
        said["bias"] = rest[0]
    if "alpha" in signature:
        said["c"], said["alpha"], said["beta"] = rest
    return call_of([out], a, b, **said)[0], out.shape


@dataclass(frozen=True)
class Examined:
    """What `examine` said of a faulty function."""

    name: str
    insists: str
    found: bool  # whether the mistake was named first, alone or with those that cannot be told from it
    said: str
    seconds: float


def examined(
    names: Iterable[str] = tuple(MISTAKES), *, insists: str = "nothing", tell: Tell | None = None
) -> list[Examined]:
    """Each mistake in a function of its own, drawn; without those that are none in what it insists on."""
    rng, found = np.random.default_rng(0), []
    for done, name in enumerate(name for name in names if name not in NONE.get(insists, ())):
        if tell:
            tell(done, None, name)
        function, told = faulty(name, float(rng.random()), insists)
        start = time.perf_counter()
        said = examine(function, told["signature"], format=told["format"])
        seconds = time.perf_counter() - start
        best = said.causes[0] if said.causes else None
        named = best is not None and name in (best.name, *best.indistinguishable_from)
        found.append(Examined(name, insists, named, str(said), seconds))
    return found

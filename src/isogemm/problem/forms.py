"""What plans of more than one product share: what was asked, the operands of a replay, and masks by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.arguments import shown
from ..errors import OptionError

DIGITS = 18  # of a window's keys: what they are counted in holds more
MASKS = f"causal, window:W, bool or added, W of at most {DIGITS} digits"


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask over [m, n] queries and keys, the same for all heads and sequences."""

    # {"", "causal", "window", "bool", "added"}: the last query sees the last key; of a window also the W - 1 before it.
    # `bool` and `added` are tensors.
    kind: str
    width: int = 0  # keys of a window

    @classmethod
    def parse(cls, text: str) -> Mask:
        """From ``window:128`` and the like; empty for none. Raises OptionError: no such mask."""
        kind, _, width = text.partition(":") if isinstance(text, str) else ("none", "", "")
        if kind == "window" and width.isdecimal() and len(width) <= DIGITS and int(width):
            return cls(kind, int(width))
        if kind not in ("", "causal", "bool", "added") or width:
            raise OptionError("mask", limit=MASKS, value=shown(text), nearest="causal")
        return cls(kind)

    def offset(self, m: int, n: int) -> int | None:
        """The offset of the causal rule, by which key j is hidden from query i where j > i + offset."""
        return n - m if self.kind == "causal" else None

    def pairs(self, m: int, n: int) -> int:
        """Queries and keys that see each other, as far as no tensor says it."""
        if self.kind in ("causal", "window"):
            width = min(self.width or n, n)

            def up_to(keys: int) -> int:
                """Of queries whose last keys are the first one, the second, and so on."""
                few = min(keys, width)
                return few * (few + 1) // 2 + (keys - few) * width

            return up_to(n) - up_to(max(0, n - m))
        return m * n

    def seen(self, m: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first, one past the last) key that each query of a window sees, 0 and 0 where it sees none."""
        stop = np.clip(np.arange(m) + n - m + 1, 0, n)
        start = np.maximum(stop - self.width, 0)
        return start, stop

    def shown(self, m: int, n: int) -> NDArray[np.bool_]:
        """[m, n] of a window: True where a query sees a key."""
        last = np.arange(m)[:, None] + n - m
        keys = np.arange(n)
        found: NDArray[np.bool_] = (keys <= last) & (keys > last - self.width)
        return found


def asked(about: Mapping[str, Any]) -> str:
    """What was asked besides the extents, in one line."""
    words = (f"{name} {', '.join(map(str, x)) if isinstance(x, tuple | list) else x}" for name, x in about.items())
    return ", ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in words)


def operand_shapes(form: str, about: Mapping[str, Any], extents: tuple[int, int, int]) -> tuple[Any, ...]:
    """Shapes of a replay's operands, in their order; lists of shapes for groups."""
    m, n, k = extents
    if form == "grouped":
        return tuple((rows, k) for rows in about["rows"]), ((k, n),) * len(about["rows"])
    if form == "quantized":
        return (m, k), (n, k)
    if form == "attention":
        heads, keys = about["heads"], (about["sequences"], about["shared"], n, k)
        masked = ((m, n),) if about.get("mask") in ("bool", "added") else ()
        return (about["sequences"], heads, m, k), keys, keys, *masked
    item = (about["items"],) if about.get("items", 1) > 1 else ()
    return (*item, m, k), (*item, k, n)


def shape_of(x: Any) -> Any:
    """The shape of an array, or those of a list's."""
    return tuple(map(shape_of, x)) if isinstance(x, list | tuple) else tuple(getattr(x, "shape", ()))

"""What a function under examination is asked: operands of every signature, in the extents that it may insist on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.dtypes import DTYPES, NUMPY
from ..base.limits import physical_memory
from ..errors import LimitError
from ..formats.blocks import BlockFormat, format_of
from .case import BYTES, Array
from .diagnosis import Diagnosis
from .results import diagnose

SIGNATURES = {
    "a, b": "a [m, k] @ b [k, n]",
    "x, w": "x [m, k] @ w [n, k].T, as a linear layer",
    "a, b, out": "the first, written to out [m, n]",
    "x, w, bias": "the second, plus bias [n]",
    "a, b, c, alpha, beta": "alpha * a @ b + beta * c, returned; c [m, n] is read only where beta is not 0",
    "a[i], b[i]": "the first for each of a [items, m, k] and b [items, k, n]",
    "a[h], b[h // group]": "the first for each of a [heads, m, k]; b [kv_heads, k, n] serves neighbouring heads",
    "x, blocks": "x [m, k] @ w.T of quantized rows w as bytes [n, row bytes]",
}
# Coprime extents first; then multiples, for functions that insist on them.
EXTENTS = (
    (37, 41, 53),
    (33, 65, 97),
    (129, 67, 301),
    (16, 32, 48),
    (32, 48, 80),
    (64, 128, 192),
    (128, 256, 384),
    (272, 304, 336),
    (64, 64, 64),
)
PADDED = (1, 4)  # places of extents after which those before them are asked in padded views
COMMON = (16, 32, 64, 96, 100, 128, 256, 384, 512, 768, 1000, 1024, 2048, 4096)  # that functions were written for
ITEMS, HEADS, KV_HEADS = 3, 6, 3
PADDING = 7  # elements behind each row
BEFORE, BEHIND = 64, 2**18  # elements around an operand
Fixed = tuple[int | None, int | None, int | None]  # m, n, k that a function insists on
SCALARS = {"exact": (1.5, 0.5), "random": (1.0, 0.0), "padded": (-0.75, 1.0)}  # alpha, beta


@dataclass(frozen=True)
class Probe:
    """One call that a function is examined with."""

    signature: str
    kind: str  # type of the elements
    extents: tuple[int, int, int]  # m, n, k
    # {"exact", "random", "padded"}: small whole numbers, exact in every type, no two rows or columns alike; normal
    # ones; normal ones in views whose rows have something behind them
    numbers: str
    format: str = ""  # of quantized rows

    def __str__(self) -> str:
        said = {"exact": "exact in every type", "padded": "random, in views whose rows are padded"}
        return f"{self.kind}, m, n, k = {self.extents}, numbers {said.get(self.numbers, self.numbers)}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the result."""
        m, n, _ = self.extents
        return {"a[i], b[i]": (ITEMS, m, n), "a[h], b[h // group]": (HEADS, m, n)}.get(self.signature, (m, n))

    @property
    def fits(self) -> bool:
        """Whether this machine's memory holds its matrices, and what is computed to diagnose them."""
        m, n, k = self.extents
        return math.prod(self.shape[:-2]) * (m * k + k * n + m * n) * BYTES <= physical_memory()

    def operands(self) -> dict[str, Any]:
        """The operands, which are the same in each call: arrays, and floats for alpha and beta."""
        m, n, k = self.extents
        rng = np.random.default_rng([m, n, k, self.numbers == "exact"])
        heads = self.signature == "a[h], b[h // group]"
        batch = (HEADS, KV_HEADS) if heads else (ITEMS, ITEMS) if self.signature == "a[i], b[i]" else ()
        a, linear = self._drawn(rng, *batch[:1], m, k), self.signature.startswith("x")
        if self.signature == "x, blocks":
            fmt = format_of(self.format)
            return {"x": a, "blocks": random_blocks(rng, fmt, n, k // fmt.block)}
        b = self._drawn(rng, *batch[1:], *((n, k) if linear else (k, n)))
        found: dict[str, Any] = {"x": a, "w": b} if linear else {"a": a, "b": b}
        if "bias" in self.signature:
            found["bias"] = self._drawn(rng, n)
        if "alpha" in self.signature:
            found["c"] = self._drawn(rng, m, n)
            found["alpha"], found["beta"] = SCALARS[self.numbers]
        return found

    def _drawn(self, rng: np.random.Generator, *shape: int) -> Array:
        """An array amid other numbers: what is read before or behind it is known."""
        line = shape[-1] + PADDING * (self.numbers == "padded")
        size = int(np.prod(shape[:-1])) * line
        room = BEFORE, min(2 * size, BEHIND)
        count = room[0] + size + room[1]
        x = rng.integers(-4, 5, count) if self.numbers == "exact" else rng.standard_normal(count)
        flat = x.astype(np.float32).astype(NUMPY[self.kind])
        return flat[room[0] : room[0] + size].reshape(*shape[:-1], line)[..., : shape[-1]]

    def diagnosed(self, runs: list[Array], *, pairs: bool) -> Diagnosis:
        """What results of this call say."""
        given = self.operands()
        if self.signature == "x, blocks":
            return diagnose(runs, given["x"], given["blocks"], format=self.format, pairs=pairs)
        a, b = (given.pop("x"), given.pop("w")) if "w" in given else (given.pop("a"), given.pop("b"))
        return diagnose(runs, a, b, trans_b="T" if self.signature.startswith("x") else "N", pairs=pairs, **given)


def random_blocks(rng: np.random.Generator, fmt: BlockFormat, n: int, blocks: int) -> Array:
    """Rows of random blocks with sensible scales, as bytes [n, row bytes]."""
    rows = rng.integers(0, 256, (n, fmt.row_bytes(blocks * fmt.block)), dtype=np.uint8)
    fields = rows.reshape(-1, fmt.nbytes).view(fmt.dtype)[..., 0]
    for scale in fmt.scales:
        fields[scale.name] = rng.uniform(0.01, 0.1, fields.shape).astype(scale.dtype)
    return rows


def probes(signature: str, format: str, fixed: Fixed) -> Iterator[Probe]:
    """The small ones of every type first; some in padded views after them."""
    done = set()
    for place, asked in enumerate(EXTENTS):
        again = ((EXTENTS[place - 1], ("padded",)),) if place in PADDED else ()
        for extents, numbers in ((asked, ("exact", "random")), *again):
            taken = _taken(extents, format, fixed)
            if (taken, numbers) not in done:
                done.add((taken, numbers))
                for kind in DTYPES:
                    yield from (Probe(signature, kind.name, taken, how, format) for how in numbers)


def check_memory(signature: str, format: str, fixed: Fixed) -> None:
    """Raise LimitError when there is no probe of these extents that fits."""
    near = list(fixed)
    while not any(probe.fits for probe in probes(signature, format, (near[0], near[1], near[2]))):
        widest = max(range(3), key=lambda i: near[i] or 0)
        near[widest] = (near[widest] or 0) // 2
    if near != [*fixed]:
        limit = f"probes that this machine's memory holds, {BYTES} bytes for each element"
        value, nearest = (", ".join(f"{x} = {y}" for x, y in zip("mnk", z, strict=True) if y) for z in (fixed, near))
        raise LimitError("m, n, k", limit=limit, value=value, nearest=nearest)


def common(signature: str, format: str, fixed: Fixed) -> Iterator[Probe]:
    """For a function that took none of those: extents that it may have been written for, one of them or two."""
    sizes = [*((64, size, 192) for size in COMMON), *((64, 192, size) for size in COMMON)]
    for extents in (*sizes, *((64, size, size) for size in COMMON if size <= 1024)):
        for kind in DTYPES:
            yield from (
                Probe(signature, kind.name, _taken(extents, format, fixed), how, format) for how in ("exact", "random")
            )


def around(signature: str, format: str, extents: tuple[int, int, int]) -> Iterator[Probe]:
    """For a function that took one size: others with the same n, k, both, or m."""
    m, n, k = extents
    for fixed in ((None, n, None), (None, None, k), (None, n, k), (m, None, None)):
        yield from probes(signature, format, fixed)


def _taken(extents: tuple[int, int, int], format: str, fixed: Fixed) -> tuple[int, int, int]:
    """The extents with those that are fixed in their place, and K in whole blocks."""
    m, n, k = (own or asked for own, asked in zip(fixed, extents, strict=True))
    block = format_of(format).block if format else 1
    return m, n, -(-k // block) * block

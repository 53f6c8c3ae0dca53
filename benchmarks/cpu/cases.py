"""What is measured on a CPU, and the bars that the project has set itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from isogemm.backends.cpu.emit.target import target
from isogemm.base.dtypes import ITEMSIZE
from isogemm.lab import Work

from ..common import Bar, Group, Row, Worded
from ..draw import of_cpus

__all__ = ["GROUPS", "RANDOM", "SUITES", "Bar", "Case", "cases"]

Form = Literal["matmul", "call", "linear", "packed", "reference", "process"]

SQUARE_SIZES = (512, 1024, 2048, 4096)
LAYOUTS = ("NN", "NT", "TN", "TT")
# (n, k) of the linears of two language models: hidden 2560 and 4096, intermediate 9728.
LINEARS = ((4096, 2560), (2560, 4096), (9728, 2560), (2560, 9728))
ROWS = (1, 2, 4, 8, 16, 20, 32, 64, 256, 1024)
BF16_ROWS = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Case(Worded):
    """One shape in one form; its words (`words`) are what ``--only`` selects by.

    Attributes
    ----------
    suite, form : str
        ``matmul`` writes to ``out=``, ``call`` returns a new array, ``linear`` multiplies weights [n, k] as
        they are, ``packed`` weights prepared once, ``reference`` runs the contract's definition, ``process``
        starts an interpreter.
    m, n, k, batch : int
    layout : str
        Of the two operands: T where it is a transposed view.
    dtype : str
    label : str
        What shapes do not say.
    bars : tuple of Bar
    rotated : bool
        Weights come from memory, as in a model whose layers take turns, not from the cache.
    """

    suite: str
    form: Form
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    layout: str = "NN"
    dtype: str = "float32"
    label: str = ""
    bars: tuple[Bar, ...] = ()
    rotated: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The case in words, unique among all cases."""
        shape = (f"m={self.m}", f"n={self.n}", f"k={self.k}", self.layout, self.dtype) if self.m else ()
        items = (f"batch={self.batch}",) if self.batch > 1 else ()
        return (self.suite, *((self.label,) if self.label else ()), *items, *shape)

    @property
    def work(self) -> Work | None:
        """Least work of the product."""
        if not self.m:
            return None
        return Work.gemm(self.m, self.n, self.k, itemsize=ITEMSIZE[self.dtype], batch=self.batch)

    @property
    def streams(self) -> bool:
        """Whether memory is the bound, so that a streaming read is timed beside it."""
        return self.rotated and self.m == 1


def _square() -> list[Case]:
    bars = (Bar("numpy", 1.0), Bar("torch", 1.0))
    return [
        Case("square", "matmul", size, size, size, layout=layout, bars=bars)
        for size in SQUARE_SIZES
        for layout in LAYOUTS
    ]


def _llm_bar(m: int) -> Bar:
    return Bar("fastest", 1.5 if 1 < m <= 16 else 1.0)


def _llm() -> list[Case]:
    return [
        Case("llm", "linear", m, n, k, layout="NT", bars=(_llm_bar(m),), rotated=True) for n, k in LINEARS for m in ROWS
    ]


def _packed() -> list[Case]:
    bars = {1: (Bar("fastest", 1.1), Bar("read", 0.9)), 64: (Bar("fastest", 1.3),)}
    return [
        Case("packed", "packed", m, n, k, layout="NT", bars=bars.get(m, ()), rotated=True)
        for n, k in LINEARS
        for m in ROWS
    ]


def _bf16() -> list[Case]:
    bars = {1: (Bar("torch", 1.7),), 4: (Bar("torch", 1.1),)}
    return [
        Case("bf16", "linear", m, n, k, layout="NT", dtype="bfloat16", bars=bars.get(m, ()), rotated=True)
        for n, k in LINEARS
        for m in BF16_ROWS
    ]


def _batched() -> list[Case]:
    bars = (Bar("numpy", 1.2, threads=(2,)),)
    return [
        Case("batched", "matmul", 512, 512, 128, batch=32, bars=bars),
        Case("batched", "matmul", 512, 512, 128, batch=32, layout="NT"),  # as attention stores its keys
        Case("batched", "matmul", 64, 64, 64, batch=64, bars=bars),
    ]


def _small() -> list[Case]:
    bars = (Bar("numpy", round(1 / 1.5, 3)),)
    return [
        Case("small", "call", 64, 64, 64, label="call", bars=bars),
        Case("small", "matmul", 64, 64, 64, label="out", bars=bars),
    ]


def _reference() -> list[Case]:
    bars = (Bar("seconds", 1.0),)
    return [Case("reference", "reference", 64, 512, 4096, dtype="bfloat16", label="tensor_core:sm90/chain", bars=bars)]


def _import() -> list[Case]:
    return [
        Case("import", "process", label="isogemm", bars=(Bar("seconds", 0.5),)),
        Case("import", "process", label="first-call"),
        Case("import", "process", label="compiling-first-call"),
        Case("import", "process", label="compiling-all"),
    ]


SUITES = {
    "square": _square,
    "llm": _llm,
    "packed": _packed,
    "bf16": _bf16,
    "batched": _batched,
    "small": _small,
    "reference": _reference,
    "import": _import,
}


RANDOM = "random"
DRAWN = 60  # layers


def cases(suites: Iterable[str], *, seed: int = 0, count: int = DRAWN) -> list[Case]:
    """Every case of some suites; `seed` and `count` are those of the drawn ones."""
    return [case for name in suites for case in (_random(seed, count) if name == RANDOM else SUITES[name]())]


def _random(seed: int, count: int) -> list[Case]:
    """Drawn layers as they are, and those of one row with packed weights too."""
    found = [
        Case(RANDOM, form, x.m, x.n, x.k, layout="NT", label=f"{form} {'cold' if x.cold else 'hot'}", rotated=x.cold)
        for x in of_cpus(seed, count)
        for form in (("linear", "packed") if x.m == 1 else ("linear",))
    ]
    return list(dict.fromkeys(found))


def _drawn(form: Form, holds: Callable[[Row], bool]) -> Callable[[Row], bool]:
    return lambda row: row["suite"] == RANDOM and row["form"] == form and holds(row)


BARS = (1.15, 0.90) if target().width == 16 else (1.05, 0.85)  # of drawn layers: with AVX-512, and without
GROUPS = (
    Group("drawn layers", "fastest", _drawn("linear", lambda row: True), *BARS),
    Group("one row, from memory", "fastest", _drawn("linear", lambda row: row["m"] == 1 and row["rotated"]), 0.95),
    Group("one row, packed, from memory", "fastest", _drawn("packed", lambda row: row["rotated"]), 1.05),
    Group("one row, packed, hot", "fastest", _drawn("packed", lambda row: not row["rotated"]), 1.0),
)

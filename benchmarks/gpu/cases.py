"""What is measured on an NVIDIA GPU, and the bars that the project has set itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from isogemm.base.dtypes import ITEMSIZE
from isogemm.lab import Work

from ..common import Bar, Group, Row, Worded
from ..draw import of_gpus

__all__ = ["ALIGNED", "CHAIN", "GROUPS", "LLM", "RANDOM", "ROWS", "SUITES", "TUNED_GROUPS", "Case", "cases"]

Form = Literal["linear", "gradient", "batched", "drawn", "host", "wall", "replay"]

# (n, k) of the linears of two language models: hidden 2560 and 4096.
LLM = ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DECODE = tuple(m for m in ROWS if m <= 16)
DEFAULTS = {"float32": "fma/chain", "bfloat16": "tensor_core:sm90/chain", "float16": "tensor_core:sm90/chain"}
PEER = "batch_invariant_ops"
TBIK, SGLANG = "tbik", "tp_invariant_ops"  # the same sums in a tree of K, whatever the number of GPUs
CHAIN = "isogemm chain"  # the same product under the default contract


@dataclass(frozen=True, slots=True)
class Case(Worded):
    """One shape in one form; its words (`words`) are what ``--only`` selects by.

    Attributes
    ----------
    suite, form : str
        ``linear`` is x[m, k] @ w[n, k].T; ``gradient`` adds dy[k, m].T @ x[k, n] to a float32 [m, n]; ``batched``
        is a stack of a[m, k] @ b[k, n]; ``drawn`` is one product of any layout, with a bias or not; ``host`` is a
        linear's time on the host, ``wall`` its time to the end of the device's work, ``replay`` its time as a node
        of a CUDA graph.
    m, n, k, batch : int
    dtype, out_dtype : str
    layout : str
        Of the two operands: T where it is a transposed view.
    contract : str
        Asked for; empty for the default.
    label : str
        What shapes do not say.
    bars : tuple of Bar
        Least ratios of speeds; against ``torch`` means the fastest of torch's ways.
    error_ratio : float
        Most error relative to torch's, in the norm against float64; 0 where none is asked for.
    spaced : bool
        Also timed with an elementwise kernel between the products.
    bias : bool
        Added to every row of a drawn product.
    """

    suite: str
    form: Form
    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    out_dtype: str = ""
    layout: str = "NT"
    contract: str = ""
    label: str = ""
    bars: tuple[Bar, ...] = ()
    error_ratio: float = 0.0
    spaced: bool = False
    bias: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The case in words, unique among all cases."""
        items = (f"batch={self.batch}",) if self.batch > 1 else ()
        shape = (f"m={self.m}", f"n={self.n}", f"k={self.k}", self.layout, self.dtype)
        named = tuple(word for word in (self.label, self.contract) if word)
        return (self.suite, *named, *items, *shape, *["bias"] * self.bias)

    @property
    def definition(self) -> str:
        """The contract whose bits ours have to be."""
        return self.contract or DEFAULTS[self.dtype]

    @property
    def arithmetic(self) -> str:
        """What the peak is that products of this kind can reach: a dtype, or tf32x3."""
        return "tf32x3" if self.definition.startswith("tf32x3") else self.dtype

    @property
    def work(self) -> Work:
        """Least work of the product; an accumulated output is read as well."""
        item, out = ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype or self.dtype]
        plain = Work.gemm(self.m, self.n, self.k, itemsize=item, out_itemsize=out, batch=self.batch)
        reread = self.m * self.n * out if self.form == "gradient" else 0
        return Work(plain.flops, plain.nbytes + reread)


def _of_llm(*rows: int) -> Callable[[Row], bool]:
    return lambda row: row["suite"] == "llm" and row["m"] in rows


def _drawn(*, wide: bool, whole: bool = True) -> Callable[[Row], bool]:
    """Cells of drawn products: of float32 or of 16 bits, and then with N and K multiples of 8 or not."""

    def holds(row: Row) -> bool:
        if row["suite"] != "random" or (row["dtype"] == "float32") != wide:
            return False
        return wide or (row["n"] % 8 == row["k"] % 8 == 0) == whole

    return holds


ALIGNED = Group("drawn, 16 bits, N and K multiples of 8", "torch", _drawn(wide=False), 1.0, 0.90)
GROUPS = (
    Group("all", "torch", _of_llm(*ROWS), 1.05),
    Group("M <= 16", "torch", _of_llm(*DECODE), 1.08),
    Group("M <= 16", PEER, _of_llm(*DECODE), 3.5),
    Group("M = 4096", PEER, _of_llm(4096), 1.4),
    ALIGNED,
    Group("drawn, 16 bits, an odd N or K", "torch", _drawn(wide=False, whole=False), 0.90, least=0.60),
    Group("drawn, float32", "torch", _drawn(wide=True), 0.90, least=0.70),
)
TUNED = replace(ALIGNED, bar=1.05, low=0.95, least=0.85)  # after live timing
TUNED_GROUPS = tuple(TUNED if group is ALIGNED else group for group in GROUPS)


def _llm() -> list[Case]:
    bars = (Bar("torch", 0.95),)
    return [Case("llm", "linear", m, n, k, bars=bars, spaced=True) for n, k in LLM for m in ROWS]


def _leaf() -> list[Case]:
    contract, bars = "tensor_core:sm90/leaf4096", (Bar("torch", 0.93),)
    forward = Case("leaf", "linear", 4096, 4096, 14336, contract=contract, bars=bars)
    gradient = Case(
        "leaf", "gradient", 14336, 4096, 8192, out_dtype="float32", layout="TN", contract=contract, bars=bars
    )
    return [forward, gradient]


def _trees() -> list[Case]:
    """Leaves that can be walked side by side against the chain, and where a chain has to wait, against torch."""
    found = []
    for order in ("tree2", "tree4", "tree8"):
        for m in (1, 16, 64, 256, 1024, 4096):
            bars = (Bar(CHAIN, round(1 / (1.05 if m < 64 else 1.1), 3)),)
            found.append(Case("trees", "linear", m, 4096, 14336, contract=f"tensor_core:sm90/{order}", bars=bars))
    few = ((2, 1216, 24960), (16, 1024, 31040), (64, 512, 25472), (128, 832, 6912), (256, 768, 14912))
    bars = (Bar("torch", 1.0),)
    found += [Case("trees", "linear", m, n, k, contract="tensor_core:sm90/tree8", bars=bars) for m, n, k in few]
    few = ((1, 1024, 18816), (8, 1584, 13664), (32, 1536, 30784), (128, 2560, 2176))
    return found + [
        Case("trees", "linear", m, n, k, dtype="float32", contract="fma/tree8", bars=bars) for m, n, k in few
    ]


def _fp32() -> list[Case]:
    ieee = Case("fp32", "linear", 4096, 4096, 4096, dtype="float32", label="ieee", bars=(Bar("torch", 0.6),))
    bars = (Bar("torch", 1.7),)
    fast = Case(
        "fp32", "linear", 4096, 4096, 4096, dtype="float32", contract="tf32x3:sm90/chain", bars=bars, error_ratio=0.5
    )
    return [ieee, fast]


def _batched() -> list[Case]:
    """Attention: scores Q K^T and then P V, with K as it is stored."""
    bars = (Bar("torch", 0.95),)
    shapes = ((512, 128, 32), (4096, 128, 32))  # tokens, width of a head, heads
    scores = [Case("batched", "batched", t, t, d, batch=h, layout="NT", label="QK", bars=bars) for t, d, h in shapes]
    back = [Case("batched", "batched", t, d, t, batch=h, layout="NN", label="PV", bars=bars) for t, d, h in shapes]
    return scores + back


def _overhead() -> list[Case]:
    shapes = ((1, 2560, 4096), (16, 6144, 2560), (64, 64, 64))
    bars = {"host": (Bar("torch", round(1 / 2.5, 3)),)}
    forms: tuple[Form, ...] = ("host", "wall", "replay")
    return [Case("overhead", form, *shape, label=form, bars=bars.get(form, ())) for form in forms for shape in shapes]


RANDOM = "random"
DRAWN = 200  # products
SUITES = {"llm": _llm, "leaf": _leaf, "trees": _trees, "fp32": _fp32, "batched": _batched, "overhead": _overhead}


def cases(suites: Iterable[str], *, seed: int = 0, count: int = DRAWN) -> list[Case]:
    """Every case of some suites; `seed` and `count` are those of the drawn ones."""
    return [case for name in suites for case in (_random(seed, count) if name == RANDOM else SUITES[name]())]


def _random(seed: int, count: int) -> list[Case]:
    found = (
        Case(RANDOM, "drawn", x.m, x.n, x.k, dtype=x.dtype, layout=x.layout, bias=x.bias) for x in of_gpus(seed, count)
    )
    return list(dict.fromkeys(found))

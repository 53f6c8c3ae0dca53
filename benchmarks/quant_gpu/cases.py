"""What is measured of quantized weights on an NVIDIA GPU, and the bars that the project has set itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from isogemm.lab import Work
from isogemm.quant import FORMATS as ALL

from ..common import Bar, Group, Row
from ..draw import of_quantized
from ..quant.measure import Case as Product

__all__ = [
    "BARRED",
    "FORMATS",
    "FP32",
    "GROUPS",
    "LAYERS",
    "OURS",
    "PLAIN",
    "PLAIN_FP32",
    "Q8",
    "RANDOM",
    "ROWS",
    "SHAPES",
    "Case",
    "cases",
    "drawn",
]

FORMATS = ("Q4_0", "Q4_K", "Q8_0", "Q6_K")
BARRED = ((28672, 4096), (19456, 2560))  # (n, k): the shapes with bars, of linears that read the most
SHAPES = (*BARRED, (4096, 4096), (2560, 9728))
ROWS = (1, 16, 64, 512, 4096)
OURS, Q8, PLAIN = "isogemm", "isogemm q8", "isogemm bf16"
FP32, PLAIN_FP32 = "isogemm fp32", "isogemm plain fp32"  # float32 activations: weights quantized, and in float32
FP32_ROWS = 16  # up to which they are measured
ITEM = 2  # bytes of bfloat16
LAYERS, RANDOM = "layers", "random"
DRAWN = tuple(name for name, fmt in ALL.items() if fmt.activations)  # formats with an integer product

# Least speed against our own product with bfloat16 weights, on each of BARRED.
FEW = {
    ("Q4_0", 1): (2.8, 2.2),
    ("Q4_0", 16): (2.2, 1.8),
    ("Q4_K", 1): (2.8, 2.2),
    ("Q4_K", 16): (2.2, 1.8),
    ("Q8_0", 1): (1.6, 1.4),
    ("Q8_0", 16): (1.6, 1.4),
}
MANY = {512: 0.8}


@dataclass(frozen=True, slots=True)
class Case(Product):
    """One product of m rows of bfloat16 with a quantized weight [n, k]; `suite` says where it comes from."""

    suite: str = LAYERS

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Against our own product with bfloat16 weights in the same run."""
        if self.suite == RANDOM or (self.n, self.k) not in BARRED:
            return ()
        few = FEW.get((self.format, self.m))
        value = few[BARRED.index((self.n, self.k))] if few else MANY.get(self.m)
        return (Bar(PLAIN, value),) if value else ()

    @property
    def fp32(self) -> bool:
        """Whether float32 activations are measured too. They have no bars."""
        return self.suite == LAYERS and self.m <= FP32_ROWS

    @property
    def weight_bytes(self) -> int:
        """Of the blocks."""
        return self.n * ALL[self.format].row_bytes(self.k)

    @property
    def work(self) -> Work:
        """Least work: the blocks, the activations and the result once."""
        return Work(2 * self.m * self.n * self.k, self.weight_bytes + ITEM * self.m * (self.n + self.k))

    @property
    def plain_work(self) -> Work:
        """The same product with bfloat16 weights."""
        return self._plain(ITEM)

    @property
    def plain_fp32_work(self) -> Work:
        """The same product in float32."""
        return self._plain(2 * ITEM)

    def _plain(self, item: int) -> Work:
        return Work(2 * self.m * self.n * self.k, item * (self.n * self.k + self.m * (self.n + self.k)))


def cases(
    formats: Iterable[str] = FORMATS, rows: Iterable[int] = ROWS, shapes: Iterable[tuple[int, int]] = SHAPES
) -> list[Case]:
    """All of them, those with bars first and those of one weight behind each other."""
    wanted = sorted(rows)
    return [Case(name, m, n, k) for n, k in shapes for name in formats for m in wanted]


def drawn(seed: int, count: int) -> list[Case]:
    """Products that nobody chose, of all formats, as they were drawn: a run that ends early has no kind too few of."""
    found = (Case(x.format, x.m, x.n, x.k, RANDOM) for x in of_quantized(seed, count, DRAWN))
    return list(dict.fromkeys(found))


def _holds(rows: range, bits: range) -> Callable[[Row], bool]:
    """Drawn cells with so many rows of x, and so many bits of a code."""
    return lambda row: row.get("suite") == RANDOM and row["m"] in rows and int(row["format"][1]) in bits


# Of each path of ours, against our own product with bfloat16 weights.
GROUPS = (
    Group("all", PLAIN, _holds(range(1, 513), range(9)), 0, least=0.85),
    Group("M <= 16, codes of up to 4 bits", PLAIN, _holds(range(1, 17), range(5)), 1.5, least=0.85),
    Group("M <= 16, codes of 5 to 8 bits", PLAIN, _holds(range(1, 17), range(5, 9)), 1.25, least=0.85),
    Group("M = 17 to 64", PLAIN, _holds(range(17, 65), range(9)), 0, least=0.85),
    Group("M = 65 to 512", PLAIN, _holds(range(65, 513), range(9)), 0, least=0.85),
)

"""Hopper's kernels for operands whose lines the copy engine cannot step along (an odd K or N, any strides), or across.

One kernel copies those operands into a workspace, their lines a multiple of 128 bytes apart (pad.cu); Hopper's own then
multiplies, and its configurations are this family's. What is copied changes no bit: zeros beyond a line are never read.
Most boxes across K bring 64 rows of A, in as many pieces as they have of K. Of fewer the copy has K contiguous;
where K is long it is worth its time though the engine could read A. A trial has products with fewer rows and with
more, so both ways of copying are tried; it has none of few columns and a long K, and B is copied as it lies.

With few rows the copy of the weights costs more than the product: gemm/unaligned reads them as they lie. Figures are in
docs/design/0015-operands-out-of-step.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, Strides
from ...driver import facts
from ...driver.kernel import Bound, Parameter, ints, longs
from ...driver.nvrtc import function_of
from ...driver.workspace import workspace
from ..hopper.config import OPERANDS, HopperConfig, serves
from ..hopper.family import Hopper
from ..hopper.model import expected
from ..model import Gpu, copying, gpu_of

HOPPER = Hopper()
THREADS, BLOCKS = 256, 16  # of a block; blocks to a multiprocessor
FEW = 64  # rows of A, below which the copy has K contiguous: most boxes across K are as wide
CACHED = 8  # words of 16 bytes in a line of the cache
WORDS = 2**31  # of 16 bytes, in an operand: more than the kernel counts


class Copy(NamedTuple):
    """An operand as lines that are copied: `number` lines of `inner` elements for each of `items`."""

    number: int
    inner: int
    items: int
    # step, unit, each: elements from line to line, along a line, from item to item
    step: int
    unit: int
    each: int
    along: bool

    @property
    def words(self) -> int:
        """16 bytes each, in a line of the copy: whole lines of the cache, or each piece of a box would lie in two."""
        words = -(-self.inner // 8)
        return words if words < CACHED else -(-words // CACHED) * CACHED

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return 16 * self.items * self.number * self.words

    @property
    def strides(self) -> Strides:
        """Strides of the copy."""
        step = 8 * self.words
        item = step * self.number if self.each else 0
        return Strides(1, step, item) if self.along else Strides(step, 1, item)


def copy_of(
    x: Strides, rows: int, columns: int, batch: int, few: bool = False, *, aligned: bool = True, turned: bool = False
) -> Copy | None:
    """What has to be copied of a stored matrix [rows, columns]; None where it can be read as it lies.

    `few`: lines of the copy are rows, whichever way they lie. `aligned`: it begins at a multiple of 16 bytes. `turned`:
    where few rows lie side by side, they are copied though they can be read.
    """
    items, each = (batch, x.batch) if batch > 1 and x.batch else (1, 0)
    along = x.row == 1 and (x.col != 1 or columns == 1)  # lines are its columns
    step, unit = (x.col, x.row) if along else (x.row, x.col)
    if (
        not (turned and few and along)
        and aligned
        and unit == 1
        and (step % 8 == 0 or (columns if along else rows) == 1)
        and each % 8 == 0
    ):
        return None
    if few and along:
        along, step, unit = False, unit, step
    return Copy(*((columns, rows) if along else (rows, columns)), items, step, unit, each, along)


class Readable(NamedTuple):
    """A product whose operands the copy engine can read, and what of A and B is copied for it."""

    product: Product
    a: Copy | None
    b: Copy | None


@lru_cache(maxsize=4096)
def padded(p: Product) -> Readable | None:
    """None where nothing has to be copied, or Hopper's kernels do not serve the product even then."""
    if p.dtype_a not in OPERANDS or p.dtype_b not in OPERANDS or min(p.m, p.n, p.k, p.batch) < 1:
        return None
    a, b = copy_of(p.a, p.m, p.k, p.batch, p.m < FEW, turned=True), copy_of(p.b, p.k, p.n, p.batch)
    if a is None and b is None:
        return None
    copied = replace(p, a=a.strides if a else p.a, b=b.strides if b else p.b)
    fits = all(x is None or x.nbytes // 16 < WORDS for x in (a, b))
    return Readable(copied, a, b) if fits and serves(copied) else None


class Padded(ProductFamily):
    """The family; see the text of this module."""

    name, home = "padded", "backends/cuda/gemm/padded"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Hopper's configurations of the product whose operands lie as its kernels want."""
        found = padded(product)
        return HOPPER.configs(found.product) if found else ()

    def supports(self, product: Product, config: str) -> bool:
        """Whether something has to be copied, and the configuration is legal then."""
        found = padded(product)
        return found is not None and HOPPER.supports(found.product, config)

    def palette(self, product: Product) -> tuple[str, ...]:
        """Hopper's palette for that product."""
        found = padded(product)
        return HOPPER.palette(found.product) if found else ()

    def microseconds(self, product: Product, config: str, device: int | Gpu) -> float | None:
        """Hopper's time, and the copies': read once, written once."""
        found, parsed = padded(product), HopperConfig.parse(config)
        if found is None or parsed is None:
            return None
        gpu = gpu_of(device)
        nbytes = sum(2 * x.nbytes for x in (found.a, found.b) if x)
        return expected(found.product, parsed, gpu) + copying(nbytes, gpu)

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind both kernels."""
        found = padded(product)
        assert found is not None, f"{config} does not serve {product}"
        sides = [x for x in (found.a, found.b) if x]
        first = -(-sides[0].nbytes // 512) * 512
        nbytes = first + (sides[1].nbytes if len(sides) > 1 else 0)
        # alpha is the product's own: -0.0 and 0.0 are equal, so what is remembered of one may be the other's.
        readable = replace(found.product, alpha=product.alpha)
        copy, multiply = bind_copies(sides, device), HOPPER.bind(readable, config, device)
        has_a, has_b = found.a is not None, found.b is not None

        def enqueue(at: Addresses, stream: int) -> None:
            memory = workspace(nbytes, device)
            left = memory.data_ptr()
            right = left + first if has_a else left
            if has_a and has_b:
                copy(stream, at.a, left, at.b, right)
            else:
                copy(stream, at.a if has_a else at.b, left, 0, 0)
            multiply(at._replace(a=left if has_a else at.a, b=right if has_b else at.b), stream)

        return enqueue


def bind_copies(sides: list[Copy], device: int) -> Bound:
    """The copies of one operand or of both: ``launch(stream, from, to, from, to)``."""
    params: list[Parameter] = []
    for x in (sides + sides)[:2]:
        params += ["ptr", "ptr", *longs(x.step, x.unit, x.each), *ints(x.number, x.inner, x.words, x.items)]
    most = BLOCKS * facts.device(device).multiprocessors
    blocks = min(most, max(-(-x.nbytes // (16 * THREADS)) for x in sides))
    kernel = function_of("gemm/padded/pad.cu", "pad", device)
    return kernel.bind(params, grid=(blocks, len(sides)), block=(THREADS,), pdl=True)

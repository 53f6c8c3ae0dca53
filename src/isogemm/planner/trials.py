"""Trials of products: a kernel run on golden products of the kind it is wanted for, its bits compared one by one.

A product's *variant* is what selects code: contract, types, layouts, alignment, epilogue, batching; not its sizes. A
trial takes a golden product of the same variant, with rows of A and columns of B repeated to many tiles, operands
surrounded by NaNs that no kernel may use, and an output in which what must not be written is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import ITEMSIZE, NUMPY
from ..contract import golden
from ..contract.golden import GoldenCase
from ..contract.spec import Contract
from ..problem.numeric import letter
from ..problem.product import Addresses, Launch, Product, Strides, alignment
from .admission import TOO_SHORT
from .bench import POISON, Bench, among_poison, beside, difference
from .family import Family

__all__ = [
    "NATIVE",
    "ProductFamily",
    "code_of",
    "config_of",
    "golden_products",
    "product_of",
    "try_config",
    "variant_of",
]

NATIVE = "tensor_core:native"

Array = NDArray[Any]
Accumulators = Callable[[str, str, str, GoldenCase], Array | None]
"""(arithmetic, dtype of A, dtype of B, case) -> float32 bits of the case's block; None where nothing is known."""

ALPHA, BETA = 1.7, 0.3  # of golden products: neither is exact, so every rounding shows
WAVE_COLUMNS = 4112  # with 1030 rows: more tiles of 128 x 256 than an H200 has multiprocessors


class ProductFamily(Family[Product, Launch], Protocol):
    """A family of kernels for products; its configurations are short texts, which it alone reads, as tables hold them.

    Attributes
    ----------
    library : bool
        Algorithms of a vendor's library: nothing but the exact product says what code they run, so no golden product of
        another size can admit them. They serve what `isogemm tune` found right, and nothing else.
    """

    library: bool = False

    def microseconds(self, product: Product, config: str, device: Any) -> float | None:
        """The time to expect, by a model of the family; None where it has none.

        `device` is its number, or what the model needs to know of one that is not here.
        """
        return None

    def palette(self, product: Product) -> Sequence[str]:
        """A few configurations that between them serve all products of this variant nearly as well as any."""
        return ()

    def shortlist(self, product: Product, device: int) -> Sequence[str]:
        """Configurations that are found in milliseconds; of a library, what it lists itself."""
        return self.configs(product)

    def code(self, case: Product, config: Any) -> str:
        """The configuration, and the variant of products."""
        return code_of(config, variant_of(case))

    def trial(self, bench: Bench, case: Product, config: Any) -> str:
        """Golden products of the case's variant; see `try_config`."""
        return try_config(bench, self, case, config)


def code_of(config: str, variant: str) -> str:
    """What a verdict on a product's kernel is about."""
    return f"{config}; {variant}"


def config_of(code: str) -> tuple[str, str]:
    """(configuration, variant) of `code_of`."""
    config, _, variant = code.partition("; ")
    return config, variant


@dataclass(frozen=True, slots=True)
class Posed:
    """A golden product: the product, its flat operands, where they begin in them, and elements before the output."""

    product: Product
    a: Array
    b: Array
    c: Array | None
    bias: Array | None
    offsets: Addresses
    shift: int


def variant_of(product: Product) -> str:
    """The text of what selects code for a product; no extents."""
    kind = str(product.contract.order.kind)
    size = str(product.contract.order.size) if kind == "tree" else ""
    parts = [
        f"{product.contract.arithmetic}/{kind}{size}",
        f"{product.dtype_a}*{product.dtype_b}>{product.dtype_out}",
        f"{letter(product.a)}{letter(product.b)}>{letter(product.out)}",
        str(Alignment.of(product)),
    ]
    if product.alpha != 1:
        parts.append("alpha")
    if product.c is not None:
        scale = "accumulate" if product.accumulate else "1" if product.beta == 1 else "beta"
        parts.append(f"c={product.dtype_c}:{letter(product.c)}:{scale}")
    if product.dtype_bias is not None:
        parts.append(f"bias={product.dtype_bias}:{'unit' if product.bias_stride == 1 else 'strided'}")
    if product.batch > 1:
        parts.append("batched")
    return " ".join(parts)


def product_of(variant: str) -> Product:
    """Some product of a variant.

    Raises
    ------
    ValueError
        Not the text of one.
    """
    contract, types, letters, align, *rest = variant.split(" ")
    said = dict(part.partition("=")[::2] for part in rest)
    a, b, out = types.replace(">", "*").split("*")
    c, letter_c, scale = said["c"].split(":") if "c" in said else ("", "", "")
    bias, _, step = said.get("bias", "").partition(":")
    (m, n, k), batch, lies = (32, 64, 1024), 2 if "batched" in said else 1, Alignment.parse(align)

    def lie(kind: str, rows: int, columns: int, dtype: str, step: int) -> Strides:
        return _strides(kind, (batch, rows, columns), ITEMSIZE[dtype], lies.base, step, False)[0]

    found = Product(
        m, n, k, a, b, out, Contract.parse(contract + "512" * contract.endswith("leaf")),
        lie(letters[0], m, k, a, lies.a), lie(letters[1], k, n, b, lies.b), lie(letters[3], m, n, out, lies.out),
        batch, lie(letter_c, m, n, c, lies.out) if c else None, c or None,
        bias or None, 3 if step == "strided" else 1, 2.0 if "alpha" in said else 1.0,
        {"1": 1.0, "beta": 0.5}.get(scale, 0.0), scale == "accumulate", lies.base,
    )  # fmt: skip
    if variant_of(found) != variant:
        raise ValueError(f"{variant!r} is no variant of products: the nearest is {variant_of(found)!r}")
    return found


def shipped_accumulators(arithmetic: str, dtype_a: str, dtype_b: str, case: GoldenCase) -> Array | None:
    """The reference's bits, from the package's data."""
    return golden.expected(arithmetic, dtype_a, dtype_b, case)


def accumulators_by(bench: Bench, family: Family[Product, Launch]) -> Accumulators:
    """Accumulators computed by the device itself: by `family` on the plainest product there is."""

    def run(arithmetic: str, dtype_a: str, dtype_b: str, case: GoldenCase) -> Array | None:
        contract = Contract(arithmetic, case.order)
        plain = Product(
            case.rows, case.columns, case.k, dtype_a, dtype_b, "float32", contract,
            Strides(case.k, 1), Strides(1, case.k), Strides(case.columns, 1), accumulate=case.started,
            c=Strides(case.columns, 1) if case.started else None, dtype_c="float32" if case.started else None,
        )  # fmt: skip
        posed = _pose(plain, case, case.rows, case.columns, 1)
        for config in family.configs(posed.product):
            if family.supports(posed.product, config):
                block: Array = _outputs(bench, family, config, posed)[0][0]
                return block
        return None

    return run


def try_config(
    bench: Bench,
    family: Family[Product, Launch],
    product: Product,
    config: str,
    accumulators: Accumulators | None = None,
) -> str:
    """Run one configuration on every golden product of the variant of `product` that it supports.

    Parameters
    ----------
    accumulators : callable, optional
        In place of the reference's bits, or of the device's own plain kernel where the arithmetic is native.

    Returns
    -------
    str
        Empty where every bit was right; else the first difference, or why nothing could be tried.
    """
    arithmetic, types = product.contract.arithmetic, (product.dtype_a, product.dtype_b)
    if accumulators is None:
        native = arithmetic == NATIVE and bench.plain is not None
        accumulators = accumulators_by(bench, bench.plain) if native else shipped_accumulators
    longest, known = 0, False
    for case in _cases(product):
        block = accumulators(arithmetic, *types, case)
        if block is None:
            continue
        known = True
        want = _with_epilogue(product, case, block)
        for m, n in _sizes(case, product):
            posed = _pose(product, case, m, n, 3 if product.batch > 1 else 1)
            if not family.supports(posed.product, config):
                continue
            longest = max(longest, case.k)
            found = _compare(*_outputs(bench, family, config, posed), want, _shift(product))
            if found:
                return f"{case.order} over k {case.k}{' from C' if case.started else ''}, {m} x {n}: {found}"
    if not known:
        return f"no golden bits for {arithmetic} on {types[0]} and {types[1]}"
    return "" if longest >= 333 else TOO_SHORT


def golden_products(product: Product) -> Iterator[Product]:
    """The products that a trial of this variant multiplies: they may select code that the product itself does not."""
    for case in _cases(product):
        for m, n in _sizes(case, product):
            yield _pose(product, case, m, n, 3 if product.batch > 1 else 1).product


def _cases(product: Product) -> Iterator[GoldenCase]:
    name = product.contract.arithmetic
    small = golden.is_small(name, product.dtype_a, product.dtype_b)
    order = product.contract.order
    for case in golden.cases(name, small=small):
        same = case.order.kind == order.kind and (order.kind != "tree" or case.order.size == order.size)
        if same and case.started == product.accumulate:
            yield case


def _sizes(case: GoldenCase, product: Product) -> tuple[tuple[int, int], ...]:
    """Rows and columns to expand a case to: one row, few, several ragged tiles, and more tiles than processors.

    Columns of whole cases are multiples of 16, as those of real products are: compilers make other code of them.
    """
    if product.batch > 1:
        return ((13, 80 if _is_whole(case) else 72), (67, 133)) if case.k > 500 else ((5, 24),)
    if case.k == 2568:
        return (1, 136), (16, 264), (67, 133), (130, 264)
    if _is_whole(case):
        return ((33, 80), (5, WAVE_COLUMNS), (1030, WAVE_COLUMNS)) if product.plain else ((13, 80), (33, 24))
    return (13, 72), (33, 24)


def _is_whole(case: GoldenCase) -> bool:
    """Whether K is a multiple of every tile; sizes and strides then are of 16 elements, as in most real products."""
    return case.k == 512


class Alignment(NamedTuple):
    """Bytes up to 128 that divide every address, and up to 16 that divide strides of A, B and out, 1 element apart.

    As text ``align=128/16``, or ``align=128/16,16,2`` where the three are not alike.
    """

    base: int
    a: int
    b: int
    out: int

    @classmethod
    def of(cls, product: Product) -> Alignment:
        """A product's; each matrix has its own, as an odd N says nothing of operands."""
        pairs = ((product.a, product.dtype_a), (product.b, product.dtype_b), (product.out, product.dtype_out))
        steps = [alignment(*(s * ITEMSIZE[dtype] for s in x if s != 1), most=16) for x, dtype in pairs]
        return cls(128 if product.align >= 128 else min(product.align, 16), *steps)

    @classmethod
    def parse(cls, text: str) -> Alignment:
        """Read the text."""
        base, _, steps = text.removeprefix("align=").partition("/")
        found = [int(step) for step in steps.split(",")]
        return cls(int(base), *(found * 3 if len(found) == 1 else found))

    def __str__(self) -> str:
        steps = self[1:]
        return f"align={self.base}/{steps[0] if len(set(steps)) == 1 else ','.join(map(str, steps))}"


def _strides(
    kind: str, shape: tuple[int, ...], itemsize: int, base: int, step: int, whole: bool
) -> tuple[Strides, int]:
    """Strides of a stack of matrices with that layout, and where it begins: lines are longer than their extent.

    Neither is better aligned than `base` and `step` say. `whole`: strides of the best alignment are multiples of 16
    elements, not of 16 bytes alone.
    """
    grain = 16 if whole and step == 16 else max(1, step // itemsize)
    batch, rows, columns = shape

    def fit(extent: int) -> int:
        count = extent // grain + 1
        return grain * (count if step == 16 else count | 1)

    if kind == "S":
        row, col, item = fit(2 * columns), 2, rows * fit(2 * columns)
    elif kind == "N":
        row, col, item = fit(columns), 1, rows * fit(columns)
    else:
        row, col, item = 1, fit(rows), columns * fit(rows)
    return Strides(row, col, fit(item) if batch > 1 else 0), 0 if base == 128 else max(1, base // itemsize)


def _pose(product: Product, case: GoldenCase, m: int, n: int, batch: int) -> Posed:
    """The golden product of this case with the variant of `product`."""
    align, k, whole = Alignment.of(product), case.k, _is_whole(case)
    rows = (np.arange(m) + 7 * np.arange(batch)[:, None]) % case.rows
    columns = (np.arange(n) + _shift(product) * np.arange(batch)[:, None]) % case.columns
    bits_a, bits_b = golden.operands(case, product.dtype_a, product.dtype_b)

    def fill(stack: Array, kind: str, step: int) -> tuple[Array, Strides, int]:
        strides, begin = _strides(kind, stack.shape, stack.itemsize, align.base, step, whole)
        return among_poison(stack, _steps(strides), begin)[0], strides, begin * stack.itemsize

    a, strides_a, at_a = fill(bits_a[rows], letter(product.a), align.a)
    b, strides_b, at_b = fill(np.moveaxis(bits_b.T[columns], 1, 2), letter(product.b), align.b)
    size = ITEMSIZE[product.dtype_out]
    strides_out, shift = _strides(letter(product.out), (batch, m, n), size, align.base, align.out, whole)
    at = Addresses(at_a, at_b, shift * size)
    c = bias = strides_c = None
    block_c, block_bias = golden.epilogue_operands(case, product.dtype_c or "float32", product.dtype_bias or "float32")
    if product.c is not None:
        block = golden.start(case) if product.accumulate else block_c
        c, strides_c, at_c = fill(block[rows[:, :, None], columns[:, None, :]], letter(product.c), align.out)
        at = at._replace(c=at_c)
    if product.dtype_bias is not None:
        step = 1 if product.bias_stride == 1 else 3
        bias = np.full(n * step, POISON[block_bias.itemsize], block_bias.dtype)
        bias[::step] = block_bias[columns[0]]
    posed = replace(
        product, m=m, n=n, k=k, batch=batch, a=strides_a, b=strides_b, out=strides_out, c=strides_c,
        contract=Contract(product.contract.arithmetic, case.order),
        alpha=1.0 if product.alpha == 1 else float(np.float32(ALPHA)), bias_stride=1 if product.bias_stride == 1 else 3,
        beta=product.beta if product.beta in (0, 1) else float(np.float32(BETA)),
        align=min([128, *(x & -x for x in at[:4] if x)]),
    )  # fmt: skip
    return Posed(posed, a, b, c, bias, at, shift)


def _steps(strides: Strides) -> tuple[int, int, int]:
    """Steps along [batch, rows, columns]."""
    return strides.batch, strides.row, strides.col


def _outputs(bench: Bench, family: Family[Product, Launch], config: str, posed: Posed) -> tuple[Array, int]:
    """Run one product: its output bits [batch, m, n], and how many words beside them were written."""
    p, o = posed.product, posed.offsets
    launch = family.bind(p, config, bench.device)
    held = [bench.put(x) for x in (posed.a, posed.b, posed.c, posed.bias)]
    target = bench.output((p.batch, p.m, p.n), ITEMSIZE[p.dtype_out], strides=_steps(p.out), shift=posed.shift)
    a, b, c, bias = (0 if x is None else x.address for x in held)
    launch(Addresses(a + o.a, b + o.b, target.address, c + o.c if c else 0, bias), bench.stream())
    return target.read()


def _with_epilogue(product: Product, case: GoldenCase, block: Array) -> Array:
    """Output bits of the block, from its accumulators."""
    reads_c = product.c is not None and not product.accumulate
    if product.dtype_out == "float32" and product.alpha == 1 and product.dtype_bias is None and not reads_c:
        return block
    from ..contract import reference

    block_c, block_bias = golden.epilogue_operands(case, product.dtype_c or "float32", product.dtype_bias or "float32")
    out = reference.epilogue(
        block.view(np.float32),
        alpha=1.0 if product.alpha == 1 else ALPHA,
        beta=0.0 if product.accumulate else product.beta if product.beta in (0, 1) else BETA,
        c=block_c.view(NUMPY[product.dtype_c or "float32"]) if reads_c else None,
        bias=None if product.dtype_bias is None else block_bias.view(NUMPY[product.dtype_bias]),
        out_dtype=NUMPY[product.dtype_out],
    )
    return out.view(np.uint16 if out.itemsize == 2 else np.uint32)


def _shift(product: Product) -> int:
    """Columns that a batch's next item starts later by; a bias is shared by all items, so its columns stay."""
    return 5 if product.dtype_bias is None else 0


def _compare(got: Array, stray: int, block: Array, shift: int) -> str:
    """The first element of the stack that differs from the expanded block, or nothing."""
    batch, m, n = got.shape
    rows = (np.arange(m) + 7 * np.arange(batch)[:, None]) % block.shape[0]
    columns = (np.arange(n) + shift * np.arange(batch)[:, None]) % block.shape[1]
    return difference("", got, block[rows[:, :, None], columns[:, None, :]]) or beside("the output", stray)

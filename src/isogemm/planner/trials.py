"""Trials: a kernel run on golden products of the kind it is wanted for, its bits compared one by one.

A product's *variant* is what selects code: contract, types, layouts, alignment, epilogue, batching; not its sizes. A
trial takes a golden product of the same variant, with rows of A and columns of B repeated to many tiles, operands
surrounded by NaNs that no kernel may use, and an output in which what must not be written is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import ITEMSIZE
from ..contract import golden
from ..contract.golden import Case
from ..contract.spec import Contract
from ..problem.numeric import letter
from ..problem.product import Addresses, Family, Product, Strides

__all__ = ["Accumulators", "Buffer", "Machine", "accumulators_by", "shipped_accumulators", "try_config", "variant_of"]

Array = NDArray[Any]
Accumulators = Callable[[str, str, str, Case], Array | None]
"""(arithmetic, dtype of A, dtype of B, case) -> float32 bits of the case's block; None where nothing is known."""

ALPHA, BETA = 1.7, 0.3  # of golden products: neither is exact, so every rounding shows
POISON = {2: 0x7FC1, 4: 0x7FC00BAD}  # NaNs, in bfloat16 as in float32, that no product returns
WAVE_COLUMNS = 4112  # with 1030 rows: more tiles of 128 x 256 than an H200 has multiprocessors


class Buffer(Protocol):
    """Memory of a device."""

    address: int

    def read(self) -> Array:
        """What it holds now, after everything enqueued."""
        ...


class Machine(Protocol):
    """A device as trials and tuning need it; tests bring their own."""

    device: int

    def stamp(self) -> Mapping[str, str]:
        """Everything that could change a kernel's bits besides its own source."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is captured into a graph: nothing may be run, compared or waited for."""
        ...

    def put(self, flat: Array) -> Buffer:
        """Copy bits to the device."""
        ...

    def stream(self) -> int:
        """The raw handle of the current stream."""
        ...


class Placed(NamedTuple):
    """How a stack of matrices lies in a flat buffer, in elements."""

    strides: Strides
    total: int
    offset: int

    def view(self, flat: Array, shape: tuple[int, int, int]) -> Array:
        """The stack as a view of the flat buffer."""
        steps = [s * flat.itemsize for s in (self.strides.batch, self.strides.row, self.strides.col)]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], shape, steps)


@dataclass(frozen=True, slots=True)
class Posed:
    """A golden product: the product, its flat operands, and where the output lies."""

    product: Product
    a: Array
    b: Array
    c: Array | None
    bias: Array | None
    offsets: Addresses
    out: Placed


def variant_of(product: Product) -> str:
    """The text of what selects code for a product; no extents."""
    kind = str(product.contract.order.kind)
    size = str(product.contract.order.size) if kind == "tree" else ""
    parts = [
        f"{product.contract.arithmetic}/{kind}{size}",
        f"{product.dtype_a}*{product.dtype_b}>{product.dtype_out}",
        f"{letter(product.a)}{letter(product.b)}>{letter(product.out)}",
        _alignment(product),
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


def shipped_accumulators(arithmetic: str, dtype_a: str, dtype_b: str, case: Case) -> Array | None:
    """The reference's bits, from the package's data."""
    return golden.expected(arithmetic, dtype_a, dtype_b, case)


def accumulators_by(machine: Machine, family: Family) -> Accumulators:
    """Accumulators computed by the device itself: by `family` on the plainest product there is."""

    def run(arithmetic: str, dtype_a: str, dtype_b: str, case: Case) -> Array | None:
        contract = Contract(arithmetic, case.order)
        plain = Product(
            case.rows, case.columns, case.k, dtype_a, dtype_b, "float32", contract,
            Strides(case.k, 1), Strides(1, case.k), Strides(case.columns, 1), accumulate=case.started,
            c=Strides(case.columns, 1) if case.started else None, dtype_c="float32" if case.started else None,
        )  # fmt: skip
        posed = _pose(plain, case, case.rows, case.columns, 1)
        for config in family.configs(posed.product):
            if family.supports(posed.product, config):
                block: Array = _outputs(machine, family, config, posed)[0][0]
                return block
        return None

    return run


def try_config(
    machine: Machine, family: Family, config: str, product: Product, accumulators: Accumulators = shipped_accumulators
) -> str:
    """Run one configuration on every golden product of the variant of `product` that it supports.

    Returns
    -------
    str
        Empty where every bit was right; else the first difference, or why nothing could be tried.
    """
    longest, known = 0, False
    for case in _cases(product):
        block = accumulators(product.contract.arithmetic, product.dtype_a, product.dtype_b, case)
        if block is None:
            continue
        known = True
        want = _with_epilogue(product, case, block)
        for m, n in _sizes(case, product):
            posed = _pose(product, case, m, n, 3 if product.batch > 1 else 1)
            if not family.supports(posed.product, config):
                continue
            longest = max(longest, case.k)
            got, stray = _outputs(machine, family, config, posed)
            difference = _compare(got, want, stray, _shift(product))
            if difference:
                where = f"{case.order} over k {case.k}{' from C' if case.started else ''}, {m} x {n}"
                return f"{where}: {difference}"
    if not known:
        return f"no golden bits for {product.contract.arithmetic} on {product.dtype_a} and {product.dtype_b}"
    return "" if longest >= 333 else "supports no golden product that is long enough to tell"


def _cases(product: Product) -> Iterator[Case]:
    name = product.contract.arithmetic
    small = golden.is_small(name, product.dtype_a, product.dtype_b)
    order = product.contract.order
    for case in golden.cases(name, small=small):
        same = case.order.kind == order.kind and (order.kind != "tree" or case.order.size == order.size)
        if same and case.started == product.accumulate:
            yield case


def _sizes(case: Case, product: Product) -> tuple[tuple[int, int], ...]:
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


def _is_whole(case: Case) -> bool:
    """Whether K is a multiple of every tile; sizes and strides then are of 16 elements, as in most real products."""
    return case.k == 512


def _alignment(product: Product) -> str:
    """``align=BASE/STEP``: bytes that divide every address, and that divide every stride but those of 1 element."""
    pairs = ((product.a, product.dtype_a), (product.b, product.dtype_b), (product.out, product.dtype_out))
    steps = [s * ITEMSIZE[dtype] for x, dtype in pairs for s in x if s not in (0, 1)]
    step = min([16, *(s & -s for s in steps)])
    return f"align={128 if product.align >= 128 else min(product.align, 16)}/{step}"


def _place(kind: str, rows: int, columns: int, batch: int, itemsize: int, align: str, whole: bool = False) -> Placed:
    """A stack of matrices with that layout, leading dimensions beyond their extent and no better aligned than said.

    `whole`: strides of the best alignment are multiples of 16 elements, not of 16 bytes alone.
    """
    base, step = (int(x) for x in align.removeprefix("align=").split("/"))
    grain = 16 if whole and step == 16 else max(1, step // itemsize)

    def fit(extent: int) -> int:
        count = extent // grain + 1
        return grain * (count if step == 16 else count | 1)

    offset = 0 if base == 128 else max(1, base // itemsize)
    if kind == "S":
        row, col, item = fit(2 * columns), 2, rows * fit(2 * columns)
    elif kind == "N":
        row, col, item = fit(columns), 1, rows * fit(columns)
    else:
        row, col, item = 1, fit(rows), columns * fit(rows)
    item = fit(item)
    return Placed(Strides(row, col, item if batch > 1 else 0), offset + batch * item + grain, offset)


def _pose(product: Product, case: Case, m: int, n: int, batch: int) -> Posed:
    """The golden product of this case with the variant of `product`."""
    align, k, whole = _alignment(product), case.k, _is_whole(case)
    rows = (np.arange(m) + 7 * np.arange(batch)[:, None]) % case.rows
    columns = (np.arange(n) + _shift(product) * np.arange(batch)[:, None]) % case.columns
    bits_a, bits_b = golden.operands(case, product.dtype_a, product.dtype_b)
    a, placed_a = _fill(bits_a[rows], letter(product.a), align, whole)
    b, placed_b = _fill(np.moveaxis(bits_b.T[columns], 1, 2), letter(product.b), align, whole)
    out = _place(letter(product.out), m, n, batch, ITEMSIZE[product.dtype_out], align, whole)
    c = bias = placed_c = None
    block_c, block_bias = golden.epilogue_operands(case, product.dtype_c or "float32", product.dtype_bias or "float32")
    if product.c is not None:
        block = golden.start(case) if product.accumulate else block_c
        c, placed_c = _fill(block[rows[:, :, None], columns[:, None, :]], letter(product.c), align, whole)
    if product.dtype_bias is not None:
        step = 1 if product.bias_stride == 1 else 3
        bias = np.full(n * step, POISON[block_bias.itemsize], block_bias.dtype)
        bias[::step] = block_bias[columns[0]]
    at = Addresses(*(p.offset * ITEMSIZE[d] for p, d in (
        (placed_a, product.dtype_a), (placed_b, product.dtype_b), (out, product.dtype_out))))  # fmt: skip
    if placed_c is not None:
        at = at._replace(c=placed_c.offset * ITEMSIZE[product.dtype_c or "float32"])
    posed = replace(
        product, m=m, n=n, k=k, batch=batch, a=placed_a.strides, b=placed_b.strides, out=out.strides,
        c=None if placed_c is None else placed_c.strides, contract=Contract(product.contract.arithmetic, case.order),
        alpha=1.0 if product.alpha == 1 else float(np.float32(ALPHA)), bias_stride=1 if product.bias_stride == 1 else 3,
        beta=product.beta if product.beta in (0, 1) else float(np.float32(BETA)),
        align=min([128, *(x & -x for x in at[:4] if x)]),
    )  # fmt: skip
    return Posed(posed, a, b, c, bias, at, out)


def _fill(stack: Array, kind: str, align: str, whole: bool) -> tuple[Array, Placed]:
    """Lay a stack of matrices out among poison."""
    batch, rows, columns = stack.shape
    placed = _place(kind, rows, columns, batch, stack.itemsize, align, whole)
    flat = np.full(placed.total, POISON[stack.itemsize], stack.dtype)
    placed.view(flat, (batch, rows, columns))[...] = stack
    return flat, placed


def _outputs(machine: Machine, family: Family, config: str, posed: Posed) -> tuple[Array, int]:
    """Run one product: its output bits [batch, m, n], and how many words beside them were written."""
    p = posed.product
    word = np.dtype(np.uint16 if ITEMSIZE[p.dtype_out] == 2 else np.uint32)
    poison = word.type(POISON[word.itemsize])
    launch = family.build(p, config, machine.device)
    held = [None if x is None else machine.put(x) for x in (posed.a, posed.b, posed.c, posed.bias)]
    target = machine.put(np.full(posed.out.total, poison, word))
    a, b, c, bias = (0 if x is None else x.address for x in held)
    o = posed.offsets
    launch(Addresses(a + o.a, b + o.b, target.address + o.out, c + o.c if c else 0, bias), machine.stream())
    flat = target.read()
    view = posed.out.view(flat, (p.batch, p.m, p.n))
    got = view.copy()
    view[...] = poison
    return got, int(np.count_nonzero(flat != poison))


def _with_epilogue(product: Product, case: Case, block: Array) -> Array:
    """Output bits of the block, from its accumulators."""
    reads_c = product.c is not None and not product.accumulate
    if product.dtype_out == "float32" and product.alpha == 1 and product.dtype_bias is None and not reads_c:
        return block
    import ml_dtypes

    from ..contract import reference

    types = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    block_c, block_bias = golden.epilogue_operands(case, product.dtype_c or "float32", product.dtype_bias or "float32")
    out = reference.epilogue(
        block.view(np.float32),
        alpha=1.0 if product.alpha == 1 else ALPHA,
        beta=0.0 if product.accumulate else product.beta if product.beta in (0, 1) else BETA,
        c=block_c.view(types[product.dtype_c or "float32"]) if reads_c else None,
        bias=None if product.dtype_bias is None else block_bias.view(types[product.dtype_bias]),
        out_dtype=types[product.dtype_out],
    )
    return out.view(np.uint16 if out.itemsize == 2 else np.uint32)


def _shift(product: Product) -> int:
    """Columns that a batch's next item starts later by; a bias is shared by all items, so its columns stay."""
    return 5 if product.dtype_bias is None else 0


def _compare(got: Array, block: Array, stray: int, shift: int) -> str:
    """The first element of the stack that differs from the expanded block, or nothing."""
    batch, m, n = got.shape
    for item in range(batch):
        rows = (np.arange(m) + 7 * item) % block.shape[0]
        want = block[rows[:, None], (np.arange(n) + shift * item) % block.shape[1]]
        unequal = got[item] != want
        if unequal.any():
            i, j = (int(x) for x in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
            count, digits = int(np.count_nonzero(unequal)), 2 + 2 * got.itemsize
            pair = f"{int(got[item, i, j]):#0{digits}x} for {int(want[i, j]):#0{digits}x}"
            return f"{count} of {unequal.size} differ, first [{item}, {i}, {j}] {pair}"
    return f"{stray} words written beside the output" if stray else ""

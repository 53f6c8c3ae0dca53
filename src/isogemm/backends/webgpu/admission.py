"""Admission: a kernel serves on an adapter only after its bits were seen to be right there, at its first use.

A trial multiplies golden operands, which hold every kind of number, into memory full of NaN with margins around the
result, and compares every bit with the reference. The device's own ``fma`` is tried first; where it rounds twice, or
drops what is too small, the kernel is tried with the one that is made of integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import NUMPY
from ...contract import golden, int32, reference
from ...contract.compare import first_mismatch
from ...contract.spec import Contract, Order
from ...errors import ContractError, DeviceError
from ...formats.blocks import format_of
from ...formats.reference import decode, dequantize
from .adapter import Adapter
from .array import buffer_of, uploaded
from .integers import code_of_block, run_quantize
from .kernels import LANES, code_of, kernel_of
from .launch import KernelCall, run
from .planes import laid

Array = NDArray[Any]
ORDERS = {"chain": Order(), "lanes": Order("lanes", LANES), "integers": Order()}
POISON = np.uint32(0x7FC0DEAD)
MARGIN = 3
# (m, n, k): less than a tile, and several ragged ones; K shorter than the lanes, and with a tail of them.
SHAPES = ((3, 5, 7), (67, 133, 333))
# Of vectors: several tiles of the largest, steps of K in flight at once, and a tail of them.
SHAPES_OF_VECTORS = ((3, 8, 8), (9, 72, 1064), (133, 264, 72))
SHAPES_OF_BLOCKS = ((3, 5, 256), (9, 133, 768))
# What alone is below 2^-126 in products of a trial, each for itself, as one kind may hide another; and the exponents of
# the numbers of a and of b.
SMALL = {
    "left": ((50, 60), (50, 60)), "right": ((50, 60), (50, 60)), "products": ((-70, -60), (-66, -60)),
    "sums": ((-62, -61), (-60, -59)), "start": ((-3, 3), (-3, 3)),
}  # fmt: skip
SHAPE_OF_SMALL = (9, 72, 72)


class TrialProduct(NamedTuple):
    """A product of a trial: operands as they lie on the host, where out starts, and the bits that it must have.

    Quantized weights are their bytes in pairs, as `planes.laid` has them [a row's pairs, n].
    """

    a: Array
    b: Array
    start: Array | None
    want: Array


class AdapterAdmissions:
    """Verdicts of this process on one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._known: dict[tuple[str, bool], str] = {}
        self._codes: dict[tuple[Any, ...], tuple[str, str]] = {}

    def code(self, name: str, types: tuple[str, str], across: bool, start: bool = False) -> str:
        """The admitted code of a kernel, put together and tried once; a ContractError where no form has the bits.

        `start`: of sums that begin with what out holds, which may be smaller than any product.
        """
        key = name, types, across, start, self.adapter.subgroup
        if key not in self._codes:
            self._codes[key] = self._tried(name, types, across, start)
        code, refused = self._codes[key]
        if refused:
            raise self._error(name, refused)
        return code

    def _tried(self, name: str, types: tuple[str, str], across: bool, start: bool) -> tuple[str, str]:
        """The first code of a kernel that is admitted, and nothing; else why the last one is not."""
        code = refused = ""
        kernel = kernel_of(name)
        own = kernel.words or kernel.order == "integers" or name == "gemv_naive" or self._fuses(types)
        for fused in (True,) if kernel.words else (True, False) if own else (False,):
            for subgroup in (self.adapter.subgroup, 0):
                code = code_of(name, types, across=across, subgroup=subgroup, fused=fused, start=start)
                refused = self.verdict(name, types, code) or (self.verdict(name, types, code, start) if start else "")
                if not refused:
                    return code, ""
        return code, refused

    def first(self, names: Iterable[str], types: tuple[str, str], across: bool, start: bool = False) -> tuple[str, str]:
        """The first of some kernels that is admitted, and its code.

        Raises the ContractError of the last one where none has the contract's bits on this adapter.
        """
        refused: ContractError | None = None
        for name in names:
            try:
                return name, self.code(name, types, across, start)
            except ContractError as error:
                refused = error
        assert refused is not None, "a tree ends with a kernel for everything"
        raise refused

    def verdict(self, name: str, types: tuple[str, str], code: str, start: bool = False) -> str:
        """The verdict on a kernel's code, known or by a trial now: empty where it is admitted, else why not."""
        key = code, start
        if key not in self._known:
            try:
                self._known[key] = trial(self.adapter, name, types, code, start)
            except DeviceError as error:  # it does not compile; another kernel may
                self._known[key] = str(error.value)
        return self._known[key]

    def quantizer(self, dtype: str, block: int) -> str:
        """The admitted code that quantizes activations. Raises ContractError: its bits are others on this adapter."""
        key = dtype, block
        if key not in self._codes:
            code = code_of_block(dtype, block)
            self._codes[key] = code, _trial_of_quantizer(self.adapter, dtype, code, block)
        code, refused = self._codes[key]
        if refused:
            raise self._error(f"quantize_x of {dtype}", refused)
        return code

    def _fuses(self, types: tuple[str, str]) -> bool:
        """Whether the device's own fma is exact for these operands, as the plainest kernel shows."""
        code = code_of("gemv_naive", types, across=False, subgroup=self.adapter.subgroup, fused=True)
        return not self.verdict("gemv_naive", types, code)

    def _error(self, name: str, refused: str) -> ContractError:
        return ContractError(
            f"{name} on {self.adapter.name}", limit="the bits of its contract", value=refused,
            nearest="the CPU, which has them",
        )  # fmt: skip


def trial(adapter: Adapter, name: str, types: tuple[str, str], code: str, start: bool = False) -> str:
    """Run a kernel's code on golden operands: empty where every bit was right, else what was wrong.

    `start`: on sums that begin with what a device may drop, and nothing else.
    """
    for product, lines in _posed(name, types, code, start):
        found = _differs(adapter, name, types, code, product, lines)
        if found:
            (m, k), n = product.a.shape, product.want.shape[1]
            return f"{ORDERS[kernel_of(name).order]} over k {k}, {m} x {n}: {found}"
    return ""


def _posed(name: str, types: tuple[str, str], code: str, start: bool) -> Iterator[tuple[TrialProduct, bool]]:
    """The products of a kernel's trial, and whether b lies along K in each."""
    kernel = kernel_of(name)
    if start:
        yield pose_small(kernel.order, types, "start"), _layouts(name, code)[0]
        return
    guarded = kernel.words and types[0] != "float16"
    for m, n, k in _shapes(name, types):
        for lines in _layouts(name, code):
            started = m > 3 if kernel.words else lines  # of vectors there is one layout: both ways by the shapes
            yield pose(kernel.order, types, m, n, k, started=started), lines
            if guarded:
                yield pose_ordinary(kernel.order, types, m, n, k, started=started), lines
    for small in SMALL if guarded else ():
        if small != "start" or kernel.order == "chain":
            yield pose_small(kernel.order, types, small), _layouts(name, code)[0]


def _shapes(name: str, types: tuple[str, str]) -> tuple[tuple[int, int, int], ...]:
    if kernel_of(name).words:
        return SHAPES_OF_VECTORS
    return SHAPES_OF_BLOCKS if types[1][0] == "Q" else SHAPES


def _layouts(name: str, code: str) -> tuple[bool, ...]:
    """Whether b lies along K, in the products of a trial: both ways, or the one that a code of vectors is for."""
    if not kernel_of(name).words:
        return True, False
    return ("const ACROSS = true;" not in code,)


@lru_cache(maxsize=64)
def pose(order: str, types: tuple[str, str], m: int, n: int, k: int, *, started: bool) -> TrialProduct:
    """A golden product of these extents, and its bits by the definition of the order."""
    started = started and order == "chain"
    case = golden.GoldenCase(Order(), k, started)
    fmt, _, rounded = types[1].partition(":")
    blocks = fmt.startswith("Q")
    words = golden.operands(case, types[0], "float32" if blocks else types[1])
    rows, columns = np.arange(m) % case.rows, np.arange(n) % case.columns
    a = words[0].view(NUMPY[types[0]])[rows]
    c = golden.start(case).view(np.float32)[rows][:, columns] if started else None
    if not blocks:
        b = words[1].view(NUMPY[types[1]])[:, columns]
        return TrialProduct(a, b, c, _evaluated(order, a, b, c))
    stored = golden_blocks(fmt, n, k)
    pairs = laid(stored, format_of(fmt)).T
    if order == "integers":
        if types[0] == "float32":  # a row whose sums are so small that a device may drop them
            low = np.random.default_rng(k).standard_normal((1, k)) * 2.0**-110
            a = np.concatenate([a[1:], low.astype(np.float32)])
        return TrialProduct(a, pairs, None, int32.evaluate(a, decode(stored, format_of(fmt))))
    with np.errstate(over="ignore"):
        weight = dequantize(stored, format_of(fmt)).astype(NUMPY[rounded]).T
    return TrialProduct(a, pairs, c, _evaluated(order, a, weight, c))


@lru_cache(maxsize=64)
def pose_ordinary(order: str, types: tuple[str, str], m: int, n: int, k: int, *, started: bool) -> TrialProduct:
    """A product without numbers that a device may drop: kernels that look for those take the device's fma throughout.

    Exponents reach down to where nothing can be dropped yet, and sums cancel.
    """
    rng = np.random.default_rng(k)

    def drawn(shape: tuple[int, int]) -> Array:
        return rng.standard_normal(shape) * np.exp2(rng.integers(-30, 8, shape))

    a, b = drawn((m, k)), drawn((k, n))
    a[:, k // 2 :], b[k // 2 :] = -a[:, : k - k // 2], b[: k - k // 2] * (1 + np.exp2(-12))
    a, b = (np.where(np.abs(x) < np.exp2(-39), 0, x) for x in (a, b))
    left, right = a.astype(NUMPY[types[0]]), b.astype(NUMPY[types[1]])
    c = drawn((m, n)).astype(np.float32) if started and order == "chain" else None
    return TrialProduct(left, right, c, _evaluated(order, left, right, c))


@lru_cache(maxsize=64)
def pose_small(order: str, types: tuple[str, str], small: str) -> TrialProduct:
    """A product of finite numbers of which a device may drop those that `small` names, and whose bits show that."""
    rng, (m, n, k) = np.random.default_rng(len(small)), SHAPE_OF_SMALL

    def drawn(shape: tuple[int, int], exponents: tuple[int, int]) -> Array:
        found: Array = rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * np.exp2(rng.integers(*exponents, shape))
        return found

    a, b, c = drawn((m, k), SMALL[small][0]), drawn((k, n), SMALL[small][1]), None
    if small in ("left", "right"):
        flat = a if small == "left" else b
        flat[:] = rng.integers(1, 128, flat.shape) * 2.0**-133  # subnormal in float32 and bfloat16
    elif small == "sums":  # each product meets its negative, but for the last bits, as the next term of its sum
        step = 1 if order == "chain" else LANES
        for first in range(0, k - 2 * step + 1, 2 * step):
            here, there = slice(first, first + step), slice(first + step, first + 2 * step)
            a[:, there], b[there] = a[:, here], -b[here] * (1 + 2.0**-7)
        b[k // (2 * step) * 2 * step :] = 0
    elif small == "start":
        a[::2], c = 0, (rng.integers(1, 2**23, (m, n)) * 2.0**-149).astype(np.float32)
    left, right = a.astype(NUMPY[types[0]]), b.astype(NUMPY[types[1]])
    return TrialProduct(left, right, c, _evaluated(order, left, right, c))


def _evaluated(order: str, a: Array, b: Array, c: Array | None) -> Array:
    if a.dtype != b.dtype:
        a, b = a.astype(np.float32), b.astype(np.float32)
    return reference.evaluate(a, b, Contract("fma", ORDERS[order]), c)


def golden_blocks(fmt: str, n: int, k: int) -> Array:
    """Rows of blocks: every byte that codes can have, and scales of every exponent but those of infinities."""
    form = format_of(fmt)
    rng = np.random.default_rng(k)
    rows = rng.integers(0, 256, (n, form.row_bytes(k)), np.uint8)
    blocks = rows.reshape(n, -1, form.nbytes).view(form.dtype)[..., 0]
    for field in form.scales:
        blocks[field.name] = rng.integers(0, 0x7800, blocks.shape, np.uint16).view(np.float16)
    return rows


def _differs(adapter: Adapter, name: str, types: tuple[str, str], code: str, posed: TrialProduct, lines: bool) -> str:
    """What a kernel's code makes of a product: empty, or the first bit that is wrong."""
    (m, n), inside, place = posed.want.shape, slice(MARGIN, -MARGIN), adapter.place
    expected = np.full((m + 2 * MARGIN, n + 2 * MARGIN), POISON, np.uint32).view(np.float32)
    room = expected.copy()
    expected[inside, inside] = posed.want
    if posed.start is not None:
        room[inside, inside] = posed.start
    out, a = uploaded(room, place), uploaded(posed.a, place)
    across = types[1][0] != "Q" and not lines
    b = uploaded(posed.b, place) if across else uploaded(posed.b.T, place).T
    scales = None
    if kernel_of(name).order == "integers":
        block = format_of(types[1]).block
        a, scales = run_quantize(adapter, code_of_block(types[0], block), a, block)
    run(adapter, name, code, KernelCall(a, b, out[inside, inside], posed.start is not None, scales))
    got = adapter.read(buffer_of(out), 0, room.nbytes).view(np.float32).reshape(room.shape)
    mismatch = first_mismatch(got, expected)
    return "" if mismatch is None else str(mismatch)


def _trial_of_quantizer(adapter: Adapter, dtype: str, code: str, block: int) -> str:
    """Compare codes and scales with the definition's, on golden rows and on rows of ties."""
    case = golden.GoldenCase(Order(), 1024)
    with np.errstate(over="ignore"):
        ties = _ties(block).astype(NUMPY[dtype])
    a = np.concatenate([golden.operands(case, dtype, dtype)[0].view(NUMPY[dtype]), ties])
    want = int32.quantize_activations(a, block)
    found = run_quantize(adapter, code, uploaded(a, adapter.place), block)
    codes, scales = (adapter.read(buffer_of(x), 0, x.nbytes) for x in found)
    if not np.array_equal(codes.view(np.int8).reshape(a.shape), want.q):
        return "codes of activations differ"
    mismatch = first_mismatch(scales.view(np.float32).reshape(want.d.shape), reference.canonical(want.d))
    return "" if mismatch is None else f"scales of activations: {mismatch}"


def _ties(block: int) -> Array:
    """Rows of 1024 whose quotients lie at halves, or a few ulps beside: an inverse that is off by one changes codes."""
    rng, blocks = np.random.default_rng(block), (8, 1024 // block, 1)
    largest = (rng.uniform(1, 2, blocks) * np.exp2(rng.integers(-20, 20, blocks))).astype(np.float32)
    halves = (rng.integers(0, 126, (8, 1024 // block, block)) + np.float32(0.5)).astype(np.float32)
    rows = halves * (largest / np.float32(127))
    rows = np.add(rows.view(np.int32), rng.integers(-2, 3, rows.shape, np.int32)).view(np.float32)
    rows[..., :1] = largest
    rows[0] = rows[0] / largest[0] * np.float32(2.0**-120)  # subnormal elements, whose inverse scale is finite
    found: Array = rows.reshape(8, 1024)
    return found

"""cuBLASLt with K in one piece, as a kernel family: out = alpha * A @ B + beta * C + bias.

Operands: bfloat16 or float16, layouts NN, NT, TN, TT with one contiguous axis and any leading dimension, one
product or a strided batch; sums in float32 (COMPUTE_32F). Split-K and reduction schemes are excluded, so that each
output element is one walk over K. Whether that walk is the contract's chain is not documented: it often is, and on odd
shapes it often is not. Nothing here is trusted; an algorithm serves a product only where its bits were admitted.

Leaves are calls one after the other, each added to what a float32 output holds: a weight gradient's, so the sums of all
leaves need no registers beside those of one.

A configuration is an algorithm of `search` as text; it is valid for one version of the library, which is part of the
device's stamp.

Measured (H200, cuBLASLt 13.1.0, normal operands, bfloat16 and float16, on 12 sizes most of which are odd): algorithms
with ids 66, 41, 42 and 35 had the chain's bits in 3,477 of 3,477 trials; ids 11, 13, 16, 21, 23, 24 and 56, which the
heuristic lists for odd sizes, had not in 3,935 of 5,380. 103 algorithms kept the bits at each of 27 values of M from 1
to 4097.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .....base.dtypes import ITEMSIZE
from .....errors import ContractError, DeviceError, LayoutError, OptionError
from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, alignment
from ...driver.facts import count
from ...driver.libcuda import context
from ...driver.workspace import workspace
from . import search as cublaslt_search
from .call import CublasCall, Descriptors, as_call, binding, handle
from .search import Algorithm, Found

OPERANDS = ("bfloat16", "float16")
MOST = 64  # configurations that are offered
MOST_LEAVES = 16  # one after the other: the output is read and written again for each
LISTED = 8  # by the heuristic, for each size of workspace, at first use
SECONDS = 1.0  # for the enumeration of one product
BIASES = 64  # addresses of biases whose descriptors are kept


class CublasLt(ProductFamily):
    """The family; see the module."""

    name, home, library = "cublaslt", "backends/cuda/gemm/cublaslt", True

    def __init__(self) -> None:
        if not _installed():
            raise ImportError("nvmath-python is not installed")

    def configs(self, product: Product) -> tuple[str, ...]:
        """What the heuristic lists, then what enumeration finds beside it, the likeliest tiles first.

        Needs the GPU: it is searched on torch's current device, and kept.
        """
        walk = _longest(product)
        return _search(walk, _current_device()) if walk else ()

    def shortlist(self, product: Product, device: int) -> tuple[str, ...]:
        """The heuristic's list alone, which takes a millisecond."""
        walk = _longest(product)
        found = cublaslt_search.heuristic(handle(device), *_described(walk), count=LISTED) if walk else []
        return tuple(str(x.algorithm) for x in found)

    def supports(self, product: Product, config: str) -> bool:
        """Whether the product is one that cuBLASLt takes; `build` asks the library about the algorithm itself."""
        try:
            Algorithm.parse(config)
        except OptionError:
            return False
        return bool(walks(product))

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Rebuild the algorithm, have it checked for this very product, and bind it.

        Raises
        ------
        OptionError
            Not a configuration of this family.
        ContractError
            The algorithm cuts K.
        LayoutError
            The library refuses the algorithm for this product.
        """
        found = walks(product)
        if not found:
            raise LayoutError("product", limit="what CublasLt.supports", value=product, nearest="another family")
        algorithm = Algorithm.parse(config)
        if not cublaslt_search.walks_whole_k(cublaslt_search.settings(algorithm.data)):
            raise ContractError("cuBLASLt algorithm", limit="K in one piece", value=config, nearest="split-K of 1")
        bound = {walk: _checked(walk, algorithm, device) for walk in dict.fromkeys(found)}
        launch = _in_turn(product, [bound[walk] for walk in found])
        return launch if count() <= 1 else _in_context(launch, device)


def _current_device() -> int:
    return int(importlib.import_module("torch").cuda.current_device())


def _installed() -> bool:
    return importlib.util.find_spec("nvmath") is not None


@lru_cache(maxsize=4096)
def walks(product: Product) -> tuple[Product, ...]:
    """The product as products of one walk over K each, one after the other; none where the library has no such calls.

    Leaves after the first begin with what the output holds by then.
    """
    order, k = product.contract.order, product.k
    if order.kind != "leaf" or k <= order.size:
        return (product,) if _serves(product) else ()
    sums = replace(product, c=None, dtype_c=None, accumulate=False)
    if product.dtype_out != "float32" or not (sums.plain and (product.c is None or product.accumulate)):
        return ()
    number = -(-k // order.size)
    starts = [x * order.size * ITEMSIZE[product.dtype_a] for x in (product.a.col, product.b.row)]
    first = replace(product, k=order.size, align=alignment(*starts, most=product.align))
    onto = replace(first, c=product.out, dtype_c="float32", accumulate=True)
    last = replace(onto, k=k - (number - 1) * order.size)
    found = first, *[onto] * (number - 2), last
    return found if number <= MOST_LEAVES and all(map(_serves, found)) else ()


def _longest(product: Product) -> Product | None:
    """The walk that algorithms are looked up for: of the longest ones the last."""
    return max(reversed(walks(product)), key=lambda walk: walk.k, default=None)


def _serves(product: Product) -> bool:
    """Whether a product has a form that a cuBLASLt call can say."""
    types = product.dtype_a in OPERANDS and product.dtype_b == product.dtype_a
    types = types and product.dtype_out in (product.dtype_a, "float32")
    if not types or not product.contract.arithmetic.startswith("tensor_core:") or not _one_walk(product):
        return False
    if product.c is not None and (product.dtype_c != product.dtype_out or not _c_is_added(product)):
        return False
    if product.alpha == 0:  # the library would skip the product, and NaN with it
        return False
    call = as_call(product)
    return call is not None and (product.dtype_bias is None or _bias_fits(product, call))


def _one_walk(product: Product) -> bool:
    """Whether the order leaves K in one chain from zero."""
    order, block, k = product.contract.order, product.contract.block, product.k
    if order.kind == "leaf":
        return k <= order.size
    return order.kind == "chain" or k <= block * -(-k // (order.size * block))


def _c_is_added(product: Product) -> bool:
    """Whether C enters the sum as the contract says.

    The library adds C at the end, by fma(alpha, sum, beta * C) with beta * C rounded: the contract's bits when alpha
    is 1. A chain that accumulates starts from C, a leaf is added to it, which is what the library does.
    """
    return product.alpha == 1 and (not product.accumulate or product.contract.order.kind == "leaf")


def _bias_fits(product: Product, call: CublasCall) -> bool:
    """The library's bias runs along the rows of its out: our columns, where out is row-major; of out's type.

    It is read 16 bytes at a time: what the library is told of alignment speaks of matrices alone.
    """
    fits = call.swapped and product.bias_stride == 1 and product.dtype_bias == product.dtype_out
    return fits and product.align >= 16


def _alignment(product: Product, call: CublasCall) -> int:
    """Bytes up to 128 that divide the addresses of all items."""
    steps = [x.stride * ITEMSIZE[x.dtype] for x in call.matrices] if call.batch > 1 else []
    return alignment(*steps, most=product.align)


@lru_cache(maxsize=1024)
def _search(walk: Product, device: int) -> tuple[str, ...]:
    """What the library offers, and what enumeration finds besides."""
    desc, align = _described(walk)
    listed = cublaslt_search.heuristic(handle(device), desc, align)
    found = cublaslt_search.enumerate_algorithms(handle(device), desc, align, seconds=SECONDS)
    return tuple(str(x.algorithm) for x in cublaslt_search.shortlist(listed, found, MOST))


def _described(walk: Product) -> tuple[Descriptors, int]:
    """The descriptors of one of `walks`, and its alignment."""
    call = as_call(walk)
    assert call is not None, walk
    return Descriptors(call, 0, walk.dtype_bias), _alignment(walk, call)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What a launch never changes: scalars and algorithm, alive as long as the launch is."""

    alpha: ctypes.c_float
    beta: ctypes.c_float
    algorithm: ctypes.Array[ctypes.c_uint8]
    workspace: int
    device: int


def _checked(walk: Product, algorithm: Algorithm, device: int) -> Launch:
    """The launch of one walk, if the library takes the algorithm for it."""
    desc, _ = _described(walk)
    found = cublaslt_search.check(handle(device), desc, algorithm)
    if found is None:
        limit = f"what the library accepts for {desc.call}"
        raise LayoutError("cuBLASLt algorithm", limit=limit, value=algorithm, nearest="configs()")
    return _bind(walk, desc, found, device)


def _in_turn(product: Product, launches: Sequence[Launch]) -> Launch:
    """Walks one after the other along K, of which all but the first are added to the output."""
    if len(launches) == 1:
        return launches[0]
    length = product.contract.order.size * ITEMSIZE[product.dtype_a]
    a, b = product.a.col * length, product.b.row * length

    def launch(at: Addresses, stream: int) -> None:
        for i, walk in enumerate(launches):
            walk(Addresses(at.a + i * a, at.b + i * b, at.out, at.out if i else at.c), stream)

    return launch


def _bind(product: Product, desc: Descriptors, found: Found, device: int) -> Launch:
    beta = 0.0 if product.c is None else 1.0 if product.accumulate else product.beta
    data = (ctypes.c_uint8 * cublaslt_search.ALGORITHM_BYTES).from_buffer_copy(found.algorithm.data)
    fixed = _Fixed(ctypes.c_float(product.alpha), ctypes.c_float(beta), data, found.workspace, device)
    if product.dtype_bias is not None:
        return _with_bias(desc.call, product.dtype_bias, fixed)
    return _closure(desc, fixed)


def _in_context(launch: Launch, device: int) -> Launch:
    """The launch in its own device's context: the library would use the current one, where the addresses are not."""

    def entered(at: Addresses, stream: int) -> None:
        with context(device):
            launch(at, stream)

    return entered


def _closure(desc: Descriptors, fixed: _Fixed) -> Launch:
    """The launch: one call of the binding, with everything but addresses and stream looked up beforehand."""
    lt, on, swapped, nbytes, device = binding(), handle(fixed.device), desc.call.swapped, fixed.workspace, fixed.device
    matmul, failure = lt.matmul, lt.cuBLASLtError
    alpha, beta, chosen = (ctypes.addressof(x) for x in (fixed.alpha, fixed.beta, fixed.algorithm))
    operation, first, second, c, out = desc.matmul, desc.first, desc.second, desc.c, desc.out

    def launch(at: Addresses, stream: int) -> None:
        x, y, z, w, _ = at
        if swapped:
            x, y = y, x
        room = workspace(nbytes, device) if nbytes else None  # held until the product is enqueued
        try:
            matmul(
                on, operation, alpha, x, first, y, second, beta, w or z, c, z, out, chosen,
                room.data_ptr() if room is not None else 0, nbytes, stream,
            )  # fmt: skip
        except failure as error:
            raise _failed(desc, fixed, error) from error

    return launch


def _with_bias(call: CublasCall, dtype: str, fixed: _Fixed) -> Launch:
    """A launch with a bias, whose address is part of a descriptor: one is kept for each, as weights stay in place."""
    kept: dict[int, Launch] = {}

    def launch(at: Addresses, stream: int) -> None:
        bound = kept.get(at.bias)
        if bound is None:
            if len(kept) >= BIASES:
                kept.clear()  # one step, so that threads need no lock; a running launch holds what it uses
            bound = kept[at.bias] = _closure(Descriptors(call, at.bias, dtype), fixed)
        bound(at, stream)

    return launch


def _failed(desc: Descriptors, fixed: _Fixed, error: Exception) -> DeviceError:
    return DeviceError(
        f"cuBLASLt launch on device {fixed.device}",
        limit=f"addresses aligned as the configuration was built for, {desc.call}",
        value=str(error),
        nearest="a configuration of configs() for this alignment",
    )

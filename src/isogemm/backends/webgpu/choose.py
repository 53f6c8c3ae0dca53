"""Which kernel: by M, then by N, then by how b lies, as a tree that `isogemm plan` prints. No branch changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...contract.spec import Contract
from ...errors import ContractError
from ...operands.device_array import DeviceId
from .adapter import Adapter
from .launch import across, divides, whole


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Where one kernel begins to be faster than another on a device."""

    tiles: int = 32  # rows from which tiles serve under ``chain``; below, products go row by row
    large: int = 64  # rows from which tiles are large, at whole vectors; below, there are more and narrow ones
    batch: int = 2  # rows from which a group takes several rows of x
    several: int = 2048  # columns from which a group takes several
    wide: int = 16384  # columns from which x is staged for a whole workgroup
    source: str = "not measured here: isogemm.webgpu.measure() does"  # where the numbers are from


@dataclass(frozen=True, slots=True)
class TreeCase:
    """What a kernel is chosen by."""

    m: int
    n: int
    across: bool  # neighbouring columns of b are neighbours in memory
    whole: bool  # both operands have one type and lie at whole vectors of 16 bytes
    at: Crossovers


@dataclass(frozen=True, slots=True)
class Branch:
    """One question of the tree, and the kernel where its answer is yes."""

    question: str
    holds: Callable[[TreeCase], bool]
    kernel: str

    def text(self, at: Crossovers) -> str:
        """The question with a device's numbers."""
        return self.question.format(at=at)


def _along(case: TreeCase) -> bool:
    return case.whole and not case.across


TREE: Mapping[str, tuple[Branch, ...]] = {
    "chain": (
        Branch("whole vectors, M >= {at.large}", lambda x: x.whole and x.m >= x.at.large, "gemm_vector"),
        Branch("whole vectors", lambda x: x.whole, "gemm_narrow"),
        Branch("M >= {at.tiles}", lambda x: x.m >= x.at.tiles, "gemm_tiled"),
        Branch("b stored [k, n]", lambda x: x.across, "gemv_transposed"),
        Branch("b stored [n, k]", lambda x: True, "gemv_naive"),
    ),
    "lanes": (
        Branch("whole vectors along K, M >= {at.batch}", lambda x: _along(x) and x.m >= x.at.batch, "gemv_vectors"),
        Branch("whole vectors along K", _along, "gemv_vector"),
        Branch("M >= {at.batch}", lambda x: x.m >= x.at.batch, "gemv_batched"),
        Branch("N >= {at.wide}", lambda x: x.n >= x.at.wide, "gemv_wide"),
        Branch("N >= {at.several}", lambda x: x.n >= x.at.several, "gemv_simd_multi"),
        Branch("N < {at.several}", lambda x: True, "gemv_simd"),
    ),
    "integers": (
        Branch("M >= {at.batch}", lambda x: x.m >= x.at.batch, "gemm_q4_0"),
        Branch("M < {at.batch}", lambda x: True, "gemv_q4_0"),
    ),
}
"""By the order over K; the first question that holds decides, unless its kernel is refused on the device."""


def choices(order: str, case: TreeCase) -> Iterator[str]:
    """The names of kernels that serve, the best first."""
    return (branch.kernel for branch in TREE[order] if branch.holds(case))


def case_of(adapter: Adapter, types: tuple[str, str], a: Any, b: Any, out: Any, at: Crossovers) -> TreeCase:
    """What a product's kernel is chosen by, as its operands lie; `out` has the sums."""
    at_vectors = types[0] == types[1] and whole(a, b) and divides(adapter, b, out)
    m, n = out.shape
    return TreeCase(m, n, across(b), at_vectors, at)


def check_contract(place: DeviceId, contract: Contract) -> None:
    """Raise `ContractError` unless products of floats have this contract on WebGPU devices."""
    if contract.arithmetic != "fma" or contract.order.kind not in ("chain", "lanes"):
        raise ContractError(
            f"contract on {place}", limit="fma/chain or fma/lanes32, and int32/chain of quantized weights",
            value=contract, nearest="fma/chain",
        )  # fmt: skip

"""Which kernel: by M, then by N, then by how b lies, as a tree that `isogemm plan` prints. No branch changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...contract.spec import Contract
from ...errors import ContractError
from ...operands.device_array import DeviceId

__all__ = ["TREE", "Branch", "Crossovers", "TreeCase", "check_contract", "choose"]


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Where one kernel begins to be faster than another on a device.

    Attributes
    ----------
    tiles, tiles_of_lanes : int
        Rows from which tiles serve, under ``chain`` and under ``lanes32``; below, products go row by row.
    batch : int
        Rows from which a group takes several rows of x.
    several : int
        Columns from which a group takes several.
    wide : int
        Columns from which x is staged for a whole workgroup.
    source : str
        Where the numbers are from.
    """

    tiles: int = 32
    tiles_of_lanes: int = 32
    batch: int = 2
    several: int = 2048
    wide: int = 16384
    source: str = "not measured here: isogemm.webgpu.measure() does"


@dataclass(frozen=True, slots=True)
class TreeCase:
    """What a kernel is chosen by. `across`: neighbouring columns of b are neighbours in memory."""

    m: int
    n: int
    across: bool
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


TREE: Mapping[str, tuple[Branch, ...]] = {
    "chain": (
        Branch("M >= {at.tiles}", lambda x: x.m >= x.at.tiles, "gemm_tiled"),
        Branch("b stored [k, n]", lambda x: x.across, "gemv_transposed"),
        Branch("b stored [n, k]", lambda x: True, "gemv_naive"),
    ),
    "lanes": (
        Branch("M >= {at.tiles_of_lanes}", lambda x: x.m >= x.at.tiles_of_lanes, "gemm_lanes"),
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
"""By the order over K; the first question that holds decides."""


def choose(order: str, case: TreeCase) -> str:
    """The name of a kernel."""
    return next(branch.kernel for branch in TREE[order] if branch.holds(case))


def check_contract(place: DeviceId, contract: Contract) -> None:
    """Raise `ContractError` unless products of floats have this contract on WebGPU devices."""
    if contract.arithmetic != "fma" or contract.order.kind not in ("chain", "lanes"):
        raise ContractError(
            f"contract on {place}", limit="fma/chain or fma/lanes32, and int32/chain of quantized weights",
            value=contract, nearest="fma/chain",
        )  # fmt: skip

"""The same product by the models of several architectures: how many elements differ, and how exact each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import compare, reference
from ..contract.spec import ContractLike, as_contract
from ..errors import OptionError

__all__ = ["ARCHITECTURES", "Across", "ArchitectureResult", "across"]

Array = NDArray[Any]
ARCHITECTURES = ("tensor_core:sm80/chain", "tensor_core:sm90/chain")
"""NVIDIA's Ampere and Hopper, for 16-bit operands."""


@dataclass(frozen=True, slots=True)
class ArchitectureResult:
    """One architecture's product."""

    contract: str
    differing: int  # elements whose bits are not those of the first architecture
    max_ulp: int  # the largest distance from the first, in units in the last place
    first: str  # the first element that differs; empty where none does
    error: float  # of the whole result against float64, in Frobenius' norm


@dataclass(frozen=True, slots=True)
class Across:
    """The report; ``str()`` is a table."""

    m: int
    n: int
    k: int
    dtype: str
    results: tuple[ArchitectureResult, ...]  # in the order asked for; the others are compared with the first

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        first, outputs = self.results[0], self.m * self.n
        lines = [f"{self.m} x {self.n} x {self.k} of {self.dtype}, {outputs:,} elements, float32 results"]
        for x in self.results:
            apart = "" if x is first else f"{x.differing:,} differ from {first.contract}, by at most {x.max_ulp:,} ULP"
            lines.append(f"{x.contract:<24} error {x.error:.3g}  {apart}".rstrip())
            lines += [f"{'':<24} first: {x.first}"] if x.first else []
        return "\n".join(lines)


def across(a: Array, b: Array, contracts: Sequence[ContractLike] = ARCHITECTURES) -> Across:
    """a @ b by each contract's definition, on this CPU, and compared bit by bit.

    Parameters
    ----------
    a, b : array [m, k] and [k, n]
        Of a dtype that every one of `contracts` has: bfloat16 or float16 for `ARCHITECTURES`. A definition is slow:
        some 10**8 multiply-adds take seconds.
    contracts : sequence of Contract or str

    Returns
    -------
    Across

    Raises
    ------
    OptionError, ShapeError, DTypeError, ContractError
        Fewer than two contracts; or as `isogemm.contract.reference.evaluate`.

    Examples
    --------
    >>> half = np.full((1, 64), 0.1, np.float16)
    >>> across(half, half.T).results[1].differing
    1
    """
    if len(contracts) < 2:
        raise OptionError("contracts", limit="at least two", value=list(map(str, contracts)), nearest=ARCHITECTURES)
    products = [reference.evaluate(a, b, contract) for contract in contracts]
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = float(np.linalg.norm(exact)) or 1.0
    found = [
        _compared(str(as_contract(contract)), product, products[0], float(np.linalg.norm(product - exact)) / size)
        for contract, product in zip(contracts, products, strict=True)
    ]
    return Across(a.shape[0], b.shape[1], a.shape[1], a.dtype.name, tuple(found))


def _compared(contract: str, product: Array, first: Array, error: float) -> ArchitectureResult:
    mismatch = compare.first_mismatch(first, product)
    ulps = compare.ulp_distance(first, product).max(initial=0)
    differing = compare.differing(first, product)
    return ArchitectureResult(contract, differing, int(ulps), str(mismatch or ""), error)

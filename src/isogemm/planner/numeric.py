"""The numeric part of a plan: everything that can reach the bits, and nothing that can see M."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.spec import Contract, ContractLike, as_contract
from ..errors import ContractError

__all__ = ["NumericPlan", "default_contract", "numeric_plan"]


@dataclass(frozen=True, slots=True)
class NumericPlan:
    """What the numbers are: one output element is a function of this and of its row and column alone.

    Attributes
    ----------
    contract : Contract
    k : int
        Length of the sum.
    dtype_a, dtype_b, out_dtype : str
        Operand and output element types.
    leaves : int
        Chains from zero that the order cuts K into.
    """

    contract: Contract
    k: int
    dtype_a: str
    dtype_b: str
    out_dtype: str
    leaves: int


def default_contract(device: str = "cpu") -> Contract:
    """The contract used when none is asked for: ``fma/chain`` on a CPU."""
    del device
    return Contract()


def numeric_plan(
    k: int, *, dtype_a: str, dtype_b: str, out_dtype: str, contract: ContractLike | None = None
) -> NumericPlan:
    """Fix the numbers. M is not an argument, so it cannot matter.

    Raises
    ------
    ContractError
        The contract is not defined for these operand types.
    """
    chosen = default_contract() if contract is None else as_contract(contract)
    for name in (dtype_a, dtype_b):
        if name not in chosen.operands:
            raise ContractError(
                f"operand type for {chosen}", limit=", ".join(chosen.operands), value=name, nearest=chosen.operands[0]
            )
    return NumericPlan(chosen, k, dtype_a, dtype_b, out_dtype, len(chosen.order.leaves(k, chosen.block)))

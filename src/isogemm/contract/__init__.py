"""Contracts: what the numbers are. Specs, the executable definition, and bit comparison."""

from .spec import ARITHMETICS, Arithmetic, Contract, ContractLike, Order, as_contract

__all__ = ["ARITHMETICS", "Arithmetic", "Contract", "ContractLike", "Order", "as_contract"]

"""Contracts: what the numbers are. Specs, the executable definition (`reference`), and bit comparison (`compare`)."""

from . import compare, reference
from .spec import ARITHMETICS, Arithmetic, Contract, ContractLike, Order, as_contract

__all__ = ["ARITHMETICS", "Arithmetic", "Contract", "ContractLike", "Order", "as_contract", "compare", "reference"]

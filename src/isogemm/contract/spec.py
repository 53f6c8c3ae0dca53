"""Contracts as values: an arithmetic and an order over K, hashable, with a text form.

A contract is everything that can reach the bits of a product besides its operands. Its text form is
``arithmetic/order``, for example ``fma/chain``, ``fma/leaf4096`` or ``tensor_core:sm90/chain``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, cast

from ..base.arguments import nearest
from ..errors import ContractError, LimitError
from .modes import MEANT

TREE_LEAVES = (2, 4, 8, 16)
LANES = 32  # of a SIMD group on most GPUs; on all others, and on CPUs, they are virtual
USUAL = {"chain": "chain", "leaf": "leaf4096", "tree": "tree8", "lanes": f"lanes{LANES}"}  # of each kind of order
LONGEST_EXACT = (2**31 - 1) // 2**14  # K up to which no sum of products of int8 can leave int32


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What happens inside one block of K."""

    name: str  # text form
    # operand dtypes it is defined for; none for ``int32``, whose weight is a quantized matrix. Operands of ``exact``
    # are integers, and so are its results; all others' are floats
    operands: tuple[str, ...]
    block: int  # elements of K that are summed as one step; cuts of K at multiples of it keep the bits
    fraction_bits: int  # fractional bits that the terms of a fused sum are truncated to; 0 where there is no fused sum


ARITHMETICS = MappingProxyType(
    {
        a.name: a
        for a in (
            Arithmetic("fma", ("float32", "bfloat16", "float16"), 1, 0),
            Arithmetic("tensor_core:sm90", ("bfloat16", "float16"), 16, 25),
            Arithmetic("tensor_core:sm80", ("bfloat16", "float16"), 8, 24),
            Arithmetic("tf32:sm90", ("float32",), 8, 25),
            Arithmetic("tf32x3:sm90", ("float32",), 32, 25),
            # Quantized weights: exact integers inside a block of 32 or 256, see contract/int32.py.
            Arithmetic("int32", (), 256, 0),
            # Integers into int32: no sum is rounded, so every order has the same bits.
            Arithmetic("exact", ("int8",), 1, 0),
            # The tensor cores of a device that no model here fits: kernels agree there, but nothing can evaluate it.
            Arithmetic("tensor_core:native", ("bfloat16", "float16"), 16, 0),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Order:
    """How the blocks of K meet: ``chain``, ``leafL``, ``treeN`` or ``lanes32``."""

    kind: Literal["chain", "leaf", "tree", "lanes"] = "chain"
    size: int = 0  # leaf length for ``leaf``, number of leaves for ``tree``, 32 for ``lanes``, 0 for ``chain``

    def __str__(self) -> str:
        return self.kind if self.kind == "chain" else f"{self.kind}{self.size}"

    def leaves(self, k: int, block: int) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of K, in the order in which they are summed; each is a chain from zero.

        ``tree`` always has ``size`` leaves, the last ones possibly empty: an empty leaf is +0. So has ``lanes``, whose
        ranges are those of K in the order of `lane_by_lane`.
        """
        if self.kind == "chain":
            return ((0, k),)
        if self.kind == "leaf":
            return tuple((start, min(start + self.size, k)) for start in range(0, k, self.size))
        if self.kind == "lanes":
            ends = [0]
            for lane in range(self.size):
                ends.append(ends[-1] + len(range(lane, k, self.size)))
            return tuple(pairwise(ends))
        length = block * -(-k // (self.size * block))
        return tuple((min(i * length, k), min((i + 1) * length, k)) for i in range(self.size))

    def lane_by_lane(self, k: int) -> list[int]:
        """All of K, the elements of lane 0 first: lane l has l, l + 32, l + 64 and so on."""
        return [p for lane in range(self.size) for p in range(lane, k, self.size)]


@dataclass(frozen=True, slots=True)
class Contract:
    """The definition of a product's bits.

    Attributes
    ----------
    arithmetic : str
        A key of ``ARITHMETICS``.
    order : Order

    Raises
    ------
    ContractError
        Unknown arithmetic, a leaf length that is not a positive multiple of the block, a leaf count other than 2, 4,
        8, 16, or lanes of blocks: they are of single elements.

    Examples
    --------
    >>> Contract.parse("fma/leaf4096")
    Contract('fma/leaf4096')
    """

    arithmetic: str = "fma"
    order: Order = Order()

    def __post_init__(self) -> None:
        if not isinstance(self.arithmetic, str) or not isinstance(self.order, Order):
            wrong = self.order if isinstance(self.arithmetic, str) else self.arithmetic
            raise ContractError(
                "parts of a contract",
                limit="an arithmetic's name and an Order",
                value=f"{type(wrong).__name__} {wrong!r}",
                nearest="Contract.parse('fma/chain')",
            )
        if self.arithmetic not in ARITHMETICS:
            raise ContractError(
                "unknown arithmetic",
                limit="one of " + ", ".join(ARITHMETICS),
                value=repr(self.arithmetic),
                nearest=_nearest_arithmetic(self.arithmetic),
            )
        _check_order(self.order, self.block)

    @property
    def block(self) -> int:
        """Elements of K that form one step of the arithmetic."""
        return ARITHMETICS[self.arithmetic].block

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operand dtypes that the arithmetic is defined for."""
        return ARITHMETICS[self.arithmetic].operands

    @property
    def fraction_bits(self) -> int:
        """Fractional bits kept of each term of a fused sum; 0 for ``fma``."""
        return ARITHMETICS[self.arithmetic].fraction_bits

    @classmethod
    def parse(cls, text: str) -> Contract:
        """Read the text form ``arithmetic/order``; a missing order is ``chain``."""
        return as_contract(text)

    def __str__(self) -> str:
        return self.arithmetic + "/" + str(self.order)  # torch.compile follows this, not a format of objects

    def __repr__(self) -> str:
        return f"Contract({str(self)!r})"


ContractLike = Contract | str


def as_contract(contract: ContractLike) -> Contract:
    """A `Contract` from itself or from its text form."""
    if isinstance(contract, Contract):
        return contract
    if isinstance(contract, str):
        return _parse(contract)
    raise ContractError(
        "not a contract",
        limit="a Contract or its text form",
        value=f"{type(contract).__name__} {contract!r}",
        nearest="'fma/chain'",
    )


@lru_cache(maxsize=256)
def _parse(text: str) -> Contract:
    arithmetic, slash, order = text.partition("/")
    return Contract(arithmetic, _parse_order(order) if slash else Order())


def _parse_order(text: str) -> Order:
    if text == "chain":
        return Order()
    match = re.fullmatch(r"(leaf|tree|lanes)([1-9][0-9]{0,17})", text)
    if match is None:
        raise ContractError(
            "unknown order",
            limit=f"chain, leafL (L a multiple of the block), treeN (N in 2, 4, 8, 16) or lanes{LANES}",
            value=repr(text),
            nearest=_nearest_order(text),
        )
    return Order(cast(Literal["leaf", "tree", "lanes"], match[1]), int(match[2]))


def check_exact(k: int) -> None:
    """Raise a LimitError where sums of products of int8 over a K might not fit into int32, whatever the values are."""
    if k > LONGEST_EXACT:
        nearest = f"the int64 sum of products over pieces of K of at most {LONGEST_EXACT}"
        raise LimitError("K of an int8 product", limit=f"{LONGEST_EXACT}: sums fit int32", value=k, nearest=nearest)


def _check_order(order: Order, block: int) -> None:
    if order.kind not in USUAL or type(order.size) is not int or (order.kind == "chain") != (order.size == 0):
        raise ContractError(
            "order of a contract", limit=f"one of {', '.join(USUAL)}, all but a chain with a size, a whole number",
            value=f"Order({order.kind!r}, {order.size!r})",
            nearest=f"Contract.parse('fma/{_nearest_order(str(order.kind))}')",
        )  # fmt: skip
    if order.kind == "tree" and order.size not in TREE_LEAVES:
        raise ContractError(
            "leaf count of a tree",
            limit=f"one of {TREE_LEAVES}",
            value=order.size,
            nearest=f"tree{min(TREE_LEAVES, key=lambda n: abs(n - order.size))}",
        )
    if order.kind == "lanes" and (order.size != LANES or block != 1):
        raise ContractError(
            "lanes", limit=f"{LANES}, of an arithmetic whose block is 1", value=f"{order.size}, block {block}",
            nearest=f"lanes{LANES}" if block == 1 else "chain",
        )  # fmt: skip
    if order.kind == "leaf" and (order.size <= 0 or order.size % block):
        raise ContractError(
            "leaf length",
            limit=f"a positive multiple of the block, {block}",
            value=order.size,
            nearest=f"leaf{max(block, round(order.size / block) * block)}",
        )


def _nearest_order(text: str) -> str:
    """The usual one of the kind that a misspelt order is like."""
    return USUAL[nearest(text.lower().rstrip("0123456789"), USUAL, "chain")]


def _nearest_arithmetic(name: str) -> str:
    """The arithmetic spelt most like `name`, or meant by it; an order alone gets the default one before it."""
    if name.lower() in MEANT:
        return MEANT[name.lower()]

    orders = {f"lanes{LANES}", *(f"tree{n}" for n in TREE_LEAVES)}
    if re.fullmatch(r"chain|leaf[1-9][0-9]{0,17}", name) or name in orders:
        return f"'fma/{name}'"

    return nearest(name, ARITHMETICS, "fma", alike=0.0)

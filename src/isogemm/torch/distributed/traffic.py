"""What each rank computes of a product that is cut, what travels, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ...base import arguments
from ...contract.spec import ContractLike, as_contract
from ...errors import OptionError, ShapeError
from .sums import FEW_ROWS


@dataclass(frozen=True)
class Transfer:
    """One way to cut a product between ranks.

    Attributes
    ----------
    cut : {"columns", "rows"}
        Of which the weight's outputs or inputs are shared.
    m, n, k : int
        What one rank computes.
    contract : str
        Of that product.
    whole : str
        Of the product on one device that has the same bits.
    travels : str
        What is sent in the forward pass, and by which operations.
    sent : int
        Bytes that each rank sends in the forward pass.
    sent_backward : int
        Bytes that each rank sends for the gradient of x.
    """

    cut: str
    m: int
    n: int
    k: int
    contract: str
    whole: str
    travels: str
    sent: int
    sent_backward: int

    def __str__(self) -> str:
        return (
            f"{self.cut:7} each rank: {self.m} x {self.n} x {self.k} under {self.contract} (whole: {self.whole}); "
            f"forward: {self.travels}, {self.sent:,} bytes sent by each; backward: {self.sent_backward:,} bytes"
        )


def traffic(
    m: int, n: int, k: int, tp: int, *, order: str = "tree8", contract: ContractLike = "fma/chain", itemsize: int = 2
) -> tuple[Transfer, ...]:
    """How a product [m, k] @ [n, k].T may be cut between `tp` ranks: by columns, and by rows.

    Parameters
    ----------
    m, n, k : int
    tp : int
        Ranks.
    order : str
        The tree of sums over ranks.
    contract : Contract or str
        Its arithmetic is that of every product; its order that of a product by columns.
    itemsize : int
        Bytes of an element of the result.

    Raises
    ------
    OptionError
        The ranks do not divide the tree's leaves.
    ShapeError
        The tree's leaves do not divide k or n.
    """
    tp, chosen = arguments.whole("tp", tp), as_contract(contract)
    leaves = as_contract(f"fma/{order}").order.size
    if leaves % tp:
        nearest = max(size for size in range(1, min(tp, leaves) + 1) if leaves % size == 0)
        raise OptionError("tp", limit=f"a divisor of the {leaves} leaves of {order}", value=tp, nearest=nearest)
    for name, length in (("n", n), ("k", k)):
        if length % (leaves * chosen.block):
            step = leaves * chosen.block
            nearest = max(step, round(length / step) * step)
            raise ShapeError(name, limit=f"a multiple of {step} for {order}", value=length, nearest=nearest)
    whole = f"{chosen.arithmetic}/{order}"
    part = f"{chosen.arithmetic}/{f'tree{leaves // tp}' if leaves > tp else 'chain'}"
    back, rows = _bytes_of_sum(m, k, tp, itemsize), _bytes_of_sum(m, n, tp, itemsize)
    how = "nothing" if tp == 1 else "all_gather of float32 sums" if m <= FEW_ROWS else _EXCHANGE
    return (
        Transfer("columns", m, n // tp, k, str(chosen), str(chosen), "nothing", 0, back),
        Transfer("rows", m, n, k // tp, part, whole, how, rows, 0),
    )


_EXCHANGE = "all_to_all of float32 sums, all_gather of rounded rows"


def _bytes_of_sum(m: int, n: int, tp: int, itemsize: int) -> int:
    """Bytes that a rank sends for a sum [m, n] over ranks, with what `sums` does."""
    if m <= FEW_ROWS:
        return (tp - 1) * m * n * 4
    share = -(-m // tp)
    return (tp - 1) * share * n * (4 + itemsize)

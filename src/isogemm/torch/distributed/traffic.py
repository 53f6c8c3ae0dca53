"""What each rank computes of a product that is cut, what travels, how many bytes, and about how long that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...api.plan import plan
from ...base import arguments
from ...base.dtypes import ITEMSIZE, as_dtype, name_of
from ...contract.spec import ContractLike, as_contract
from ..device import column
from .ranks import Ranks, check_divides
from .sums import FEW_ROWS, OVERLAP_ROWS


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
    product_us, transfer_us : float or None
        Microseconds of the forward pass: what a plan of the product expects, and what `LINK` takes that the product
        does not hide. None where no model knows the product, as on CPUs.
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
    product_us: float | None
    transfer_us: float | None

    def __str__(self) -> str:
        time = "; no time: no model of such a product"
        if self.product_us is not None and self.transfer_us is not None:
            time = f"; about {self.product_us + self.transfer_us:.4g} us"
            time += f": product {self.product_us:.4g}, transfer {self.transfer_us:.4g} over {LINK}" * bool(self.sent)
        return (
            f"{self.cut:7} each rank: {self.m} x {self.n} x {self.k} under {self.contract} (whole: {self.whole}); "
            f"forward: {self.travels}, {self.sent:,} bytes sent by each; backward: {self.sent_backward:,} bytes"
            f"{time}"
        )


@dataclass(frozen=True)
class Link:
    """What carries bytes between two ranks."""

    name: str
    bytes_per_second: float  # that a rank sends while it receives as many
    latency_us: float  # of one operation

    def __str__(self) -> str:
        rate = f"{self.bytes_per_second / 1e9:.0f} GB/s each way"
        return f"{self.name}, assumed: {rate}, {self.latency_us:g} us an operation"


LINK = Link("NVLink 4", 370e9, 5.0)  # what a copy of 33 MB and a sum of one row took between two H100


def traffic(
    m: int,
    n: int,
    k: int,
    tp: int,
    *,
    order: str = "tree8",
    contract: ContractLike | None = None,
    dtype: Any = "bfloat16",
    device: str = "cpu",
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
        Its arithmetic is that of every product; its order that of a product by columns. By default the device's.
    dtype : dtype or str
        Of the operands and of the result.
    device : str
        Of every rank, as in `isogemm.plan`.

    Raises
    ------
    OptionError
        The order is no tree, or the ranks do not divide its leaves.
    DeviceError
        As `isogemm.plan`.
    ShapeError
        The tree's leaves do not divide k or n, or there is no rank.
    """
    tp, element = arguments.extent("tp", tp), as_dtype(dtype, "dtype")
    m, n, k = (arguments.extent(name, x, 0) for name, x in (("m", m), ("n", n), ("k", k)))
    alone: Any = plan(m, n, k, dtype=dtype, device=device, contract=contract)
    assert element is not None  # or there was no plan
    chosen, kind = as_contract(alone.contract), name_of(element)
    itemsize = ITEMSIZE[kind]
    check_divides("tp", tp, order)
    one = Ranks(order=order)
    for name, length in (("n", n), ("k", k)):
        one.part(name, length, chosen.block)
    whole = f"{chosen.arithmetic}/{order}"
    part = f"{chosen.arithmetic}/{f'tree{one.leaves // tp}' if one.leaves > tp else 'chain'}"
    mapped = device.lower() not in ("cpu", "webgpu")
    back, rows = _Sum.of(m, k, tp, itemsize, mapped=mapped), _Sum.of(m, n, tp, itemsize, mapped=mapped)

    def expected(n: int, k: int, under: str, out: str) -> float | None:
        found: Any = plan(m, n, k, dtype=kind, out_dtype=out, device=device, contract=under)
        us: float | None = getattr(found, "expected_us", None)
        return us

    columns = expected(n // tp, k, str(chosen), kind)
    partial = expected(n, k // tp, part, kind if tp == 1 else "float32")
    none = None if columns is None else 0.0
    return (
        Transfer("columns", m, n // tp, k, str(chosen), str(chosen), "nothing", 0, back.sent, columns, none),
        Transfer("rows", m, n, k // tp, part, whole, rows.how, rows.sent, 0, partial, rows.behind(partial, m, tp)),
    )


@dataclass(frozen=True)
class _Sum:
    """What each rank sends for a sum [m, n] over ranks, as `sums` does."""

    steps: tuple[str, ...] = ()
    partial: int = 0  # bytes of float32 sums
    rounded: int = 0  # bytes of results

    @classmethod
    def of(cls, m: int, n: int, tp: int, itemsize: int, *, mapped: bool) -> _Sum:
        """The sum over ranks by collectives, or through memory that the ranks' GPUs map of one another."""
        if tp == 1:
            return cls()
        whole = (tp - 1) * m * n * 4
        if mapped and whole <= column("ranks", "cuda").ONE_SHOT_BYTES:
            return cls(("float32 sums, written into the others' memory",), whole)
        if not mapped and m <= FEW_ROWS:
            return cls(("all_gather of float32 sums",), whole)
        share = (tp - 1) * -(-m // tp) * n
        written = ("float32 sums, written to the rank that adds them", "rounded rows, written back")
        sent = ("all_to_all of float32 sums", "all_gather of rounded rows")
        return cls(written if mapped else sent, share * 4, share * itemsize)

    @property
    def how(self) -> str:
        return ", ".join(self.steps) or "nothing"

    @property
    def sent(self) -> int:
        return self.partial + self.rounded

    def behind(self, product_us: float | None, m: int, tp: int) -> float | None:
        """Microseconds of `LINK` that the product does not hide: with many rows, the others' travel beside the next."""
        if product_us is None:
            return None
        partial, rounded = (x / LINK.bytes_per_second * 1e6 for x in (self.partial, self.rounded))
        if tp > 1 and m >= OVERLAP_ROWS * tp:
            one = product_us / tp  # after which the first rows leave
            partial = max(0.0, partial - product_us + one, partial / (tp - 1) - one)
        return partial + rounded + len(self.steps) * LINK.latency_us

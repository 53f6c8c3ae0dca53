"""Plans for a GPU: which kernel would serve a product, why, what admitted it, and what time to expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..base.dtypes import ITEMSIZE
from ..errors import DeviceError
from ..problem.numeric import USUAL, AnyPlan, NumericPlan, is_packed, numeric_key
from ..problem.product import Product
from .admission import Admission
from .products import Chooser
from .tables import DeviceLimits, Hint, Table, TunedRow, recommended, shipped_tables
from .trials import NATIVE, variant_of

__all__ = ["SCHEMA", "DevicePlan", "explain", "explain_offline", "explain_on"]

SCHEMA = "isogemm.device_plan.v1"
NEAR = 4.0  # ratio of bounds within which a measured time is scaled: below, what a launch costs would be scaled too


@dataclass(frozen=True, slots=True)
class DevicePlan(AnyPlan):
    """A frozen, printable plan for one product of packed matrices on a GPU.

    Attributes
    ----------
    m, n, k, trans_a, trans_b, numeric
        As in `isogemm.problem.numeric.AnyPlan`.
    batch : int
        Items of a batch.
    device : str
        The GPU that the plan is for.
    here : bool
        Whether that GPU is in this machine; else the plan is read from a shipped table.
    family, config : str
        The kernel.
    reason : str
        Why this one.
    admission : str
        What admitted it, and when.
    expected_us, bound_us : float or None
        Time as measured, as a model expects it, or drawn from a near product (`reason` says which), and the roofline's
        from measured ceilings.
    bound : str
        memory, compute, or unknown where no ceilings were measured.
    tree : tuple of (int, str)
        The most rows, and the kernel that was the fastest up to them, ascending; the last serves all beyond. Of the
        table's row for this N, K and type, or the nearest; empty where no table was asked.
    """

    batch: int
    device: str
    here: bool
    family: str
    config: str
    reason: str
    admission: str
    expected_us: float | None
    bound_us: float | None
    bound: str
    tree: tuple[tuple[int, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": SCHEMA, **AnyPlan.to_dict(self)}

    def _title(self) -> str:
        return f"{AnyPlan._title(self)} on {self.device}"

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (name, value) lines."""
        native = self.contract.arithmetic == NATIVE
        lines = [
            *self.heading(self.batch, "no executable definition" if native else "m plays no part"),
            ("device", self.device if self.here else f"{self.device}, by its shipped table: there is no GPU here"),
            *self._tree(),
            ("kernel", f"{self.family} [{self.config}]{self._instead()}"),
            ("why", self.reason),
            ("admission", self.admission),
            ("expected", "not measured" if self.expected_us is None else _time(self.expected_us)),
        ]
        if self.tree:
            lines.append(("crossover", f"as timed there; from vectors to tiles {USUAL} rows are usual elsewhere"))
        if self.bound_us is not None:
            share = f", {self.bound_us / self.expected_us:.0%} of it reached" if self.expected_us else ""
            lines.append(("bound", f"{self.bound}: {_time(self.bound_us)}{share}"))
        return [*lines, ("digest", self.digest)]

    def _instead(self) -> str:
        """Where the arrow points to another kernel than the plan's, what that means."""
        branch = next((line for mark, line in self._tree() if mark.startswith("->")), "")
        mine = f"{self.family} [{self.config.partition(' #')[0]}]"
        if self.here or not branch or branch.endswith(mine):
            return ""
        return ", as the branch's was admitted for the timed n and k alone, or does not take these"

    def _tree(self) -> list[tuple[str, str]]:
        """A question for each range of rows, the one that holds with an arrow."""
        lines, low = [], 1
        for i, (most, kernel) in enumerate(self.tree):
            last = i == len(self.tree) - 1
            here = low <= self.m and (self.m <= most or last)
            lines.append(("-> if" if here else "   if", f"M {f'>= {low}' if last else f'<= {most}'}: {kernel}"))
            low = most + 1
        return lines


def explain(pose: Callable[[str], Product], chooser: Chooser | None, device: int) -> DevicePlan:
    """The plan of a product on a GPU of this machine; without one, by a shipped table.

    Parameters
    ----------
    pose : callable
        The product, given the arithmetic of the device's tensor cores.
    chooser : Chooser or None
        The device's; None where it is not here.

    Raises
    ------
    DeviceError
        No GPU, and no shipped table to read instead.
    """
    if chooser is not None:
        return explain_on(pose(chooser.arithmetic() or "tensor_core:sm90"), chooser)
    tables = shipped_tables()
    if device or not tables:
        raise DeviceError(
            "plan for cuda", limit="a GPU, or a shipped tuning table", value=f"neither for device {device}",
            nearest="device='cpu'",
        )  # fmt: skip
    return explain_offline(pose(tables[0].arithmetic or "tensor_core:sm90"), tables[0])


def explain_on(product: Product, chooser: Chooser) -> DevicePlan:
    """The plan on a device at hand. Runs nothing: kernels not tried yet are said to be tried at first use.

    Raises
    ------
    DeviceError
        No kernel of this device supports the product.
    """
    device = chooser.admissions.stamp.get("device", "this GPU")
    for hint, found in chooser.judged(product):
        if found.state in ("admitted", "unknown"):
            ceilings = hint.table or next((t for t in chooser.tables if t.stamp.get("device") == device), None)
            return _plan(product, hint, _said(found), ceilings, device, here=True)
    raise DeviceError(
        f"kernel on {device}", limit="one that supports the product", value=f"none for {numeric_key(product)}",
        nearest="fma/chain",
    )  # fmt: skip


def explain_offline(product: Product, table: Table) -> DevicePlan:
    """The plan that a device's table gives; whether a kernel is legal is as its row says.

    Raises
    ------
    DeviceError
        The table has no kernel for such products.
    """
    key, variant = numeric_key(product), variant_of(product)
    dates = {(x.family, config): x.date for x in table.admitted if x.variant == variant for config in x.configs}
    if is_packed(product):
        here = (x for x in table.library_of(key) if x.variant == variant and x.low <= product.m <= x.high)
        dates |= {(x.family, x.config): x.date for x in here}
    libraries = {x.family for x in table.library}
    for hint in recommended([table], product):
        known = hint.use in dates
        if known or hint.use.family not in libraries:
            found = Admission("admitted", f"table {table.name}", dates[hint.use]) if known else Admission("unknown")
            return _plan(product, hint, _said(found), table, table.stamp.get("device", table.name), here=False)
    raise DeviceError(
        f"plan by table {table.name}", limit=f"a kernel for {key.arithmetic}", value=str(key), nearest="a GPU"
    )


def _time(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us:,.0f} us"


def _said(found: Admission) -> str:
    if found.state == "unknown":
        return "tried on golden products at first use"
    return f"{found.state} {found.date}, {found.source}"


def _plan(product: Product, hint: Hint, admission: str, table: Table | None, device: str, *, here: bool) -> DevicePlan:
    """Put together what is known of a kernel."""
    p, order = product, product.contract.order
    leaves = len(order.leaves(p.k, p.contract.block))
    bound_us, bound = _roofline(product, table.ceilings if table else DeviceLimits(0.0, {}))
    expected = hint.expected_us
    if expected is None and hint.row is not None and bound_us is not None and table is not None:
        expected = _scaled(product, hint.row, bound_us, table.ceilings)
    return DevicePlan(
        p.m, p.n, p.k, "N" if p.a.col == 1 else "T", "N" if p.b.col == 1 else "T",
        NumericPlan(p.contract, p.k, p.dtype_a, p.dtype_b, p.dtype_out, leaves), p.batch, device, here,
        *hint.use, hint.reason, admission, expected, bound_us, bound, _crossovers(hint.row),
    )  # fmt: skip


def _crossovers(row: TunedRow | None) -> tuple[tuple[int, str], ...]:
    """The fastest kernel by M, ranges of one kernel joined; an algorithm of a library's goes by its family alone."""
    found: list[tuple[int, str]] = []
    for bucket in row.buckets if row is not None else ():
        family, config = bucket.uses[0]
        kernel = f"{family} [{config.partition(' #')[0]}]"
        if found and found[-1][1] == kernel:
            found.pop()
        found.append((bucket.m, kernel))
    return tuple(found)


def _roofline(product: Product, ceilings: DeviceLimits) -> tuple[float | None, str]:
    """Microseconds below which the product cannot be done, and what sets them."""
    peaks: Mapping[str, float] = ceilings.tflops
    peak = peaks.get(product.contract.arithmetic.partition(":")[0])
    if not ceilings.memory_gb_per_second or not peak:
        return None, "unknown"
    p = product
    a, b, out = p.m * p.k * ITEMSIZE[p.dtype_a], p.k * p.n * ITEMSIZE[p.dtype_b], p.m * p.n * ITEMSIZE[p.dtype_out]
    memory = p.batch * (a + b + out) / ceilings.memory_gb_per_second / 1e3
    compute = 2 * p.m * p.n * p.k * p.batch / peak / 1e6
    return max(memory, compute), "memory" if memory > compute else "compute"


def _scaled(product: Product, row: TunedRow, bound_us: float, ceilings: DeviceLimits) -> float | None:
    """The time of a near product at the same M, brought to this one's bound; None where it is not near enough."""
    timed = row.microseconds(product.m)
    near, _ = _roofline(replace(product, n=row.key.n, k=row.key.k, batch=row.key.batch), ceilings)
    if timed is None or not near or not 1 / NEAR <= bound_us / near <= NEAR:
        return None
    return timed * bound_us / near

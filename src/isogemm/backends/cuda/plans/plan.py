"""A plan for a GPU: which kernel would serve a product, why, what admitted it, what time to expect, and what else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from ....base.dtypes import ITEMSIZE
from ....contract.spec import Contract
from ....errors import DeviceError, OptionError
from ....planner.admission import Admission
from ....planner.choose import FORESEEN
from ....planner.products import Chooser, Ranking
from ....planner.tables import DeviceLimits, Hint, Table, TunedRow
from ....planner.trials import NATIVE, golden_products, variant_of
from ....problem.forms import asked
from ....problem.numeric import USUAL, AnyPlan, NumericPlan, is_packed, numeric_key, plan_data, reading, word
from ....problem.product import Product
from ..gemm.cublaslt.family import walks
from ..gemm.model import together

SCHEMA = "isogemm.device_plan.v2"
OTHERS = 3  # alternatives that are named on either side of the kernel
# Microseconds that a kernel takes besides what memory takes for its operands, and how wholly that overlaps with what
# its model says: of Hopper's kernels within 15 % of the fastest of a product, in benchmarks/results/gpu-h200-*.jsonl,
# 5,843 times that memory bounds are as expected to 11 % (root mean square of logarithms, by hand), not 29.
BEGUN, WHOLLY = 2.2, 6.0
NEAR = 4.0  # ratio of bounds within which a measured time is scaled: below, what a launch costs would be scaled too


@dataclass(frozen=True, slots=True)
class DevicePlan(AnyPlan):
    """A frozen, printable plan for one product of packed matrices on a GPU, or for what goes there as one."""

    batch: int  # items of a batch
    device: str  # the GPU that the plan is for
    here: bool  # whether that GPU is in this machine; else the plan is made of its description, and of a shipped table
    # family, config: the kernel
    family: str
    config: str
    reason: str  # why this one
    admission: str  # what admitted it, and when
    # expected_us, bound_us: time as measured, as a model expects it, or drawn from a near product (`reason` says
    # which), and the roofline's from measured ceilings
    expected_us: float | None
    bound_us: float | None
    bound: str  # memory, compute, or unknown where no ceilings were measured
    # the most rows, and the kernel that was the fastest up to them, ascending; the last serves all beyond. Of the
    # table's row for this N, K and type, or the nearest; empty where no table was asked
    tree: tuple[tuple[int, str], ...] = ()
    form: str = ""  # empty, or grouped, quantized or attention
    about: tuple[tuple[str, Any], ...] = ()  # what else was asked: rows of groups, the format, heads and mask
    alternatives: tuple[tuple[str, str], ...] = ()  # what else there is, and why not

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `DevicePlan.from_dict` gives the plan back."""
        return {"schema": SCHEMA, **AnyPlan.to_dict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DevicePlan:
        """A plan from `to_dict`'s data, on any machine.

        Raises
        ------
        OptionError
            Not a plan of this schema, or a damaged one.
        """
        names = {field.name for field in fields(cls)}
        with reading(data, SCHEMA):
            wrong = names ^ (data.keys() - {"schema"})
            if wrong:
                limit, nearest = f"schema {SCHEMA}", "isogemm.plan(...)"
                raise OptionError("plan", limit=limit, value=sorted(wrong), nearest=nearest)
            given = data["numeric"]
            numeric = NumericPlan(**given | {"contract": Contract.parse(given["contract"])})
        return cls(**{name: _frozen(data[name]) for name in names - {"numeric"}}, numeric=numeric)

    @classmethod
    def from_json(cls, text: str) -> DevicePlan:
        """A plan from `to_json`'s text. Raises as `from_dict`."""
        return cls.from_dict(plan_data(text))

    def run(self, *operands: Any) -> Any:
        """Replay by exactly this kernel, on CUDA tensors: a and b, lists of them, x and a quantized w, or q, k and v.

        Where the mask of attention is a tensor, it comes last, [m, n].

        Raises
        ------
        DeviceError
            They are on another device than the plan's.
        ShapeError, DTypeError, LayoutError
            They are not the plan's operands.
        ContractError
            The kernel is not admitted here.
        OptionError
            This machine has another kernel's configuration for them.
        """
        from .replay import run

        return run(self, *operands)

    def _title(self) -> str:
        return f"{AnyPlan._title(self)} on {self.device}"

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (name, value) lines."""
        native = self.contract.arithmetic == NATIVE
        lines = [
            *self.heading(self.batch, "no executable definition" if native else "m plays no part"),
            ("device", self.device if self.here else f"{self.device}, as described: that GPU is not here"),
            *([("form", f"{self.form}: {asked(dict(self.about))}")] if self.form else []),
            *self._tree(),
            ("kernel", f"{self.family} [{self.config}]{self._word()}{self._instead()}"),
            ("why", self.reason),
            ("admission", self.admission),
            ("expected", "not measured" if self.expected_us is None else _time(self.expected_us)),
        ]
        if self.tree:
            lines.append(("crossover", f"as timed there; from vectors to tiles {USUAL} rows are usual elsewhere"))
        if self.bound_us is not None:
            share = f", {self.bound_us / self.expected_us:.0%} of it reached" if self.expected_us else ""
            lines.append(("bound", f"{self.bound}: {_time(self.bound_us)}{share}"))
        return [*lines, *(("not", f"{name}: {why}") for name, why in self.alternatives), ("digest", self.digest)]

    def _word(self) -> str:
        """The field's word for a product; of groups that of their mean."""
        rows = len(dict(self.about).get("rows", "1"))
        return "" if self.form == "attention" else f", a {word(-(-self.m // rows), self.n)}"

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


def _frozen(x: Any) -> Any:
    return tuple(_frozen(item) for item in x) if isinstance(x, list) else x


def explain_on(product: Product, chooser: Chooser) -> DevicePlan:
    """The plan on a device at hand. Runs nothing: kernels not tried yet are said to be tried at first use.

    Raises
    ------
    DeviceError
        No kernel of this device supports the product.
    """
    device = chooser.admissions.stamp.get("device", "this GPU")
    passed: list[tuple[str, str]] = []
    own = next((t for t in chooser.tables if t.stamp.get("device") == device), None)
    judged = ((_from_memory(product, hint, own), found) for hint, found in chooser.judged(product))
    for hint, found in judged:
        if found.state in ("admitted", "unknown"):
            table = hint.table or own
            others = (*passed[-OTHERS:], *_behind(hint for hint, _ in judged))
            return _plan(product, hint, said(found), table, device, others, here=True)
        passed.append((_label(hint), f"{found.state} {found.detail}".rstrip()))
    raise _none(product, device)


def explain_offline(product: Product, ranking: Ranking, device: str = "") -> DevicePlan:
    """The plan for a device that is not here: the order is a chooser's, verdicts are those of the first table.

    Where the `device` is not that table's, it says which kernel, and neither its time nor that it was admitted.

    Raises
    ------
    DeviceError
        No kernel for such products is known.
    """
    table = ranking.tables[0]
    key, variant, name = numeric_key(product), variant_of(product), table.stamp.get("device", table.name)
    own = device in ("", name)
    dates = {(x.family, config): x.date for x in table.admitted if x.variant == variant for config in x.configs}
    if is_packed(product):
        here = (x for x in table.library_of(key) if x.variant == variant and x.low <= product.m <= x.high)
        dates |= {(x.family, x.config): x.date for x in here}
    libraries = {x.family for x in table.library}
    passed: list[tuple[str, str]] = []
    hints = (_from_memory(product, hint, table if own else None) for hint in _legal(product, ranking))
    for hint in hints:
        known = own and hint.use in dates
        if known or hint.use.family not in libraries:
            found = Admission("admitted", f"table {table.name}", dates[hint.use]) if known else Admission("unknown")
            others = (*passed[-OTHERS:], *_behind(hints))
            if hint.table is None and hint.expected_us is not None:
                hint = hint._replace(reason=_foreseen(product, hint.reason, ranking.device.multiprocessors))
            elif hint.table is not None and not own:
                hint = hint._replace(reason=f"{hint.reason}, of another device", row=None, expected_us=None)
            return _plan(product, hint, said(found), table if own else None, device or name, others, here=False)
        passed.append((_label(hint), "an algorithm of a library, admitted for other rows, or on another device"))
    raise _none(product, device or name)


def _none(product: Product, device: str) -> DeviceError:
    return DeviceError(
        f"kernel on {device}", limit="one that supports the product", value=f"none for {numeric_key(product)}",
        nearest="fma/chain",
    )  # fmt: skip


def _legal(product: Product, ranking: Ranking) -> Iterator[Hint]:
    """What may serve a product; of families that do not load here a row is taken at its word.

    An order of which there are no golden products, as lanes, has no kernel of ours: none could be tried.
    """
    triable = any(golden_products(product))
    for hint in ranking.hints(product):
        family = ranking.families.get(hint.use.family)
        if family is None or ((triable or family.library) and family.supports(product, hint.use.config)):
            yield hint


def _from_memory(product: Product, hint: Hint, table: Table | None) -> Hint:
    """A kernel with the time to expect. Models order kernels, and think more of memory than it has."""
    bound_us, bound = _roofline(product, table.ceilings) if table else (None, "")
    if hint.expected_us is None or bound_us is None or bound != "memory" or not hint.reason.startswith(FORESEEN):
        return hint
    return hint._replace(expected_us=together(hint.expected_us, BEGUN + bound_us, power=WHOLLY))


def _foreseen(product: Product, reason: str, multiprocessors: int) -> str:
    """Why a model's choice comes first on a device that is not here, and that calls there may come to another."""
    library = ", cuBLASLt's among them" if is_packed(product) and walks(product) else ""
    return f"{reason} on {multiprocessors} multiprocessors; first uses there time it against others{library}"


def _label(hint: Hint) -> str:
    return "{} [{}]".format(hint.use.family, hint.use.config.partition(" #")[0])


def _behind(hints: Iterator[Hint]) -> list[tuple[str, str]]:
    """Kernels that would be asked next, and why not first."""
    found: dict[str, str] = {}
    for hint in islice(hints, OTHERS):
        us = "" if hint.expected_us is None else f", {_time(hint.expected_us)}"
        found.setdefault(_label(hint), f"asked next, by {hint.reason}{us}")
    return list(found.items())


def _time(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us:,.0f} us"


def said(found: Admission) -> str:
    """What admitted a kernel, in words."""
    if found.state == "unknown":
        return "tried on golden products at first use"
    return f"{found.state} {found.date}, {found.source}"


def _plan(
    product: Product, hint: Hint, admission: str, table: Table | None, device: str,
    others: tuple[tuple[str, str], ...], *, here: bool,
) -> DevicePlan:  # fmt: skip
    """Put together what is known of a kernel."""
    p, order = product, product.contract.order
    leaves = len(order.leaves(p.k, p.contract.block))
    bound_us, bound = _roofline(product, table.ceilings if table else DeviceLimits(0.0, {}))
    expected = hint.expected_us
    if expected is None and hint.row is not None and bound_us is not None and table is not None:
        expected = _scaled(product, hint.row, bound_us, table.ceilings)
    batched = p.batch > 1
    return DevicePlan(
        p.m, p.n, p.k, "N" if p.a.col == 1 else "T", "N" if p.b.col == 1 else "T",
        NumericPlan(p.contract, p.k, p.dtype_a, p.dtype_b, p.dtype_out, leaves), p.batch, device, here,
        *hint.use, hint.reason, admission, expected, bound_us, bound, _crossovers(hint.row),
        form="batched" if batched else "", about=(("items", p.batch),) if batched else (), alternatives=others,
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
    p = product
    a, b, out = p.m * p.k * ITEMSIZE[p.dtype_a], p.k * p.n * ITEMSIZE[p.dtype_b], p.m * p.n * ITEMSIZE[p.dtype_out]
    return roofline(2 * p.m * p.n * p.k * p.batch, p.batch * (a + b + out), p.contract.arithmetic, ceilings)


def roofline(flops: int, nbytes: int, arithmetic: str, ceilings: DeviceLimits) -> tuple[float | None, str]:
    """Microseconds below which it cannot be done, and what sets them."""
    peak = ceilings.tflops.get(arithmetic.partition(":")[0])
    if not ceilings.memory_gb_per_second or not peak:
        return None, "unknown"
    memory, compute = nbytes / ceilings.memory_gb_per_second / 1e3, flops / peak / 1e6
    return max(memory, compute), "memory" if memory > compute else "compute"


def _scaled(product: Product, row: TunedRow, bound_us: float, ceilings: DeviceLimits) -> float | None:
    """The time of a near product at the same M, brought to this one's bound; None where it is not near enough."""
    timed = row.microseconds(product.m)
    near, _ = _roofline(replace(product, n=row.key.n, k=row.key.k, batch=row.key.batch), ceilings)
    if timed is None or not near or not 1 / NEAR <= bound_us / near <= NEAR:
        return None
    return timed * bound_us / near

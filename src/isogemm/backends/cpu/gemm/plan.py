"""The plan of a product on the CPU: what would run, why, and at what bound; printed, kept in a file, and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np

from ....base.dtypes import INT8, NAMED, NUMPY, name_of
from ....base.threads import get_num_threads
from ....contract.spec import Contract, ContractLike
from ....errors import DTypeError, OptionError, ShapeError
from ....operands.views import array
from ....problem.numeric import USUAL, AnyPlan, NumericPlan, numeric_plan, plan_data, word
from ....problem.settings import Settings, check_integers, check_operand
from ..emit.target import target
from .exact import PIECE
from .execute import gemm
from .facts import facts
from .packed import PackedWeight
from .schedule import TREE, Problem, Schedule, schedule
from .tasks import swap_operands

SCHEMA = "isogemm.plan.v1"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan(AnyPlan):
    """A frozen, printable plan for one product on the CPU.

    Attributes
    ----------
    m, n, k, trans_a, trans_b, numeric
        As in `isogemm.problem.numeric.AnyPlan`.
    schedule : Schedule
        Who computes them and how the work is cut; never changes a bit.
    swapped : bool
        The transposed product is computed, which has the same bits.
    packed : bool
        B is a weight prepared by `isogemm.pack`.
    target : str
        Instruction set that the kernels are compiled for.
    """

    schedule: Schedule
    swapped: bool
    packed: bool
    target: str

    @property
    def strategy(self) -> str:
        """Kernel family: gemv, stream, small, skinny, tiled, or definition where a contract has no kernel."""
        return self.schedule.strategy if self.contract.arithmetic in ("fma", "exact") else "definition"

    @property
    def split_axis(self) -> str:
        """Axis whose ranges go to different threads."""
        s = self.schedule
        if s.threads == 1 or s.grid_m * s.grid_n == 1:
            return "none"
        rows = s.grid_m > s.grid_n
        return "m" if rows != self.swapped else "n"

    @property
    def threads(self) -> int:
        """Threads that take part."""
        return self.schedule.threads

    @property
    def thresholds(self) -> str:
        """What decided between kernels, and whether it was measured on this machine."""
        return str(facts())

    @property
    def flops(self) -> int:
        """2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least traffic: each operand read once, the output written once."""
        x = self.numeric
        return (
            self.m * self.k * NAMED[x.dtype_a].itemsize
            + self.n * self.k * NAMED[x.dtype_b].itemsize
            + self.m * self.n * NAMED[x.out_dtype].itemsize
        )

    @property
    def intensity(self) -> float:
        """Flops per byte of least traffic."""
        return self.flops / max(1, self.bytes)

    @property
    def bound(self) -> str:
        """What should limit it: memory, compute, or the call itself for tiny products."""
        if self.flops < 2 * 32**3:
            return "call"
        return "memory" if self.intensity < facts().ridge else "compute"

    def expected_seconds(self, *, gflops: float, gbytes: float) -> float:
        """Roofline time from measured ceilings: GFLOP/s and GB/s of the threads in use."""
        return max(self.flops / gflops, self.bytes / gbytes) * 1e-9

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `Plan.from_dict` gives the plan back."""
        numeric = asdict(self.numeric) | {"contract": str(self.contract)}
        return {
            "schema": SCHEMA,
            "shape": {"m": self.m, "n": self.n, "k": self.k},
            "trans_a": self.trans_a,
            "trans_b": self.trans_b,
            "numeric": numeric,
            "strategy": self.strategy,
            "split_axis": self.split_axis,
            "schedule": asdict(self.schedule),
            "swapped": self.swapped,
            "packed": self.packed,
            "target": self.target,
            "flops": self.flops,
            "bytes": self.bytes,
            "bound": self.bound,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """A plan from `to_dict`'s data.

        Raises
        ------
        OptionError
            Not a plan of this schema, or a damaged one: it is told which field, and what that can be.
        ContractError
            A contract that there is not.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            data = data if isinstance(data, Mapping) else {}
            raise OptionError("plan", limit=f"schema {SCHEMA}", value=data.get("schema"), nearest="isogemm.plan(...)")
        numeric, shape = _section(data, "numeric"), _section(data, "shape")
        made = {
            "numeric": _made(NumericPlan, numeric | {"contract": Contract.parse(numeric.get("contract", ""))}),
            "schedule": _made(Schedule, _section(data, "schedule")),
        }
        own = {field.name: data.get(field.name) for field in fields(cls)} | shape | made
        plan = _made(cls, own)
        least, most = int(plan.flops > 0), max(plan.m, plan.n, 1)  # chunks
        legal_types = {"out_dtype": ("int32",) if plan.contract.arithmetic == "exact" else tuple(NUMPY)}
        legal_types |= dict.fromkeys(("dtype_a", "dtype_b"), plan.contract.operands)
        for name, value, legal in (
            *((x, own[x], ("N", "T", "C")) for x in ("trans_a", "trans_b")),
            *((x, numeric[x], legal_types[x]) for x in ("dtype_a", "dtype_b", "out_dtype")),
            *((x, getattr(plan.schedule, x), range(least, most + 1)) for x in ("grid_m", "grid_n")),
        ):
            if value not in legal:
                raise _damaged(name, f"one of {legal}" if isinstance(legal, tuple) else f"{least} to {most}", value)
        return plan

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from `to_json`'s text. Raises as `from_dict`."""
        return cls.from_dict(plan_data(text))

    def run(self, a: Any, b: Any) -> Any:
        """Replay: the product a[m, k] @ b[k, n] by exactly this schedule, as a new array.

        Raises
        ------
        ShapeError, DTypeError
            The operands are not the plan's.
        DTypeError, LayoutError, DeviceError
            They are no arrays of this host, as in `isogemm.matmul`.
        """
        packed = isinstance(b, PackedWeight)
        a, b = array("a", a), b if packed else array("b", b)
        for name, x in (("a", a), ("b", b)):
            if not isinstance(x, PackedWeight):
                check_operand(name, x, INT8)
        shapes = tuple(a.shape), (b.k, b.n) if packed else tuple(b.shape)
        expected = (self.m, self.k), (self.k, self.n)
        if shapes != expected or packed != self.packed:
            turned = shapes == (expected[0], (self.n, self.k)) and not packed
            nearest = "w.T, where w is a weight [n, k]; or " * turned + "plan these operands anew"
            raise ShapeError("operands of a replay", limit=expected, value=shapes, nearest=nearest)
        types = name_of(a.dtype), name_of(b.dtype)
        if types != (self.numeric.dtype_a, self.numeric.dtype_b):
            raise DTypeError(
                "operands of a replay", limit=self.numeric.dtype_a, value=types, nearest="the plan's types"
            )
        check_integers(self.k, None, Settings(self.contract))
        out = np.empty((self.m, self.n), NAMED[self.numeric.out_dtype])
        gemm(a, b, out, Settings(self.contract), chosen=self.schedule)
        return out

    def rows(self) -> list[tuple[str, str]]:
        s = self.schedule
        how = f"{self.strategy}, a {word(self.m, self.n)}" + (", weight prepared once" if self.packed else "")
        lines = [*self.heading(), ("strategy", how)]
        if self.strategy != "definition":
            lines += [
                *self._tree(),
                ("tiles", f"{s.mr} rows a panel; blocks MC {s.mc}, NC {s.nc}, KC {s.kc} ({self.target})"),
                ("operands", f"A: {s.a_mode}; B: {s.b_mode}" + ("; computed as B^T A^T" if self.swapped else "")),
                ("threads", f"{s.threads}, split {self.split_axis}, {s.grid_m * s.grid_n} chunks"),
            ]
        if self.contract.arithmetic == "exact":
            pieces = f"{-(-self.k // PIECE)} of at most {PIECE}"
            lines.append(("pieces", f"of K: {pieces}, in float32, which holds their sums; int32 adds these up"))
        lines += [
            ("work", f"{self.flops / 1e9:.3g} GFLOP, {self.bytes / 1e6:.3g} MB, {self.intensity:.3g} flop/byte"),
            ("bound", self.bound),
            ("digest", self.digest),
        ]
        return lines

    def _tree(self) -> list[tuple[str, str]]:
        """The questions that choose a strategy, the one that decided with an arrow."""
        width = target().width
        taken = "on panels" if self.packed else self.schedule.strategy
        lines = [
            ("-> if" if branch.kernel.endswith(taken) else "   if",
             f"{branch.question.format(facts())}: {branch.kernel}")
            for branch in TREE
        ]  # fmt: skip
        what = f"M is n, {self.n}: the transposed product is computed; " if self.swapped else ""
        return [
            *lines,
            ("crossover", f"{what}of {width} lanes; from vectors to tiles {USUAL} rows are usual elsewhere"),
            ("thresholds", self.thresholds),
        ]


def plan(
    extents: tuple[int, int, int],
    types: tuple[str, str, str],
    trans: str,
    packed: bool,
    contract: ContractLike | None,
    threads: int | None,
) -> Plan:
    """The plan of checked arguments of `isogemm.plan`: m, n, k; dtypes of A, B and C; letters of op.

    Raises
    ------
    ContractError, LimitError, OptionError
        A contract of other operands; int8 with sums that int32 might not hold, or packed.
    """
    (m, n, k), (dtype, b_type, out_type), (a_op, b_op) = extents, types, (trans[0], trans[1])
    numeric = numeric_plan(k, dtype_a=dtype, dtype_b=b_type, out_dtype=out_type, contract=contract)
    if numeric.contract.arithmetic == "exact":
        check_integers(k, None, Settings(numeric.contract))
        if packed:
            raise OptionError("packed", limit="False with int8, which is not packed", value=packed, nearest=False)
        dtype = b_type = out_type = "float32"  # what its pieces are computed as
        k = min(k, PIECE)
    cpu = target()
    plain = out_type == "float32"
    item = NAMED[out_type].itemsize
    swapped = not packed and swap_operands(m, n, n * item, item, item)
    if swapped:
        problem = Problem(
            n, m, k, b_type == "float32", a_op == "N", a_op == "T", NAMED[dtype].itemsize, False, plain and n == 1
        )
    else:
        problem = Problem(
            m, n, k, dtype == "float32", b_op == "T", b_op == "N", NAMED[b_type].itemsize, packed, plain
        )  # fmt: skip
    chosen = schedule(problem, get_num_threads() if threads is None else threads, cpu)
    return Plan(m, n, extents[2], a_op, b_op, numeric, chosen, swapped, packed, f"{cpu.isa}, {cpu.name}")


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    if not isinstance(found, dict):
        raise _damaged(name, "an object", found)
    return found


def _made(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass of its fields, each of the field's type; whole numbers of 31 bits, and words that there are."""
    kinds = get_type_hints(kind)
    if data.keys() != kinds.keys():
        raise _damaged(kind.__name__, f"the fields {', '.join(kinds)}", ", ".join(data))
    for name, value in data.items():
        words = get_args(kinds[name])
        if words and value not in words:
            raise _damaged(name, f"one of {', '.join(words)}", value)
        if not words and type(value) is not kinds[name]:
            raise _damaged(name, f"a value of type {kinds[name].__name__}", value)
        if kinds[name] is int and not 0 <= value < 2**31:
            raise _damaged(name, "0 to 2147483647", value)
    return kind(**data)


def _damaged(name: str, limit: str, value: Any) -> OptionError:
    return OptionError(f"{name} of a plan", limit=limit, value=value, nearest="what to_dict() gave")

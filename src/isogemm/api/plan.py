"""Plans: what would run, why, and at what bound, without running it; and the same again from a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from ..base.arguments import of_type, shown
from ..base.threads import get_num_threads
from ..contract.spec import Contract, ContractLike
from ..errors import DTypeError, OptionError, ShapeError
from ..problem.numeric import NumericPlan, numeric_plan

if TYPE_CHECKING:
    from ..backends.cpu.gemm.schedule import Schedule
    from ..planner.explain import DevicePlan
    from ..problem.product import Product

__all__ = ["SCHEMA", "Plan", "plan"]

SCHEMA = "isogemm.plan.v1"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Flops per byte at which a core's fp32 peak meets its share of memory bandwidth, where nothing was measured:
# 116 GFLOP/s over 17 GB/s (Zen 4, two threads on one memory channel). Only the word "bound" depends on it.
DEFAULT_RIDGE = 7.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A frozen, printable plan for one product on the CPU.

    Attributes
    ----------
    m, n, k : int
        C[m, n] = op(A)[m, k] @ op(B)[k, n].
    trans_a, trans_b : {"N", "T"}
        How the operands are stored.
    numeric : NumericPlan
        What the numbers are; made without M.
    schedule : Schedule
        Who computes them and how the work is cut; never changes a bit.
    swapped : bool
        The transposed product is computed, which has the same bits.
    packed : bool
        B is a weight prepared by `isogemm.pack`.
    target : str
        Instruction set that the kernels are compiled for.
    """

    m: int
    n: int
    k: int
    trans_a: str
    trans_b: str
    numeric: NumericPlan
    schedule: Schedule
    swapped: bool
    packed: bool
    target: str

    @property
    def contract(self) -> Contract:
        """The definition of the bits."""
        return self.numeric.contract

    @property
    def strategy(self) -> str:
        """Kernel family: gemv, stream, small, skinny, tiled, or definition where a contract has no kernel."""
        return self.schedule.strategy if self.contract.arithmetic == "fma" else "definition"

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
    def flops(self) -> int:
        """2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least traffic: each operand read once, the output written once."""
        x = self.numeric
        return (
            self.m * self.k * _BYTES[x.dtype_a]
            + self.n * self.k * _BYTES[x.dtype_b]
            + self.m * self.n * _BYTES[x.out_dtype]
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
        return "memory" if self.intensity < DEFAULT_RIDGE else "compute"

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

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """A plan from `to_dict`'s data.

        Raises
        ------
        OptionError
            Not a plan of this schema.
        """
        from ..backends.cpu.gemm.schedule import Schedule

        if data.get("schema") != SCHEMA:
            raise OptionError("plan", limit=f"schema {SCHEMA}", value=data.get("schema"), nearest="isogemm.plan(...)")
        numeric = data["numeric"] | {"contract": Contract.parse(data["numeric"]["contract"])}
        rest = {name: data[name] for name in ("trans_a", "trans_b", "swapped", "packed", "target")}
        return cls(**data["shape"], **rest, numeric=NumericPlan(**numeric), schedule=Schedule(**data["schedule"]))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from `to_json`'s text."""
        return cls.from_dict(json.loads(text))

    @property
    def digest(self) -> str:
        """Hash over everything in the plan."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def run(self, a: Any, b: Any) -> Any:
        """Replay: the product a[m, k] @ b[k, n] by exactly this schedule, as a new array.

        Raises
        ------
        ShapeError
            The operands are not the plan's.
        """
        from .replay import replay

        return replay(self, a, b)

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (name, value) lines, the table that `str` prints."""
        s, x = self.schedule, self.numeric
        lines = [
            ("product", f"C[{self.m}, {self.n}] = op{self.trans_a}(A) @ op{self.trans_b}(B), k = {self.k}"),
            ("contract", f"{self.contract}  ({x.leaves} chain{'s' if x.leaves != 1 else ''} over K; m plays no part)"),
            ("types", f"{x.dtype_a} x {x.dtype_b} -> {x.out_dtype}"),
            ("strategy", self.strategy + (", weight prepared once" if self.packed else "")),
        ]
        if self.strategy != "definition":
            lines += [
                ("tiles", f"{s.mr} rows a panel; blocks MC {s.mc}, NC {s.nc}, KC {s.kc} ({self.target})"),
                ("operands", f"A: {s.a_mode}; B: {s.b_mode}" + ("; computed as B^T A^T" if self.swapped else "")),
                ("threads", f"{s.threads}, split {self.split_axis}, {s.grid_m * s.grid_n} chunks"),
            ]
        lines += [
            ("work", f"{self.flops / 1e9:.3g} GFLOP, {self.bytes / 1e6:.3g} MB, {self.intensity:.3g} flop/byte"),
            ("bound", self.bound),
            ("digest", self.digest),
        ]
        return lines

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {value}" for name, value in self.rows())

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"plan {self.m} x {self.n} x {self.k}", show_header=False)
        for name, value in self.rows():
            table.add_row(name, Text(value))  # as it is: a configuration in brackets is no markup
        return table


@overload
def plan(
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = ...,
    weight_dtype: str | None = ...,
    out_dtype: str | None = ...,
    trans_a: str = ...,
    trans_b: str = ...,
    packed: bool = ...,
    contract: ContractLike | None = ...,
    threads: int | None = ...,
    device: Literal["cpu"] = ...,
) -> Plan: ...


@overload
def plan(
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = ...,
    weight_dtype: str | None = ...,
    out_dtype: str | None = ...,
    trans_a: str = ...,
    trans_b: str = ...,
    contract: ContractLike | None = ...,
    device: str,
) -> Plan | DevicePlan: ...


def plan(
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = "float32",
    weight_dtype: str | None = None,
    out_dtype: str | None = None,
    trans_a: str = "N",
    trans_b: str = "T",
    packed: bool = False,
    contract: ContractLike | None = None,
    threads: int | None = None,
    device: str = "cpu",
) -> Plan | DevicePlan:
    """Plan C[m, n] = op(A)[m, k] @ op(B)[k, n] without running it.

    Parameters
    ----------
    m, n, k : int
        Extents, at least 0.
    dtype : {"float32", "bfloat16", "float16"}
        Element type of A, and of B and C unless `weight_dtype` or `out_dtype` say otherwise; C is float32 where B is.
    trans_a, trans_b : {"N", "T", "C"}
        How the operands are stored; the default is a linear layer's: weights stored [n, k].
    packed : bool
        B was prepared by `isogemm.pack`.
    contract : Contract or str, optional
        Default ``fma/chain``; on a GPU, 16-bit operands have that of its tensor cores.
    threads : int, optional
        Default `get_num_threads()`.
    device : str
        ``cpu``, or ``cuda`` or ``cuda:1`` for a GPU. Without one, ``cuda`` reads the table that is shipped.

    Returns
    -------
    Plan, or DevicePlan for a GPU

    Raises
    ------
    ShapeError, DTypeError, ContractError, OptionError
        A value out of range; the message names the nearest legal one.
    DeviceError
        A GPU that is not there and has no table, or no kernel of it supports the product.
    """
    for name, value in (("m", m), ("n", n), ("k", k)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ShapeError(name, limit="a whole number of at least 0", value=repr(value), nearest=0)
    b_type = dtype if weight_dtype is None else weight_dtype
    out_type = (
        ("float32" if isinstance(b_type, str) and b_type == "float32" else dtype) if out_dtype is None else out_dtype
    )
    for name in (dtype, b_type, out_type):
        if not isinstance(name, str) or name not in _BYTES:
            raise DTypeError("dtype", limit=", ".join(_BYTES), value=shown(name), nearest="float32")
    of_type("device", device, str, "text: cpu, cuda or cuda:N", "'cpu'")
    a_op, b_op = _operation("trans_a", trans_a), _operation("trans_b", trans_b)
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise OptionError("threads", limit="at least 1", value=repr(threads), nearest=1)
    types = (dtype, b_type, out_type)
    if device != "cpu":
        if packed or threads is not None:
            raise OptionError("packed and threads", limit="device='cpu'", value=device, nearest="leave them out")
        return _on_gpu((m, n, k), types, a_op + b_op, contract, device)
    return _on_cpu((m, n, k), types, a_op + b_op, packed, contract, threads)


def _on_cpu(
    extents: tuple[int, int, int],
    types: tuple[str, str, str],
    trans: str,
    packed: bool,
    contract: ContractLike | None,
    threads: int | None,
) -> Plan:
    from ..backends.cpu.emit.target import target
    from ..backends.cpu.gemm.execute import swap_operands
    from ..backends.cpu.gemm.schedule import Problem, schedule

    (m, n, k), (dtype, b_type, out_type), (a_op, b_op) = extents, types, (trans[0], trans[1])
    numeric = numeric_plan(k, dtype_a=dtype, dtype_b=b_type, out_dtype=out_type, contract=contract)
    cpu = target()
    plain = out_type == "float32"
    swapped = not packed and swap_operands(m, n, n * _BYTES[out_type], _BYTES[out_type], _BYTES[out_type])
    if swapped:
        problem = Problem(
            n, m, k, b_type == "float32", a_op == "N", a_op == "T", _BYTES[dtype], False, plain and n == 1
        )
    else:
        problem = Problem(
            m, n, k, dtype == "float32", b_op == "T", b_op == "N", _BYTES[b_type], packed, plain
        )  # fmt: skip
    chosen = schedule(problem, get_num_threads() if threads is None else threads, cpu)
    return Plan(m, n, k, a_op, b_op, numeric, chosen, swapped, packed, f"{cpu.isa}, {cpu.name}")


def _on_gpu(
    extents: tuple[int, int, int],
    types: tuple[str, str, str],
    trans: str,
    contract: ContractLike | None,
    device: str,
) -> DevicePlan:
    """Read the device's tables and verdicts; see `isogemm.planner.explain`."""
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or (ordinal and not ordinal.isdecimal()):
        raise OptionError("device", limit="cpu, cuda or cuda:N", value=repr(device), nearest="cuda")
    if 0 in extents:
        raise ShapeError("plan for cuda", limit="extents of at least 1", value=extents, nearest=1)
    from dataclasses import replace

    from ..backends import backend, open_device
    from ..operands.device_array import DeviceId
    from ..planner.explain import explain
    from ..planner.tuning import Wanted, pose

    m, n, k = extents

    def product(arithmetic: str) -> Product:
        numeric = numeric_plan(
            k, dtype_a=types[0], dtype_b=types[1], out_dtype=types[2], contract=contract, device="cuda",
            arithmetic=arithmetic,
        )  # fmt: skip
        posed = pose(Wanted("", n, k, trans), m=m, dtype=types[0], contract=numeric.contract, out_dtype=types[2])
        return replace(posed, dtype_b=types[1])

    number = int(ordinal or 0)
    here = open_device(DeviceId(kind, number)).chooser if backend(kind).count() > number else None
    return explain(product, here, number)


def _operation(name: str, value: str) -> str:
    text = value.upper() if isinstance(value, str) else value
    if text not in ("N", "T", "C"):
        raise OptionError(name, limit="N, T or C", value=repr(value), nearest="N")
    return "T" if text == "C" else text

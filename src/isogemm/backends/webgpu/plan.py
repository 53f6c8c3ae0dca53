"""Plans for a WebGPU device: the tree of decisions with this device's crossovers, and where a product goes in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...base.dtypes import FLOAT32, NUMPY
from ...errors import OptionError
from ...operands.device_array import device_array
from ...problem.numeric import USUAL, AnyPlan, numeric_plan, word
from .adapter import Adapter, DeviceBuffer
from .choose import TREE, Crossovers, case_of, check_contract, choices

SCHEMA = "isogemm.webgpu_plan.v1"


@dataclass(frozen=True, slots=True)
class WebGpuPlan(AnyPlan):
    """A frozen, printable plan for one product on a WebGPU device."""

    device: str  # the adapter
    kernel: str
    crossovers: Crossovers  # the device's; those of the sources of these kernels are 16 to 64 rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": SCHEMA, **AnyPlan.to_dict(self)}

    def _title(self) -> str:
        return f"{AnyPlan._title(self)} on {self.device}"

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (name, value) lines: a question a line, the one that decides with an arrow."""
        at, taken = self.crossovers, False
        lines = [*self.heading(), ("device", self.device)]
        for branch in TREE[self.numeric.contract.order.kind]:
            decides = branch.kernel == self.kernel and not taken
            taken = taken or decides
            lines.append(("-> if" if decides else "   if", f"{branch.text(at)}: {branch.kernel}"))
        return [
            *lines,
            ("kernel", f"{self.kernel}, a {word(self.m, self.n)}"),
            ("admission", "by its bits at its first use; refused, the next that holds"),
            ("tiles", f"from M = {at.tiles}, large ones from {at.large}; elsewhere {USUAL} is usual"),
            ("measured", at.source),
        ]


def plan(
    adapter: Adapter,
    crossovers: Crossovers,
    extents: tuple[int, int, int],
    types: tuple[str, str, str],
    trans: str,
    packed: bool,
    contract: Any,
    threads: int | None,
) -> WebGpuPlan:
    """The plan of checked arguments of `isogemm.plan`.

    Raises
    ------
    OptionError
        `packed` or `threads`, which a CPU has.
    ContractError
        This device does not have the contract.
    """
    if packed or threads is not None:
        raise OptionError(
            "packed and threads", limit="device='cpu'", value=str(adapter.place), nearest="leave them out"
        )
    m, n, k = extents
    numeric = numeric_plan(k, dtype_a=types[0], dtype_b=types[1], out_dtype=types[2], contract=contract)
    check_contract(adapter.place, numeric.contract)
    nowhere = DeviceBuffer(None, 0)

    def stored(rows: int, columns: int, dtype: Any, trans: str = "N") -> Any:
        shape = (rows, columns) if trans == "N" else (columns, rows)
        x = device_array(nowhere.address, shape, None, dtype, adapter.place, owner=nowhere)
        return x if trans == "N" else x.T

    a, b = stored(m, k, NUMPY[types[0]], trans[0]), stored(k, n, NUMPY[types[1]], trans[1])
    case = case_of(adapter, types[:2], a, b, stored(m, n, FLOAT32), crossovers)
    kernel = next(choices(numeric.contract.order.kind, case))
    return WebGpuPlan(m, n, k, trans[0], trans[1], numeric, adapter.name, kernel, crossovers)

"""The kernels for products, a row each: the file, the order that it walks K in, and what one workgroup computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .source import Constants, assembled, element, operand_b

__all__ = ["KERNELS", "LANES", "WgslKernel", "code_of"]

LANES = 32


@dataclass(frozen=True)
class WgslKernel:
    """One kernel for out [m, n] = a [m, k] @ b [k, n].

    Attributes
    ----------
    file : str
        In the folder ``wgsl``, without its suffix.
    order : {"chain", "lanes", "integers"}
        The order over K, and so the contract.
    rows, columns : int
        Of out, for one workgroup.
    lanes : int
        Of the 32 lanes, those of one thread; 0 where a thread has all.
    workgroup : int
        Threads.
    constants : mapping of str to int
        Of its file.
    """

    file: str
    order: str
    rows: int
    columns: int
    workgroup: int
    lanes: int = 0
    constants: Mapping[str, int] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """That share one output."""
        return LANES // self.lanes if self.lanes else 1


def _lanes(lanes: int, workgroup: int, *, rows: int = 1, outputs: int = 1) -> dict[str, int | dict[str, int]]:
    """A kernel whose groups have 32 lanes."""
    constants = ({"ROWS": rows} if rows > 1 else {}) | ({"OUTPUTS": outputs} if outputs > 1 else {})
    columns = workgroup * lanes // LANES * outputs
    return {"rows": rows, "columns": columns, "workgroup": workgroup, "lanes": lanes, "constants": constants}


KERNELS: Mapping[str, WgslKernel] = {
    "gemv_naive": WgslKernel("gemv_naive", "chain", 1, 64, 64),
    "gemv_transposed": WgslKernel("gemv_transposed", "chain", 1, 64, 64),
    "gemv_simd": WgslKernel("gemv_simd", "lanes", **_lanes(1, 128)),  # type: ignore[arg-type]
    "gemv_simd_multi": WgslKernel("gemv_simd_multi", "lanes", **_lanes(4, 64, outputs=4)),  # type: ignore[arg-type]
    "gemv_wide": WgslKernel("gemv_wide", "lanes", **_lanes(8, 256, outputs=2)),  # type: ignore[arg-type]
    "gemv_batched": WgslKernel("gemv_batched", "lanes", **_lanes(4, 64, rows=8)),  # type: ignore[arg-type]
    "gemm_simdgroup": WgslKernel("gemm_simdgroup", "chain", 32, 16, 256),
    "gemm_tiled": WgslKernel("gemm_tiled", "chain", 64, 64, 256, constants={"STEP": 1}),
    "gemm_lanes": WgslKernel("gemm_tiled", "lanes", 64, 64, 256, constants={"STEP": LANES}),
    "gemv_q4_0": WgslKernel("gemv_q4_0", "integers", 1, 8, 64, constants={"ROWS": 1}),
    "gemm_q4_0": WgslKernel("gemv_q4_0", "integers", 4, 8, 64, constants={"ROWS": 4}),
}


def code_of(name: str, types: tuple[str, str], *, across: bool, subgroup: int, fused: bool) -> str:
    """The WGSL of a kernel for operands of these types.

    Parameters
    ----------
    types : (str, str)
        Of a and b; quantized weights are ``Q4_0:float16``, rounded to that type, or for integers ``Q4_0``.
    across : bool
        Neighbouring columns of b are neighbours in memory; else neighbouring k are.
    subgroup : int
        The least size of a subgroup; 0 without subgroups.
    """
    kernel = KERNELS[name]
    constants: dict[str, int | bool] = dict(kernel.constants)
    b = ("blocks", types[1].lower()) if kernel.order == "integers" else operand_b(types[1])
    parts = ["params", "integers", element("a", types[0]), *b]
    if kernel.lanes:
        constants |= {"WORKGROUP": kernel.workgroup, "LANES": kernel.lanes, "THREADS": kernel.threads}
        parts.append("meet_subgroup" if subgroup >= kernel.threads else "meet_workgroup")
    if kernel.file == "gemm_tiled":
        constants["ACROSS"] = across
    return assembled(kernel.file, tuple(parts), _constants(constants), fused=fused)


def _constants(given: Constants) -> Constants:
    return dict(sorted(given.items()))

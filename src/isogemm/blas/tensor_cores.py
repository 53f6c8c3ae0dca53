"""Whether a library's product can run on an NVIDIA GPU's tensor cores, or why not.

The multiples are those of NVIDIA's guide to matrix multiplication (Deep Learning Performance, "Requirements to use
Tensor Cores"): 16 bytes of each operand's row. Before cuBLAS 11 they were a condition; since then a product that misses
them may still use tensor cores, by narrower loads. Kernels here mask the ends of rows, so no shape changes the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.arguments import extent, items, shown
from ..contract.modes import MODES, contract_of
from ..errors import DTypeError, OptionError

__all__ = ["BYTES", "TYPES", "Eligibility", "tensor_cores"]

BYTES = 16
TYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Element types that some tensor core takes, and their bytes; float32 is rounded to tf32 on the way."""


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The answer; true where tensor cores can be used at full width.

    Attributes
    ----------
    uses : bool
        Type and mode allow tensor cores at all.
    reasons : tuple of str
        What is missed, one condition each; empty where nothing is.
    """

    uses: bool
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        if not self.reasons:
            return "tensor cores: yes"
        answer = "not at full width" if self.uses else "no"
        return "\n".join([f"tensor cores: {answer}", *(f"  {reason}" for reason in self.reasons)])


def tensor_cores(
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = "float32",
    mode: str = "default",
    leading: tuple[int, ...] = (),
    addresses: tuple[int, ...] = (),
) -> Eligibility:
    """Whether C[m, n] = A[m, k] @ B[k, n] can use tensor cores at full width.

    Parameters
    ----------
    m, n, k : int
    dtype : {"float32", "bfloat16", "float16", "int8"}
        Of A and B.
    mode : str
        A key of `isogemm.contract.modes.MODES`.
    leading : tuple of int, optional
        Leading dimensions in elements of `dtype`, where they are not those of A, B and C stored by rows: k, n and n.
    addresses : tuple of int, optional
        Where the operands begin, in bytes.

    Returns
    -------
    Eligibility

    Raises
    ------
    DTypeError, OptionError, ShapeError
        An unknown type or mode, an extent or a leading dimension below 1.

    Examples
    --------
    >>> print(tensor_cores(256, 251, 256, dtype="float16"))
    tensor cores: not at full width
      n = 251 is no multiple of 8: a row of 16 bytes of float16
    """
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise DTypeError("dtype", limit=", ".join(TYPES), value=shown(dtype), nearest="float16")
    m, n, k = (extent(name, size) for name, size in (("m", m), ("n", n), ("k", k)))
    steps, begins = _each("leading", leading, 1), _each("addresses", addresses, 0)
    contract_of(mode)
    refused = _refused(dtype, mode)
    several = BYTES // TYPES[dtype]
    row = f"no multiple of {several}: a row of {BYTES} bytes of {dtype}"
    reasons = [f"{name} = {size} is {row}" for name, size in (("n", n), ("k", k)) if size % several]
    reasons += [
        f"a leading dimension of {ld} is {row}" for ld in dict.fromkeys(steps) if ld % several and ld not in (n, k)
    ]
    reasons += [f"address {at:#x} is no multiple of {BYTES} bytes" for at in begins if at % BYTES]
    return Eligibility(not refused, (*([refused] if refused else []), *reasons))


def _each(name: str, given: Any, least: int) -> list[int]:
    found = items(given)
    if found is None:
        raise OptionError(name, limit="a whole number for each operand", value=shown(given), nearest="()")
    return [extent(f"{name}[{i}]", x, least) for i, x in enumerate(found)]


def _refused(dtype: str, mode: str) -> str:
    """Why a mode keeps a type from tensor cores; empty where it does not."""
    known = MODES[mode]
    if dtype == "float32" and not known.contract.startswith("tf32"):
        return f"mode {mode} computes float32 as IEEE numbers; mode='tf32' or 'tf32x3' rounds or splits them first"
    if dtype != "float32" and known.contract.startswith("tf32"):
        return f"mode {mode} is of float32; {dtype} needs mode='default'"
    if dtype != "float32" and known.contract:
        return f"mode {mode} asks for IEEE sums of {dtype}, which tensor cores do not give"
    return ""

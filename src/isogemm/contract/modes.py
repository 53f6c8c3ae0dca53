"""Math modes by the names that BLAS libraries and lectures use, and what each is as a contract.

A library's mode says how fast and how exact a product may be; a contract says which numbers it gives. Here a mode is no
more than a name for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..base.arguments import nearest
from ..errors import OptionError

__all__ = ["MEANT", "MODES", "Mode", "contract_of"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A math mode."""

    name: str
    contract: str  # what it is here; empty for the device's default, which depends on the operands' type
    operands: str  # what it is defined for
    cublas: str  # the mode or compute type of cuBLAS that it stands for; empty where there is none
    torch: str  # the value of ``torch.backends.cuda.matmul.fp32_precision``; empty where there is none
    meaning: str


_FLOATS = "float32, bfloat16, float16"
MODES: Mapping[str, Mode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Mode(
                "default", "", f"{_FLOATS}, int8", "CUBLAS_DEFAULT_MATH", "",
                "fma/chain; on a GPU its own tensor cores' sums for 16-bit operands; on a CPU the exact ones for int8",
            ),
            Mode(
                "tf32", "tf32:sm90/chain", "float32", "CUBLAS_TF32_TENSOR_OP_MATH", "tf32",
                "operands rounded to 11 significant bits, sums of tensor cores in float32's range",
            ),
            Mode(
                "tf32x3", "tf32x3:sm90/chain", "float32", "", "",
                "each operand split into two tf32 numbers, three products: float32's accuracy on tensor cores",
            ),
            Mode(
                "ieee", "fma/chain", _FLOATS, "CUBLAS_COMPUTE_32F", "ieee",
                "fused multiply-adds of IEEE float32, one after the other; 16-bit operands are widened exactly",
            ),
            Mode(
                "pedantic", "fma/chain", _FLOATS, "CUBLAS_PEDANTIC_MATH", "",
                "as ieee: the order over K is fixed already, which in cuBLAS is what pedantic asks for",
            ),
        )
    }
)  # fmt: skip
"""Every mode, by name."""

MEANT: Mapping[str, str] = MappingProxyType(
    {
        **{mode.name: mode.contract for mode in MODES.values() if mode.contract},
        **{mode.cublas.lower(): mode.contract for mode in MODES.values() if mode.contract and mode.cublas},
        **dict.fromkeys(("fp32", "float32", "f32", "sgemm", "highest", "simt"), "fma/chain"),
        **dict.fromkeys(("high", "medium"), "tf32:sm90/chain"),
        **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half", "tensor_core"), "tensor_core:sm90/chain"),
        **dict.fromkeys(("int8", "i8", "integer"), "exact/chain"),
    }
)
"""Words that are no contract, and the one that was probably meant."""


def contract_of(mode: str, contract: object = None) -> str | None:
    """The contract that a mode stands for, as text; None for the device's default.

    Parameters
    ----------
    mode : str
        A key of `MODES`.
    contract : object
        What was asked for besides; anything but None is refused.

    Raises
    ------
    OptionError
        There is no such mode, or both a mode and a contract are given.
    """
    if contract is not None:
        value = f"mode {mode!r} and contract {str(contract)!r}"
        raise OptionError("mode", limit="a mode or a contract", value=value, nearest=f"contract={str(contract)!r}")
    found = MODES.get(mode) if isinstance(mode, str) else None
    if found is None:
        raise OptionError("mode", limit="one of " + ", ".join(MODES), value=repr(mode), nearest=_nearest(mode))
    return found.contract or None


def _nearest(mode: object) -> str:
    word = mode.lower() if isinstance(mode, str) else ""
    meant = MEANT.get(word)
    same = [known.name for known in MODES.values() if known.contract == meant]
    same.sort(key=lambda name: MODES[name].cublas.lower() != word)  # two modes may be one contract
    return repr(same[0] if same else nearest(str(mode).lower(), MODES, "default"))

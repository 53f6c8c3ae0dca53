"""What every kernel of attention is to the planner, and how its file is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....base.dtypes import CODE
from ....contract.attention import EXP2_TERMS
from ....planner.bench import Bench
from ..driver import facts
from ..driver.kernel import Kernel
from ..driver.nvrtc import function_of
from .case import AttentionCase
from .trial import Run, try_kernel


class Attention:
    """A family of one kernel; what is here fits most of them."""

    name: str
    home = "backends/cuda/attention"
    plain: Attention | None = None  # whose bits it has to have where a device's arithmetic has no definition

    def supports(self, case: AttentionCase, config: str = "") -> bool:
        """Whether it can compute this; `config` is the text of its code."""
        return case.tensor_cores

    def rank(self, case: AttentionCase) -> int | None:
        """Where it stands among kernels that support a case, the least first; None where it is not worth a trial."""
        raise NotImplementedError

    def defines(self, case: AttentionCase) -> Mapping[str, Any]:
        """All that selects the compiled code."""
        raise NotImplementedError

    def launch(self, case: AttentionCase) -> Run:
        """Compile, or take from a cache, and bind."""
        raise NotImplementedError

    def reaching(self, case: AttentionCase) -> Iterable[AttentionCase]:
        """Cases that every verdict on the code of `case` rests on, whatever call asked for it first."""
        return ()

    def configs(self, case: AttentionCase) -> Sequence[str]:
        """The text of the code of a case: equal texts, equal code."""
        return [macros(self.defines(case))]

    def code(self, case: AttentionCase, config: str) -> str:
        """The configuration itself."""
        return config

    def trial(self, bench: Bench, case: AttentionCase, config: str) -> str:
        """See `isogemm.backends.cuda.attention.trial`."""
        return try_kernel(bench, self, case, self.plain)

    def bind(self, case: AttentionCase, config: str, device: int) -> Run:
        """`launch`."""
        return self.launch(case)


def macros(defines: Mapping[str, Any]) -> str:
    """Macros as one text."""
    return " ".join(f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in defines.items())


def terms(dtype: str) -> tuple[float, ...]:
    """Coefficients of exp2 for results of `dtype`."""
    return tuple(float(x) for x in EXP2_TERMS[dtype])


def padded(size: int) -> int:
    """Columns of a tile of Triton's for heads of that size."""
    return max(16, 1 << (size - 1).bit_length())


def named_steps(**strides: Sequence[int]) -> dict[str, int]:
    """Strides over batch entries, heads, tokens and keys, as Triton's kernels name them: ``q_b``, ``q_h``, ``q_t``."""
    return {f"{name}_{axis}": step for name, of in strides.items() for axis, step in zip("bhtk", of, strict=False)}


def edges(case: AttentionCase, whole: tuple[int, int], ragged: tuple[int, int]) -> Iterator[AttentionCase]:
    """Cases of two head sizes, as tiles have them and not: all rows and keys; bounds; lines farther apart."""
    yield case.made((2, 2, 67, 2, 300, *whole), bounds=False, stats=True, offset=300 - 67, pad=0)
    yield case.made((3, 2, 70, 3, 300, *ragged), bounds=True, stats=case.masks == 2, offset=40, pad=8)
    yield case.made((3, 2, 70, 3, 300, *ragged), bounds=True, stats=False, offset=-3, pad=24)


def loaded(
    name: str, case: AttentionCase, defines: Mapping[str, Any], *, function: str = "", before: str = ""
) -> Kernel:
    """A function of a file of this folder, by default ``attention_<name>``; results of exp2 have the case's dtype."""
    return compiled(name, case.dtype, case.device, defines, function=function, before=before)


def compiled(
    name: str, dtype: str, device: int, defines: Mapping[str, Any], *, function: str = "", before: str = ""
) -> Kernel:
    """`loaded`, with the coefficients of exp2 for results of `dtype`, on a device."""
    every = {**defines, "TERMS": ",".join(f"{value.hex()}f" for value in terms(dtype))}
    return function_of(f"attention/{name}.cu", function or f"attention_{name}", device, every, before=before)


def mask_defines(case: AttentionCase) -> dict[str, Any]:
    """Macros of the mask, the rule and the result."""
    kind = CODE.get(case.dtype_mask or "", 0)
    return {"MASK": case.masks, "MASK_KIND": kind, "CAUSAL": case.offset is not None, "OUT": CODE[case.dtype_out]}


def blocks_of(groups: int, device: int) -> int:
    """Blocks of each of so many groups that together fill a device twice."""
    return -(-2 * facts.device(device).multiprocessors // groups)

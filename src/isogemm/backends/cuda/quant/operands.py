"""What products with packed weights share on the host: checks of operands, how results are stored, compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ....errors import DeviceError, DTypeError, LimitError, ShapeError
from ..gemm.fp32 import ADD_BIAS, KINDS, LIMIT
from .layout import Packed

if TYPE_CHECKING:
    from ..driver.kernel import Kernel

__all__ = ["Tail", "check", "compiled", "dtype_of", "tail_of"]


class Tail(NamedTuple):
    """Strides of out and of the bias, and the packed types of include/fp32_epilogue.cu."""

    row: int
    column: int
    bias: int
    types: int


def dtype_of(tensor: Any) -> str:
    """Name of a tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def tail_of(out: Any, bias: Any) -> Tail:
    """How results are stored."""
    types = KINDS[dtype_of(out)]
    if bias is not None:
        types |= KINDS[dtype_of(bias)] << 8 | ADD_BIAS << 12
    row, column = out.stride()
    return Tail(row, column, 0 if bias is None else bias.stride(0), types)


def check(x: Any, packed: Packed, out: Any, bias: Any, takes: Callable[[str, int, int, int, str], bool]) -> None:
    """Refuse what a product x @ W.T + bias cannot take.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, LimitError
    """
    n, k = packed.n, packed.k
    if x.ndim != 2 or x.shape[1] != k or tuple(out.shape) != (x.shape[0], n):
        raise ShapeError(
            "operands of a quantized product", limit=f"x [m, {k}] and out [m, {n}]",
            value=f"x {list(x.shape)} and out {list(out.shape)}", nearest=f"x [m, {k}]",
        )  # fmt: skip
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError("bias", limit=f"[{n}]", value=list(bias.shape), nearest=f"[{n}]")
    for name, tensor in (("x", x), ("out", out), ("bias", bias)):
        if tensor is None:
            continue
        if dtype_of(tensor) not in KINDS:
            raise DTypeError(name, limit="float32, bfloat16 or float16", value=dtype_of(tensor), nearest="float32")
        if tensor.device != packed.data.device:
            where = str(packed.data.device)
            raise DeviceError(f"device of {name}", limit=f"the weight's, {where}", value=tensor.device, nearest=where)
    if not takes(packed.format, x.shape[0], n, k, dtype_of(x)):
        size = max(x.shape[0], n, k)
        raise LimitError("sizes of a quantized product", limit=f"up to {LIMIT}", value=size, nearest=LIMIT)


def compiled(file: str, kernel: str, device: int, **defines: object) -> Kernel:
    """Compile and load a kernel of a file of this folder."""
    from ..driver.facts import device as facts
    from ..driver.kernel import load
    from ..driver.nvrtc import compile_files

    cubin = compile_files([f"quant/{file}"], arch=facts(device).arch, defines=defines, options=("-std=c++17",))
    return load(cubin, kernel, device)

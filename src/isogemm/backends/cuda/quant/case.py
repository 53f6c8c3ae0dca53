"""A product with a quantized weight but for its addresses: what kernels are chosen by, tried with and bound to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....base.dtypes import CODE, ITEMSIZE, torch_name
from ....errors import DeviceError, DTypeError, ShapeError
from ....problem.product import alignment
from ..driver.kernel import Parameter, longs
from ..gemm.fp32 import ADD_BIAS
from .layout import Packed


@dataclass(frozen=True, slots=True)
class QuantCase:
    """x @ W.T + bias but for its addresses; matrices are contiguous and aligned where nothing else is said."""

    # ``same``: x times weights rounded to its type; ``q8``: codes of x times codes; ``fp32``: x and weights in float32
    path: str
    format: str
    dtype: str
    dtype_out: str
    dtype_bias: str | None
    m: int
    n: int
    k: int
    # what the bits have to be, empty where nobody asks; it selects no code
    arithmetic: str = field(default="", compare=False)
    # x_strides, out_strides: elements from row to row and from column to column; None: contiguous
    x_strides: tuple[int, int] | None = None
    out_strides: tuple[int, int] | None = None
    bias_stride: int = 1
    # x_align, out_align: what divides the addresses of x and of out: a power of two up to 16
    x_align: int = 16
    out_align: int = 16

    @property
    def x(self) -> tuple[int, int]:
        """Strides of x."""
        return self.x_strides or (self.k, 1)

    @property
    def out(self) -> tuple[int, int]:
        """Strides of the result."""
        return self.out_strides or (self.n, 1)

    @property
    def wide(self) -> bool:
        """Whether rows of the result begin at multiples of 16 bytes."""
        row = self.out[0] if self.m > 1 else self.n
        return self.out_align == 16 and row * ITEMSIZE[self.dtype_out] % 16 == 0

    @property
    def bias_kind(self) -> int:
        """Code of the type of the bias; -1 where there is none."""
        return -1 if self.dtype_bias is None else CODE[self.dtype_bias]

    @property
    def types(self) -> int:
        """The packed types of include/fp32_epilogue.cu."""
        bias = 0 if self.dtype_bias is None else CODE[self.dtype_bias] << 8 | ADD_BIAS << 12
        return CODE[self.dtype_out] | bias

    @property
    def steps(self) -> list[Parameter]:
        """Strides of the result and of the bias, as kernels take them."""
        return longs(*self.out, 0 if self.dtype_bias is None else self.bias_stride)


def case_of(path: str, x: Any, packed: Packed, out: Any, bias: Any) -> QuantCase:
    """The case of tensors x [m, k], out [m, n] and bias [n] or None.

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        They are no operands of a product with this weight.
    """
    n, k, where = packed.n, packed.k, packed.data.device
    m = int(x.shape[0]) if x.ndim == 2 else -1
    for name, tensor, shape in (("x", x, (m, k)), ("out", out, (m, n)), ("bias", bias, (n,))):
        if tensor is not None and tuple(tensor.shape) != shape:
            limit = f"[m, {k}]" if name == "x" else str(shape)
            raise ShapeError(f"{name} of a quantized product", limit=limit, value=list(tensor.shape), nearest=limit)
    for name, tensor in (("x", x), ("out", out), ("bias", bias)):
        if tensor is not None and torch_name(tensor.dtype) not in CODE:
            value = torch_name(tensor.dtype)
            raise DTypeError(name, limit="float32, bfloat16 or float16", value=value, nearest="float32")
        if tensor is not None and tensor.device != where:
            raise DeviceError(
                f"device of {name}", limit=f"the weight's, {where}", value=tensor.device, nearest=str(where)
            )
    return QuantCase(
        path, packed.format, torch_name(x.dtype), torch_name(out.dtype),
        None if bias is None else torch_name(bias.dtype), m, n, k, "",
        _strides(x), _strides(out), 1 if bias is None else bias.stride(0),
        *(alignment(matrix.data_ptr(), most=16) for matrix in (x, out)),
    )  # fmt: skip


def _strides(matrix: Any) -> tuple[int, int] | None:
    """None of a contiguous one."""
    return None if matrix.is_contiguous() else tuple(matrix.stride())

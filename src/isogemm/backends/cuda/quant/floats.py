"""float32 activations times quantized weights on the device: ``fma/chain``, with the CPU's bits.

Few rows of x: weights are dequantized in registers, see quant/floats.cu. More: some rows of W at a time are
written out as float32, and the kernels of plain products multiply them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....contract.spec import Contract, Order
from ....problem.product import Addresses, Product, Strides
from ..gemm.fp32 import KINDS, LIMIT
from .layout import FORMATS, ROWS, Layout, Packed, macros
from .operands import Tail, check, compiled, dtype_of, tail_of

__all__ = ["FEW", "run", "takes"]

FEW = 8
"""Rows of x up to which weights are dequantized in registers."""

WARPS = 2
RING = 32 * 1024  # bytes of a warp's ring, about
PIECE = 2**25  # dequantized elements at a time
_MOST = 4096


class Few(NamedTuple):
    """A bound launch, and its device."""

    launch: Callable[..., None]
    device: int


_few: dict[tuple[Any, ...], Few] = {}


def takes(format: str, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether `run` multiplies x [m, k] of a type with a weight [n, k] in a format."""
    return format in FORMATS and dtype in KINDS and k >= 0 and max(m, n, k) <= LIMIT


def run(x: Any, packed: Packed, out: Any, bias: Any = None) -> None:
    """out = x @ W.T + bias under ``fma/chain``, W dequantized in float32; enqueued on torch's current stream.

    Parameters
    ----------
    x : CUDA tensor [m, k]
        float32, or bfloat16 or float16, which is widened; any strides.
    packed : Packed
        W [n, k].
    out : CUDA tensor [m, n]
        float32, bfloat16 or float16, any strides.
    bias : CUDA tensor [n], optional

    Raises
    ------
    ShapeError, DTypeError, DeviceError, LimitError
        Operands do not fit.

    Determinism
    -----------
    Each result is a function of one row of x, one row of W and the bias.
    """
    check(x, packed, out, bias, takes)
    if not out.numel():
        return
    if x.shape[0] > FEW and packed.k:
        _many(x, packed, out, bias)
        return
    from ..driver.facts import current_stream

    key = (
        packed.layout.format.name, packed.n, packed.k, x.shape, x.stride(), x.dtype, out.stride(), out.dtype,
        None if bias is None else (bias.stride(), bias.dtype), x.data_ptr() % 16, packed.data.device,
    )  # fmt: skip
    if key not in _few:
        if len(_few) >= _MOST:
            _few.clear()
        _few[key] = _bind(x, packed, tail_of(out, bias))
    found = _few[key]
    found.launch(
        current_stream(found.device), x.data_ptr(), packed.data.data_ptr(), out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )  # fmt: skip


def _bind(x: Any, packed: Packed, tail: Tail) -> Few:
    """``launch(stream, x, w, out, bias)``."""
    (m, k), n, lay, device = x.shape, packed.n, packed.layout, packed.data.get_device()
    dtype, (row, column) = dtype_of(x), x.stride()
    unit = 4 * x.element_size()
    vector = column == 1 and x.data_ptr() % unit == 0 and (row % 4 == 0 or m == 1)
    rows = 1 << (min(m, FEW) - 1).bit_length()
    stages = _stages(lay)
    made = compiled(
        "floats.cu",
        "quant_floats",
        device,
        **macros(lay),
        NX=rows,
        TYPE=KINDS[dtype],
        VEC=vector,
        WARPS=WARPS,
        STAGES=stages,
        TYPES=tail.types,
    )
    numbers = [("i64", v) for v in (row, column, tail.row, tail.column, tail.bias)]
    launch = made.bind(
        [*["ptr"] * 4, *numbers, *(("i32", v) for v in (m, n, k))],
        grid=(-(-n // (2 * ROWS * WARPS)), -(-m // rows)), block=(32 * WARPS,),
        shared=WARPS * stages * _stage_bytes(lay), pdl=True,
    )  # fmt: skip
    return Few(launch, device)


def _stage_bytes(lay: Layout) -> int:
    return 2 * (256 // lay.record_k) * lay.record_bytes


def _stages(lay: Layout) -> int:
    return max(2, min(6, RING // _stage_bytes(lay)))


def _many(x: Any, packed: Packed, out: Any, bias: Any) -> None:
    """Some rows of W at a time, as float32."""
    import torch

    from ..driver.facts import current_stream
    from ..gemm.execute import choose
    from . import dequantize as quant_dequantize

    wide = x if x.dtype == torch.float32 else x.float()
    (m, k), device = x.shape, packed.data.get_device()
    rows = min(packed.n, max(ROWS, PIECE // k // 128 * 128))
    step = -(-k // 4) * 4
    room = torch.empty((rows, step), dtype=torch.float32, device=out.device)[:, :k]
    for first in range(0, packed.n, rows):
        count = min(rows, packed.n - first)
        quant_dequantize.run(packed, room[:count], first)
        into = out[:, first : first + count]
        at = Addresses(
            wide.data_ptr(), room.data_ptr(), into.data_ptr(), 0, 0 if bias is None else bias[first:].data_ptr()
        )
        product = Product(
            m, count, k, "float32", "float32", dtype_of(out), Contract("fma", Order()),
            a=Strides(*wide.stride()), b=Strides(1, step), out=Strides(*out.stride()),
            dtype_bias=None if bias is None else dtype_of(bias), bias_stride=1 if bias is None else bias.stride(0),
            align=_align(at.a | at.b | at.out),
        )  # fmt: skip
        choose(product, device)(at, current_stream(device))


def _align(addresses: int) -> int:
    """The largest power of two up to 128 that divides them all."""
    return (addresses | 128) & -(addresses | 128)

"""A library's algorithms against a kernel of ours, on the device: the product itself, on operands that show an order.

Four kinds of operands: normal ones; ones whose products cancel in pairs along K, half of K apart, so that what is
added in another order leaves other roundings; ones alone, whose sums grow past what is exact in 16 bits; and tiny ones,
which show whether subnormal numbers and the sign of zero are kept (cuBLASLt 13.1.0 has kernels that pass the others and
not these: for k 1 of 16 bits those with ids 12 and 16, for float32 those with id 55).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .....base.dtypes import ITEMSIZE
from .....problem.product import Addresses, Launch, Product

KINDS = ("normal", "cancelling", "ones", "tiny")
SEED = 1
# What normal values are multiplied with to be tiny, row by row in turns: some products are subnormal in the result's
# type, or underflow. Those of float16 are never so small in float32; there operands are subnormal.
TINY = {"float32": (2.0**-66, 2.0**-74), "bfloat16": (2.0**-66, 2.0**-74), "float16": (2.0**-20, 1.0)}


def nbytes(product: Product) -> int:
    """Memory that a comparison takes."""
    p = product
    a, b = p.m * p.k * ITEMSIZE[p.dtype_a], p.n * p.k * ITEMSIZE[p.dtype_b]
    out = p.m * p.n * ITEMSIZE[p.dtype_out]
    return p.batch * (2 * (a + b) + 3 * out + (0 if p.dtype_c is None else p.m * p.n * ITEMSIZE[p.dtype_c]))


def differing(product: Product, ours: Launch, others: Sequence[Launch], random: Any, stream: int) -> list[int]:
    """Elements of a packed product in which each of `others` differs from ours, over all kinds of operands.

    These are drawn by `random`, a generator of torch's, on its device.
    """
    import torch

    random.manual_seed(SEED)
    counts = [torch.zeros((), dtype=torch.int64, device=random.device) for _ in others]
    for kind in KINDS:
        held, at = operands(product, kind, random)
        words = torch.int16 if ITEMSIZE[product.dtype_out] == 2 else torch.int32
        want = None
        for count, launch in zip((None, *counts), (ours, *others), strict=True):
            out = _like_out(product, product.dtype_out, random, "poison")
            launch(at._replace(out=out.data_ptr()), stream)
            if count is None:
                want = out.view(words)
            else:
                count += (out.view(words) != want).sum()
        del held
    return [int(count) for count in counts]


def operands(product: Product, kind: str, random: Any) -> tuple[tuple[Any, ...], Addresses]:
    """A packed product's operands of a kind, with an output of NaNs, and where they lie."""
    import torch

    p = product
    bias = None
    if p.dtype_bias is not None:
        shape = (p.n * p.bias_stride,)
        bias = torch.randn(shape, dtype=getattr(torch, p.dtype_bias), device=random.device, generator=random)
    held = (
        _matrix(p, "a", kind, random),
        _matrix(p, "b", kind, random),
        _like_out(p, p.dtype_out, random, "poison"),
        None if p.dtype_c is None else _like_out(p, p.dtype_c, random, "normal"),
        bias,
    )
    return held, Addresses(*[0 if x is None else x.data_ptr() for x in held])


def _matrix(product: Product, which: str, kind: str, random: Any) -> Any:
    """Packed values of operand ``a`` or ``b``, whatever its layout, aligned no better than the product's."""
    import torch

    p, where = product, random.device
    rows = p.m if which == "a" else p.n
    dtype = getattr(torch, p.dtype_a if which == "a" else p.dtype_b)
    shape = (p.batch, rows, p.k)
    if kind == "ones":
        x = torch.ones(shape, dtype=dtype, device=where)
    else:
        x = torch.randn(shape, dtype=dtype, device=where, generator=random)
    if kind == "tiny":
        x[:, 0::2], x[:, 1::2] = (x[:, i::2] * factor for i, factor in enumerate(TINY[p.dtype_a]))
    if kind == "cancelling":
        half = p.k // 2
        x[..., half : 2 * half] = x[..., :half] if which == "a" else -x[..., :half]
    strides = p.a if which == "a" else p.b
    along_k = strides.col == 1 if which == "a" else strides.row == 1
    return _shifted(x if along_k else x.transpose(1, 2), p.align)


def _like_out(product: Product, dtype: str, random: Any, kind: str) -> Any:
    """Memory of the shape of `out`, in the order in which that lies: NaNs, or normal values."""
    import torch

    p, kept = product, getattr(torch, dtype)
    shape = (p.batch, p.m, p.n) if p.out.col == 1 else (p.batch, p.n, p.m)
    if kind == "poison":
        return _shifted(torch.full(shape, float("nan"), dtype=kept, device=random.device), p.align)
    return _shifted(torch.randn(shape, dtype=kept, device=random.device, generator=random), p.align)


def _shifted(x: Any, align: int) -> Any:
    """The values one after the other, at an address that is a multiple of `align` bytes and of no more."""
    import torch

    shift = 0 if align >= 128 else max(1, align // x.element_size())
    if not shift:
        return x.contiguous()
    flat = torch.empty(x.numel() + shift, dtype=x.dtype, device=x.device)
    return flat[shift:].view(x.shape).copy_(x)

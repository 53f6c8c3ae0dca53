"""Grouped products as torch writes them: one tensor whose groups end at offsets, and a stack or a tensor beside it.

- a [S, K], b [G, K, N]: ``out[i:j] = a[i:j] @ b[g]`` of [S, N];
- a [G, M, K], b [K, S]: ``out[:, i:j] = a[g] @ b[:, i:j]`` of [M, S];
- a [M, S], b [S, N]: ``out[g] = a[:, i:j] @ b[i:j]`` of [G, M, N];
- a [G, M, K], b [G, K, N], without offsets: ``out[g] = a[g] @ b[g]`` of [G, M, N],

where group g is the rows or columns from i up to j, and j is its offset.

A group is one item of `isogemm.gemm_grouped`, so a row of it has the bits of that row alone. What no group holds is
zero, where torch leaves memory as it was found. The first and the third form read offsets on a GPU where they are, on
tensor cores of Hopper's; else how long groups are is needed on the host, which waits for it once in a call.
"""

from __future__ import annotations

from typing import Any

import torch

from ...api import products as api
from ...contract.spec import Contract
from ...errors import DeviceError, OptionError, ShapeError
from ..arguments import contract_text
from ..device import column
from .products import resolved

Tensor = Any  # torch is untyped to mypy


def grouped_mm(
    contract: Contract | str | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """torch's grouped_mm outside the gradient's graph: the arguments of aten._grouped_mm.

    Raises OptionError: a bias, which torch does not add either; offsets of another dtype than int32; offsets where
    nothing is ragged, or none where something is. Raises ShapeError: dimensions, groups or offsets that do not belong
    together, as far as can be seen before the products. Raises DeviceError: offsets on a CUDA device while a graph is
    captured.
    """
    _check(a, b, offs, bias)
    if offs is None:
        return api.gemm_strided_batched(a, b, contract=contract, out_dtype=out_dtype)
    out = _by_device(contract, a, b, offs, out_dtype or a.dtype)
    if out is not None:
        return out
    rows, columns = a.dim() == 2, b.dim() == 2  # which of the operands is one tensor for all groups
    length = a.shape[-1] if rows and columns else a.shape[0] if rows else b.shape[1]
    groups = spans(offs, length)
    end = groups[-1][1] if groups else 0
    shape = (len(groups), a.shape[0], b.shape[1]) if rows and columns else (a.shape[-2], b.shape[-1])
    out = a.new_empty(shape, dtype=out_dtype or a.dtype)
    if rows and columns:
        items = [(a[:, i:j], b[i:j], out[g]) for g, (i, j) in enumerate(groups)]
    elif rows:
        out[end:].zero_()
        items = [(a[i:j], b[g], out[i:j]) for g, (i, j) in enumerate(groups) if i < j]
    else:
        out[:, end:].zero_()
        items = [(a[g], b[:, i:j], out[:, i:j]) for g, (i, j) in enumerate(groups) if i < j]
    if items:
        left, right, outs = (list(x) for x in zip(*items, strict=True))
        api.gemm_grouped(left, right, out=outs, contract=contract, out_dtype=out_dtype)
    return out


def _by_device(contract: Contract | str | None, a: Tensor, b: Tensor, offs: Tensor, out_dtype: Any) -> Tensor | None:
    """The first and the third form by kernels that read offsets on the device; None where there are none."""
    if not _on_gpu(a, b, offs) or a.dim() == 3 or not a.numel() or not offs.is_contiguous():
        return None
    asked = contract_text(contract)
    kernels, rest = column("grouped", "cuda"), (offs, asked, out_dtype, lambda: resolved(asked, a, b))
    if b.dim() == 2:
        return kernels.outer(a.mT, b, *rest, ends=True)
    return kernels.multiplied(a, b.mT, None, *rest, ends=True)


def _on_gpu(a: Tensor, b: Tensor, offs: Tensor) -> bool:
    """Whether all lies on one GPU, and operands are of a type that tensor cores multiply."""
    return a.is_cuda and offs.device == a.device and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)


def spans(offs: Tensor, length: int) -> list[tuple[int, int]]:
    """Where each group begins and ends; waits for offsets that are on a device.

    Raises DeviceError: a stream is captured, in which nothing can be waited for. Raises ShapeError: offsets that fall,
    or end behind what they divide.
    """
    ends = on_host(offs)
    starts = [0, *ends[:-1]]
    if any(i > j for i, j in zip(starts, ends, strict=True)) or (ends and ends[-1] > length):
        nearest = [min(max(ends[: g + 1]), length) for g in range(len(ends))]
        raise ShapeError(
            "offsets of grouped_mm",
            limit=f"ascending, up to {length}",
            value=ends,
            nearest=[max(x, 0) for x in nearest],
        )
    return list(zip(starts, ends, strict=True))


def on_host(lengths: Tensor) -> list[int]:
    """Offsets or counts as numbers. Raises DeviceError: a stream is captured, in which nothing can be waited for."""
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            "groups of rows in graph capture", limit="lengths that the host knows", value="a tensor on the device",
            nearest="eager code, or torch.bmm of weights that were gathered by row",
        )  # fmt: skip
    found: list[int] = lengths.tolist()
    return found


def _check(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None) -> None:
    """What torch checks, but for strides, which isogemm takes any of."""
    if bias is not None:
        raise OptionError("bias of grouped_mm", limit=None, value="a tensor", nearest="adding it to the result")
    for name, x in (("a", a), ("b", b)):
        if x.dim() not in (2, 3):
            raise ShapeError(f"dimensions of {name} in grouped_mm", limit="2 or 3", value=x.dim(), nearest=3)
    if (offs is None) != (a.dim() == b.dim() == 3):
        limit = "none for two stacks" if offs is not None else "int32 ends of the groups, for a tensor of 2 dimensions"
        value, nearest = ("offsets", None) if offs is not None else (None, "torch.tensor(ends, dtype=torch.int32)")
        raise OptionError("offs of grouped_mm", limit=limit, value=value, nearest=nearest)
    if a.shape[-1] != b.shape[-2]:
        value = f"{a.shape[-1]} and {b.shape[-2]}"
        raise ShapeError("inner dimensions of grouped_mm", limit="equal", value=value, nearest=b.shape[-2])
    if offs is not None:
        if offs.dtype is not torch.int32:
            raise OptionError("offs of grouped_mm", limit="int32", value=offs.dtype, nearest="offs.to(torch.int32)")
        if offs.dim() != 1:
            raise ShapeError("dimensions of offs in grouped_mm", limit=1, value=offs.dim(), nearest=1)
    counts = {x.shape[0] for x in (a, b) if x.dim() == 3} | (set() if offs is None else {offs.shape[0]})
    if len(counts) > 1:
        raise ShapeError("groups of grouped_mm", limit="as many in each operand", value=sorted(counts), nearest=None)

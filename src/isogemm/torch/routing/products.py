"""torch's matrix products as calls of isogemm: what `isogemm.torch.routing.scope` puts in the place of aten's kernels.

Each function takes the arguments of the aten operator of its name. They run below autograd, on tensors that it no
longer watches, so the same functions serve forward products and those that autograd's own nodes call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...api import products as api
from ...contract.spec import Contract
from ...errors import ContractError, DTypeError
from ..device import DTYPES
from ..gemm.products import scaled
from ..gemm.ragged import grouped_mm
from .elementwise import written

Tensor = Any  # torch is untyped to mypy
_aten: Any = torch.ops.aten


def operands(values: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among an operator's positional arguments."""
    return [x for x in values if isinstance(x, torch.Tensor)]


def _outside(args: Any) -> list[Any] | None:
    """An operator's arguments outside the gradient's graph; None where isogemm does not compute their product.

    It computes those of dense tensors of one of its dtypes, on a CPU or a CUDA device.
    """
    dtype, found = None, []
    for x in args:
        if isinstance(x, torch.Tensor):
            if dtype is None:
                dtype = x.dtype
            if (
                x.dtype is not dtype
                or dtype not in DTYPES
                or not (x.is_cpu or x.is_cuda)
                or x.layout is not torch.strided
                or x.is_nested
            ):
                return None
            if x.requires_grad:
                x = x.detach()
        found.append(x)
    return found


def is_served(args: Any) -> bool:
    """Whether isogemm computes products and reductions of an operator's arguments."""
    return _outside(args) is not None


def _fit(name: str, args: list[Any]) -> bool:
    """Whether two factors have the dimensions and the number of items that torch asks for, and the addend the result's.

    The addend may have fewer of them, or 1 in places, unless the result is written to it.
    """
    _, ranks = _ROWS.get(name.partition(".")[0].rstrip("_"), (None, ()))
    if not ranks:
        return True
    a, b = args[len(ranks) - 2 : len(ranks)]
    if (a.dim(), b.dim()) != ranks[-2:] or (b.dim() == 3 and len(a) != len(b)):
        return False
    if len(ranks) == 2:
        return True
    shape, addend = (a.shape[:-1] + b.shape[1:][-1:])[-ranks[0] :], args[0].shape
    if name.endswith("_") or len(addend) > len(shape):
        return bool(addend == shape)
    return all(n in (1, full) for n, full in zip(addend[::-1], shape[::-1], strict=False))


def replaced(function: Callable[..., Tensor], name: str, contract: Contract | None, args: Any, kwargs: Any) -> Any:
    """The result of one aten operator: a new tensor, or written to `out` or to the operator's own first argument.

    None where the operands are not isogemm's, or have shapes that torch refuses: the caller passes the operator on to
    torch. Raises ContractError: the contract does not define products of this dtype.
    """
    count = 2 if function is grouped_mm else len(args)  # behind its operands are offsets, in integers
    found, out = _outside(args[:count]), kwargs.get("out")
    if found is None or not _fit(name, found):
        return None
    found += args[count:]
    if out is not None:
        if "dtype" not in name and _outside((found[0], out)) is None:
            return None
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    try:
        result = function(contract, *found, **kwargs)
    except DTypeError as error:  # a TypeError, for which ``a @ b`` would blame the operands' classes instead
        raise ContractError(error.what, limit=error.limit, value=error.value, nearest=error.nearest) from error
    if out is None:
        return args[0].copy_(result) if name.endswith("_") else result
    return written(out, result)


def mm(contract: Contract | None, a: Tensor, b: Tensor, out_dtype: Any = None) -> Tensor:
    """a @ b: [m, k] and [k, n], or a vector on the right, or two vectors."""
    return api.matmul(a, b, contract=contract, out_dtype=out_dtype)


def bmm(contract: Contract | None, a: Tensor, b: Tensor, out_dtype: Any = None) -> Tensor:
    """a[i] @ b[i]."""
    return api.gemm_strided_batched(a, b, contract=contract, out_dtype=out_dtype)


def addmm(
    contract: Contract | None, c: Tensor, a: Tensor, b: Tensor, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """alpha * a @ b + beta * c, for matrices and for stacks of them; rounded in the order of `isogemm.gemm`."""
    return scaled(c, a, b, float(alpha), float(beta), contract, out_dtype)


def addmv(contract: Contract | None, c: Tensor, a: Tensor, v: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """alpha * a @ v + beta * c."""
    column = c.expand(a.shape[0]).unsqueeze(1)
    return addmm(contract, column, a, v.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


def addbmm(contract: Contract | None, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """alpha * sum over i of a[i] @ b[i] + beta * c: one product whose K runs through the stack."""
    count, m, k = a.shape
    wide = a.transpose(0, 1).reshape(m, count * k)
    return addmm(contract, c, wide, b.reshape(count * k, b.shape[-1]), beta=beta, alpha=alpha)


def addmm_activation(
    contract: Contract | None, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor:
    """relu or gelu of `addmm`, which is rounded first."""
    v = addmm(contract, c, a, b, beta=beta, alpha=alpha)
    return torch.nn.functional.gelu(v, approximate="tanh" if v.is_cuda else "none") if use_gelu else torch.relu(v)


def linear(contract: Contract | None, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias for any number of leading dimensions; reaches a dispatch mode in inference mode only."""
    if w.dim() == 1 and bias is None:
        return api.matmul(x, w, contract=contract)
    return api.linear(x, w, bias, contract=contract)


def convolution(
    contract: Contract | None, x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Tensor | None:  # fmt: skip
    """What w lies upon, as rows of a product with it: along one dimension, or of patches that do not overlap.

    Others would be written out several times over in each dimension, and are torch's.
    """
    rank, extents = w.dim() - 2, w.shape[2:]
    wide = [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=False)]
    if (
        transposed
        or groups != 1
        or 0 in w.shape  # torch's own error
        or any(d != 1 for d in dilation)
        or any(p < 0 for p in padding)
        or not len(stride) == len(padding) == rank == x.dim() - 2
        or (rank > 1 and any(step < n for step, n in zip(stride, extents, strict=True)))
        or any(n > all_ for n, all_ in zip(extents, wide, strict=True))
        or x.shape[1] != w.shape[1]
    ):
        return None
    patches = torch.nn.functional.pad(x, [p for p in reversed(padding) for _ in range(2)])
    for d in range(rank):
        patches = patches.unfold(d + 2, extents[d], stride[d])
    rows = patches.movedim(1, rank + 1).flatten(rank + 1)
    return api.linear(rows, w.flatten(1), bias, contract=contract).movedim(-1, 1).contiguous()


# What computes each of aten's products; and the dimensions of its two factors, before them those of the result, where
# something is added to the product. None where torch's rules are others.
_ROWS: dict[str, tuple[Callable[..., Tensor | None], tuple[int, ...]]] = {
    "mm": (mm, (2, 2)),
    "bmm": (bmm, (3, 3)),
    "mv": (mm, (2, 1)),
    "dot": (mm, (1, 1)),
    "vdot": (mm, (1, 1)),
    "addmm": (addmm, (2, 2, 2)),
    "_addmm_activation": (addmm_activation, (2, 2, 2)),
    "baddbmm": (addmm, (3, 3, 3)),
    "addmv": (addmv, (1, 2, 1)),
    "addbmm": (addbmm, (2, 3, 3)),
    "linear": (linear, ()),
    "_grouped_mm": (grouped_mm, ()),
    "convolution": (convolution, ()),
}
_IN_PLACE = ("addmm_", "baddbmm_", "addmv_", "addbmm_")


def _table() -> dict[Any, tuple[Callable[..., Tensor | None], str]]:
    table = {}
    for name in (*_ROWS, *_IN_PLACE):
        packet = getattr(_aten, name)
        for overload in packet.overloads():
            variant = name if overload == "default" else f"{name}.{overload}"
            table[getattr(packet, overload)] = (_ROWS[name.rstrip("_")][0], variant)
    return table


# Every overload of aten's products that isogemm computes, with its name.
PRODUCTS = _table()

# transformers' operator for torch's where that one is missing, or a compiler cannot take it: the same arguments.
_ELSEWHERE = {"transformers.grouped_mm_fallback.default": (grouped_mm, "grouped_mm_fallback")}


def product_of(func: Any) -> tuple[Callable[..., Tensor], str] | None:
    """How isogemm computes an operator that is a product, and its name; None for every other operator."""
    return PRODUCTS.get(func) or _ELSEWHERE.get(str(func))


# Operators whose kernels hold products that no dispatch mode sees, by how their names begin: torch computes them.
_HOLDING = (
    "_addmm _cdist _convolution _cslt_sparse_mm _cudnn_rnn _dyn_quant_matmul _efficient_attention _euclidean_dist "
    "_flash_attention _fused_sdp _int_mm _native_multi_head _scaled_dot_product _scaled_grouped _scaled_mm "
    "_sparse_addmm _sparse_mm _sparse_semi_structured _sparse_sparse _thnn_ _transformer_encoder _trilinear "
    "_triton_ _weight_int conv_depthwise convolution cudnn_conv linalg_matrix_exp linear_backward miopen_conv "
    "miopen_rnn mkldnn_ slow_conv sspaddmm"
)
_CONTAINED = tuple(_HOLDING.split())


def contained(name: str) -> bool:
    """Whether an aten operator that isogemm does not compute has products in its kernel."""
    return name.startswith(_CONTAINED)


def is_composite(func: Any) -> bool:
    """Whether torch defines an operator by others, which a dispatch mode sees in its place except in inference mode."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
    except RuntimeError:  # not one of the dispatcher's, as aten.sym_size
        return False

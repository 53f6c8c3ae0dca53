"""Calls of torch above autograd: what a scope replaces whole, or gives one form.

A dispatch mode sees operators below autograd, after torch has chosen how to make a call of them. Where that choice
looks at the batch (the strides of a linear layer's input), or is itself the operation (fused attention), the call is
taken here: by `isogemm.torch.routing.scope`'s function mode inside a scope, and by kernels of composite operators after
`enable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...api import products as api
from ...contract.spec import Contract
from ...errors import ContractError, IsogemmError, OptionError
from .. import reductions
from ..attention.calls import scaled_dot_product_attention
from ..device import DTYPES
from .rows import is_normed

Tensor = Any  # torch is untyped to mypy
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_free(*tensors: Tensor | None, transformed: bool = False) -> bool:
    """Whether a call may be replaced whole: torch's own tensors with memory, and no trace or tangent.

    `transformed`: by something that torch.func's transforms know; else there must be none of those either.
    """
    for x in tensors:
        if x is not None and (
            type(x) not in _PLAIN or x.dtype not in DTYPES or not (x.is_cpu or x.is_cuda) or x.is_nested
        ):
            return False
    return not (
        (torch._C._are_functorch_transforms_active() and not transformed)
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def folded(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of multi_head_attention_forward with contiguous inputs, so that its own calls of `linear` fold.

    Those calls are not seen one by one: a function mode sees the outermost call alone. One tensor stays one tensor.
    """
    seen: dict[int, Tensor] = {}

    def contiguous(x: Any) -> Any:
        return seen.setdefault(id(x), x.contiguous()) if isinstance(x, torch.Tensor) else x

    named = {k: contiguous(v) if k in ("query", "key", "value") else v for k, v in kwargs.items()}
    return (*map(contiguous, args[:3]), *args[3:]), named


def linear(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`linear` as one addmm, whatever the strides.

    torch makes it a product and an addition, with a rounding between them, where the input's strides do not fold: a
    transposed activation folds alone and not in a batch, and a bfloat16 result would then depend on the batch.
    """
    x, w, bias = (*args, *(kwargs[k] for k in ("input", "weight", "bias") if k in kwargs), None)[:3]
    if (
        type(x) is not torch.Tensor
        or x.is_nested
        or bias is None
        or bias.dim() != 1
        or w.dim() != 2
        or x.dim() in (0, 2)
        or x.dtype not in DTYPES
        or x.shape[-1] != w.shape[1]  # torch's own error
    ):
        return func(*args, **kwargs)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return torch.addmm(bias, rows, w.t()).view(*x.shape[:-1], w.shape[0])


def linear_direct(contract: Contract | None, args: Any, kwargs: Any) -> Tensor | None:
    """`linear` without torch's dispatcher, where no gradient is recorded; None where the call is not so simple."""
    if kwargs or len(args) < 2:
        return None
    x, w, bias = args if len(args) == 3 else (*args, None)
    dtype = x.dtype
    if (
        x.is_nested
        or w.dtype is not dtype
        or (bias is not None and (bias.dtype is not dtype or bias.dim() != 1))
        or w.dim() != 2
        or x.dim() < 1
        or x.shape[-1] != w.shape[1]
        or not is_free(x, w, bias)
        or torch.is_autocast_enabled(x.device.type)
    ):
        return None
    try:
        return api.linear(x, w, bias, contract=contract)
    except IsogemmError:  # said in torch's place, and once, by the operator's own route
        return None


def attention(contract: Contract | None, *args: Any, **kwargs: Any) -> Tensor | None:
    """scaled_dot_product_attention by isogemm's; None where it is torch's: dropout, other dtypes, unequal batches."""
    operands = [*args[:3], *[kwargs[k] for k in ("query", "key", "value") if k in kwargs]]
    if not is_free(*operands, transformed=True) or kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
        return None
    chain = None if contract is None else f"{contract.arithmetic}/chain"
    try:
        return scaled_dot_product_attention(*args, **kwargs, contract=chain)
    except ContractError:
        raise
    except IsogemmError:  # a shape, a size or a mask that it has not, and torch may have
        return None


def refusal(name: str, attention: bool) -> OptionError | None:
    """The error for an operator with products inside that a scope refuses to leave to torch; None for the others.

    Attention of a forward pass comes here when nobody above autograd has taken the call. Grouped products of scaled
    operands (float8 and narrower) would change a mixture of experts in silence.
    """
    if attention and name.startswith("_scaled_dot_product") and torch._C._current_autograd_node() is None:
        return OptionError(
            "attention under isogemm.torch.invariant()",
            limit="calls that a scope sees: not inside of TorchScript, or where torch's function modes are off",
            value=f"{name}, which torch chose unseen",
            nearest="isogemm.torch.enable() for the process, or invariant(attention=False), which leaves it to torch",
        )
    if name.startswith("_scaled_grouped_mm"):
        return OptionError(
            "grouped products under isogemm.torch.invariant()",
            limit="float32, bfloat16 or float16",
            value=f"{name}, of operands with scales",
            nearest="torch.nn.functional.grouped_mm of weights that were dequantized",
        )
    return None


def rms_norm(
    contract: Contract | None,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    """rms_norm by the row operation, gradients included; None where it is torch's."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps  # torch's choice for all three dtypes
    return _normed(reductions.rms_norm, input, normalized_shape, (weight,), eps)


def layer_norm(
    contract: Contract | None,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | None:
    """layer_norm by the row operation, gradients included; None where it is torch's."""
    return _normed(reductions.layer_norm, input, normalized_shape, (weight, bias), eps)


def _normed(norm: Callable[..., Tensor], x: Tensor, normalized: Any, parameters: Any, eps: float) -> Tensor | None:
    """A norm over the last dimensions as over one; autocast has its own idea of the dtype, and is torch's."""
    shape = tuple(normalized)
    if not is_free(x, *parameters) or torch.is_autocast_enabled(x.device.type) or not is_normed(x, shape, *parameters):
        return None
    if len(shape) == 1:
        rows = x
    else:
        rows = x.flatten(x.dim() - len(shape))
        parameters = [None if w is None else w.reshape(-1) for w in parameters]
    try:
        found = norm(rows, *parameters, eps)
    except IsogemmError:
        return None
    return found if len(shape) == 1 else found.view(x.shape)


# Functions of torch that are replaced whole: by what, and their names.
WHOLE: dict[Any, tuple[Callable[..., Tensor | None], str]] = {
    torch.nn.functional.scaled_dot_product_attention: (attention, "scaled_dot_product_attention"),
    torch.nn.functional.rms_norm: (rms_norm, "rms_norm"),
    torch.rms_norm: (rms_norm, "rms_norm"),
    torch.nn.functional.layer_norm: (layer_norm, "layer_norm"),
    torch.layer_norm: (layer_norm, "layer_norm"),
}

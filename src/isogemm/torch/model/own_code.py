"""The own code of a module, from a router to a whole model: torch's functions in it computed by isogemm.

A formula of ours in the place of another library's would have to be that library's in every version and mode. Here the
module's own forward method runs, and the functions that it calls, above autograd, are isogemm's with isogemm's
gradients: products, softmax, sums along rows, sigmoid and silu. Of equal numbers topk takes the first.
Which modules that is enough for is seen in a run of their code, in which every operator has to be known not to look at
the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from ...contract.spec import Contract
from ...errors import OptionError
from .. import functional, reductions
from ..attention.calls import scaled_dot_product_attention
from ..device import DTYPES
from ..operator import Tensor
from .layers import Converted

_F = torch.nn.functional


class own(TorchFunctionMode):  # type: ignore[misc]
    """A scope in which torch's functions are isogemm's, with their gradients, where isogemm has them."""

    ours: ClassVar[dict[Any, Callable[..., Any]]]  # of torch's functions, what is called in their place

    def __init__(self, contract: Contract | None = None, grad_order: str = "leaf4096") -> None:
        super().__init__()
        self.contract, self.grad_order = contract, grad_order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours, kwargs = self.ours.get(func), kwargs or {}
        if ours is not None and args and isinstance(args[0], torch.Tensor) and args[0].dtype in DTYPES:
            result = ours(self, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        buffers = {"main_grad": getattr(weight, "main_grad", None), "bias_main_grad": getattr(bias, "main_grad", None)}
        return functional.linear(x, weight, bias, contract=self.contract, grad_order=self.grad_order, **buffers)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor | None:
        if b.dim() != 2 or a.dim() < 2:
            return None
        return functional.linear(a, b.mT, contract=self.contract, grad_order=self.grad_order)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        if getattr(b, "main_grad", None) is not None:
            raise OptionError(
                "main_grad of stacked experts", limit="gradients in .grad", value="a stack with a buffer",
                nearest="no use_main_grad: micro-batches add up in .grad",
            )  # fmt: skip
        return functional.bmm(a, b, contract=self.contract, grad_order=self.grad_order)

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        chain = None if self.contract is None else f"{self.contract.arithmetic}/chain"
        return scaled_dot_product_attention(*args, **kwargs, contract=chain)

    def softmax(self, x: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor | None:
        return reductions.softmax(x, out_dtype=dtype) if is_last(x, dim) and dtype in RESULTS else None

    def softmax_to(self, x: Tensor, dim: Any, dtype: Any = None) -> Tensor | None:
        """torch's own, whose third argument is another than that of torch.nn.functional's."""
        return self.softmax(x, dim, dtype=dtype)

    def sum(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
        return along(reductions.sum, x, dim, keepdim, dtype)

    def topk(self, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        """The first of equals first, which torch leaves to its kernels."""
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    def sigmoid(self, x: Tensor) -> Tensor:
        return reductions.sigmoid(x)

    def silu(self, x: Tensor, inplace: bool = False) -> Tensor | None:
        return None if inplace else reductions.silu(x)


def is_last(x: Tensor, dim: Any) -> bool:
    """Whether `dim` is the last dimension of x and no other."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    return x.dim() > 0 and type(dim) is int and dim in (-1, x.dim() - 1)


def along(kind: Callable[..., Tensor], x: Tensor, dim: Any, keepdim: bool, dtype: Any) -> Tensor | None:
    """What an operation along rows makes of one dimension, whichever it is; None where that is torch's."""
    if dtype not in RESULTS or (type(dim) is not int and not is_last(x, dim)):
        return None
    if not is_last(x, dim):
        y = along(kind, x.movedim(dim, -1), -1, False, dtype)
        return y.unsqueeze(dim) if keepdim and y is not None else y
    if torch.is_grad_enabled() and x.requires_grad:
        x = x.clone()  # torch's sum remembers no operand, which may be divided by its result in place
    return kind(x, keepdim=keepdim, out_dtype=dtype)


RESULTS = (*DTYPES, None)
own.ours = {
    _F.linear: own.linear,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm), own.matmul
    ),
    _F.softmax: own.softmax,
    **dict.fromkeys((torch.softmax, torch.Tensor.softmax), own.softmax_to),
    **dict.fromkeys((torch.sum, torch.Tensor.sum), own.sum),
    **dict.fromkeys((_F.sigmoid, torch.sigmoid, torch.Tensor.sigmoid), own.sigmoid),
    _F.silu: own.silu,
    _F.scaled_dot_product_attention: own.attention,
    **dict.fromkeys((torch.bmm, torch.Tensor.bmm), own.bmm),
    **dict.fromkeys((torch.topk, torch.Tensor.topk), own.topk),
}


class OwnCode(Converted):
    """A module whose own forward method runs in the scope of `own`: mixed into its class."""

    scope: ClassVar[type[own]] = own
    contract: Contract | None = None
    grad_order = "leaf4096"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        with self.scope(self.contract, self.grad_order):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class OwnBlock(OwnCode):
    """`OwnCode` of a module with modules inside: compilers leave it as it is.

    torch 2.13 shows ``F.sigmoid`` in compiled code to no function mode.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if torch.compiler.is_compiling():
            return _eagerly(super().forward, *args, **kwargs)
        return super().forward(*args, **kwargs)


# As torch.compiler.disable, which would import the whole compiler now rather than at the first call.
@torch._disable_dynamo  # type: ignore[untyped-decorator]
def _eagerly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def unsafe(call: Callable[..., Any], *inputs: Any) -> str:
    """The first operator in a call that may look at the batch, or what the call raised; empty where there is none."""
    from ..routing.coverage import coverage

    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            rows = coverage(call, *inputs, scope=False).not_routed
    except Exception as error:  # whatever another library's code raises
        return f"could not be run alone ({type(error).__name__})"
    return f"calls {rows[0].op}" if rows else ""

"""Buffers that take gradients in the place of ``.grad``: what a call that has one may not have, and what torch is told.

How far a buffer's sum has come is in `isogemm.torch.gemm.buffers`, who makes and collects them in
`isogemm.torch.gemm.main_grad`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import OptionError
from ..operands.tensors import run_as_it_is
from .operator import Tensor, is_compiling, is_grad_enabled, is_plain


def check_no_ddp() -> None:
    """Raise where a call with buffers for its gradients is part of DistributedDataParallel's forward pass.

    That averages ``.grad`` over the ranks, so each would go its own way; and it waits for gradients that do not come.
    """
    if getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        refuse_ddp()


def check_no_hooks(name: str, parameter: Tensor) -> None:
    """Raise where hooks of a parameter wait for the gradient that its buffer, `name`, takes.

    Compilers are told of those that are there when they look, and of none of what they make themselves.

    Raises
    ------
    OptionError
    """
    recorded = is_grad_enabled() and parameter.requires_grad and (parameter.is_leaf or not is_compiling())
    if recorded and _has_hooks(parameter):
        limit = "no hooks: there is no gradient to call them with"
        raise OptionError(
            f"{name} of a parameter with hooks", limit=limit, value="tensor hooks", nearest=f"{name}=None, or no hooks"
        )


def _has_hooks(x: Tensor) -> bool:
    """Whether a tensor has hooks; its own, for a compiler would look at a stand-in that has none."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


# As torch.compiler.assume_constant_result has it, which would load the compiler with this package.
_has_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]
run_as_it_is(_has_hooks.__code__)


def check_no_tree(name: str, grad_order: str) -> None:
    """Raise of a tree for sums that go on in the buffer `name`: it has no total before its last row.

    Raises
    ------
    OptionError
    """
    if grad_order.startswith("tree"):
        raise OptionError(
            f"grad_order with {name}", limit="chain or leafL", value=grad_order, nearest="leaf4096, which has a total"
        )


def asked_for(ctx: Any, place: int, buffer: Tensor | None) -> Tensor | None:
    """A parameter's buffer, where a backward pass goes on to the parameter's ``.grad``; else None.

    `torch.autograd.grad` and ``backward(inputs=...)`` ask for some gradients and leave all other sums as they are.
    Compilers and transforms ask for those that they trace.

    Parameters
    ----------
    ctx : context of a torch.autograd.Function
    place : int
        Of the parameter among the tensors that the Function was given.
    buffer : tensor, optional
    """
    if buffer is None or is_compiling() or not is_plain():
        return buffer
    node = ctx.next_functions[place][0]
    if node is None:  # the parameter was frozen
        return buffer
    while node.next_functions:  # of a cast, a view or 1 + weight
        node = node.next_functions[0][0]
    try:
        return buffer if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad hands this very gradient back
        return None


def written_between(*buffers: Tensor | None) -> None:
    """Let compiled code hand buffers to its backward pass as they are by then, as contexts of eager code do.

    A compiler saves all that the pass reads, and torch refuses what was written to since: by the backward pass of
    another call, where two forward passes come first.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None:
        return
    from torch.fx.experimental import proxy_tensor  # loads much, and is loaded by what traces

    proxies = getattr(proxy_tensor, "_get_proxies", lambda _: ())  # torch before 2.13 has no word for it
    for buffer in buffers:
        for proxy in () if buffer is None else proxies(buffer):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def refuse_ddp() -> NoReturn:
    """Raise of buffers for gradients inside of DistributedDataParallel."""
    raise OptionError(
        "main_grad inside of DistributedDataParallel", limit="gradients in .grad, which it averages",
        value="a model after use_main_grad",
        nearest="the model without DistributedDataParallel: isogemm.torch.collect_main_grad(model), then "
        "torch.distributed.all_reduce(p.grad) for p in model.parameters(); or no use_main_grad",
    )  # fmt: skip

"""Float32 buffers that gradients are summed in, so that the bits do not depend on how a batch is cut.

The gradient of a parameter is a sum over rows. A layer of isogemm continues that sum in a float32 buffer, in order, so
micro-batches one after the other have the bits of one batch. Two uses of one parameter (an embedding table that is the
head's weight as well) are two sums, whose terms would be interleaved differently by each division: every use has a
buffer of its own, and they are added once, at the end, in the order of the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from ...base import arguments
from ...errors import OptionError
from ..gradient_buffers import refuse_ddp
from ..model.layers import Converted, Linear
from ..model.names import below
from ..operator import Tensor
from ..routing.elementwise import subnormals_kept
from .buffers import clear, is_unread, mark_read


def use_main_grad(module: Any) -> list[str]:
    """Give every parameter of a model's converted layers a float32 buffer of zeros for its gradient.

    The backward pass continues its sums from the buffers, and the parameters get no ``.grad``. The buffer is the
    parameter's attribute ``main_grad``; a parameter of several layers has one more in ``main_grads`` of each other
    layer. `collect_main_grad` adds them up for the optimizer and sets them to zero; so does this function when it is
    called again.

    Returns
    -------
    list of str
        Names of the parameters that have a buffer now; the others get ``.grad`` as always.

    Raises
    ------
    OptionError
        There is no layer of isogemm's in the model, or it is inside of DistributedDataParallel, which averages
        ``.grad`` and would not see the buffers; a model that is wrapped later raises in its forward pass. Or its
        parameters are sharded (FSDP2): layers see others then, gathered for a call, which have no buffers.

    Notes
    -----
    An optimizer's step with sums in buffers that nobody has collected would leave their parameters as they are, or move
    them by gradients of an earlier step, so it is an OptionError, in every torch.optim.Optimizer of the process from
    the first call of this function on. One that reads ``main_grad`` itself says so: ``optimizer.reads_main_grad =
    True``.

    Determinism
    -----------
    Micro-batches of whole leaves (of ``grad_order``) leave the bits of the whole batch, if each layer is called once
    in a forward pass. One that begins in the middle of a leaf is an OptionError in its backward pass. A layer
    that is called several times sums its calls in the order in which autograd reaches them.
    """
    found = []
    for child in module.modules() if isinstance(module, torch.nn.Module) else ():
        if isinstance(child, torch.nn.parallel.DistributedDataParallel):
            refuse_ddp()
    uses_of = _uses(module)
    for name, parameter, _ in uses_of:
        if hasattr(parameter, "device_mesh"):  # a DTensor
            raise OptionError(
                f"main_grad of {name}", limit="parameters that one process holds", value=type(parameter.data).__name__,
                nearest="no use_main_grad: micro-batches add up in .grad; or isogemm.torch.distributed.GradientTree",
            )  # fmt: skip
    if not _watching:  # steps that trainers make read ``.grad`` alone
        _watching.append(optimizers.register_optimizer_step_pre_hook(_check_step))
    kept = []
    for name, parameter, uses in uses_of:
        before = getattr(parameter, "main_grad", None)
        for layer, key, first in uses:
            own = dict(layer.main_grads or {})
            known = own.pop(key, None)
            buffer = before if first or before is None else known
            shape, device = layer.buffer_shape(key), layer._parameters[key].device
            if buffer is not None and (buffer.shape, buffer.device, buffer.dtype) == (shape, device, torch.float32):
                kept.append(buffer)  # recorded graphs may have it
            else:
                buffer = layer.zeros(key)
            if first:
                parameter.main_grad = buffer
            else:
                own[key] = buffer
            layer.main_grads = own or None
        found.append(name)
    clear(kept)
    return found


def main_grads(module: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, parameter, gradient) of every parameter with buffers, one after the other.

    The gradient is float32: the buffer itself, or, where a parameter has several uses, a new tensor: their sum in the
    order of the modules, plus what other modules left in ``.grad``.
    """
    for name, parameter, uses in _uses(module):
        sums = []
        for layer, key, _ in uses:
            if (buffer := layer._buffer(key, parameter)) is not None:
                mark_read(buffer)
                sums.append(layer.summed(key, buffer))
        if not sums:
            continue
        total = sums[0]
        with subnormals_kept(total):
            for other in sums[1:]:
                total = total + other
            if parameter.grad is not None:
                total = total + parameter.grad.float()
        yield name, parameter, total


def collect_main_grad(module: Any, *, zero: bool = True) -> list[str]:
    """Put the sums of the float32 buffers into ``.grad``, each rounded once to its parameter's dtype.

    For an optimizer with float32 copies of the parameters, take the sums themselves from `main_grads`.

    Parameters
    ----------
    module : torch.nn.Module
    zero : bool
        Set the buffers to zero, for the next step.

    Returns
    -------
    list of str
        Names of the parameters.

    Raises
    ------
    OptionError
        There is no layer of isogemm's, or none with buffers.
    """
    found = []
    for name, parameter, total in main_grads(module):
        parameter.grad = total.to(parameter.dtype, copy=True)
        found.append(name)
    if not found:
        raise OptionError("main_grad", limit="layers with buffers", value="none", nearest="use_main_grad(module)")
    if zero:
        clear([buffer for _, parameter, uses in _uses(module) for buffer in _buffers(parameter, uses)])
    return found


_watching: list[Any] = []  # torch's handle of the hook on every optimizer's step, once there is one


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise where a step would pass over gradients that nobody has collected."""
    if getattr(optimizer, "reads_main_grad", False):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            buffer = getattr(p, "main_grad", None)
            if buffer is None or not p.requires_grad or not (p.grad is None or is_unread(buffer)):
                continue
            if bool(buffer.any()):
                raise OptionError(
                    f"step of {type(optimizer).__name__}", limit="gradients in .grad",
                    value="a parameter with sums in the float32 buffer of use_main_grad that nobody has collected; its "
                    f".grad is {'None' if p.grad is None else 'that of an earlier step'}",
                    nearest="isogemm.torch.collect_main_grad(model) before the step; with transformers.Trainer "
                    "isogemm.torch.TrainerCallback, and no use_main_grad of your own",
                )  # fmt: skip


def _buffers(parameter: Tensor, uses: list[tuple[Any, str, bool]]) -> list[Tensor]:
    found = [layer._buffer(key, parameter) for layer, key, _ in uses]
    return [buffer for buffer in found if buffer is not None]


def _uses(module: Any) -> list[tuple[str, Tensor, list[tuple[Any, str, bool]]]]:
    """(name, parameter, uses) of all that want gradients, in the order of the modules.

    A use is (layer, the parameter's name there, whether its buffer stands in the parameter's ``main_grad``). That is
    the first one that is no Linear, or the first: a Linear can be handed any buffer, other functions look there.
    """
    arguments.of_type("module", module, torch.nn.Module, "a torch.nn.Module", "the model itself")
    found: dict[int, tuple[str, Tensor, list[tuple[Any, str]]]] = {}
    layers: list[tuple[str, Any]] = [
        (name, child) for name, child in module.named_modules() if isinstance(child, Converted)
    ]
    if not any(child._parameters for _, child in layers):
        raise OptionError("main_grad", limit="layers of isogemm.torch", value="none", nearest="convert(module)")
    for prefix, layer in layers:
        for key, p in layer._parameters.items():
            if p is not None and p.requires_grad:
                found.setdefault(id(p), (below(prefix, key), p, []))[2].append((layer, key))
    return [(name, p, _with_first(uses)) for name, p, uses in found.values()]


def _with_first(uses: list[tuple[Any, str]]) -> list[tuple[Any, str, bool]]:
    first = next((i for i, (layer, _) in enumerate(uses) if not isinstance(layer, Linear)), 0)
    return [(layer, key, i == first) for i, (layer, key) in enumerate(uses)]

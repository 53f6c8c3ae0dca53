"""The way back from `convert`: torch's modules in the place of isogemm's, which are the same objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base import arguments
from ...errors import OptionError
from ..quant.convert import CALLS
from ..quant.linear import QuantizedLinear
from .huggingface.loss import give_back
from .layers import Converted
from .watch import forget

# What isogemm keeps in a module, and torch's has not.
_KEPT = ("contract", "grad_order", "halves", "main_grads", "place")
_BUFFERS = ("merged_bias", "merged_weight", "table")


def restore(module: Any) -> list[str]:
    """Undo `convert`, in place: every module gets the class back that it had, models their attention function and loss.

    Parameters, hooks, and modules that were put in since stay. Float32 buffers of `use_main_grad` are dropped; what is
    in them is lost, so collect them first.

    Parameters
    ----------
    module : torch.nn.Module

    Returns
    -------
    list of str
        Names of the modules that are torch's again.

    Raises
    ------
    OptionError
        A Linear whose weight is quantized: its floats are gone. Layers that are cut between ranks: the other parts of
        their weights are elsewhere. Nothing was changed.
    DTypeError
        `module` is no module.
    """
    from ..distributed.layers import Parallel  # late, with all of torch.distributed

    arguments.of_type("module", module, torch.nn.Module, "a torch.nn.Module", "the model itself")
    named = list(module.named_modules())
    quantized = [name for name, child in named if isinstance(child, QuantizedLinear)]
    _refuse(quantized, "weights that are floats", "quantized: ")
    cut = [name for name, child in named if isinstance(child, Parallel) and child.cut and child.ranks.size > 1]
    _refuse(cut, "whole weights", "parts of the weights of ")
    attention = forget(module)
    vars(module).pop(CALLS, None)
    found = []
    for name, child in module.named_modules():
        if isinstance(child, Converted):
            _become_plain(child)
            found.append(name)
        vars(child).pop("contract", None)  # attention modules that keep their class have one
        give_back(child)
    for child, before in attention:
        child.config._attn_implementation = before
    return found


def _refuse(names: Sequence[str], limit: str, value: str) -> None:
    if names:
        raise OptionError(
            "restore", limit=limit, value=value + ", ".join(names), nearest="the model from its checkpoint"
        )


def _become_plain(child: Any) -> None:
    child.__class__ = _before(type(child))
    for name in _KEPT:
        vars(child).pop(name, None)
    for name in _BUFFERS:
        if name in child._buffers:
            del child._buffers[name]
            child._non_persistent_buffers_set.discard(name)
    for p in child._parameters.values():
        if p is not None and hasattr(p, "main_grad"):
            del p.main_grad


def _before(cls: type) -> type:
    """The class that `convert` found: what a mixed class is made of, or the class of torch that ours is."""
    made_of = getattr(cls, "made_of", None)
    if made_of is not None:
        return next(each for each in made_of[:2] if not issubclass(each, Converted))  # type: ignore[no-any-return]
    return next(base for base in cls.__mro__ if not issubclass(base, Converted))

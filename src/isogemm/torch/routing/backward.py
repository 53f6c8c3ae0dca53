"""What autograd records under a scope: a mark for a backward elsewhere, and backward calls that keep the function mode.

torch takes a function mode off its stack while the mode's handler runs, and backward() is such a call. What runs
inside of it, the recomputed forward of a checkpoint above all, would then be seen by the dispatch mode alone: attention
and norms would be torch's. Here the mode is put back around the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import overrides

from ...errors import OptionError
from .state import active

Tensor = Any  # torch is untyped to mypy
_SEQUENCES = (tuple, list)
position = torch.autograd._get_sequence_nr  # of the next node that this thread records


def mark(func: Any, result: Any, start: int) -> None:
    """Guard the nodes recorded since `start` that results have: their backward is an error where nothing routes.

    A result may be an argument, whose node was recorded elsewhere: that one stays as it is. isogemm's own operators
    have the same gradient anywhere.
    """
    if getattr(func, "namespace", "") == "isogemm" or getattr(func, "_qualified_op_name", "").startswith("isogemm::"):
        return  # an operator, or all of one name
    last = None
    for x in result if isinstance(result, _SEQUENCES) else (result,):
        node = x.grad_fn if isinstance(x, torch.Tensor) else None
        if node is not None and node is not last and node._sequence_nr() >= start:
            node.register_prehook(_inside)
            last = node


def _inside(gradients: Any) -> None:
    """Run by autograd before a recorded node."""
    if not active():
        raise OptionError(
            "backward of what was recorded under isogemm.torch.invariant()",
            limit="a backward that is routed too",
            value="backward() outside of it",
            nearest="call backward() inside the `with`, or isogemm.torch.enable() for the process",
        )


def differentiated(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A call of backward() or grad() with the mode in force wherever autograd's engine runs Python.

    torch's function is run as it is, but for the name by which it finds the engine: nothing between its check for
    modes and its call of the engine could be hooked otherwise. The engine hands the stack of modes to its threads.
    """
    if func is torch.Tensor.backward:
        func, args, kwargs = torch.autograd.backward, *_as_function(*args, **kwargs)
    engine = func.__globals__.get("_engine_run_backward")
    if engine is None:  # another torch
        return func(*args, **kwargs)

    def run(*a: Any, **k: Any) -> Any:
        overrides._push_mode(mode)
        try:
            return engine(*a, **k)
        finally:
            overrides._pop_mode()

    names = {**func.__globals__, "_engine_run_backward": run}
    call = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    call.__kwdefaults__ = func.__kwdefaults__
    return call(*args, **kwargs)


def _as_function(
    x: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> tuple[Any, Any]:
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    return (x, gradient), options


BACKWARD: tuple[Callable[..., Any], ...] = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)

"""Activation modules, whose CPU kernels give an element other bits in another place: each in whole vectors.

`elementwise` says which functions those are, and why. A module that computes one gets here what a scope of
`isogemm.torch.invariant` gives an operator: flat operands that end behind the last element. Which modules compute one
is seen in a run of their own forward method, so that modules of any library are known.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import OptionError
from ...operands.tensors import is_traced
from ..operator import Tensor, apart, define, once
from ..routing.elementwise import EXACT, blocked, filled, form, is_exact, padded, refuse_flushing
from .layers import Converted
from .recognition import Looks, Match, agrees, magnitudes, random, stand_in, touched
from .traced import other, train

# What the operator that compilers see calls. Modules of one class and one state share a place, so that compiled blocks
# of a model share their code; the others have one each. A place is text that means the same in each process, or that no
# other process has: programs are exported, and loaded elsewhere.
_OWN: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_SHARED: dict[Any, str] = {}
_STAND_INS: dict[str, Any] = {}

_UNTAGGED = frozenset({"log_sigmoid_forward"})  # it returns what its gradient needs, too
_MOVED = (
    "_to_copy alias arange cat clone constant_pad_nd copy detach empty empty_like flip full full_like gather index "
    "index_select new_empty new_full new_ones new_zeros ones ones_like roll stack zeros zeros_like"
)
_MOVES = frozenset(_MOVED.split())


class Activation(Converted):
    """An activation of torch or another library: mixed into its class, whose forward method sees whole vectors.

    `rule` is the operator whose threads' shares count, empty where operators of two rules are in it.
    """

    part = "activation"  # by which `coverage` knows it
    rule: str = ""
    place: str = ""
    training: bool

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own function of each element, by one of its kernel's forms."""
        call = super().forward  # type: ignore[misc]
        if not args:
            name, x = next(iter(options.items()))
            return _evaluate(lambda x: call(**{**options, name: x}), x, self.rule)
        if len(args) != 1 or options:
            return _evaluate(lambda x: call(x, *args[1:], **options), args[0], self.rule)
        if not (torch.compiler.is_compiling() or is_traced()):
            return _evaluate(call, args[0], self.rule)
        return _activation_op(args[0], self.place)

    def keep(self) -> None:
        """Let the operator that compilers see find this module, or one like it."""
        key = _state(self)
        if key is None and _OWN.get(self.place) is self:
            return
        place = _SHARED.get(key) if key is not None else None
        if place is None:
            place = _place_of(type(self), key)
            if key is None:
                _OWN[place] = self
            else:
                _SHARED[key], _STAND_INS[place] = place, stand_in(self)
                train(_STAND_INS[place], self.training)
        vars(self)["place"] = place

    def __setstate__(self, state: Any) -> None:
        """Copied or loaded, perhaps by another process."""
        super().__setstate__(state)  # type: ignore[misc]
        self.keep()

    def __setattr__(self, name: str, value: Any) -> None:
        """With another state it is another function, which compiled code has to notice."""
        super().__setattr__(name, value)
        if "place" in vars(self) and name not in _INNER:
            self.keep()


def _state(module: Any) -> Any:
    """A module's class and attributes as a key; None where an attribute is none of the plain types."""
    state = {name: _value(x) for name, x in vars(module).items() if name not in _INNER}
    return None if None in state.values() else (type(module), *sorted(state.items(), key=lambda item: item[0]))


_INNER = vars(torch.nn.Module()).keys() - {"training"} | {"place", "__class__"}


def _value(x: Any) -> Any:
    """What is equal where attributes are: functions are themselves, for others may have their names."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return type(x), repr(x)
    if isinstance(x, functools.partial):
        names = tuple(sorted(x.keywords))
        inside = tuple(_value(y) for y in (x.func, *x.args, *(x.keywords[name] for name in names)))
        return None if None in inside else (functools.partial, names, inside)
    is_global = isinstance(x, (types.FunctionType, types.BuiltinFunctionType)) and "<locals>" not in x.__qualname__
    return x if is_global else None


def _place_of(cls: type, key: Any) -> str:
    """Text for a state, or for the only module that has it."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if key is not None:
        place = f"{name}:{hashlib.sha256(_text(key).encode()).hexdigest()[:16]}"
        if place not in _STAND_INS:  # else it is that of another class or function of this name
            return place
    return f"{name}:{uuid.uuid4().hex}"


def _text(x: Any) -> str:
    """What `_value` gives, by names."""
    if isinstance(x, tuple):
        return f"({','.join(map(_text, x))})"
    return f"{x.__module__}.{x.__qualname__}" if hasattr(x, "__qualname__") else repr(x)


def _module(place: str) -> Any:
    """The module of a place.

    Raises
    ------
    OptionError
        There is none: a program that was exported or traced by another process.
    """
    found = _STAND_INS[place] if place in _STAND_INS else _OWN.get(place)
    if found is None:
        name = place.partition(":")[0]
        raise OptionError(
            "activation of an exported or traced program", limit="one that this process has converted",
            value=f"a {name} of another process", nearest=f"isogemm.torch.convert(...) of such a {name} first",
        )  # fmt: skip
    return found


def _gradient(dy: Tensor, x: Tensor, place: str) -> Tensor:
    """What an eager module's backward pass computes: autograd, which torch's dispatcher leaves out below operators."""
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        below = below.remove(key)
    keys = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), below)
    with keys, torch.enable_grad():
        x = x.detach().requires_grad_()
        dx: Tensor = torch.autograd.grad(_module(place).forward(x), x, dy)[0]
    return apart(dx, dy, x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.place = inputs
    ctx.save_for_backward(x)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return *once("a compiled activation", [_backward_op(dy, x, ctx.place)], dy, x), None


_backward_op = define(
    "activation_backward", "(Tensor dy, Tensor x, str place) -> Tensor", _gradient,
    lambda dy, x, place: x.new_empty(x.shape),
)  # fmt: skip
# So that a compiled model has the bits of an eager one.
_activation_op = define(
    "activation", "(Tensor x, str place) -> Tensor", lambda x, place: apart(_module(place).forward(x), x),
    lambda x, place: x.new_empty(x.shape), setup=_remember,
    backward=_differentiate,
)  # fmt: skip


def _evaluate(call: Callable[..., Any], x: Any, rule: str) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_cpu or not x.is_floating_point() or not x.numel():
        return call(x)
    if rule and not (torch.is_grad_enabled() and x.requires_grad):
        return blocked(rule, call, (x,), {})
    refuse_flushing(f"gradients of {rule or 'an activation'}")  # they are torch's, when they are taken
    n = x.numel()
    # At least one more element, so that a gradient arrives as a copy that is contiguous: the backward kernels have
    # several forms too, and rules of their own.
    total, before = n + 1, 0
    while total != before:
        before, total = total, filled(filled(total, "gelu"), "")
    return call(padded(x.reshape(n), total))[:n].view(x.shape)


@dataclass(slots=True)
class _Seen:
    """What a module called: operators of several forms, and such as are not elementwise."""

    several: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    why: str = ""  # what else it does that no function of elements does


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, shape: Any, seen: _Seen) -> None:
        super().__init__()
        self.shape, self.seen = shape, seen

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__.rstrip("_")
        kind = "blocked" if name in _UNTAGGED else form(func)
        shapes = [x.shape for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not kind and not func.is_view and name not in _MOVES:
            self.seen.others.append(name)
        elif kind == "blocked" and not (name in EXACT and is_exact(name, args, kwargs)):
            whole = all(shape in (self.shape, ()) for shape in shapes)
            (self.seen.several if whole else self.seen.others).append(name)
        return func(*args, **kwargs)


def known(child: Any, looks: Looks) -> Match | None:
    """What a module without weights is; None where nothing in it depends on an element's place."""
    tensors = (*child._parameters.values(), *child._buffers.values())
    if child._modules or any(x is not None for x in tensors):
        return None
    seen = looks.at(_seen, child)
    if seen is None or not (seen.several or seen.others):
        return None
    name = type(child).__name__
    if seen.others:
        why = f"{name} calls {seen.others[0]}, which is no function of elements known here"
    elif seen.why:
        why = f"{name} {seen.why}"
    else:
        why = f"{name} works in place" if getattr(child, "inplace", False) else touched(child)
    gelu = {op.startswith("gelu") for op in seen.several}
    rule = "" if len(gelu) != 1 else seen.several[0]
    return Match.unless(why, "activation", Activation, type(child), rule=rule)


def _seen(child: Any) -> _Seen | None:
    """What its own forward method calls for a small tensor; None where it takes something else."""
    try:
        takes = inspect.signature(child.forward).parameters.values()
        plain = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if sum(p.default is p.empty for p in plain) != 1:
            return None
        probe, x, seen = stand_in(child), magnitudes(random(3, 16) * 4), _Seen()
        for training in (False, True):
            train(probe, training)
            if training and not seen.several:
                break  # what is random in training, and nothing otherwise
            with torch.no_grad(), torch.autocast("cpu", enabled=False), _Recorder(x.shape, seen):
                y = probe.forward(x.clone())
            if seen.several and not _elementwise(probe, x, y):
                seen.others.append(seen.several[0])
    except Exception:  # whatever another library's code raises: it is no function of one tensor
        return None
    if seen.several:
        seen.why = other(probe, None, lambda empty: probe.forward(empty(3, 16)), torch.float32)
    return seen


def _elementwise(probe: Any, x: Tensor, y: Any) -> bool:
    """Whether it is a tensor like x whose elements may lie in a row, and in any order."""
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return False
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0), device="cpu")
    return agrees(lambda: probe.forward(x.reshape(-1)[order])[order.argsort()].view(x.shape), lambda: y)

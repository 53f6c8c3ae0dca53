"""What a forward method of another library calls: its operators, written down in a run without numbers.

Numbers show what a method does to them, and not what it would do to others: a limit of 10 is not seen at 3, nor a
branch for training in evaluation. So a method is run on tensors that have a shape and no elements, in evaluation and in
training and in each dtype. What it asks of them comes here by name, with its constants, and is held against what the
formula is made of. There is nothing that it could branch on but what is its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...base.seen import Seen
from ..operator import Tensor

# What moves elements and makes none; so do views.
_MOVES = frozenset({"_unsafe_view", "cat", "clone", "contiguous"})
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_SIZED = frozenset({"_softmax", "addmm", "bmm", "mean", "mm", "softmax"})  # whole numbers there are dimensions


# What a formula is made of: operators of aten, and the numbers that may stand in each.
Formula = Mapping[str, tuple[float, ...]]


class Other(Exception):
    """A method does what its formula does not."""


class Hidden:
    """Stands in the place of an attribute that a method may hand on, and not look at."""

    def _look(self, *others: Any) -> Any:
        raise Other("depends on its place in the model")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __index__ = __int__ = __float__ = _look
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = __str__ = _look


def other(probe: Any, formula: Formula | None, call: Callable[[Callable[..., Tensor]], Any], dtype: Any) -> str:
    """What a module does that its formula does not, in evaluation and in training; empty where there is nothing.

    `call(empty)` runs its method, with inputs that ``empty(*shape)`` makes. A formula of None has any operator.
    """
    for training in (False, True):
        train(probe, training)
        if why := _other(probe, formula, call, dtype, training):
            return f"{why} in training" if training else why
    return ""


def train(probe: Any, training: bool) -> None:
    """Set the mode, by no method that a class might have replaced."""
    for module in probe.modules():
        vars(module)["training"] = training


def _other(probe: Any, formula: Formula | None, call: Any, dtype: Any, training: bool) -> str:
    run = _Run(formula, dtype)

    def empty(*shape: int, dtype: Any = dtype) -> Tensor:
        made = run.watched(torch.empty(shape, dtype=dtype, device="meta"))
        return made.requires_grad_(training and dtype.is_floating_point)

    tensors = [kept for module in probe.modules() for kept in (module._parameters, module._buffers)]
    saved = [dict(kept) for kept in tensors]
    for kept in tensors:
        kept.update({name: run.weight(x) for name, x in kept.items() if x is not None})
    before = _state(probe)
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(training), torch.autocast("cpu", enabled=False):
            warnings.simplefilter("ignore")
            call(empty)
    except Exception as error:  # whatever another library's code raises: it is not what we know
        told = str(error) if isinstance(error, Other) else f"cannot be looked into: {_first_line(error)}"
        return run.why or told
    finally:
        after = _state(probe)
        for kept, were in zip(tensors, saved, strict=True):
            kept.clear()
            kept.update(were)
    changed = [name for name, value in after.items() if before.get(name) is not value]
    return run.why or (f"changes its attribute {changed[0]}" if changed else "")


def _state(probe: Any) -> dict[str, Any]:
    return {**vars(probe), **probe._buffers, **probe._parameters}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}" if str(error) else type(error).__name__


class _Run:
    """One run of a method: what it may call, and the first thing that it did and may not."""

    def __init__(self, formula: Formula | None, dtype: Any) -> None:
        self.formula, self.why, self.dtype = formula, "", dtype
        self.dtypes = {dtype, torch.float32, torch.float64}
        self.kept: dict[int, Tensor] = {}  # inputs and weights by their memory, which is no other's while they are here

    def watched(self, x: Tensor) -> Any:
        """An input or a weight, which is not to be written to."""
        self.kept[x.untyped_storage()._cdata] = x
        return _Empty(x, self)

    def weight(self, x: Tensor) -> Any:
        dtype = self.dtype if isinstance(x, torch.nn.Parameter) and x.is_floating_point() else x.dtype
        return self.watched(torch.empty(x.shape, dtype=dtype, device="meta"))

    def stop(self, why: str) -> None:
        self.why = self.why or why  # said even where the method catches what is raised
        raise Other(why)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, writes = func._overloadpacket.__name__, func._schema.is_mutable
        name = name.removesuffix("_") if writes else name
        if name == "_local_scalar_dense":
            self.stop("looks at the numbers that it is given")
        if name == "_to_copy":
            if kwargs.get("dtype", torch.float32) not in self.dtypes and self.formula is not None:
                self.stop(f"converts to {kwargs['dtype']}")
        elif func.is_view and func._overloadname == "dtype":
            self.stop("reads bits as another dtype")
        elif not func.is_view and name not in _MOVES:
            self.check(name, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        inside, options = _each(self.inner, args), {key: _each(self.inner, x) for key, x in kwargs.items()}
        if writes and inside[0].untyped_storage()._cdata in self.kept:
            self.stop(f"calls {name} in place")
        found = func(*inside, **options) if writes else _outcome(func, inside, options)
        return args[0] if writes else _each(lambda x: _Empty(x, self) if isinstance(x, torch.Tensor) else x, found)

    def check(self, name: str, args: Any, kwargs: Any) -> None:
        if self.formula is None:
            return
        if name not in self.formula:
            self.stop(f"calls {name}")
        allowed = (*self.formula[name], _NEUTRAL[name]) if name in _NEUTRAL else self.formula[name]
        for x in (*args, *kwargs.values()):
            number = isinstance(x, (int, float)) and not isinstance(x, bool)
            if not number or (name in _SIZED and isinstance(x, int)):
                continue
            # A constant may come rounded to float32.
            if not any(x == c or math.isclose(x, c, rel_tol=1e-7) for c in allowed):
                self.stop(f"calls {name} with {x}")

    def inner(self, x: Any) -> Any:
        if isinstance(x, _Empty):
            return x.inner
        if not isinstance(x, torch.Tensor):
            return x
        if self.formula is not None:
            self.stop("uses a tensor that is neither an input nor a weight")
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


class _Empty(torch.Tensor):  # type: ignore[misc]
    """A tensor that says it is on the CPU, and has no elements."""

    inner: Tensor
    run: _Run
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, run: _Run) -> Any:
        options: Any = {"strides": inner.stride(), "dtype": inner.dtype, "device": "cpu"}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    def __init__(self, inner: Tensor, run: _Run) -> None:
        self.inner, self.run = inner, run

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = next(x for x in _tensors((*args, *kwargs.values())) if isinstance(x, _Empty))
        return found.run.call(func, args, kwargs)


class _Kind(NamedTuple):
    """All that an operator finds in a tensor without elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


_outcomes: Seen[Any] = Seen(4096)


def _outcome(func: Any, args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, of tensors without elements.

    torch finds out in Python what comes of most operators, and modules, modes and models ask for the same ones: that
    was half of `convert`. What shares memory with an operand is asked for each time.
    """
    try:
        key = func, torch.get_default_dtype(), _known_by(args), _known_by(tuple(kwargs.items()))
        known = _outcomes.get(key)
    except TypeError:  # no hash
        return func(*args, **kwargs)
    if known is not None:
        return _each(_made, known)
    found = func(*args, **kwargs)
    given = {x.untyped_storage()._cdata for x in _tensors((*args, *kwargs.values()))}
    if given.isdisjoint(x.untyped_storage()._cdata for x in _tensors(found)):
        _outcomes.keep(key, _each(_kind, found))
    return found


def _known_by(x: Any) -> Any:
    """A key for an argument: numbers have their type, since 1, 1.0 and True are equal."""
    return (type(x), *map(_known_by, x)) if type(x) in (tuple, list) else (type(x), _kind(x))


def _kind(x: Any) -> Any:
    return _Kind(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


def _made(x: Any) -> Any:
    return torch.empty_strided(*x[:2], dtype=x.dtype, device="meta") if type(x) is _Kind else x


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors in a value: itself, or in tuples and lists."""
    if isinstance(x, torch.Tensor):
        yield x
    elif type(x) in (tuple, list):
        for each in x:
            yield from _tensors(each)


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """`change` of what an operator takes or gives, inside tuples and lists too.

    Operators have no deeper trees, and torch's own maps of those were a third of the time of `convert`.
    """
    return type(x)([_each(change, y) for y in x]) if type(x) in (tuple, list) else change(x)

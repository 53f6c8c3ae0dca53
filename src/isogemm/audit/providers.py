"""Providers: whatever computes ``x @ w.T``, behind one interface.

A provider of one's own is a callable ``f(x, w)``: x [m, k] and w [n, k] are NumPy arrays of the audited dtype, of any
strides, both writable but not to be written; the result is a NumPy array [m, n] of x's dtype or float32, the same dtype
in every call. It is named ``module:function`` or ``path/to/file.py:function``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import TracebackException
from types import MappingProxyType
from typing import Any

import numpy as np

from ..base.arguments import nearest, of_type
from ..base.dtypes import NUMPY
from ..errors import OptionError
from ..lab import limit_threads
from ..lab.limits import held
from ..operands.tensors import as_tensor, on_host
from .data import Array

Call = Callable[..., Any]
Function = Callable[[Array, Array], Array]
Accumulate = Callable[[Array | None, Array, Array], Array]
Form = Callable[[Array, Sequence[Array]], Array]
"""``form(x, blocks)``: the products of x with each block of a weight's rows, side by side."""

FORMS = MappingProxyType(
    {
        "loop": "one product per column block",
        "batched": "the column blocks as a list of products",
        "strided": "the column blocks as one strided batch that shares x",
        "shared": "the rows as one strided batch that shares w",
    }
)


class Absent(Exception):
    """A provider cannot run here; the message says why."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, also of one that cannot say it."""
    return (str(TracebackException(type(error), error, None)).splitlines() or [""])[0]


class Provider:
    """What the audit calls.

    Attributes
    ----------
    name : str
        As given to ``--provider``.
    dtypes : tuple of str
        Operand dtypes it takes.
    forms : mapping of str to Form
        The ways it offers to compute the same product, by name (see `FORMS`).
    packed : callable or None
        ``packed(x, w)``: the product with w prepared first; None where there is no such thing.
    accumulate : callable or None
        ``accumulate(total, dy, x)``: ``total + dy.T @ x``, how gradients of a weight [n, k] are summed over
        micro-batches; `total` is None at first.
    streamed, captured : callable or None
        ``(x, w)``: the product on a stream of its own, and captured in a graph and replayed.
    watched : callable or None
        A context whose value is a list: each product within appends the kernels that it ran, in words.
    """

    name: str = ""
    dtypes: tuple[str, ...] = tuple(NUMPY)
    packed: Function | None = None
    accumulate: Accumulate | None = None
    streamed: Function | None = None
    captured: Function | None = None
    watched: Callable[[], contextlib.AbstractContextManager[list[str]]] | None = None

    def __init__(self) -> None:
        self.forms: dict[str, Form] = {"loop": self._loop}

    def linear(self, x: Array, w: Array) -> Array:
        """``x @ w.T``: [m, n]."""
        raise NotImplementedError

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Run with `count` threads, set through every control there is: isogemm's, threadpoolctl's and torch's."""
        with limit_threads(count):
            yield

    def _loop(self, x: Array, blocks: Sequence[Array]) -> Array:
        return np.concatenate([self.linear(x, block) for block in blocks], axis=1)


class CallableProvider(Provider):
    """A provider of one's own: a callable ``f(x, w)``. Its thread count is Numba's too, where Numba is loaded."""

    def __init__(self, name: str, function: Function) -> None:
        super().__init__()
        self.name = name
        self._function = function
        self.accumulate = getattr(function, "accumulate", None)

    def linear(self, x: Array, w: Array) -> Array:
        return self._function(x, w)

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[None]:
        with super().threads(count), limited_numba(count):
            yield


@dataclass(frozen=True)
class LibraryCalls:
    """What a library offers; None where it does not."""

    linear: Call  # ``linear(x, w)``: x @ w.T
    batched: Call | None = None  # ``batched(a, b)``: a[i] @ b[i] of stacks, strides of 0 included
    listed: Call | None = None  # ``listed(x, blocks)``: x @ blocks[i].T as a list of products
    packed: Call | None = None  # `linear` with a weight prepared first
    accumulate: Call | None = None  # ``accumulate(total, dy, x)``: total + dy.T @ x; `total` is None at first


class LibraryProvider(Provider):
    """A library's calls, which take the audit's arrays as they are; `_in` and `_out` are for those that do not."""

    def __init__(self, name: str, calls: LibraryCalls) -> None:
        super().__init__()
        self.name, self._calls = name, calls
        if calls.batched is not None:
            self.forms |= {"strided": self._strided, "shared": self._shared}
        if calls.listed is not None:
            self.forms["batched"] = self._listed
        if calls.packed is not None:
            self.packed = partial(self._run, calls.packed)
        if calls.accumulate is not None:
            self.accumulate = self._accumulated

    def linear(self, x: Array, w: Array) -> Array:
        return self._run(self._calls.linear, x, w)

    def _run(self, call: Call, x: Array, w: Array) -> Array:
        return self._out(self._called(call, self._in(x), self._weight(w)))

    def _listed(self, x: Array, blocks: Sequence[Array]) -> Array:
        parts = self._called(self._calls.listed, self._in(x), [self._in(block) for block in blocks])
        return np.concatenate([self._out(part) for part in parts], axis=1)

    def _strided(self, x: Array, blocks: Sequence[Array]) -> Array:
        items, stack = _repeated(self._in(x), len(blocks)), self._in(stacked(blocks)).swapaxes(1, 2)
        return side_by_side(self._out(self._called(self._calls.batched, items, stack)))

    def _shared(self, x: Array, blocks: Sequence[Array]) -> Array:
        items, w = self._in(x)[:, None, :], self._in(whole(blocks)).T
        return self._out(self._called(self._calls.batched, items, _repeated(w, len(x))))[:, 0, :]

    def _accumulated(self, total: Array | None, dy: Array, x: Array) -> Array:
        before = None if total is None else self._in(total)
        return self._out(self._called(self._calls.accumulate, before, self._in(dy), self._in(x)))

    def _called(self, call: Any, *operands: Any) -> Any:
        return call(*operands)

    def _weight(self, w: Array) -> Any:
        return self._in(w)

    def _in(self, a: Array) -> Any:
        """An array as the library takes it."""
        return a

    def _out(self, y: Any) -> Array:
        """A result of the library as an array."""
        return on_host(y)


class TorchProvider(LibraryProvider):
    """Calls on tensors of the CPU, which share the arrays' memory: ``torch.nn.functional.linear`` by default."""

    def __init__(self, name: str = "torch", calls: LibraryCalls | None = None) -> None:
        try:
            import torch
        except ImportError as error:
            raise Absent(f"torch is not installed here ({error})") from error
        except Exception as error:  # an installation without one of its libraries, for example
            raise Absent(f"importing torch failed: {type(error).__name__}: {error}") from error
        super().__init__(name, calls or torch_calls())
        self._torch: Any = torch

    def _called(self, call: Any, *operands: Any) -> Any:
        with self._torch.inference_mode():
            return super()._called(call, *operands)

    def _in(self, a: Array) -> Any:
        return as_tensor(a)


def isogemm_calls() -> LibraryCalls:
    """Ours, under one contract: gradients continue the walk over K in float32."""
    from ..api import packing, products  # late, with Numba

    def listed(x: Any, blocks: Sequence[Any]) -> Any:
        return products.gemm_batched([x] * len(blocks), list(blocks), trans_b="T")

    def packed(x: Any, w: Any) -> Any:
        return products.linear(x, packing.pack(w))

    def accumulate(total: Any, dy: Any, x: Any) -> Any:
        if total is None:
            shape = dy.shape[1], x.shape[1]
            total = np.zeros(shape, np.float32) if isinstance(x, np.ndarray) else x.new_zeros(shape).float()
        return products.gemm(dy, x, trans_a="T", out=total, accumulate=True)

    return LibraryCalls(products.linear, products.gemm_strided_batched, listed, packed, accumulate)


def numpy_calls() -> LibraryCalls:
    """NumPy's: the BLAS it is linked with for float32; its own loops or an up-conversion else."""

    def linear(x: Array, w: Array) -> Any:
        return x @ w.T

    return LibraryCalls(linear, np.matmul, accumulate=_adding(linear))


def torch_calls() -> LibraryCalls:
    """torch's own: what a model calls."""
    import torch

    linear = torch.nn.functional.linear
    return LibraryCalls(linear, torch.bmm, accumulate=_adding(linear))


def _adding(linear: Call) -> Call:
    """Each micro-batch's gradient added to the sum of those before, as training does."""

    def accumulate(total: Any, dy: Any, x: Any) -> Any:
        one = linear(dy.T, x.T)
        return one if total is None else total + one

    return accumulate


BUILTIN: MappingProxyType[str, Callable[[], LibraryCalls]] = MappingProxyType(
    {"isogemm": isogemm_calls, "numpy": numpy_calls, "torch": torch_calls}
)

_FUNCTION = "module:function of a module that can be imported"


def function_of(name: str, known: Collection[str] = tuple(BUILTIN)) -> Function:
    """The callable that ``module:function`` or ``file.py:function`` names; raises as loading a provider does.

    `known` are the names that are taken without a module.
    """
    of_type("provider", name, str, "text: " + _limit(known), "'mymodule:my_linear'")
    place, colon, attribute = name.rpartition(":")
    if name.endswith(".py") and Path(name).is_file():
        raise _unknown(name, "a file, of which it takes one function", known, f"{name}:your_function")
    if not colon or not place or not attribute:
        module, dot, last = name.rpartition(".")
        meant = f"{module}:{last}, with a colon" if dot and module and last else _FUNCTION
        why = "not a name of ours, nor module:function" if known else "not module:function"
        raise _unknown(name, why, known, meant)
    function: Any = _import(place, name, known)
    parts, named = attribute.split("."), [x for x, found in vars(function).items() if callable(found)]
    for part in parts:
        function = getattr(function, part, None)
    if not callable(function):
        like = nearest(parts[0], named, "") if len(parts) == 1 else ""
        raise _unknown(name, f"{place} has no callable {attribute}", known, f"{place}:{like}" if like else _FUNCTION)
    return function  # type: ignore[no-any-return]


def _import(place: str, name: str, known: Collection[str]) -> Any:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise _unknown(name, f"no file {place}", known)
    try:
        if is_file:
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        with _importable_here():
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            here = "where {0}.py lies, or path/to/{0}.py:{1}".format(place.replace(".", "/"), name.rpartition(":")[2])
            raise _unknown(name, f"no module {place} here, nor among those installed", known, f"run {here}") from error
        raise Absent(f"importing {place} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise Absent(f"importing {place} failed: {type(error).__name__}: {first_line(error)}") from error


@contextlib.contextmanager
def _importable_here() -> Iterator[None]:
    # An installed command does not look in the current folder, where a user's module usually lies.
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _limit(known: Collection[str]) -> str:
    return ", ".join([*known, "or module:function"]) if known else "module:function or file.py:function"


def _unknown(name: str, why: str, known: Collection[str], otherwise: str = _FUNCTION) -> OptionError:
    what = "provider" if known else "function"
    near = nearest(name, known, otherwise)
    return OptionError(f"unknown {what} ({why})", limit=_limit(known), value=repr(name), nearest=near)


def whole(blocks: Sequence[Array]) -> Array:
    """The matrix whose consecutive row blocks `blocks` are, without a copy."""
    first = blocks[0]
    rows = sum(len(block) for block in blocks)
    return np.lib.stride_tricks.as_strided(first, (rows, first.shape[1]), first.strides, writeable=True)


def stacked(blocks: Sequence[Array]) -> Array:
    """Consecutive row blocks of equal height as one 3-D view, without a copy."""
    height, k = blocks[0].shape
    return whole(blocks).reshape(len(blocks), height, k)


def _repeated(x: Any, count: int) -> Any:
    """`count` times the same matrix as one stack, without a copy: an array or a tensor."""
    shape = (count, *x.shape)
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x.expand(shape)


def side_by_side(products: Array) -> Array:
    """[blocks, m, n] as [m, blocks * n]."""
    return products.transpose(1, 0, 2).reshape(products.shape[1], -1)


def limited_numba(count: int) -> contextlib.AbstractContextManager[None]:
    """Numba's own threads, where Numba is loaded: at most as many as it was started with."""
    if "numba" not in sys.modules:
        return contextlib.nullcontext()
    import numba

    return held(min(count, numba.config.NUMBA_NUM_THREADS), numba.get_num_threads, numba.set_num_threads)

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..base.arguments import nearest
from ..base.dtypes import NUMPY
from ..errors import OptionError
from ..lab import limit_threads
from ..operands.tensors import as_tensor, on_host
from .data import Array

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

    def _added(self, total: Array | None, dy: Array, x: Array) -> Array:
        """Each micro-batch's gradient added to the sum of those before, as training does."""
        one = self.linear(dy.T, x.T)
        return one if total is None else total + one

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


class IsogemmProvider(Provider):
    """`isogemm.linear` and its batched forms under one contract."""

    name = "isogemm"

    def __init__(self) -> None:
        from ..api import packing, products  # late, with Numba

        super().__init__()
        self._products, self._pack = products, packing.pack
        self.packed, self.accumulate = self._packed, self._accumulated
        self.forms |= {"batched": self._batched, "strided": self._strided, "shared": self._shared}

    def linear(self, x: Array, w: Array) -> Array:
        return np.asarray(self._products.linear(x, w))

    def _packed(self, x: Array, w: Array) -> Array:
        return np.asarray(self._products.linear(x, self._pack(w)))

    def _accumulated(self, total: Array | None, dy: Array, x: Array) -> Array:
        start = np.zeros((dy.shape[1], x.shape[1]), np.float32) if total is None else total
        return np.asarray(self._products.gemm(dy, x, trans_a="T", out=start, accumulate=True))

    def _batched(self, x: Array, blocks: Sequence[Array]) -> Array:
        parts = self._products.gemm_batched([x] * len(blocks), list(blocks), trans_b="T")
        return np.concatenate([np.asarray(part) for part in parts], axis=1)

    def _strided(self, x: Array, blocks: Sequence[Array]) -> Array:
        stack = stacked(blocks)
        items = np.broadcast_to(x, (len(blocks), *x.shape))
        return side_by_side(np.asarray(self._products.gemm_strided_batched(items, stack, trans_b="T")))

    def _shared(self, x: Array, blocks: Sequence[Array]) -> Array:
        w = whole(blocks)
        items = np.broadcast_to(w, (len(x), *w.shape))
        return np.asarray(self._products.gemm_strided_batched(x[:, None, :], items, trans_b="T"))[:, 0, :]


class NumpyProvider(Provider):
    """``x @ w.T`` of NumPy: the BLAS it is linked with for float32; its own loops or an up-conversion else."""

    name = "numpy"

    def __init__(self) -> None:
        super().__init__()
        self.accumulate = self._added
        self.forms |= {"strided": self._strided, "shared": self._shared}

    def linear(self, x: Array, w: Array) -> Array:
        return np.asarray(x @ w.T)

    def _strided(self, x: Array, blocks: Sequence[Array]) -> Array:
        return side_by_side(np.matmul(x[None], stacked(blocks).transpose(0, 2, 1)))

    def _shared(self, x: Array, blocks: Sequence[Array]) -> Array:
        return np.asarray(np.matmul(x[:, None, :], whole(blocks).T[None])[:, 0, :])


class TorchProvider(Provider):
    """``torch.nn.functional.linear`` on the CPU; arrays are shared with torch, not copied."""

    name = "torch"

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise Absent(f"torch is not installed here ({error})") from error
        except Exception as error:  # an installation without one of its libraries, for example
            raise Absent(f"importing torch failed: {type(error).__name__}: {error}") from error
        super().__init__()
        self.accumulate = self._added
        self._torch: Any = torch
        self.forms |= {"strided": self._strided, "shared": self._shared}

    def linear(self, x: Array, w: Array) -> Array:
        with self._torch.inference_mode():
            return on_host(self._torch.nn.functional.linear(as_tensor(x), as_tensor(w)))

    def _strided(self, x: Array, blocks: Sequence[Array]) -> Array:
        with self._torch.inference_mode():
            stack = as_tensor(stacked(blocks))
            items = as_tensor(x).expand(len(blocks), *x.shape)
            return side_by_side(on_host(self._torch.bmm(items, stack.transpose(1, 2))))

    def _shared(self, x: Array, blocks: Sequence[Array]) -> Array:
        with self._torch.inference_mode():
            w = as_tensor(whole(blocks)).t()
            items = as_tensor(x)[:, None, :]
            return on_host(self._torch.bmm(items, w.expand(len(x), *w.shape)))[:, 0, :]


BUILTIN: MappingProxyType[str, Callable[[], Provider]] = MappingProxyType(
    {"isogemm": IsogemmProvider, "numpy": NumpyProvider, "torch": TorchProvider}
)


_FUNCTION = "module:function of a module that can be imported"


def function_of(name: str) -> Function:
    """The callable that ``module:function`` or ``file.py:function`` names; raises as loading a provider does."""
    place, colon, attribute = name.rpartition(":")
    if name.endswith(".py") and Path(name).is_file():
        raise _unknown(name, "a file, of which it takes one function", f"{name}:your_function")
    if not colon or not place or not attribute:
        module, dot, last = name.rpartition(".")
        meant = f"{module}:{last}, with a colon" if dot and module and last else _FUNCTION
        raise _unknown(name, "not a name of ours, nor module:function", meant)
    function: Any = _import(place, name)
    parts, named = attribute.split("."), [x for x, found in vars(function).items() if callable(found)]
    for part in parts:
        function = getattr(function, part, None)
    if not callable(function):
        like = nearest(parts[0], named, "") if len(parts) == 1 else ""
        raise _unknown(name, f"{place} has no callable {attribute}", f"{place}:{like}" if like else _FUNCTION)
    return function  # type: ignore[no-any-return]


def _import(place: str, name: str) -> Any:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise _unknown(name, f"no file {place}")
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
            raise _unknown(name, f"no module {place} here, nor among those installed", f"run {here}") from error
        raise Absent(f"importing {place} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise Absent(f"importing {place} failed: {type(error).__name__}: {error}") from error


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


def _unknown(name: str, why: str, otherwise: str = _FUNCTION) -> OptionError:
    return OptionError(
        f"unknown provider ({why})",
        limit=", ".join(BUILTIN) + ", or module:function",
        value=repr(name),
        nearest=nearest(name, BUILTIN, otherwise),
    )


def whole(blocks: Sequence[Array]) -> Array:
    """The matrix whose consecutive row blocks `blocks` are, without a copy."""
    first = blocks[0]
    rows = sum(len(block) for block in blocks)
    return np.lib.stride_tricks.as_strided(first, (rows, first.shape[1]), first.strides, writeable=True)


def stacked(blocks: Sequence[Array]) -> Array:
    """Consecutive row blocks of equal height as one 3-D view, without a copy."""
    height, k = blocks[0].shape
    return whole(blocks).reshape(len(blocks), height, k)


def side_by_side(products: Array) -> Array:
    """[blocks, m, n] as [m, blocks * n]."""
    return products.transpose(1, 0, 2).reshape(products.shape[1], -1)


@contextlib.contextmanager
def limited_numba(count: int) -> Iterator[None]:
    """Numba's own threads, where Numba is loaded: at most as many as it was started with."""
    if "numba" not in sys.modules:
        yield
        return
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    try:
        yield
    finally:
        numba.set_num_threads(before)

"""Routing of torch's products and reductions to isogemm, forward and backward, for a scope.

`invariant` puts two of torch's modes on the calling thread. The dispatch mode sees every aten operator below
autograd, those that autograd's own nodes call included, and replaces products and reductions. The function mode sees
the calls above autograd: it replaces attention, gives `linear` one form for every layout, and marks what autograd
records, so that a backward outside of the scope is an error rather than a plain one. Both live in torch's thread-local
state, which the threads of its autograd engine take over. `process` does the same for all threads.
docs/routing.md is the user's page; docs/design/0007-routing.md has the reasons and the costs.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._contextlib import _DecoratorContextManager
from torch.utils._python_dispatch import TorchDispatchMode

from ...base.arguments import flag
from ...contract.spec import ContractLike, as_contract
from ...errors import OptionError
from ...operands.tensors import run_as_it_is
from ..operator import needs_gradient
from . import calls
from .backward import BACKWARD, differentiated, mark, position
from .elementwise import blocked, form, per_element, refuse_flushing
from .process import disable, enable
from .products import contained, is_composite, operands, product_of, replaced
from .rows import REDUCTIONS, has_no_order, reduced
from .state import active, aside, enabled, pushed, removed

__all__ = ["active", "disable", "enable", "enabled", "invariant"]

_infra, _KEYS = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_is_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
_no_dispatch = torch._C._DisableTorchDispatch
_depth, _mode_at = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at


class _Treatment(NamedTuple):
    """What the dispatch mode does with an operator; found by the operator's id, and so it keeps the operator alive."""

    run: Callable[..., Any]  # a method of _OperatorMode: (self, entry, args, kwargs)
    func: Any
    function: Any
    name: str
    is_traced: bool  # what it computes would be a constant to a trace
    is_sum: bool = False  # torch's own where it has no alpha, as nearly always


class _OperatorMode(TorchDispatchMode):  # type: ignore[misc]
    """Below autograd: products, reductions and elementwise functions of more than one form; the rest is torch's."""

    routes_products = True

    def __init__(self, scope: invariant) -> None:
        super().__init__()
        self.contract, self.strict = scope.contract, scope.strict
        self.rows, self.attention, self.listing = scope.rows, scope.attention, scope._listing
        self.routed, self.passed, self.whole = scope.routed, scope.passed, scope._whole
        self.count = 0  # of what was routed
        self.refused: OptionError | None = None  # TorchScript makes another error of it, without its text
        self.own = 0  # of what was replaced above autograd: its gradient is isogemm's anywhere
        self.shown = 0  # calls of torch's that the function mode has seen and left to torch, and that run now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry: Any = _known.get(id(func), _NEW)
        if not types and (entry is None or (not kwargs and entry is not _NEW and entry.is_sum)):
            return func(*args, **kwargs) if kwargs else func(*args)
        if entry is _NEW:
            entry = _learn(func)
        if entry is not None and entry.is_traced and _is_recorded():
            raise _compiled()  # a trace would run later and elsewhere
        if types and subclasses(types):  # their handlers first, which find this mode again for the products they make
            return func(*args, **(kwargs or {})) if _infra(_KEYS.FAKE) is not None else NotImplemented
        if entry is None:
            return func(*args, **(kwargs or {}))
        return entry.run(self, entry, args, kwargs or {})

    def product(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        result = replaced(entry.function, entry.name, self.contract, args, kwargs)
        return self._counted(entry, result, args, kwargs)

    def reduction(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        if not self.rows or has_no_order(entry.function, args, kwargs):
            return entry.func(*args, **kwargs)
        return self._counted(entry, reduced(entry.function, self.contract, args, kwargs), args, kwargs)

    def elements(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        if not self.rows:
            return entry.func(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) and x.is_nested for x in args):
            self._note(f"{entry.name} of nested tensors")
        return blocked(entry.name, entry.func, args, kwargs)

    def attended(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        """scaled_dot_product_attention as one operator: in inference mode."""
        if self.attention:
            result = calls.attention(self.contract, *args, **kwargs)
            if result is not None:
                return self._counted(entry, result, args, kwargs)
        return self.composite(entry, args, kwargs)

    def composite(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        """An operator made of others, which comes whole in inference mode."""
        with pushed(self):
            result = entry.func.decompose(*args, **kwargs)
        return entry.func(*args, **kwargs) if result is NotImplemented else result

    def each(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        """An operator on lists, whose kernel on a CPU is a loop: the same loop, in which this mode sees each call."""
        tensors = next((x for x in args if isinstance(x, (list, tuple))), ())
        if not self.rows or "out" in kwargs or not tensors or not tensors[0].is_cpu:
            return entry.func(*args, **kwargs)
        with pushed(self):
            results = [
                entry.function(*(x[i] if isinstance(x, (list, tuple)) else x for x in args), **kwargs)
                for i in range(len(tensors))
            ]
        return None if entry.name.endswith("_") else results

    def contained(self, entry: _Treatment, args: Any, kwargs: Any) -> Any:
        """An operator with products inside its kernel."""
        if not self.listing and (error := calls.refusal(entry.name, self.attention and not self.shown)) is not None:
            self.refused = error
            raise error
        self._note(entry.name)
        return entry.func(*args, **kwargs)

    def _counted(self, entry: _Treatment, result: Any, args: Any, kwargs: Any) -> Any:
        if result is None:
            self._note(f"{entry.name} {operands(args)[0].dtype}".replace("torch.", ""))
            return entry.func(*args, **kwargs)
        self.count += 1
        self.routed[entry.name] += 1
        return result

    def _note(self, what: str) -> None:
        if self.strict:
            raise OptionError(
                "a product or a reduction under isogemm.torch.invariant(strict=True)",
                limit="those that isogemm computes, of float32, bfloat16 or float16",
                value=what,
                nearest="strict=False, which leaves it to torch and counts it in `passed`",
            )
        self.passed[what] += 1


def _mark_for_compilers() -> None:
    """Say that the mode's handler is not to be compiled on its code, in place of the wrapper that torch puts around it.

    The wrapper is a third of what a scope costs an operator that is not routed. Where torch cannot mark code, it stays.
    """
    raw = _OperatorMode.__torch_dispatch__
    while hasattr(raw, "__wrapped__"):
        raw = raw.__wrapped__
    if raw.__code__.co_filename == __file__ and run_as_it_is(raw.__code__):
        _OperatorMode.__torch_dispatch__ = raw  # type: ignore[method-assign]


_mark_for_compilers()

_NEW = object()
# By an operator's id, since its own hash is a Python function; None for operators that are torch's.
_known: dict[int, _Treatment | None] = {}
_plain: list[Any] = []  # the operators that are None there, kept alive for the same reason


def _learn(func: Any) -> _Treatment | None:
    """Find out what to do with an operator, once."""
    entry = None
    name = str(getattr(getattr(func, "_overloadpacket", None), "__name__", func))
    if (product := product_of(func)) is not None:
        entry = _Treatment(_OperatorMode.product, func, *product, True)
    elif func in REDUCTIONS:
        entry = _Treatment(_OperatorMode.reduction, func, *REDUCTIONS[func], True)
    elif getattr(func, "namespace", "") == "aten":
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            entry = _Treatment(_OperatorMode.attended, func, None, name, True)
        elif is_composite(func):
            entry = _Treatment(_OperatorMode.composite, func, None, name, False)
        elif name.startswith("_foreach_") and (each := per_element(name)) is not None:
            entry = _Treatment(_OperatorMode.each, func, each, name, False)
        elif contained(name):
            entry = _Treatment(_OperatorMode.contained, func, None, str(func).removeprefix("aten."), False)
        elif form(func) == "blocked":
            is_sum = name in ("add", "sub", "add_", "sub_") and func._overloadname == "Tensor"
            entry = _Treatment(_OperatorMode.elements, func, None, name, True, is_sum)
    if entry is None:
        _plain.append(func)
    _known[id(func)] = entry
    return entry


class _FunctionMode(TorchFunctionMode):  # type: ignore[misc]
    """Above autograd: attention and norms whole, one form of linear, and a mark on what is recorded for backward."""

    def __init__(self, products: _OperatorMode) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_compiling():
            raise _compiled()
        taken = _TAKEN.get(func)
        is_recording = _is_grad_enabled()
        if taken is None and not is_recording:
            return func(*args, **kwargs) if kwargs else func(*args)
        products, kwargs = self.products, kwargs or {}
        count, own, start = products.count, products.own, position()
        result = func(*args, **kwargs) if taken is None else taken(self, func, args, kwargs)
        if is_recording and products.own == own and (products.rows or products.count != count):
            mark(func, result, start)
        return result

    def linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_top() and not needs_gradient(*args):
            with _no_dispatch():
                result = calls.linear_direct(self.products.contract, args, kwargs)
            if result is not None:
                self.products.count += 1
                self.products.routed["mm" if len(args) == 2 or args[2] is None else "addmm"] += 1
                return result
        return calls.linear(func, args, kwargs)

    def folded(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = calls.folded(args, kwargs)
        return self._left(func, args, kwargs)

    def _left(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.products.shown += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.products.shown -= 1

    def whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that isogemm computes as one, gradients included."""
        products, (function, name) = self.products, calls.WHOLE[func]
        wanted = products.attention if function is calls.attention else products.rows
        if wanted and not _is_recorded() and _infra(_KEYS.FAKE) is None:
            with aside():
                result = function(products.contract, *args, **kwargs)
            if result is not None:
                products.own += 1
                products.routed[name] += 1
                products.whole[name, str(result.dtype).removeprefix("torch.")] += 1
                return result
        return self._left(func, args, kwargs)

    def _is_top(self) -> bool:
        """Whether nobody looks at operators but this scope."""
        depth = _depth()
        return bool(depth) and _mode_at(depth - 1) is self.products


_TAKEN: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _FunctionMode.linear,
    torch.nn.functional.multi_head_attention_forward: _FunctionMode.folded,
    **dict.fromkeys(calls.WHOLE, _FunctionMode.whole),
    **dict.fromkeys(BACKWARD, differentiated),
}


def _is_recorded() -> bool:
    return _infra(_KEYS.PROXY) is not None or _infra(_KEYS.FUNCTIONAL) is not None


def subclasses(types: Any) -> bool:
    """Whether operands of an operator have handlers of their own."""
    return any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types)


def _compiled() -> OptionError:
    return OptionError(
        "torch.compile, export or a trace under isogemm.torch.invariant()",
        limit="eager code: a compiler may merge products into kernels of its own",
        value="a function that is being compiled",
        nearest="isogemm.torch.convert(module), whose products a compiler keeps, outside of invariant()",
    )


class invariant(_DecoratorContextManager):  # type: ignore[misc]
    """torch's products, reductions and attention by isogemm, forward and backward, on this thread, for a scope.

    ``with isogemm.torch.invariant(): ...``, or ``@isogemm.torch.invariant()`` on a function or a generator. aten's mm,
    addmm, bmm, baddbmm, mv, addmv, dot, addbmm, grouped_mm, their in-place and ``out=`` variants, and so matmul, linear
    and einsum, for float32, bfloat16 and float16 on CPUs and CUDA devices; softmax, log_softmax, logsumexp, layer_norm,
    rms_norm, sum and mean; scaled_dot_product_attention; convolutions along one dimension, and of patches. On a CPU,
    functions of elements whose kernels have several forms get one. Everything else stays torch's.

    Parameters
    ----------
    contract : Contract or str, optional
        The products' bits; by default those of `isogemm.matmul`.
    strict : bool
        Raise at a product or one of these reductions that isogemm does not compute (float64, complex, integers, a
        convolution with groups, a fused attention) instead of leaving it to torch.
    rows : bool
        False leaves reductions, norms and functions of elements to torch.
    attention : bool
        False leaves scaled_dot_product_attention to torch.

    Attributes
    ----------
    routed, passed : Counter
        After ``with invariant() as scope``: the calls computed by isogemm, and those left to torch, by operator.

    Raises
    ------
    ContractError
        No such contract; or a product whose dtype the contract does not define.
    OptionError
        A model or a function in the contract's place; a backward outside of the scope of what was recorded inside; a
        product that `strict` forbids; torch.compile of a function that enters the scope; a coroutine function as
        decorated function; threads that flush subnormals.

    Determinism
    -----------
    A product has the bits of the same call of isogemm, a reduction along rows those of `isogemm.torch.reductions` (but
    for a softmax of four dimensions or more: a chain), and attention those of
    `isogemm.torch.scaled_dot_product_attention`. `isogemm.torch.coverage` lists what of a model is torch's.
    """

    def __init__(
        self, contract: ContractLike | None = None, *, strict: bool = False, rows: bool = True, attention: bool = True
    ) -> None:
        super().__init__()
        if torch.compiler.is_dynamo_compiling():
            raise _compiled()
        if callable(contract):
            raise OptionError(
                "isogemm.torch.invariant",
                limit="a scope: it takes a contract, and neither a model nor a function",
                value=type(contract).__name__,
                nearest="`with isogemm.torch.invariant():` around the calls, or `@isogemm.torch.invariant()`",
            )
        self.contract = None if contract is None else as_contract(contract)
        self.strict, self.rows, self.attention = (
            flag(name, x) for name, x in (("strict", strict), ("rows", rows), ("attention", attention))
        )
        # By thread, each of which changes its own alone.
        self._entered: dict[int, list[tuple[_OperatorMode, _FunctionMode]]] = {}
        self._listing = False  # for `coverage`, which has no errors of its own
        self.routed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self._whole: Counter[tuple[str, str]] = Counter()  # calls that were replaced above autograd, and their dtypes

    def clone(self) -> invariant:
        """A scope of its own for each call of a decorated function."""
        return type(self)(self.contract, strict=self.strict, rows=self.rows, attention=self.attention)

    def __call__(self, function: Any) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise OptionError(
                "a function decorated with isogemm.torch.invariant()",
                limit="a plain function or generator",
                value="a coroutine function, which would run after the scope has ended",
                nearest="`with isogemm.torch.invariant():` around the calls inside of it",
            )
        return super().__call__(function)

    def __enter__(self) -> invariant:
        refuse_flushing("isogemm.torch.invariant()")
        products = _OperatorMode(self)
        functions = _FunctionMode(products)
        dispatch._push_mode(products)
        overrides._push_mode(functions)
        self._entered.setdefault(threading.get_ident(), []).append((products, functions))
        return self

    def __exit__(self, _kind: Any, error: Any, _trace: Any) -> None:
        thread = threading.get_ident()
        mine = self._entered.get(thread)
        if not mine:
            raise OptionError(
                "leaving isogemm.torch.invariant()",
                limit="the thread that entered it",
                value="another thread; the scope stays in force on its own",
                nearest="enter and leave the scope on one thread",
            )
        products, functions = mine.pop()
        if not mine:
            del self._entered[thread]
        removed(functions, torch._C._len_torch_function_stack, overrides._pop_mode, overrides._push_mode)
        removed(products, torch._C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode)
        if products.refused is not None and error is not None and error is not products.refused:
            raise products.refused from error

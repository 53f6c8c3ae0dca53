"""Routing of torch's matrix products to isogemm, forward and backward: for a scope, or for the process.

`invariant` puts two of torch's modes on the calling thread. The dispatch mode sees every aten operator below
autograd, those that autograd's own nodes call included, and replaces the products. The function mode sees the calls
above autograd: it gives `linear` one form for every layout, and marks what autograd records, so that a backward
outside of the scope is an error rather than a plain one. Both live in torch's thread-local state, which the threads
of its autograd engine take over. `enable` replaces the kernels themselves, for all threads. docs/routing.md is the
user's page; docs/design/0007-routing.md has the reasons and the costs.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._contextlib import _DecoratorContextManager
from torch.utils._python_dispatch import TorchDispatchMode

from ..contract.spec import Contract, ContractLike, as_contract
from ..errors import OptionError
from .products import DTYPES, PRODUCTS, contained, operands, replaced

__all__ = ["active", "disable", "enable", "enabled", "invariant"]

Tensor = Any  # torch is untyped to mypy


class _Products(TorchDispatchMode):  # type: ignore[misc]
    """Below autograd: products to isogemm, everything else to torch."""

    def __init__(self, contract: Contract | None, strict: bool) -> None:
        super().__init__()
        self.contract, self.strict = contract, strict
        self.routed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = PRODUCTS.get(func)
        if found is not None and (_infra(_KEYS.PROXY) is not None or _infra(_KEYS.FUNCTIONAL) is not None):
            raise _compiled()  # a trace would take the product for a constant, or run later and elsewhere
        if types and subclasses(types):  # their handlers first, which find this mode again for the products they make
            return func(*args, **kwargs) if _infra(_KEYS.FAKE) is not None else NotImplemented
        if found is None:
            if func in _whole:
                return self._other(func, args, kwargs)
            return func(*args, **kwargs)
        function, name = found
        result = replaced(function, name, self.contract, args, kwargs)
        if result is None:
            self._note(f"{name} {operands(args)[0].dtype}".replace("torch.", ""))
            return func(*args, **kwargs)
        self.routed[name] += 1
        return result

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator made of others (it comes whole in inference mode), or one with products inside its kernel."""
        if _whole[func] == "composite":
            with _pushed(self):
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        self._note(str(func).removeprefix("aten."))
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        if self.strict:
            raise OptionError(
                "a product under isogemm.torch.invariant(strict=True)",
                limit="those that isogemm computes: float32, bfloat16 or float16 matrix products",
                value=what,
                nearest="strict=False, which leaves it to torch and counts it in `passed`",
            )
        self.passed[what] += 1


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Above autograd: one form of linear, and a mark on what is recorded for backward."""

    def __init__(self, products: _Products) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise _compiled()
        kwargs = kwargs or {}
        before = self.products.routed.total()
        if func is _LINEAR:
            result = _linear(func, args, kwargs)
        else:
            if func is _ATTENTION:
                args, kwargs = _folding(args, kwargs)
            result = func(*args, **kwargs)
        if self.products.routed.total() != before and torch.is_grad_enabled():
            for x in result if isinstance(result, tuple | list) else (result,):
                if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                    x.grad_fn.register_prehook(_inside)
        return result


_infra, _KEYS = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_LINEAR = torch.nn.functional.linear
_ATTENTION = torch.nn.functional.multi_head_attention_forward


def subclasses(types: Any) -> bool:
    """Whether operands of an operator have handlers of their own."""
    return any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types)


def _folding(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of multi_head_attention_forward with contiguous inputs, so that its own calls of `linear` fold.

    Those calls are not seen one by one: a function mode sees the outermost call alone. One tensor stays one tensor.
    """
    seen: dict[int, Tensor] = {}

    def contiguous(x: Any) -> Any:
        return seen.setdefault(id(x), x.contiguous()) if isinstance(x, torch.Tensor) else x

    named = {k: contiguous(v) if k in ("query", "key", "value") else v for k, v in kwargs.items()}
    return (*map(contiguous, args[:3]), *args[3:]), named


def _linear(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`linear` as one addmm, whatever the strides.

    torch makes it a product and an addition, with a rounding between them, where the input's strides do not fold: a
    transposed activation folds alone and not in a batch, and a bfloat16 result would then depend on the batch.
    """
    x, w, bias = (*args, *(kwargs[k] for k in ("input", "weight", "bias") if k in kwargs), None)[:3]
    if (
        type(x) is not torch.Tensor
        or bias is None
        or bias.dim() != 1
        or w.dim() != 2
        or x.dim() == 2
        or x.dtype not in DTYPES
    ):
        return func(*args, **kwargs)
    if x.shape[-1] != w.shape[1]:
        return func(*args, **kwargs)  # torch's own error
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return torch.addmm(bias, rows, w.t()).view(*x.shape[:-1], w.shape[0])


def _inside(gradients: Any) -> None:
    """Run by autograd before a recorded product's node."""
    if not active():
        raise OptionError(
            "backward of what was recorded under isogemm.torch.invariant()",
            limit="a backward that is routed too",
            value="backward() outside of it",
            nearest="call backward() inside the `with`, or isogemm.torch.enable() for the process",
        )


def _compiled() -> OptionError:
    return OptionError(
        "torch.compile, export or a trace under isogemm.torch.invariant()",
        limit="eager code: a compiler may merge products into kernels of its own",
        value="a function that is being compiled",
        nearest="isogemm.torch.convert(module), whose products a compiler keeps, outside of invariant()",
    )


class _Whole(dict[Any, str]):
    """What has to be looked at besides the products: made of other operators, or with products in its kernel."""

    def __missing__(self, func: Any) -> str:
        kind = ""
        if getattr(func, "namespace", "") == "aten":
            if is_composite(func):
                kind = "composite"
            elif contained(func._overloadpacket.__name__):
                kind = "contained"
        self[func] = kind
        return kind

    def __contains__(self, func: Any) -> bool:
        return bool(self[func])


def is_composite(func: Any) -> bool:
    """Whether torch defines an operator by others, which a dispatch mode sees in its place except in inference mode."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


_whole = _Whole()


class _pushed:
    """A dispatch mode on this thread's stack, without the process-wide flags that ``with mode`` sets as well."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        dispatch._push_mode(self.mode)

    def __exit__(self, *_: object) -> None:
        _remove(self.mode, torch._C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode)


def _remove(mode: Any, length: Callable[[], int], pop: Callable[[], Any], push: Callable[[Any], None]) -> None:
    """Take one mode off a stack of this thread, wherever it lies: two generators need not leave in order."""
    above = []
    while length():
        top = pop()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push(other)


class invariant(_DecoratorContextManager):  # type: ignore[misc]
    """Matrix products of torch by isogemm, forward and backward, on this thread, until the scope ends.

    ``with isogemm.torch.invariant(): ...``, or ``@isogemm.torch.invariant()`` on a function or a generator. aten's mm,
    addmm, bmm, baddbmm, mv, addmv, dot, addbmm, their in-place and ``out=`` variants, and so matmul, linear and einsum,
    for float32, bfloat16 and float16 on CPUs and CUDA devices. Everything else stays torch's.

    Parameters
    ----------
    contract : Contract or str, optional
        The products' bits; by default those of `isogemm.matmul`.
    strict : bool
        Raise at a product that isogemm does not compute (float64, complex, integers, a convolution, a fused attention)
        instead of leaving it to torch.

    Attributes
    ----------
    routed, passed : Counter
        After ``with invariant() as scope``: the products computed by isogemm, and those left to torch, by operator.

    Raises
    ------
    ContractError
        No such contract; or a product whose dtype the contract does not define.
    OptionError
        A backward outside of the scope of what was recorded inside; a product that `strict` forbids; torch.compile of a
        function that enters the scope; a coroutine function as decorated function.

    Determinism
    -----------
    A product has the bits of the same call of isogemm. Reductions, convolutions and fused attention are torch's:
    `isogemm.torch.coverage` lists those of a model.
    """

    def __init__(self, contract: ContractLike | None = None, *, strict: bool = False) -> None:
        super().__init__()
        if torch.compiler.is_dynamo_compiling():
            raise _compiled()
        self.contract = None if contract is None else as_contract(contract)
        self.strict = strict
        self._entered: list[tuple[int, _Products, _Calls]] = []
        self.routed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def clone(self) -> invariant:
        """A scope of its own for each call of a decorated function."""
        return type(self)(self.contract, strict=self.strict)

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
        products = _Products(self.contract, self.strict)
        products.routed, products.passed = self.routed, self.passed
        calls = _Calls(products)
        dispatch._push_mode(products)
        overrides._push_mode(calls)
        self._entered.append((threading.get_ident(), products, calls))
        return self

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        mine = [i for i, (owner, _p, _c) in enumerate(self._entered) if owner == thread]
        if not mine:
            raise OptionError(
                "leaving isogemm.torch.invariant()",
                limit="the thread that entered it",
                value="another thread",
                nearest="enter and leave the scope on one thread",
            )
        _owner, products, calls = self._entered.pop(mine[-1])
        _remove(calls, torch._C._len_torch_function_stack, overrides._pop_mode, overrides._push_mode)
        _remove(products, torch._C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode)


class _Process:
    """What `enable` has registered."""

    lock = threading.Lock()
    library: Any = None
    contract: Contract | None = None


def active() -> bool:
    """Whether products of this thread are routed now: inside `invariant`, or after `enable`."""
    return _Process.library is not None or any(
        isinstance(mode, _Products) for mode in dispatch._get_current_dispatch_mode_stack()
    )


def enabled() -> bool:
    """Whether `enable` is in force."""
    return _Process.library is not None


def enable(contract: ContractLike | None = None) -> None:
    """Route the products of all threads, forward and backward, until `disable`: `invariant` for the process.

    aten's kernels for CPU and CUDA are replaced, so nothing but the products gets slower. Call it (and `disable`) while
    no other thread uses torch: torch's table of kernels is not made to change under a running call. Compiled functions
    run eagerly while it is in force. Calling it again changes the contract.

    Parameters
    ----------
    contract : Contract or str, optional
        As in `invariant`.

    Raises
    ------
    ContractError
        No such contract.
    OptionError
        This torch cannot give its own kernels back.
    """
    chosen = None if contract is None else as_contract(contract)
    with _Process.lock:
        if _Process.library is None:
            _Process.library = _registered()
            torch.compiler.set_stance("force_eager")
        _Process.contract = chosen


def disable() -> None:
    """Give torch's products back to torch; nothing happens where `enable` is not in force."""
    with _Process.lock:
        if _Process.library is not None:
            library, _Process.library = _Process.library, None
            library._destroy()
            torch.compiler.set_stance("default")


def _registered() -> Any:
    if not hasattr(torch.library, "get_kernel"):  # torch's own kernels could not be reached any more
        raise OptionError(
            "isogemm.torch.enable()",
            limit="a torch with torch.library.get_kernel",
            value=f"torch {torch.__version__}",
            nearest="with isogemm.torch.invariant():, or a newer torch",
        )
    library = torch.library.Library("aten", "IMPL")
    keys = ["CPU", *(["CUDA"] if torch.cuda.is_available() else [])]
    for func, (function, name) in PRODUCTS.items():
        composite = is_composite(func)
        for key in ["CompositeImplicitAutograd"] if composite else keys:
            if composite or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                library.impl(func, _kernel(func, function, name, key), key, with_keyset=True)
    return library


def _kernel(func: Any, function: Callable[..., Tensor], name: str, key: str) -> Callable[..., Any]:
    """What stands in the dispatcher's table for one operator on one device while `enable` is in force."""
    composite = key == "CompositeImplicitAutograd"
    original = torch.library.get_kernel(func, "CPU" if composite else key)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        result = replaced(function, name, _Process.contract, args, kwargs)
        return original.call_boxed(keyset, *args, **kwargs) if result is None else result

    def whole(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if name != "linear":
            return original.call_boxed(keyset, *args, **kwargs)
        return _linear(lambda *a, **k: original.call_boxed(keyset, *a, **k), args, kwargs)

    return whole if composite else kernel

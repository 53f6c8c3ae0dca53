"""Routing for the process: aten's own kernels replaced, for all threads, until they are given back.

A scope's modes belong to a thread and see every operator. Here the dispatcher's table has isogemm's functions in the
places of the operators that are routed, so that nothing else gets slower. torch's kernels, taken before, serve the
operands that are not isogemm's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...base.arguments import flag
from ...contract.spec import ContractLike, as_contract
from ...errors import OptionError
from ..operator import needs_gradient
from . import calls
from .elementwise import blocked, form, refuse_flushing
from .products import PRODUCTS, is_composite, replaced
from .rows import REDUCTIONS, reduced
from .state import Process

_COMPOSITE = "CompositeImplicitAutograd"
_SUMS = frozenset({"add", "sub", "rsub", "floor_divide"})
_aten: Any = torch.ops.aten
# One kernel for all devices, which a device's own goes before.
_EXPLICIT = frozenset(
    {_aten.logsumexp.default, _aten.logsumexp.out, _aten._grouped_mm.default, _aten.convolution.default}
)


def enable(contract: ContractLike | None = None, *, rows: bool = True, attention: bool = True) -> None:
    """Route what `invariant` routes for all threads, forward and backward, until `disable`.

    aten's kernels for CPU and CUDA are replaced, so nothing but the routed operators gets slower. Call it (and
    `disable`) while no other thread uses torch: torch's table of kernels is not made to change under a running call.
    Compiled functions run eagerly while it is in force. Calling it again changes the options.

    Parameters
    ----------
    contract : Contract or str, optional
    rows, attention : bool
        As in `invariant`.

    Raises
    ------
    ContractError
        No such contract.
    OptionError
        This torch cannot give its own kernels back: it is older than 2.9. Or this thread flushes subnormals.
    """
    chosen = None if contract is None else as_contract(contract)
    rows, attention = flag("rows", rows), flag("attention", attention)
    refuse_flushing("isogemm.torch.enable()")
    with Process.lock:
        if Process.library is not None and Process.options != (rows, attention):
            Process.library._destroy()
            Process.library = None
        if Process.library is None:
            Process.library = _registered(rows, attention)
            Process.options = (rows, attention)
            if Process.stance is None:
                Process.stance = torch.compiler.set_stance("force_eager")
        Process.contract = chosen


def disable() -> None:
    """Give torch's operators back to torch; nothing happens where `enable` is not in force."""
    with Process.lock:
        if Process.library is not None:
            library, Process.library = Process.library, None
            library._destroy()
            stance, Process.stance = Process.stance, None
            _give_back(stance)


def _give_back(stance: Any) -> None:
    """The compiler's stance of before, unless the program has chosen another one since."""
    from torch._dynamo import eval_frame

    if getattr(eval_frame, "_stance", stance.stance) == stance.stance:
        stance.__exit__(None, None, None)


def _registered(rows: bool, attention: bool) -> Any:
    if not hasattr(torch.library, "get_kernel"):  # torch's own kernels could not be reached any more
        limit = "torch 2.9 or newer, which has torch.library.get_kernel"
        nearest = "with isogemm.torch.invariant():, or a newer torch"
        raise OptionError("isogemm.torch.enable()", limit=limit, value=f"torch {torch.__version__}", nearest=nearest)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says once that kernels are replaced, which is what was asked for
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _replace_all(library, rows, attention)
    return library


def _replace_all(library: Any, rows: bool, attention: bool) -> None:
    devices = ["CPU", *(["CUDA"] if torch.cuda.is_available() else [])]
    for func, (function, name) in PRODUCTS.items():
        if not is_composite(func):
            _replace(library, func, devices, _instead(partial(replaced, function, name)))
    for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
        if hasattr(_aten, name):
            _replace(library, getattr(_aten, name).default, devices, _refused(name))
    _replace(library, _aten.linear.default, [_COMPOSITE], _linear)
    if attention:
        _replace(library, _aten.scaled_dot_product_attention.default, [_COMPOSITE], _whole(calls.attention))
    if rows:
        for func, (function, _name) in REDUCTIONS.items():
            if not is_composite(func):
                _replace(library, func, devices, _instead(partial(reduced, function)))
        _replace(library, _aten.rms_norm.default, [_COMPOSITE], _whole(calls.rms_norm))
        _replace(library, _aten.layer_norm.default, [_COMPOSITE], _whole(calls.layer_norm))
        for func in _elementwise():
            _replace(library, func, ["CPU"], _elements(func))


Body = Callable[[Callable[..., Any], Any, Any], Any]  # (torch's kernel, args, kwargs)


def _replace(library: Any, func: Any, keys: list[str], body: Body) -> None:
    """Put `body` in the place of an operator's kernels."""
    for key in keys:
        if func in _EXPLICIT or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            library.impl(func, _kernel(func, key, body), key, with_keyset=True)


def _kernel(func: Any, key: str, body: Body) -> Callable[..., Any]:
    """What stands in the dispatcher's table for one operator on one device while `enable` is in force."""
    original = torch.library.get_kernel(func, "CPU" if key == _COMPOSITE else key)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return body(lambda *a, **k: original.call_boxed(keyset, *a, **k), args, kwargs)

    return kernel


def _instead(compute: Callable[[Any, Any, Any], Any]) -> Body:
    """``compute(contract, args, kwargs)``, and torch's own kernel where that is None."""

    def body(original: Any, args: Any, kwargs: Any) -> Any:
        result = compute(Process.contract, args, kwargs)
        return original(*args, **kwargs) if result is None else result

    return body


def _whole(function: Callable[..., Any]) -> Body:
    return _instead(lambda contract, args, kwargs: function(contract, *args, **kwargs))


def _elements(func: Any) -> Body:
    name = func._overloadpacket.__name__
    places = [i for i, x in enumerate(func._schema.arguments) if str(x.type) == "Tensor"]

    def body(original: Any, args: Any, kwargs: Any) -> Any:
        for i in places:
            if i < len(args) and not isinstance(args[i], torch.Tensor):
                args = _with_scalar(args, i)
        return blocked(name, original, args, kwargs)

    return body


def _with_scalar(args: Any, place: int) -> Any:
    """Arguments with a tensor for a number in a tensor's place, which a kernel cannot hand on."""
    like = next(x for x in args if isinstance(x, torch.Tensor))
    dtype = like.dtype if like.is_floating_point() or like.is_complex() else None
    return (*args[:place], torch.tensor(args[place], dtype=dtype), *args[place + 1 :])


def _refused(name: str) -> Body:
    def body(original: Any, args: Any, kwargs: Any) -> Any:
        raise calls.refusal(name, attention=False) or AssertionError(name)

    return body


def _linear(original: Any, args: Any, kwargs: Any) -> Any:
    if not needs_gradient(*args):
        result = calls.linear_direct(Process.contract, args, kwargs)
        if result is not None:
            return result
    return calls.linear(original, args, kwargs)


def _elementwise() -> list[Any]:
    """aten's elementwise operators of more than one form, but for sums, which are left alone.

    A kernel cannot hand a number on that stands in a tensor's place, and sums are too many to make them slower.
    """
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or packet.strip("_") in _SUMS:
            continue
        func = getattr(getattr(_aten, packet), overload or "default")
        if form(func) == "blocked" and func not in PRODUCTS and func not in REDUCTIONS:
            found.append(func)
    return found

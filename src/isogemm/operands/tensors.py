"""torch's tensors as operands: which are taken, and the memory of those on the CPU. Imports no torch of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import BFLOAT16, FACTORS, INTEGERS, OF_COMPLEX, OR_INT8, TORCH, supported, torch_name
from ..errors import DTypeError, LayoutError, OptionError
from .device_array import foreign_device
from .memory import tensor_of, view

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


KINDS: dict[type, None] = {}
"""torch's tensor types, once one was seen: importing torch is not ours to do."""
_waiting: list[Callable[[Any], Any]] = []


def when_seen(take: Callable[[Any], Any]) -> None:
    """Call `take` with torch once somebody has passed a tensor: short paths take torch's functions by it."""
    _waiting.append(take)
    if KINDS:
        take(sys.modules["torch"])


def uncompiled(function: F) -> F:
    """Keep torch's compiler out of a function and of all that it calls.

    It would take what they read of memory and of tables, addresses and shapes among it, for constants of other calls.
    Operators of `isogemm.torch` are what it sees of a product.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # not inlined, for this reason
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "it takes arrays; functions and layers of isogemm.torch are operators that torch.compile sees"
    )
    if not run_as_it_is(function.__code__):
        _waiting.append(lambda torch: run_as_it_is(function.__code__))
    return function


def run_as_it_is(code: Any) -> bool:
    """Mark code: called by itself it is not compiled, nor what it calls. False where torch is not there, or cannot."""
    dynamo = getattr(getattr(sys.modules.get("torch"), "_C", None), "_dynamo", None)
    frames: Any = getattr(dynamo, "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return False
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return True


def learn() -> None:
    """Somebody has passed a tensor: from now on the short paths are asked."""
    if not KINDS:
        torch = sys.modules["torch"]
        for take in _waiting:
            take(torch)
        KINDS.update({torch.Tensor: None, torch.nn.Parameter: None})


def ready() -> bool:
    """Whether torch is there, and known."""
    if "torch" in sys.modules:
        learn()
    return bool(KINDS)


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor. Never imports torch: who has none of it, or not all yet, has no tensors."""
    return isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ()))  # another thread may import it now


def is_traced() -> bool:
    """Whether torch records the calls of this thread, to run them again: by torch.jit.trace, or by make_fx.

    Either sees torch's operators alone. What is computed behind their back would be a constant of what was recorded.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch._C._get_tracing_state() is not None:
        return True
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return bool(torch._C._len_torch_dispatch_stack()) and torch._C._get_dispatch_mode(proxy) is not None


def check_untraced(name: str) -> None:
    """Raise an OptionError where a result would become a constant of a trace."""
    if is_traced():
        limit = "eager code: the result would be a constant of the trace"
        nearest = "functions and layers of isogemm.torch, which are operators there; or torch.compile"
        raise OptionError(f"{name} under torch.jit.trace or make_fx", limit=limit, value="a trace", nearest=nearest)


def wrote(out: Any) -> None:
    """Count a write into a tensor, or into each of a list: torch does not see what kernels do to its memory.

    By its count autograd finds that what it saved for a gradient is no more.
    """
    if isinstance(out, list | tuple):
        for x in out:
            wrote(x)
    elif is_tensor(out) and not out.is_inference():  # which have no count
        sys.modules["torch"].autograd.graph.increment_version(out)


def stacked(name: str) -> str:
    """What to write in the place of a list of tensors."""
    return f"torch.stack({name}) for one product, isogemm.gemm_grouped or isogemm.torch.grouped for one with each"


def check_tensor(name: str, x: Any, *, integers: bool = False) -> None:
    """Raise unless a torch tensor is dense, outside the gradient's graph and any trace, and of a supported dtype.

    `integers`: so are int8 and int32, as on the CPU. Raises LayoutError, OptionError or DTypeError.
    """
    torch = sys.modules["torch"]
    if x.layout is not torch.strided:
        raise LayoutError(f"{name}", limit="a dense tensor", value=str(x.layout), nearest=f"{name}.to_dense()")
    if x.requires_grad and torch.is_grad_enabled():
        limit = "a tensor outside the gradient's graph"
        nearest = f"{name}.detach(), torch.no_grad(), or isogemm.torch.linear, which records gradients"
        raise OptionError(f"{name}", limit=limit, value="requires_grad=True", nearest=nearest)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) and not (integers and str(x.dtype) in INTEGERS):
        nearest = f"torch.float32, by {name}.float()"
        if x.is_complex():
            nearest = f"torch.float32, {OF_COMPLEX}"
        elif not x.is_floating_point() and name in FACTORS:
            nearest += f", or torch.{OR_INT8}"
        raise DTypeError(
            f"dtype of {name}",
            limit=supported(str(x.dtype)),
            value=str(x.dtype),
            nearest=nearest,
            said=f"{name} is {x.dtype}, and products here are of float32, bfloat16 or float16",
        )
    if has_tangent(x):
        limit, nearest = "a tensor outside the gradient's graph", f"{name}.detach(), or reverse mode"
        raise OptionError(f"{name}", limit=limit, value="a dual tensor, of forward-mode gradients", nearest=nearest)
    watched = torch._C  # most calls look no further
    if watched._get_tracing_state() is not None or watched._len_torch_dispatch_stack():
        check_untraced(name)


def has_tangent(x: Any) -> bool:
    """Whether a tensor carries a forward-mode gradient. Below autograd, which has seen to it by then, none does."""
    torch = sys.modules["torch"]
    forward, on = torch.autograd.forward_ad, torch._C
    if forward._current_level < 0 or on._dispatch_tls_is_dispatch_key_excluded(on.DispatchKey.AutogradFunctionality):
        return False
    return forward.unpack_dual(x).tangent is not None


def from_tensor(name: str, x: Any) -> Array:
    """An ndarray over the memory of a CPU tensor that a product takes.

    Raises DeviceError, LayoutError, OptionError or DTypeError.
    """
    torch = sys.modules["torch"]
    learn()
    if x.device.type != "cpu":
        raise foreign_device(name, str(x.device))
    check_tensor(name, x, integers=True)
    dtype = (TORCH | INTEGERS)[str(x.dtype)]
    viewed = _plain(x, dtype) if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else _unwrapped(x)
    if viewed is None:
        raise _no_memory(name, x)
    return viewed


def words(x: Any) -> Any:
    """The bits of a contiguous torch tensor as integers of its elements' size: those of a NaN are its own, too."""
    return x.view(getattr(sys.modules["torch"], f"int{8 * x.element_size()}"))


def rounded(x: Any, dtype: Any) -> Any:
    """A dense tensor of `x` rounded once to `dtype` of torch's, every NaN the canonical one of the contracts."""
    import torch

    y = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    kind, nan = (torch.int32, 0x7FFFFFFF) if dtype is torch.float32 else (torch.int16, 0x7FFF)
    y.view(kind).masked_fill_(y.isnan(), nan)
    return y


def memory(name: str, x: Any) -> Array:
    """An ndarray over a CPU tensor of any element type that NumPy has: indices, masks, sums to be written.

    Raises LayoutError: the tensor has no memory that could be viewed.
    """
    viewed = _plain(x, np.dtype(torch_name(x.dtype)))
    if viewed is None:
        raise _no_memory(name, x)
    return viewed


def _no_memory(name: str, x: Any) -> LayoutError:
    value, nearest = type(x).__name__, f"{name}.contiguous()"
    if sys.modules["torch"]._C._functorch.is_legacy_batchedtensor(x):
        value, nearest = "a batch of gradients", "vectorize=False, one gradient at a time, or torch.func.jacrev"
    elif x.is_neg():  # contiguous() would give it back as it is
        value, nearest = "a lazy negation", f"{name}.resolve_neg()"
    return LayoutError(f"{name}", limit="a tensor with plain memory", value=value, nearest=nearest)


def _plain(x: Any, dtype: np.dtype[Any]) -> Array | None:
    viewed = view(x, dtype)
    if viewed is None:  # what a finished transform of torch.func has left behind, torch's operators see through
        try:
            return view(x.detach(), dtype)
        except RuntimeError:
            return None
    return viewed


def _unwrapped(x: Any) -> Array | None:
    """The memory of a wrapper around other tensors, which says itself what that is, or has none."""
    try:
        return _as_numpy(x.detach())
    except (RuntimeError, TypeError):
        return None


def _as_numpy(x: Any) -> Array:
    """The array that a CPU tensor outside any gradient says it is."""
    torch = sys.modules["torch"]
    if x.dtype is torch.bfloat16:  # NumPy has no name for it: the same bits as uint16
        return np.asarray(x.view(torch.uint16).numpy().view(BFLOAT16))
    return np.asarray(x.numpy())


def on_host(x: Any) -> Array:
    """An array of a tensor on any device, bfloat16 included, or of what NumPy takes; the memory where it can be.

    Raises DTypeError: a masked array, of which some numbers do not count. Raises LayoutError or DeviceError: a tensor
    that is not dense, or has no numbers.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError("array", limit="an array without a mask", value="a masked array", nearest="x.filled(0)")
    if not hasattr(x, "detach"):
        return np.asarray(x)
    if str(x.layout) != "torch.strided" or x.is_nested:
        value = "a nested tensor" if x.is_nested else str(x.layout)
        raise LayoutError("tensor", limit="a dense one", value=value, nearest="x.to_dense(), or x.to_padded_tensor(0)")
    if x.is_meta:
        raise foreign_device("tensor", "meta")
    return _as_numpy(x.detach().cpu().resolve_conj().resolve_neg())


def as_tensor(x: Any) -> Any:
    """A torch tensor over an array's memory; a tensor as it is. Loads torch."""
    import torch

    if not isinstance(x, np.ndarray):
        return x
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)


def to_tensor(x: Array) -> Any:
    """A torch tensor over the memory of an array that this package made: torch's own, where `memory` made it."""
    found = tensor_of(x)
    return as_tensor(x) if found is None else found

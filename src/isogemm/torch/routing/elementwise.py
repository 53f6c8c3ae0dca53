"""Functions of elements on the CPU, with one form for every element.

torch's CPU kernels take whole vectors through one function (Sleef's, or float32 inside a 16-bit kernel) and what is
left over, or anything strided, through another (the C library's, or steps rounded to 16 bits). What is left over
depends on how many elements there are and how threads share them, so silu, sigmoid, gelu, softplus, a 16-bit rsqrt and
many others give one element other bits in another batch. Here such an operator gets flat operands, filled up so that
every thread's share is whole vectors: then every element takes the first function. Operands that are so already cost
a few comparisons. CUDA's elementwise kernels have one function per element and are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...base.floating import flushes, ieee_defaults
from ...errors import OptionError

Tensor = Any  # torch is untyped to mypy

# Elements that any of torch's CPU kernels takes in one step are a divisor of this: two vectors of 32 16-bit numbers.
_STEP = 64
_GRAIN = 32768  # at::internal::GRAIN_SIZE: a thread's least share
_GELU_GRAIN = 16384  # gelu divides by its own rule: by all threads, above this
_FILL = 0.5  # in every function's domain
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

_workers = threading.local()  # each thread has torch workers of its own

# One operation, correctly rounded or exact, or torch's vectorised math on every path: the same bits on all of them.
_EXACT = (
    "abs acos acosh add addcdiv addcmul asin asinh atan bitwise_and bitwise_left_shift bitwise_not bitwise_or "
    "bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clone copysign cos deg2rad div eq erf erfc exp "
    "expm1 fill floor fmax fmin ge gt hardtanh hardtanh_backward heaviside isinf isnan isneginf isposinf "
    "le leaky_relu leaky_relu_backward lerp log log10 log1p log2 logical_and logical_not logical_or logical_xor lt "
    "masked_fill maximum minimum mse_loss_backward mul nan_to_num native_dropout_backward ne neg nextafter pow "
    "rad2deg reciprocal relu round rsqrt rsub sgn sigmoid_backward sign signbit sin sqrt sub tan tanh tanh_backward "
    "threshold threshold_backward trunc where"
)
EXACT = frozenset(_EXACT.split())

# Exact for some arguments: x**2, a float32 rsqrt, sums without alpha.
_LOOKED_AT = frozenset({"add", "pow", "rsqrt", "rsub", "sub"})

# Elementwise, which torch does not say of them.
_UNTAGGED = frozenset(
    {"softplus_backward", "mish_backward", "elu_backward", "hardswish", "hardswish_backward", "hardsigmoid_backward"}
)
_NOT_ONE = frozenset({"mvlgamma"})  # adds up
_POWERS = frozenset({0, 1, 2, 3, -1, -2})  # products and quotients


def form(func: Any) -> str:
    """How one aten operator treats elements: "exact", "blocked" (a matter of `blocked`), or "" where it is neither."""
    name = func._overloadpacket.__name__.rstrip("_")
    returns = [str(x.type) for x in func._schema.returns]
    if torch.Tag.nondeterministic_seeded in func.tags or name in _NOT_ONE or returns != ["Tensor"]:
        return ""
    if torch.Tag.pointwise not in func.tags and name not in _UNTAGGED and name not in EXACT:
        return ""
    return "exact" if name in EXACT and name not in _LOOKED_AT else "blocked"


def per_element(name: str) -> Any:
    """The operator that one of lists (``_foreach_sigmoid``) repeats, where its elements are a matter of `blocked`."""
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    found = packet is not None and any(form(getattr(packet, x)) == "blocked" for x in packet.overloads())
    return packet if found else None


def is_exact(name: str, args: Any, kwargs: Any) -> bool:
    """Whether one call of an operator in `_LOOKED_AT` is one operation."""
    if name == "pow":
        return type(args[1]) in (int, float) and args[1] in _POWERS
    if name == "rsqrt":
        return bool(args[0].dtype is torch.float32)
    return bool((args[2] if len(args) > 2 else kwargs.get("alpha", 1)) == 1)


def _pieces(numel: int, name: str) -> int:
    """What the number of elements has to be a multiple of."""
    if name.startswith("gelu"):
        return _STEP * torch.get_num_threads() if numel > _GELU_GRAIN else _STEP
    return _STEP * min(torch.get_num_threads(), -(-numel // _GRAIN)) if numel > _GRAIN else _STEP


def filled(numel: int, name: str) -> int:
    """The least number of elements, from `numel` on, that every thread takes in whole steps."""
    total, step = max(numel, _STEP), 0
    while step != (step := _pieces(total, name)) or total % step:
        total = -(-total // step) * step
    return total


def padded(x: Tensor, total: int) -> Tensor:
    """A flat tensor, and behind it what every function takes."""
    return torch.constant_pad_nd(x, (0, total - x.shape[0]), _FILL)


def _spoiled() -> bool:
    """Whether torch's arithmetic flushes subnormals here: in this thread, or in one that shares its work.

    Those have the mode of the moment in which they were started, and keep it; so ask them, once.
    """
    if torch.compiler.is_compiling():
        return False
    if flushes():
        return True
    count = torch.get_num_threads()
    known, flushing = getattr(_workers, "seen", (1, False))
    if count <= known or torch._C._len_torch_dispatch_stack():
        return bool(flushing)
    with torch.inference_mode():
        halves = torch.full((count * _GRAIN,), 2.0**-126, dtype=torch.float32, device="cpu").mul_(0.5)
        flushing = not bool(halves.view(torch.int32).all())
    _workers.seen = count, flushing
    return flushing


def refuse_flushing(what: str) -> None:
    """Raise where torch's own arithmetic, which is left to torch in `what`, flushes subnormals."""
    if _spoiled():
        raise OptionError(
            what,
            limit="a processor that keeps subnormals",
            value="one told to flush them, in this thread or in threads that torch started from it",
            nearest="torch.set_flush_denormal(False) before torch's first operation",
        )


def subnormals_kept(x: Tensor) -> AbstractContextManager[None]:
    """torch's own arithmetic on `x` by IEEE 754, also where this thread, or one that helps it, flushes subnormals."""
    return nullcontext() if x.is_cuda or not _spoiled() else _alone()


@contextmanager
def _alone() -> Iterator[None]:
    """torch's arithmetic on this thread alone, which keeps subnormals meanwhile."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with ieee_defaults():
            yield
    finally:
        torch.set_num_threads(threads)


def blocked(name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``call(*args, **kwargs)`` for an elementwise operator of torch's, each element by the vectorised function.

    `name` has an underscore at the end where the operator writes to its first argument; `call` is its own kernel.
    """
    if not _spoiled():
        return _blocked(name, call, args, kwargs)
    with _alone():
        return _blocked(name, call, args, kwargs)


def _blocked(name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    bare = name.rstrip("_")
    if bare in _LOOKED_AT and is_exact(bare, args, kwargs):
        return call(*args, **kwargs)
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not tensors:
        return call(*args, **kwargs)
    first = tensors[0]
    if not first.is_cpu or any(x.is_nested for x in tensors):
        return call(*args, **kwargs)
    if first.dtype not in _FLOATS:
        return _of_integers(name, call, args, kwargs)
    numel = first.numel()
    if numel == 0:
        return call(*args, **kwargs)
    whole = numel % _STEP == 0 and numel % _pieces(numel, name) == 0
    if whole and not kwargs:
        shape = first.shape
        for x in tensors:
            if not (x.is_contiguous() and x.shape == shape):
                break
        else:
            return call(*args)
    return _flat(name, call, args, kwargs, tensors)


def _of_integers(name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An operator whose first tensor has no floating-point dtype: torch converts it piece by piece where it has to."""
    if name.endswith("_") or kwargs:
        return call(*args, **kwargs)
    none = call(*[x.new_empty((0,) * min(x.dim(), 1)) if isinstance(x, torch.Tensor) else x for x in args])
    if none.dtype not in _FLOATS:
        return call(*args)
    return _blocked(name, call, [x.to(none.dtype) if isinstance(x, torch.Tensor) else x for x in args], kwargs)


def _flat(name: str, call: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """The same on flat copies that end behind the last element."""
    stacked = any(x.dim() for x in tensors)  # else all are scalars, and stay equal in rank
    shape = tensors[0].shape
    if any(x.shape != shape for x in tensors):
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    numel = shape.numel()
    if numel == 0 or (name.endswith("_") and shape != args[0].shape):  # torch's own error: its memory cannot grow
        return call(*args, **kwargs)
    total = filled(numel, name)

    def flat(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or (stacked and not x.dim()):
            return x  # a scalar takes no part in the choice of the result's dtype: it has to stay one
        x = (x if x.shape == shape else x.expand(shape)).reshape(numel)
        return padded(x, total)

    outs = {k: x for k, x in kwargs.items() if isinstance(x, torch.Tensor)}
    into = {k: x.new_empty(total) for k, x in outs.items()}
    result = call(*map(flat, args), **{**kwargs, **into})
    if not name.endswith("_") and not outs:
        return result[:numel].view(shape)
    return written(args[0] if name.endswith("_") else next(iter(outs.values())), result[:numel].view(shape))


def written(out: Tensor, result: Tensor) -> Tensor:
    """A result in the tensor that was asked for, which takes its shape."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)

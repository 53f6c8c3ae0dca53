"""The products as torch operators: isogemm::mm, addmm, bmm, baddbmm, linear, grouped and walk_.

An operator is what torch.compile, torch.export, vmap and dispatch modes see of a product. Each has the same body as the
direct call (`product`, `linear`, `grouped`, `walk`) and a fake kernel; gradients are registered in
`gemm.backward`, rules for vmap in `gemm.batching`. All take tensors of any strides and return new contiguous ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch

from ..api import products as api
from ..backends import open_device
from ..base.dtypes import FLOAT32, TORCH
from ..contract.spec import Contract, Order, as_contract
from ..errors import DeviceError, OptionError
from ..operands.device_array import DeviceId

__all__ = [
    "Reverse",
    "check_no_ddp",
    "define_forward",
    "forward_alone",
    "grouped",
    "is_direct",
    "is_plain",
    "linear",
    "product",
    "refuse_ddp",
    "refuse_forward_mode",
    "refuse_meta",
    "resolved",
    "walk",
    "with_order",
]

Tensor = Any  # torch is untyped to mypy

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OPTIONS = 'str contract="", str grad_order="leaf4096", ScalarType? out_dtype=None'


class Reverse(torch.autograd.Function):  # type: ignore[misc]
    """A Function with gradients in reverse mode alone, which torch.func's forward mode is told in words."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """Raise of gradients that are asked for in forward mode: by jvp, jacfwd, linearize, and hessian, made of it.

    Raises
    ------
    OptionError
    """
    raise OptionError(
        "forward-mode gradients", limit="reverse mode", value="a dual tensor",
        nearest="backward(), torch.func.vjp or jacrev; jacrev(jacrev(f)) for a Hessian",
    )  # fmt: skip


def check_no_ddp() -> None:
    """Raise where a call with buffers for its gradients is part of DistributedDataParallel's forward pass.

    That averages ``.grad`` over the ranks, so each would go its own way; and it waits for gradients that do not come.

    Raises
    ------
    OptionError
    """
    if getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        refuse_ddp()


def refuse_ddp() -> NoReturn:
    """Raise of buffers for gradients inside of DistributedDataParallel.

    Raises
    ------
    OptionError
    """
    raise OptionError(
        "main_grad inside of DistributedDataParallel", limit="gradients in .grad, which it averages",
        value="a model after use_main_grad",
        nearest="the model without DistributedDataParallel: isogemm.torch.collect_main_grad(model), then "
        "torch.distributed.all_reduce(p.grad) for p in model.parameters(); or no use_main_grad",
    )  # fmt: skip


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are tensors with memory and nothing watches the call: then no operator is needed.

    An operator's boundary costs tens of microseconds in eager mode. It is needed where something has to see the
    product: a subclass (fake tensors among them), a dispatch mode, a function transform, forward-mode gradients,
    a trace.
    """
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_meta):
            return False
    return not (_dispatch_modes() or _transforms() or _forward_ad._current_level >= 0 or _trace() is not None)


def differentiates() -> bool:
    """Whether a transform of torch.func is active that may ask for gradients: all but functionalize."""
    if not _transforms():
        return False
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() != torch._C._functorch.TransformType.Functionalize


def is_direct(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    """Whether a product of these can go straight to a kernel: nothing watches, compiles, records or casts it.

    The same as `is_plain` and more, in under a microsecond: eager decoding is made of such calls.
    """
    if torch.compiler.is_compiling() or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if _dispatch_modes() or _transforms() or _forward_ad._current_level >= 0 or _trace() is not None:
        return False
    if c is not None and (type(c) not in _PLAIN or c.is_meta):
        return False
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)):
        return False
    kind = "cuda" if a.is_cuda else "cpu" if a.is_cpu else ""
    return kind != "" and not (b.is_meta or torch.is_autocast_enabled(kind))


# What may see an operator between the caller and the kernel.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_trace = torch._C._get_tracing_state
_forward_ad = torch.autograd.forward_ad


def resolved(contract: str, a: Tensor, b: Tensor) -> Contract:
    """The contract of a product: the one asked for, or the default of the operands' device and dtypes."""
    if contract:
        return as_contract(contract)
    if a.device.type != "cuda":
        return Contract()
    ordinal = torch.cuda.current_device() if a.device.index is None else a.device.index
    return open_device(DeviceId(a.device.type, ordinal)).default(*(TORCH.get(str(x.dtype), FLOAT32) for x in (a, b)))


@lru_cache(maxsize=256)
def with_order(contract: Contract, order: str = "chain") -> Contract:
    """The contract of the same arithmetic with another order.

    Raises
    ------
    ContractError
        No such order, or a leaf that is no multiple of the arithmetic's block.
    """
    return Contract(contract.arithmetic, Order()) if order == "chain" else as_contract(f"{contract.arithmetic}/{order}")


def product(c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, contract: str, out_dtype: Any) -> Tensor:
    """alpha * a @ b + beta * c for matrices or equally long stacks of them, outside the gradient's graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return product(c, a, b, alpha, beta, contract, out_dtype)
    if contract == "fma/chain" and a.is_cpu:
        contract = ""  # the default there, whose calls are the shortest
    if out_dtype is a.dtype:
        out_dtype = None  # likewise
    if alpha == 1 and (c is None or beta == 0) and a.dim() == b.dim() == 2:
        return api.matmul(a, b, contract=contract or None, out_dtype=out_dtype)
    call = api.gemm if a.dim() == 2 else api.gemm_strided_batched
    if c is None or beta == 0:
        return call(a, b, alpha=alpha, contract=contract or None, out_dtype=out_dtype)
    if beta == 1 and c.dim() == 1 and c.shape[0] == b.shape[-1]:  # a bias: the same sum, and read once
        return call(a, b, alpha=alpha, bias=c, contract=contract or None, out_dtype=out_dtype)
    c = c.expand(*a.shape[:-1], b.shape[-1])
    return call(a, b, c, alpha=alpha, beta=beta, contract=contract or None, out_dtype=out_dtype)


def linear(x: Tensor, w: Tensor, bias: Tensor | None, contract: str, out_dtype: Any) -> Tensor:
    """x @ w.T + bias, outside the gradient's graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return api.linear(x, w, bias, contract=contract or None, out_dtype=out_dtype)
    return api.linear(x, w, bias, contract=contract or None, out_dtype=out_dtype)


def grouped(a: list[Tensor], b: list[Tensor], contract: str, out_dtype: Any) -> list[Tensor]:
    """a[i] @ b[i], outside the gradient's graph; memory of their own, as an operator's results must have."""
    with torch.no_grad():
        # Allocated one by one: an operator may not return views of one allocation.
        outs = [
            x.new_empty(x.shape[0], y.shape[-1], dtype=out_dtype or _wider(x, y)) for x, y in zip(a, b, strict=True)
        ]
        return list(api.gemm_grouped(a, b, out=outs, contract=contract or None, out_dtype=out_dtype))


def walk(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    """The walk over K of a @ b, continued from the float32 values in `out`."""
    with torch.no_grad():
        api.matmul(a, b, out=out, contract=contract, accumulate=True)
        torch.autograd.graph.increment_version(out)  # kernels write behind torch's back


# The dispatcher drops trailing arguments that equal the schema's defaults: the bodies repeat them.


def _mm(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    return product(None, a, b, alpha, 0.0, contract, out_dtype)


def _addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    return product(c, a, b, alpha, beta, contract, out_dtype)


def _linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
) -> Tensor:
    return linear(x, w, bias, contract, out_dtype)


def _grouped(a: list[Tensor], b: list[Tensor], contract: str, grad_order: str, out_dtype: Any) -> list[Tensor]:
    return grouped(a, b, contract, out_dtype)


def refuse_meta(x: Tensor, *others: Tensor | None) -> None:
    """Refuse meta tensors beside one with data: torch runs the fake kernel there, whose result is memory as found.

    Raises
    ------
    DeviceError
    """
    for other in others:
        if other is not None and other.device.type == "meta" != x.device.type:
            raise DeviceError("device of operands", limit=str(x.device), value="meta", nearest=f"load it to {x.device}")


def _fake_product(c: Tensor | None, a: Tensor, b: Tensor, contract: str, grad_order: str, out_dtype: Any) -> Tensor:
    refuse_meta(a, b, c)
    with_order(resolved(contract, a, b), grad_order)  # an unknown contract or order is an error while tracing
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"inner dimensions differ: {tuple(a.shape)} and {tuple(b.shape)}")
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype or _wider(a, b))


def _wider(a: Tensor, b: Tensor) -> Any:
    """The result's dtype where none is asked for."""
    return b.dtype if b.dtype is torch.float32 else a.dtype


def _fake_mm(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    return _fake_product(None, a, b, contract, grad_order, out_dtype)


def _fake_addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    return _fake_product(c, a, b, contract, grad_order, out_dtype)


def _fake_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
) -> Tensor:
    refuse_meta(x, bias)
    return _fake_product(None, x, w.mT, contract, grad_order, out_dtype)


def _fake_product_forward(
    c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, contract: str, out_dtype: Any
) -> Tensor:
    return _fake_product(c, a, b, contract, "chain", out_dtype)


def _fake_linear_forward(x: Tensor, w: Tensor, bias: Tensor | None, contract: str, out_dtype: Any) -> Tensor:
    refuse_meta(x, bias)
    return _fake_product(None, x, w.mT, contract, "chain", out_dtype)


def _fake_grouped(a: list[Tensor], b: list[Tensor], contract: str, grad_order: str, out_dtype: Any) -> list[Tensor]:
    return [_fake_product(None, x, y, contract, grad_order, out_dtype) for x, y in zip(a, b, strict=True)]


def _fake_walk(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    torch._check(a.shape[1] == b.shape[0], lambda: f"inner dimensions differ: {tuple(a.shape)} and {tuple(b.shape)}")


_library = torch.library.Library("isogemm", "FRAGMENT")


def _define(name: str, schema: str, body: Any, fake: Any) -> Any:
    """An operator without torch's `custom_op` around it, whose checks take longer than a short call of ours."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"isogemm::{name}", fake, lib=_library)
    return getattr(torch.ops.isogemm, name).default


def define_forward(name: str, schema: str, bodies: dict[str, Any], fake: Any) -> Any:
    """The operator isogemm::{name}_forward, which has no gradient: what compiled code calls where none is recorded.

    A gradient's formula costs every call of its operator a second dispatch through Python, recorded or not. There are
    no defaults: compiled code hands arguments over by place then. Operands may have any strides, so a compiler need
    not copy them into those that it saw while tracing.
    """
    name = f"{name}_forward"
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    for key, body in bodies.items():
        _library.impl(name, body, key)
    torch.library.register_fake(f"isogemm::{name}", fake, lib=_library)
    return getattr(torch.ops.isogemm, name).default


def forward_alone() -> bool:
    """Whether a compiler traces and no gradient is recorded: then `define_forward`'s operators are called."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


_MATRICES = f"(Tensor a, Tensor b, float alpha=1.0, {_OPTIONS}) -> Tensor"
_WITH_C = f"(Tensor c, Tensor a, Tensor b, float alpha=1.0, float beta=1.0, {_OPTIONS}) -> Tensor"
_LINEAR = f"(Tensor x, Tensor w, Tensor? bias, {_OPTIONS}, Tensor? main_grad=None, Tensor? bias_main_grad=None)"

# No defaults: a gradient of lists has to have the structure of the arguments, of which the dispatcher drops defaults.
_LISTS = "(Tensor[] a, Tensor[] b, str contract, str grad_order, ScalarType? out_dtype) -> Tensor[]"

mm_op = _define("mm", _MATRICES, _mm, _fake_mm)
bmm_op = _define("bmm", _MATRICES, _mm, _fake_mm)
addmm_op = _define("addmm", _WITH_C, _addmm, _fake_addmm)
baddbmm_op = _define("baddbmm", _WITH_C, _addmm, _fake_addmm)
linear_op = _define("linear", f"{_LINEAR} -> Tensor", _linear, _fake_linear)
product_forward_op = define_forward(
    "product",
    "(Tensor? c, Tensor a, Tensor b, float alpha, float beta, str contract, ScalarType? out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": product},
    _fake_product_forward,
)
linear_forward_op = define_forward(
    "linear",
    "(Tensor x, Tensor w, Tensor? bias, str contract, ScalarType? out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": linear},
    _fake_linear_forward,
)
grouped_op = _define("grouped", _LISTS, _grouped, _fake_grouped)
walk_op: Any = torch.library.custom_op(
    "isogemm::walk_", walk, mutates_args=("out",), schema="(Tensor a, Tensor b, Tensor(a!) out, str contract) -> ()"
)
walk_op.register_fake(_fake_walk)

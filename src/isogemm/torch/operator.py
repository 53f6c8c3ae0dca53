"""What torch sees of a call of isogemm, and which of four ways a call takes.

- **direct**: straight to the kernel. Nothing watches and nothing is recorded.
- **graph**: through a `torch.autograd.Function`, in eager mode and for torch.func's transforms.
- **operator**: as an operator of torch's with a fake kernel, a gradient and a rule for vmap, where a compiler, a
  trace, a transform, a dispatch mode or a subclass has to see the call.
- **forward**: as an operator without a gradient, in compiled code that records none. A gradient's formula costs every
  call of its operator a second dispatch through Python, recorded or not; so compiled code that has its gradients
  already, in a graph of their own, calls these, too.

The ways of a call have one body and the same bits. An operator's boundary costs tens of microseconds in eager mode, so
it is taken only where it is needed. Everything that decides about ways is in this file; `define`, `define_forward`,
`define_call` and `Operator` are the rows that `isogemm.torch.gemm`, `rows`, `attention` and `quant` are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import DeviceError, OptionError
from ..operands.tensors import has_tangent, is_traced, run_as_it_is

Tensor = Any  # torch is untyped to mypy

# What may see an operator between the caller and the kernel.
is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_trace = torch._C._get_tracing_state
_forward_ad = torch.autograd.forward_ad


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are tensors with memory and nothing watches the call: then no operator is needed.

    Something has to see the product where there is a subclass (fake tensors among them), a dispatch mode, a function
    transform, forward-mode gradients, a trace.
    """
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_meta):
            return False
    return not (_dispatch_modes() or _transforms() or _forward_ad._current_level >= 0 or _trace() is not None)


def is_direct(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    """Whether a product of these can go straight to a kernel: nothing watches, compiles, records or casts it.

    The same as `is_plain` and more, in under a microsecond: eager decoding is made of such calls.
    """
    if is_compiling() or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if _dispatch_modes() or _transforms() or _forward_ad._current_level >= 0 or _trace() is not None:
        return False
    if c is not None and (type(c) not in _PLAIN or c.is_meta):
        return False
    if is_grad_enabled() and (a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)):
        return False
    kind = "cuda" if a.is_cuda else "cpu" if a.is_cpu else ""
    return kind != "" and not (b.is_meta or torch.is_autocast_enabled(kind))


def needs_gradient(*tensors: Any) -> bool:
    """Whether autograd records a call of these."""
    return is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def differentiates() -> bool:
    """Whether a transform of torch.func is active that may ask for gradients: all but functionalize."""
    if not _transforms():
        return False
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() != torch._C._functorch.TransformType.Functionalize


def forward_alone() -> bool:
    """Whether a compiler traces and no gradient is recorded: then `define_forward`'s operators are called."""
    return is_compiling() and not is_grad_enabled()


def watched(*tensors: Tensor | None) -> str:
    """The way of a call whose gradient is somebody else's: "direct", "operator" or "forward"."""
    if is_compiling():
        return "operator" if is_grad_enabled() else "forward"
    return "direct" if is_plain(*tensors) else "operator"


def way(*tensors: Tensor | None) -> str:
    """The way of a product or of attention: "direct", "graph", "operator" or "forward".

    Raises
    ------
    OptionError
        An operand has a tangent.
    """
    if is_compiling():
        return "operator" if is_grad_enabled() else "forward"
    if is_plain(*tensors):
        if is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return "graph"
        return "direct"
    _refuse_tangents(*tensors)
    # torch.func's transforms differentiate a Function, not an operator; what a vmap hides cannot be seen from here.
    return "graph" if is_grad_enabled() and differentiates() else "operator"


def row_way(what: str, tensors: tuple[Any, ...]) -> str:
    """The way of an operation along rows, which is direct beside dispatch modes and subclasses with memory, too.

    Raises
    ------
    OptionError
        A transform of torch.func, which would see nothing of the operation, or a tangent, which would be lost.
    """
    if is_compiling():
        return "operator" if is_grad_enabled() else "forward"
    if _transforms() or _forward_ad._current_level >= 0:
        _refuse_transforms(what, [t for t in tensors if isinstance(t, torch.Tensor)])
    if _trace() is not None:  # torch compares what it records with and without gradients
        return "operator"
    if _has_fake(tensors) or (_dispatch_modes() and is_traced()):
        return "operator" if needs_gradient(*tensors) else "forward"
    if is_grad_enabled():
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.requires_grad:
                return "graph"
    return "direct"


def records(*tensors: Any) -> bool:
    """Whether operations along rows have to be seen one by one: for gradients, or by what looks on."""
    if is_compiling() or is_traced() or _transforms() or _forward_ad._current_level >= 0 or _has_fake(tensors):
        return True
    return needs_gradient(*tensors)


def _has_fake(tensors: tuple[Any, ...]) -> bool:
    """Whether one is a fake tensor: a shape without memory, for which an operator has a fake kernel."""
    for t in tensors:  # noqa: SIM110  # in half the time
        if type(t) not in _PLAIN and isinstance(t, FakeTensor):
            return True
    return False


def _refuse_transforms(what: str, tensors: list[Tensor]) -> None:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if _transforms() and (
        needs_gradient(*tensors) or any(wrapped(t.detach()) for t in tensors)
    ):  # as they will be read
        raise OptionError(
            f"{what} under a transform of torch.func", limit="autograd, torch.compile, no_grad", value="a transform",
            nearest="backward() or torch.autograd.grad",
        )  # fmt: skip
    _refuse_tangents(*tensors)


def _refuse_tangents(*tensors: Tensor | None) -> None:
    if any(x is not None and has_tangent(x) for x in tensors):
        refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """Raise of gradients that are asked for in forward mode: by jvp, jacfwd, linearize, and hessian, made of it."""
    raise OptionError(
        "forward-mode gradients", limit="reverse mode", value="a dual tensor",
        nearest="backward(), torch.func.vjp or jacrev; jacrev(jacrev(f)) for a Hessian",
    )  # fmt: skip


def refuse_second(what: str) -> NoReturn:
    """Raise of a second derivative that there is not: cut off, gradients would pass for constants."""
    raise OptionError(
        f"gradients of {what}", limit="one derivative", value="a second one", nearest="create_graph=False"
    )


def refuse_vmap(what: str, nearest: str) -> Callable[..., NoReturn]:
    """A rule for vmap that refuses it."""

    def rule(*_: Any) -> NoReturn:
        raise OptionError(f"vmap over {what}", limit="mm, addmm, bmm, baddbmm and linear", value=what, nearest=nearest)

    return rule


def refuse_meta(x: Tensor, *others: Tensor | None) -> None:
    """Refuse meta tensors beside one with data: torch runs the fake kernel there, whose result is memory as found."""
    for other in others:
        if other is not None and other.device.type == "meta" != x.device.type:
            raise DeviceError("device of operands", limit=str(x.device), value="meta", nearest=f"load it to {x.device}")


_library = torch.library.Library("isogemm", "FRAGMENT")
_PT2 = torch.Tag.pt2_compliant_tag


def define(
    name: str, schema: str, body: Any, fake: Any, *, setup: Any = None, backward: Any = None, forward: Any = None,
    vmap: Any = None,
) -> Any:  # fmt: skip
    """The operator isogemm::{name}, without torch's `custom_op` around it, whose checks take longer than a short call.

    What those would find is left to who defines one. A body returns no memory of an argument or of another result
    (`apart`), and counts what it writes to an argument (`torch.autograd.graph.increment_version`). A gradient in which
    an operator without `backward` is called is not differentiated again (`once`).

    Parameters
    ----------
    name, schema : str
    body, fake : callable
        They get all arguments by place, those with a default in the schema included, which the dispatcher drops.
    setup, backward : callable, optional
        As of a `torch.autograd.Function`: (ctx, inputs, output) and (ctx, *gradients).
    forward : callable, optional
        Of the same arguments, by an operator of `define_forward`, which compiled graphs then have in this one's place.
    vmap : callable, optional
        (info, in_dims, *arguments), the arguments as `body` gets them.
    """
    op = _in_library(name, schema, (_PT2,), {"CompositeExplicitAutograd": body}, fake)
    if backward is not None and "Tensor[]" in schema:  # whose gradients only torch's own way takes apart
        torch.library.register_autograd(op, _of_memory(backward), setup_context=setup)
    elif backward is not None:
        _library.impl(name, _with_defaults(op, _autograd_kernel(op, setup, backward, forward or op)), "Autograd")
    if vmap is not None:
        torch.library.register_vmap(op, _with_defaults(op, vmap, 2))
    return op


def _autograd_kernel(op: Any, setup: Any, backward: Any, forward: Any) -> Callable[..., Any]:
    """What an operator is to autograd: torch's `register_autograd`, but for what a compiler's graph has below it."""

    def below(*given: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return (forward if _compiles() else op)(*given)

    transformed, function = functions(op._opname, below, setup, backward)

    def kernel(*given: Any) -> Any:
        if _forward_ad._current_level >= 0:  # of a transform that a compiler looks into
            _refuse_tangents(*[x for x in given if isinstance(x, torch.Tensor)])
        if not (is_grad_enabled() and torch._C._any_requires_grad(*given)):
            return below(*given)
        return (transformed if _transforms() else function).apply(*given)

    run_as_it_is(kernel.__code__)
    return kernel


def _compiles() -> bool:
    """Whether a compiler traces what is below autograd: what it makes of it runs where no gradient is recorded.

    An exported program is none: its operators have gradients, for who trains it. Nor is what lies below a transform of
    torch.func: autograd comes there once more, and records what the function closes over.
    """
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return functional is not None and not (_transforms() or torch.compiler.is_exporting())


def apart(result: Tensor, *others: Tensor | None) -> Tensor:
    """A dense tensor in memory of its own, copied where it has that of another: an operator hands back no other."""
    place = result.untyped_storage().data_ptr()
    if not result.is_contiguous() or any(x is not None and x.untyped_storage().data_ptr() == place for x in others):
        return result.clone(memory_format=torch.contiguous_format)
    return result


def define_forward(name: str, schema: str, bodies: Mapping[str, Any], fake: Any, *, vmap: Any = None) -> Any:
    """The operator isogemm::{name}_forward, which has no gradient; `bodies` by dispatch key.

    There are no defaults: compiled code hands arguments over by place then. Operands may have any strides, so a
    compiler need not copy them into those that it saw while tracing.
    """
    op = _in_library(f"{name}_forward", schema, (_PT2, torch.Tag.flexible_layout), bodies, fake)
    if vmap is not None:
        torch.library.register_vmap(op, vmap)
    return op


def _in_library(name: str, schema: str, tags: tuple[Any, ...], bodies: Mapping[str, Any], fake: Any) -> Any:
    _library.define(f"{name}{schema}", tags=tags)
    op = getattr(torch.ops.isogemm, name).default
    for key, body in bodies.items():
        _library.impl(name, _with_defaults(op, body), key)
    torch.library.register_fake(f"isogemm::{name}", _with_defaults(op, fake), lib=_library)
    return op


def _with_defaults(op: Any, function: Any, ahead: int = 0) -> Any:
    """`function` with the defaults of the schema behind what a dispatcher hands over; `ahead` are its own arguments."""
    arguments = op._schema.arguments
    if not any(x.has_default_value() for x in arguments):
        run_as_it_is(function.__code__)  # torch's dispatcher calls it, where a compiler may look for code
        return function
    values = (None,) * ahead + tuple(x.default_value if x.has_default_value() else None for x in arguments)

    def filled(*given: Any) -> Any:
        return function(*given, *values[len(given) :])

    run_as_it_is(filled.__code__)
    return filled


class Reverse(torch.autograd.Function):  # type: ignore[misc]
    """A Function with gradients in reverse mode alone, which torch.func's forward mode is told in words."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


def once(what: str, gradients: Sequence[Any], *given: Any) -> tuple[Any, ...]:
    """Gradients that were made of what is `given`, with an error for who differentiates them (create_graph=True).

    Without, they would pass for constants: torch knows nothing of a kernel.
    """
    if not is_grad_enabled():
        return tuple(gradients)
    found = iter(_Once.apply(what, len(gradients), *gradients, *given))
    return tuple([None if gradient is None else next(found) for gradient in gradients])


class _Once(Reverse):
    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.what = what
        return tuple([gradient.detach() for gradient in tensors[:count] if gradient is not None])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second(ctx.what)


def _of_memory(backward: Any) -> Callable[..., Any]:
    """`backward` of gradients as kernels read them: autograd negates some lazily, and their memory has the opposite."""

    def of_memory(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *map(_in_memory, gradients))

    return of_memory


def _in_memory(dy: Any) -> Any:
    if isinstance(dy, list):  # those of an operator's list of results
        return [_in_memory(x) for x in dy]
    return dy if dy is None else dy.resolve_neg()


def functions(name: str, forward: Any, setup: Any, backward: Any, vmap: Any = None) -> tuple[Any, Any]:
    """A Function for torch.func, and the same in torch's older form, whose call is 30 us shorter.

    Without a rule for vmap torch makes one, of the rules of what `forward` and `backward` call.
    """

    def eager(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        setup(ctx, inputs, output)
        return output

    back = {"backward": staticmethod(_of_memory(backward))}
    rule = {"generate_vmap_rule": True} if vmap is None else {"vmap": staticmethod(vmap)}
    body = {"forward": staticmethod(forward), "setup_context": staticmethod(setup), **back, **rule}
    return type(name, (Reverse,), body), type(name, (Reverse,), {"forward": staticmethod(eager), **back})


class Operator:
    """A call with a gradient, by the shortest way that it allows.

    Parameters
    ----------
    name : str
    operands : slice
        The arguments whose kind decides: the tensors that are read.
    direct, operator, forward : callable
        The call by each way; without `forward` compiled code always calls `operator`.
    setup, backward, vmap : callable
        As in `functions`.
    """

    def __init__(
        self, name: str, operands: slice, direct: Any, operator: Any, forward: Any, setup: Any, backward: Any,
        vmap: Any = None,
    ) -> None:  # fmt: skip
        self.operands, self.direct, self.operator, self.forward = operands, direct, operator, forward or operator
        self.function, self.eager = functions(name, self.unrecorded, setup, backward, vmap)

    def __call__(self, *arguments: Any) -> Any:
        """The result."""
        how = way(*arguments[self.operands])
        if how == "direct":
            return self.direct(*arguments)
        return self.with_gradient(*arguments) if how == "graph" else self._by(how, arguments)

    def unrecorded(self, *arguments: Any) -> Any:
        """The result where the gradient is no matter of this call."""
        return self._by(watched(*arguments[self.operands]), arguments)

    def with_gradient(self, *arguments: Any) -> Any:
        """The result, with a gradient of `backward`."""
        return (self.function if _transforms() else self.eager).apply(*arguments)

    def _by(self, how: str, arguments: tuple[Any, ...]) -> Any:
        if how == "direct":
            return self.direct(*arguments)
        return self.forward(*arguments) if how == "forward" else self.operator(*arguments)


def define_call(
    name: str, schema: str, operands: slice, body: Any, fake: Any, *, setup: Any, backward: Any, vmap: Any
) -> Operator:
    """The operator isogemm::{name} of `define`, and the call that takes it where none shorter is allowed."""
    op = define(name, schema, body, fake, setup=setup, backward=backward, vmap=vmap)
    return Operator(_class_name(name), operands, body, op, None, setup, backward, vmap)


def define_gradient(name: str, schema: str, operands: slice, body: Any, fake: Any, *, of: str, vmap: Any) -> Operator:
    """Likewise of what makes gradients of `of`: recorded, which is for a second derivative, it raises of that."""
    op = define(name, schema, body, fake, vmap=vmap)
    refuse: Callable[..., NoReturn] = lambda ctx, *_: refuse_second(of)  # noqa: E731
    return Operator(_class_name(name), operands, body, op, None, lambda *_: None, refuse, vmap)


def _class_name(name: str) -> str:
    return name.title().replace("_", "")

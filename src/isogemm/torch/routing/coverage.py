"""What a real run of a model does under `isogemm.torch.invariant`: every operator, and whether it may see the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...base import arguments
from ...contract.spec import ContractLike
from ...errors import DTypeError
from .backward import position
from .elementwise import EXACT, form, is_exact, per_element
from .products import PRODUCTS, contained, is_composite, is_served, operands, product_of
from .rows import REDUCTIONS
from .scope import invariant, subclasses
from .state import enabled, pushed

ROUTED, ELEMENTWISE, NOT_ROUTED = "routed", "elementwise", "not routed"

# Operators that move, make or compare numbers and add none: by name, without an underscore at the end.
_MOVING = (
    "_local_scalar_dense _reshape_copy _to_copy _unsafe_view all amax amin aminmax any arange argmax "
    "argmin argsort bucketize cat clone constant_pad_nd copy cummax cummin detach diagonal_backward "
    "embedding empty empty_like empty_permuted empty_strided equal eye fill flip full full_like gather "
    "index index_copy index_fill index_select is_same_size item kthvalue lift_fresh "
    "lift_fresh_copy linspace masked_fill masked_scatter masked_select max median min new_empty "
    "new_empty_strided new_full new_ones new_zeros nll_loss2d_backward nll_loss_backward nonzero one_hot ones "
    "ones_like pin_memory repeat repeat_interleave resize roll scalar_tensor scatter searchsorted select_backward "
    "select_scatter set slice_backward slice_scatter sort split split_with_sizes_copy stack tril tril_indices triu "
    "triu_indices unfold_copy where zero zeros zeros_like"
)
MOVES = frozenset(_MOVING.split())
_DRAWING = (
    "_fused_dropout bernoulli dropout exponential multinomial native_dropout normal normal_functional "
    "rand rand_like randint randint_like randn randn_like random randperm uniform"
)
_RANDOM = frozenset(_DRAWING.split())


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """One operator with one dtype in one phase."""

    op: str  # its name with the overload: ``aten.addmm.default``
    dtype: str  # of its first tensor operand, or of its result where it has none
    phase: str  # {"forward", "backward"}: whether one of autograd's nodes called it
    # {"routed", "elementwise", "not routed"}: computed by isogemm; row-wise safe (it adds nothing up, or exactly, and
    # gives an element the same bits everywhere); a product or a reduction of torch's, or an operator that this list
    # does not know, that may depend on the batch
    status: str
    count: int  # calls
    why: str  # what the status rests on


@dataclass(frozen=True, slots=True)
class Coverage:
    """The operators of one run; prints as a table.

    Attributes
    ----------
    rows : tuple of CoverageRow
        Those that are not routed first, then by count.
    """

    rows: tuple[CoverageRow, ...]

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    @property
    def not_routed(self) -> tuple[CoverageRow, ...]:
        """What may depend on the batch."""
        return tuple(row for row in self.rows if row.status == NOT_ROUTED)

    def count(self, status: str) -> int:
        """Calls with a status."""
        return sum(row.count for row in self.rows if row.status == status)

    def as_data(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, for JSON."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        head = ("op", "dtype", "phase", "count", "status", "why")
        body = [(r.op, r.dtype, r.phase, str(r.count), r.status, r.why) for r in self.rows]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)
        ]
        totals = ", ".join(f"{self.count(status)} {status}" for status in (ROUTED, ELEMENTWISE, NOT_ROUTED))
        return "\n".join([*lines, f"calls: {totals}"])


def coverage(
    model_or_function: Callable[..., Any],
    *inputs: Any,
    contract: ContractLike | None = None,
    backward: bool = False,
    rows: bool = True,
    attention: bool = True,
    scope: bool | None = None,
    **options: Any,
) -> Coverage:
    """Run a model once and list what it calls, with each operator's status.

    Parameters
    ----------
    model_or_function : callable
        Called with `inputs` and `options`, in the caller's grad and inference modes.
    contract, rows, attention
        As in `isogemm.torch.invariant`.
    scope : bool, optional
        True runs it under `isogemm.torch.invariant`. False runs it as it is: then only operators of isogemm's modules
        and functions are routed, and functions of elements of several forms on a CPU are not, outside of converted
        activations. By default False for a module that `isogemm.torch.convert` has changed, which needs no scope, and
        True for everything else and after `isogemm.torch.enable`.
    backward : bool
        Differentiate the floating-point results too, with respect to the module's parameters and to the inputs that
        require grad; no ``.grad`` is written. (A function may also call ``backward()`` itself.)

    Returns
    -------
    Coverage

    Raises
    ------
    ContractError
        As `isogemm.torch.invariant`. Errors of the model pass through.
    DTypeError
        `model_or_function` cannot be called.
    """
    if not callable(model_or_function):
        value, limit = arguments.shown(model_or_function), "a module, or a function"
        raise DTypeError("model_or_function", limit=limit, value=value, nearest="coverage(model, inputs)")
    if scope is None:
        scope = enabled() or not _converted(model_or_function)
    routing = invariant(contract, rows=rows, attention=attention)
    routing._listing = True
    recorder = _Recorder(routing, rows, scope)
    hooks = [] if scope else _watched(model_or_function, recorder)
    try:
        with routing if scope else nullcontext(), pushed(recorder):
            results = model_or_function(*inputs, **options)
            if backward:
                _differentiate(model_or_function, [*inputs, *options.values()], results)
    finally:
        for hook in hooks:
            hook.remove()
    found = [
        CoverageRow(op, dtype, phase, status, n, why) for (op, dtype, phase, status, why), n in recorder.calls.items()
    ]
    found += [
        CoverageRow(name, dtype, "forward", ROUTED, n, "replaced whole") for (name, dtype), n in routing._whole.items()
    ]
    found.sort(key=lambda row: (row.status != NOT_ROUTED, row.status != ROUTED, -row.count, row.op))
    return Coverage(tuple(found))


def _converted(model: Any) -> list[Any]:
    """The modules of isogemm's in a model."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [m for m in modules if any(kind.__module__.startswith("isogemm.") for kind in type(m).__mro__)]


def _watched(model: Any, recorder: _Recorder) -> list[Any]:
    """Hooks that tell the recorder when a converted activation runs, whose elements come in whole vectors."""
    found = [m for m in _converted(model) if getattr(m, "part", "") == "activation"]
    return [
        *(m.register_forward_pre_hook(recorder.enter) for m in found),
        *(m.register_forward_hook(recorder.leave, always_call=True) for m in found),
    ]


def _differentiate(model: Any, inputs: list[Any], results: Any) -> None:
    found = [
        x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and x.grad_fn is not None
    ]
    leaves = [p for p in getattr(model, "parameters", tuple)() if p.requires_grad]
    leaves += [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if found and leaves:
        with torch.no_grad():
            ones = [torch.ones_like(x) for x in found]
        torch.autograd.grad(found, leaves, ones, allow_unused=True)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator before the products' mode does."""

    def __init__(self, scope: invariant, rows: bool, is_open: bool) -> None:
        super().__init__()
        self.scope, self.rows = scope, rows and is_open
        self.closed = "" if is_open else " outside of isogemm.torch.invariant()"
        self.closed_to_rows = self.closed or ("" if rows else ", with rows=False")
        self.inside: list[int] = []  # where converted activations that run now began, in the order of recorded nodes
        self.nodes: list[tuple[int, int]] = []  # what the others recorded
        self.calls: Counter[tuple[str, str, str, str, str]] = Counter()

    def enter(self, module: Any, args: Any) -> None:
        """Before a converted activation."""
        self.inside.append(position())

    def leave(self, module: Any, args: Any, result: Any) -> None:
        """After it: its gradients are computed in whole vectors too."""
        self.nodes.append((self.inside.pop(), position()))

    def whole(self) -> bool:
        """Whether functions of elements get whole vectors now."""
        node = torch._C._current_autograd_node()
        if self.rows or node is None:
            return self.rows or bool(self.inside)
        place = node._sequence_nr()
        return any(first <= place < last for first, last in self.nodes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if subclasses(types):
            return NotImplemented
        known = func in PRODUCTS or func in REDUCTIONS or func is torch.ops.aten.scaled_dot_product_attention.default
        if not known and func.namespace == "aten" and is_composite(func):
            with pushed(self):
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        before = self.scope.routed.total()
        result = func(*args, **kwargs)
        routed = self.scope.routed.total() != before  # what happened, not what was to be expected
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        shown = operands((*tensors, result))[:1]
        dtype = str(shown[0].dtype).removeprefix("torch.") if shown else "-"
        phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        counted = [] if func._overloadpacket is torch.ops.aten.cumsum else tensors  # it rounds before it adds
        exact = bool(tensors) and not any(_inexact(x) for x in (*counted, *torch.utils._pytree.tree_leaves(result)))
        status = _status(func, routed, exact, tensors, args, kwargs, self)
        self.calls[(str(func), dtype, phase, *status)] += 1
        return result


def _inexact(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _status(
    func: Any, routed: bool, exact: bool, tensors: list[Any], args: Any, kwargs: Any, recorder: _Recorder
) -> tuple[str, str]:
    """A call's status and what it rests on. What is not known to be safe is not routed."""
    name = func._overloadpacket.__name__
    if func.namespace == "isogemm":
        return ROUTED, "isogemm's own operator"
    is_product = product_of(func) is not None
    if routed:
        return ROUTED, "product" if is_product else "reduction" if func in REDUCTIONS else "product inside"
    if func.namespace != "aten":
        return NOT_ROUTED, "unknown: not an operator of torch's"
    if is_product:
        return NOT_ROUTED, "product, exact in integers" if exact else "product" + _why(args, recorder.closed)
    if contained(name) or name == "scaled_dot_product_attention":
        return NOT_ROUTED, "product inside the operator"
    if name.rstrip("_") in _RANDOM or torch.Tag.nondeterministic_seeded in func.tags:
        return NOT_ROUTED, "random numbers, drawn by position"
    if func.is_view or name.rstrip("_") in MOVES:
        return ELEMENTWISE, "moves or compares"
    if name in ("bincount", "histc"):
        return ELEMENTWISE, "counts"
    if exact:
        return ELEMENTWISE, "exact in integers"
    if any(x.is_nested for x in tensors):
        return NOT_ROUTED, "nested tensors are torch's"
    of_lists = name.startswith("_foreach_") and per_element(name) is not None
    kind = "blocked" if of_lists else form(func)
    if not kind:
        known = func in REDUCTIONS
        return NOT_ROUTED, "reduction" + _why(args, recorder.closed_to_rows) if known else "reduction, or unknown"
    bare = name.rstrip("_")
    if kind == "exact" or (bare in EXACT and is_exact(bare, args, kwargs)):
        return ELEMENTWISE, "elementwise"
    if not any(x.is_cpu for x in tensors):
        return ELEMENTWISE, "elementwise"
    if recorder.whole() and not any(x.is_complex() for x in tensors):
        return ELEMENTWISE, "elementwise, in whole vectors"
    return NOT_ROUTED, "elementwise, but of several forms on a CPU"


def _why(args: Any, closed: str) -> str:
    """Why torch computed what isogemm could route: it was not asked, or has not what the operands are."""
    return closed if closed and is_served(args) else " of a dtype or layout isogemm has not"

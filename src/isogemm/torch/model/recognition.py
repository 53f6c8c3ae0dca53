"""Which modules have a layer of ours: by their class where it is torch's own, else by what they do.

A class of another library is looked at in three ways, on a small stand-in of the same class with small random weights:
by its structure; by the operators that its own forward method calls (`traced`); and by that method's results. So a norm
that multiplies by ``1 + weight`` is not taken for one that multiplies by weight, nor a block with a limit for one
without, and a later version of a library that computes something else is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..operator import Tensor
from . import layers, traced
from .merging import GatedAct, GatedMLP
from .traced import Formula

PLAIN: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are
EPS_NAMES = ("variance_epsilon", "eps")
GATES = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS = ("act_fn", "activation_fn", "act")  # names of the one in a gated block
NORM: Formula = dict.fromkeys(["div", "mean", "mul", "reciprocal", "rsqrt", "sqrt", "square"], ()) | {
    "pow": (2, 0.5, -0.5)
}
SILU: Formula = dict.fromkeys(["div", "exp", "mul", "neg", "reciprocal", "sigmoid", "silu"], ()) | {"add": (1,)}
GATED: Formula = {**SILU, "addmm": (), "linear": (), "mm": ()}


@dataclass(frozen=True, slots=True)
class Match:
    """What was recognised in a module: its part, and the class that it gets, or why it stays as it is."""

    part: str
    layer: type | None = None
    why: str = ""

    @classmethod
    def unless(cls, why: str, part: str, layer: Any, kind: type, **attributes: Any) -> Match:
        """`kind` with the forward method of `layer`, as `mixed` makes it; or why not."""
        return cls(part, why=why) if why else cls(part, mixed(layer, kind, **attributes))


class Looks:
    """What was found in modules, so that one is not looked at again that is like another in all that counts."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def at(self, look: Callable[..., Any], child: Any, *rest: Any, without: tuple[str, ...] = ()) -> Any:
        """``look(child, *rest)``, once for all modules that differ in nothing but the attributes `without`."""
        key = look, rest, _likeness(child, without)
        if key not in self.found:
            self.found[key] = look(child, *rest)
        return self.found[key]


def _likeness(child: Any, without: tuple[str, ...] = ()) -> Any:
    """A module's class and all that is in it, but for numbers in tensors. Objects count as themselves."""
    tensors = {**child._parameters, **child._buffers}.items()
    return (
        type(child),
        child._compiled_call_impl is None,
        bool(child._forward_hooks or child._forward_pre_hooks),
        tuple((k, _value(x)) for k, x in vars(child).items() if k not in _INNER and k not in without),
        tuple((k, None if x is None else (x.dtype, x.dim(), x.device)) for k, x in tensors),
        tuple((k, m and _likeness(m)) for k, m in child._modules.items()),
    )


_INNER = vars(torch.nn.Module()).keys()


def _value(x: Any) -> Any:
    return (type(x), repr(x)) if x is None or isinstance(x, (bool, int, float, str)) else id(x)


def known(child: Any, looks: Looks) -> Match | None:
    """What a module is to `convert`; None where it is nothing that isogemm has a layer for."""
    cls = type(child)
    for torchs, (part, layer, odd) in _TORCH.items():
        if cls is torchs:
            why = odd(child) or touched(child)
            return Match(part, why=why) if why else Match(part, layer)
        if torchs is torch.nn.Linear and isinstance(child, torchs):
            return Match.unless(touched(child) or no_linear(child), part, layers.Linear, cls)
        if torchs is torch.nn.Embedding and isinstance(child, torchs):
            why = touched(child) or _lookup(child) or looks.at(_no_scaled_lookup, child)
            return Match(part, why=why) if why else Match(part, around(cls, layers.Embedding))
        if isinstance(child, torchs):
            return Match(part, why=f"a subclass of {torchs.__name__}, {cls.__module__}.{cls.__qualname__}")
    return _foreign(child, looks)


def touched(child: Any) -> str:
    """Why a module's class does not say what it computes; empty where it does."""
    if "forward" in vars(child):
        return "its forward method was replaced"
    if getattr(child, "_compiled_call_impl", None) is not None:
        return "it was compiled before"
    if any(map(torch.nn.parameter.is_lazy, child._parameters.values())):
        return "its parameters have no sizes yet, and its class is another one when they have: call it once first"
    return ""


def no_linear(child: Any) -> str:
    """Why a Linear, or a module of a class made of it, does not compute x @ weight.T + bias; empty where it does."""
    cls = type(child)
    if cls is torch.nn.Linear:
        return ""
    name = f"a subclass of Linear, {cls.__module__}.{cls.__qualname__}"
    if list(child._parameters) != ["weight", "bias"] or child._modules or child._buffers:
        return f"{name}, with other parameters"
    biased = child.bias is not None
    bias = torch.nn.Parameter(random(12, seed=2), requires_grad=False) if biased else None
    probe = stand_in(child, weight=random_linear(8, 12, 1).weight, bias=bias)
    if not biased:
        probe._parameters["bias"] = None
    operators = dict.fromkeys(["add", "addmm", "linear", "mm", "t"], ())

    def formula(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, probe.weight, probe.bias)

    why = no_function(probe, operators, ((3, 8), (1, 1, 8), (2, 4096, 8)), formula, magnitudes(random(3, 8)))
    return f"{name}: {why}" if why else ""


def _dimensions(norm: Any) -> str:
    count = len(norm.normalized_shape)
    return "" if count == 1 else f"over {count} dimensions; rows have one"


def _lookup(table: Any) -> str:
    odd = (name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(table, name))
    return next((f"an Embedding with {name}" for name in odd), "")


def _no_scaled_lookup(table: Any) -> str:
    """Why a subclass of Embedding is not rows times a number; empty where it is."""
    cls = type(table)
    name = f"a subclass of Embedding, {cls.__module__}.{cls.__qualname__}"
    if list(table._parameters) != ["weight"] or table._modules:
        return f"{name}, with other parameters"
    probe = on_cpu(table, weight=torch.nn.Parameter(random(7, 16), requires_grad=False))
    ids = torch.tensor([[0, 3, 6], [1, 2, 5]], device="cpu")
    try:
        with torch.no_grad():
            scale = float(probe.forward(ids)[0, 0, 0] / probe.weight[0, 0])
    except Exception as error:  # whatever another library's code raises
        return f"{name}: {type(error).__name__}"

    def call(empty: Any) -> None:
        for shape in ((3,), (1, 1), (2, 4096)):
            probe.forward(empty(*shape, dtype=torch.int64))

    operators: Formula = {"embedding": (-1, table.padding_idx or 0), "mul": (scale,)}
    why = differs(probe, operators, call, lambda: agrees(probe.forward, lambda ids: probe.weight[ids] * scale, ids))
    return f"{name}: {why}" if why else ""


# Classes of torch: their part, the layer, and why a module of the class has none; empty where it has.
_TORCH: dict[type, tuple[str, type, Callable[[Any], str]]] = {
    torch.nn.Linear: ("linear", layers.Linear, lambda child: ""),
    torch.nn.RMSNorm: ("norm", layers.RMSNorm, _dimensions),
    torch.nn.LayerNorm: ("norm", layers.LayerNorm, _dimensions),
    torch.nn.Embedding: ("embedding", layers.Embedding, _lookup),
    torch.nn.SiLU: ("mlp", layers.SiLU, lambda child: "a SiLU that works in place" if child.inplace else ""),
}


def _foreign(child: Any, looks: Looks) -> Match | None:
    cls, parameters = type(child), child._parameters
    if child._modules.keys() >= set(GATES):
        return _gated(child, looks)
    if child._modules:
        return None
    has_eps = any(isinstance(vars(child).get(name), float) for name in EPS_NAMES)
    if list(parameters) == ["weight"] and parameters["weight"] is not None:
        is_norm = child.weight.dim() == 1 and has_eps
    elif not parameters and not hasattr(child, "weight") and has_eps:
        is_norm = looks.at(_row_norm, child).layer is not None  # eps alone says nothing
    elif not parameters and is_silu(child, looks):
        return Match.unless(touched(child), "mlp", layers.AnySiLU, cls)
    else:
        return None
    if not is_norm:
        return None
    why = touched(child)
    found: Match = Match("norm", why=why) if why else looks.at(_row_norm, child)
    return found


def is_silu(child: Any, looks: Looks) -> bool:
    """Whether an activation module is SiLU: by name, and by what it does."""
    if type(child) is torch.nn.SiLU or isinstance(child, layers.AnySiLU):
        return True
    return type(child).__name__ == "SiLUActivation" and not looks.at(_no_silu, child)


def _no_silu(child: Any) -> str:
    x = magnitudes(random(3, 16) * 4)
    return no_function(stand_in(child), SILU, ((3, 16), (2, 1, 16)), torch.nn.functional.silu, x)


def no_function(probe: Any, formula: Formula, shapes: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Why a stand-in does not compute a function of one tensor; empty where it does. As `differs`, which see."""
    count = len(inspect.signature(type(probe).forward).parameters) - 1
    if count != 1:
        return f"its forward method takes {count} arguments"
    return differs(
        probe,
        formula,
        lambda empty: [probe.forward(empty(*shape)) for shape in shapes],
        lambda: agrees(probe.forward, function, x),
    )


def _row_norm(child: Any) -> Match:
    name = next(name for name in EPS_NAMES if isinstance(vars(child).get(name), float))
    weighted = "weight" in child._parameters
    probe = stand_in(child, weight=torch.nn.Parameter(random(16), requires_grad=False) if weighted else None)
    eps = vars(child)[name]

    def formula(x: Tensor) -> Tensor:
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        return y * probe.weight if weighted else y

    def shifted(x: Tensor) -> Tensor:
        return formula(x) + x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)

    # Rows whose mean square is far above, and near, eps: that is where eps shows.
    rows = torch.cat((magnitudes(random(3, 16)), random(3, 16, seed=1) * max(eps, 1e-12) ** 0.5))
    operators = {**NORM, "add": (eps,), "_fused_rms_norm": (eps,)}
    shapes = ((3, 16), (1, 1, 16), (2, 4096, 3, 16))
    why = no_function(probe, operators, shapes, formula, rows)
    if why and weighted and not no_function(probe, {**operators, "add": (eps, 1.0)}, shapes, shifted, rows):
        narrow = rows[:2].bfloat16()  # Gemma's result has the dtype of x, whatever the weight's
        if probe.forward(narrow).dtype == narrow.dtype:
            return Match.unless("", "norm", layers.RowNorm, type(child), eps_name=name, offset=True)
    if why:
        why = f"{type(child).__name__} does not compute x / sqrt(mean(x**2) + {name}) * weight: {why}"
    return Match.unless(why, "norm", layers.RowNorm, type(child), eps_name=name)


def _gated(child: Any, looks: Looks) -> Match:
    """What a module with a gate is: `GatedMLP` with SiLU, `GatedAct` with an activation that is looked at by itself."""
    key = next((name for name in ACTIVATIONS if child._modules.get(name) is not None), "")
    act = child._modules.get(key)
    why = touched(child) or _no_block(child, key, looks)
    if why or (is_silu(act, looks) and not touched(act)):
        return Match.unless(why, "mlp", GatedMLP, type(child), act_name=key)
    return Match.unless("", "mlp", GatedAct, type(child), act_name=key)


def _no_block(child: Any, act_name: str, looks: Looks) -> str:
    """Why a module with a gate is no gated block; empty where it is one."""
    name = type(child).__name__
    if not act_name:
        return f"{name} has no module for its activation; what is inside is looked at alone"
    if not all(isinstance(child._modules[gate], torch.nn.Linear) for gate in GATES):
        return f"projections of {name} are no Linear modules"
    act = child._modules[act_name]
    for key, module in child._modules.items():
        if key not in GATES and module is not None and layers.has_hooks(module):
            return f"{'its activation' if module is act else key} has hooks, which would not be called"
    why = looks.at(_no_gates, child, act_name)
    return f"{name} does not compute down_proj(act(gate_proj(x)) * up_proj(x)): {why}" if why else ""


def _no_gates(child: Any, act_name: str) -> str:
    """Why a module computes no gated block; empty where it does.

    Its activation is looked at by itself, so SiLU stands in for it, whose results show where it is called.
    """
    gate, up, down = (random_linear(k, n, i) for i, (k, n) in enumerate(((8, 12), (8, 12), (12, 8))))
    probe = stand_in(child, gate_proj=gate, up_proj=up, down_proj=down, **{act_name: torch.nn.SiLU()})

    def formula(x: Tensor) -> Tensor:
        y: Tensor = down(torch.nn.functional.silu(gate(x)) * up(x))
        return y

    return no_function(probe, GATED, ((3, 8), (1, 1, 8), (2, 4096, 8)), formula, magnitudes(random(3, 8)))


def differs(probe: Any, formula: Formula, call: Any, same: Callable[[], bool]) -> str:
    """What a stand-in does that a formula does not; empty where there is nothing.

    First by the operators that ``call(empty)`` makes it call, as `traced.other` has it; then by ``same()``, which
    compares results, in evaluation and in training.
    """
    if why := traced.other(probe, formula, call, torch.float32):
        return why
    for training in (False, True):
        traced.train(probe, training)
        if not same():
            return "its results are others" + (" in training" if training else "")
    for dtype in (torch.bfloat16, torch.float16):
        if why := traced.other(probe, formula, call, dtype):
            return f"{why}, in {dtype}"
    return ""


def magnitudes(x: Tensor) -> Tensor:
    """Rows of x of every size, one with an infinity, one with a NaN."""
    sizes = [x * size for size in (1.0, 1e-3, 30.0, 1e3, 1e6)]
    odd = x[:2].clone()
    odd[0, 1], odd[1, 2] = float("inf"), float("nan")
    return torch.cat((*sizes, odd))


def stand_in(child: Any, **replaced: Any) -> Any:
    """A module of the same class and attributes, with these parameters and modules; no hooks, in eval mode.

    Other modules inside it are stand-ins, too, so that it may change its mode; their tensors are the originals.
    """
    cls: Any = type(child)
    probe = cls.__new__(cls)
    torch.nn.Module.__init__(probe)
    for name, value in vars(child).items():
        if name not in vars(probe):
            vars(probe)[name] = value
    for name, module in child._modules.items():
        if name not in replaced:
            probe._modules[name] = None if module is None else _inside(module)
    for name, value in replaced.items():
        if value is not None:
            setattr(probe, name, value)
    vars(probe)["training"] = False
    return probe


def on_cpu(child: Any, **replaced: Any) -> Any:
    """`stand_in`, with the module's buffers on the CPU."""
    probe = stand_in(child, **replaced)
    for key, buffer in child._buffers.items():
        probe.register_buffer(key, None if buffer is None else buffer.detach().cpu(), persistent=False)
    return probe


def _inside(module: Any) -> Any:
    probe = stand_in(module)
    probe._parameters.update(module._parameters)
    probe._buffers.update(module._buffers)
    return probe


def agrees(forward: Callable[..., Any], formula: Callable[..., Any], *inputs: Any) -> bool:
    """Whether a forward method gives what a formula gives, up to float32's roundings. A failing one does not."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got, want = forward(*inputs), formula(*inputs)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        return all(isinstance(x, torch.Tensor) and _close(x, y) for x, y in pairs)
    except Exception:  # whatever another library's code raises: it is not what we know
        return False


def _close(x: Tensor, y: Tensor) -> bool:
    """Up to roundings, which are measured by the largest number of a row."""
    if x.shape != y.shape:
        return False
    x, y = x.double(), y.double()
    size = torch.where(y.isfinite(), y, 0).abs()
    size = size.amax(-1, keepdim=True) if y.dim() else size
    near = (x - y).abs() <= 1e-4 * y.abs() + 1e-5 * size
    return bool((near | (x == y) | (x.isnan() & y.isnan())).all())


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that are always the same and leave torch's generators as they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **PLAIN)


def random_linear(k: int, n: int, seed: int) -> Any:
    """A Linear without a bias, with `random` weights."""
    layer = torch.nn.Linear(k, n, bias=False, device="meta")  # no initial values: torch's generator stays as it is
    layer.weight = torch.nn.Parameter(random(n, k, seed=seed), requires_grad=False)
    return layer


def mixed(layer: Any, cls: Any, **attributes: Any) -> Any:
    """`cls` with the forward method of `layer`: a subclass of both, with the name of `cls`; the same one every time."""
    return _mixed(layer, cls, tuple(attributes.items()))


def around(cls: Any, layer: Any) -> Any:
    """`cls` with its own forward method, in which ``super().forward`` is that of `layer`; the same one every time."""
    return _mixed(cls, layer, ())


@cache
def _mixed(layer: Any, cls: Any, attributes: tuple[tuple[str, Any], ...]) -> Any:
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce}
    return type(cls.__name__, (layer, cls), {**body, **dict(attributes), "made_of": (layer, cls, attributes)})


def _reduce(self: Any, protocol: int) -> Any:
    """For pickle and copy: the class is made again from what it is made of."""
    return _make, type(self).made_of, vars(self)


def _make(layer: Any, cls: Any, attributes: tuple[tuple[str, Any], ...]) -> Any:
    made = _mixed(layer, cls, attributes)
    return made.__new__(made)

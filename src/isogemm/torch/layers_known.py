"""Which modules have a layer of ours: by their class where it is torch's own, else by what they do.

A class of another library is looked at in two ways: by its structure, and by the result of its own forward method on a
small stand-in, a module of the same class with small random weights. So a norm that multiplies by ``1 + weight`` is not
taken for one that multiplies by weight, and a later version of a library that computes something else is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from . import layers, reductions
from .layers import Converted
from .ops import Tensor

__all__ = ["PLAIN", "Known", "agrees", "is_silu", "known", "mixed", "random", "random_linear", "stand_in", "touched"]

PLAIN: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are
EPS_NAMES = ("variance_epsilon", "eps")


@dataclass(frozen=True, slots=True)
class Known:
    """What was recognised in a module: its part, and the class that it gets, or why it stays as it is."""

    part: str
    layer: type | None = None
    why: str = ""


def known(child: Any) -> Known | None:
    """What a module is to `convert`; None where it is nothing that isogemm has a layer for."""
    for torchs, look in _TORCH.items():
        if isinstance(child, torchs):
            if type(child) is torchs:
                return _unless_touched(child, look(child))
            return Known(_PARTS[torchs], why=f"a subclass of {torchs.__name__}, {_full(child)}")
    return _foreign(child)


def _full(child: Any) -> str:
    return f"{type(child).__module__}.{type(child).__qualname__}"


def touched(child: Any) -> str:
    """Why a module's class does not say what it computes; empty where it does."""
    if "forward" in vars(child):
        return "its forward method was replaced"
    if getattr(child, "_compiled_call_impl", None) is not None:
        return "it was compiled before"
    return ""


def _unless_touched(child: Any, found: Known) -> Known:
    why = touched(child)
    return Known(found.part, why=why) if why and found.layer else found


def _norm(child: Any) -> Known:
    layer = layers.RMSNorm if isinstance(child, torch.nn.RMSNorm) else layers.LayerNorm
    if len(child.normalized_shape) != 1:
        return Known("norm", why=f"over {len(child.normalized_shape)} dimensions; rows have one")
    return Known("norm", layer)


def _embedding(child: Any) -> Known:
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(child, name):
            return Known("embedding", why=f"an Embedding with {name}")
    return Known("embedding", layers.Embedding)


def _silu(child: Any) -> Known:
    if child.inplace:
        return Known("mlp", why="a SiLU that works in place")
    return Known("mlp", layers.SiLU)


_TORCH: dict[type, Callable[[Any], Known]] = {
    torch.nn.Linear: lambda child: Known("linear", layers.Linear),
    torch.nn.RMSNorm: _norm,
    torch.nn.LayerNorm: _norm,
    torch.nn.Embedding: _embedding,
    torch.nn.SiLU: _silu,
}
_PARTS: dict[type, str] = {
    torch.nn.Linear: "linear",
    torch.nn.RMSNorm: "norm",
    torch.nn.LayerNorm: "norm",
    torch.nn.Embedding: "embedding",
    torch.nn.SiLU: "mlp",
}


def _foreign(child: Any) -> Known | None:
    children = child._modules
    found: tuple[str, Callable[[Any], Known]] | None = None
    if not children and list(child._parameters) == ["weight"] and child._parameters["weight"] is not None:
        if child.weight.dim() == 1 and any(isinstance(vars(child).get(name), float) for name in EPS_NAMES):
            found = "norm", _row_norm
    elif not children and not child._parameters and any(isinstance(vars(child).get(name), float) for name in EPS_NAMES):
        found = ("norm", _row_norm) if _row_norm(child).layer else None  # eps alone says nothing
    elif children.keys() >= {"gate_proj", "up_proj", "down_proj"}:
        found = "mlp", _gated_mlp
    elif not children and not child._parameters and is_silu(child):
        found = "mlp", lambda child: Known("mlp", mixed(_Silu, type(child)))
    if found is None:
        return None
    why = touched(child)
    return Known(found[0], why=why) if why else found[1](child)


class _Silu(Converted):
    part = "mlp"

    def forward(self, input: Any) -> Any:
        return reductions.silu(input)


def is_silu(child: Any) -> bool:
    """Whether an activation module is SiLU: by name, and by what it does."""
    if type(child) is torch.nn.SiLU or isinstance(child, (layers.SiLU, _Silu)):
        return True
    return type(child).__name__ == "SiLUActivation" and agrees(
        lambda x: type(child).forward(child, x), torch.nn.functional.silu, random(3, 16) * 4
    )


def _row_norm(child: Any) -> Known:
    name = next(name for name in EPS_NAMES if isinstance(vars(child).get(name), float))
    weighted = "weight" in child._parameters
    probe = stand_in(child, weight=torch.nn.Parameter(random(16), requires_grad=False) if weighted else None)
    eps = vars(child)[name]

    def formula(x: Tensor) -> Tensor:
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        return y * probe.weight if weighted else y

    # Rows whose mean square is far above, and near, eps: that is where eps shows.
    rows = random(3, 16) * torch.tensor([[1.0], [30.0], [max(eps, 1e-12) ** 0.5]], **PLAIN)
    if agrees(probe.forward, formula, rows):
        return Known("norm", mixed(layers.RowNorm, type(child), eps_name=name))
    return Known("norm", why=f"{type(child).__name__} does not compute x / sqrt(mean(x**2) + {name}) * weight")


def _gated_mlp(child: Any) -> Known:
    act = next((child._modules[name] for name in ("act_fn", "activation_fn", "act") if name in child._modules), None)
    if act is None or not is_silu(act) or touched(act):
        return Known(
            "mlp", why=f"the activation of {type(child).__name__} is not SiLU; what is inside is looked at alone"
        )
    if not all(isinstance(child._modules[name], torch.nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return Known("mlp", why=f"projections of {type(child).__name__} are no Linear modules")
    if act._forward_hooks or act._forward_pre_hooks:
        return Known("mlp", why="its activation has hooks, which would not be called")
    gate, up, down = (random_linear(k, n, i) for i, (k, n) in enumerate(((8, 12), (8, 12), (12, 8))))
    probe = stand_in(child, gate_proj=gate, up_proj=up, down_proj=down)
    if agrees(probe.forward, lambda x: down(torch.nn.functional.silu(gate(x)) * up(x)), random(3, 8)):
        return Known("mlp", mixed(layers.GatedMLP, type(child)))
    return Known("mlp", why=f"{type(child).__name__} does not compute down_proj(silu(gate_proj(x)) * up_proj(x))")


def stand_in(child: Any, **replaced: Any) -> Any:
    """A module of the same class, on the CPU in float32, with these parameters and modules; no hooks, in eval mode."""
    cls: Any = type(child)
    probe = cls.__new__(cls)
    torch.nn.Module.__init__(probe)
    for name, value in vars(child).items():
        if name not in vars(probe):
            vars(probe)[name] = value
    for name, value in {**child._modules, **replaced}.items():
        if value is not None:
            setattr(probe, name, value)
    vars(probe)["training"] = False
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
    return x.shape == y.shape and bool(torch.allclose(x.float(), y.float(), rtol=1e-4, atol=1e-5))


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

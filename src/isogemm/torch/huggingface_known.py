"""Which attention modules, rotary embeddings and models of transformers are what isogemm computes.

As in `layers_known`: by structure, and by what their own forward methods give on small stand-ins.
"""

from __future__ import annotations

import copy
import inspect
import sys
from functools import cache
from typing import Any

import torch

from .huggingface import NAME, Rotary, RotaryAttention, register, tables
from .layers_known import PLAIN, Known, agrees, mixed, random, random_linear, stand_in, touched
from .ops import Tensor

__all__ = ["attention_modules", "known", "models", "prepare_rotary", "refusal", "rotary_widths", "switch"]

_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ARGUMENTS = ["self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"]
_FIXED = ("default", "linear", "llama3", "yarn")  # kinds of rotary embedding whose frequencies never change


def known(child: Any, widths: frozenset[int] = frozenset()) -> Known | None:
    """What an attention module with rotary embeddings, or a rotary embedding, is; None for anything else.

    `widths` are how much of a head the model's rotary embeddings turn.
    """
    if "transformers" not in sys.modules or not type(child).__module__.startswith("transformers."):
        return None
    if set(child._modules) >= _PROJECTIONS and vars(child).keys() >= {"head_dim", "scaling", "config"}:
        why = touched(child) or _turns_a_part(child, widths) or _differs(child)
        return Known("rope", why=why) if why else Known("rope", mixed(RotaryAttention, type(child)))
    if type(child).__name__.endswith("RotaryEmbedding") and "inv_freq" in child._buffers:
        why = touched(child) or _turns_otherwise(child)
        return Known("rope", why=why) if why else Known("rope", mixed(Rotary, type(child)))
    return None


def rotary_widths(module: Any) -> frozenset[int]:
    """How many elements of a head the rotary embeddings in a module turn."""
    buffers = [child._buffers.get("inv_freq") for child in module.modules()]
    return frozenset(2 * w.shape[-1] for w in buffers if w is not None and w.dim())


def _turns_a_part(child: Any, widths: frozenset[int]) -> str:
    """Why an attention module does not turn whole heads; empty where it does."""
    config = vars(child)["config"]
    if len(widths) == 1:  # one kind of rotary embedding, which says more than a configuration
        part = child.head_dim not in widths
    else:
        found = [vars(config), *_dictionaries(getattr(config, "rope_parameters", None))]
        part = any(each.get("partial_rotary_factor") not in (None, 1) for each in found)
        part = part or bool(widths and child.head_dim not in widths)
    return f"{type(child).__name__} turns a part of each head, not all of it" if part else ""


def _dictionaries(rope: Any) -> list[dict[str, Any]]:
    """Parameters of rope: one dictionary, or one for each kind of layer inside it."""
    return [rope, *(x for x in rope.values() if isinstance(x, dict))] if isinstance(rope, dict) else []


def _differs(child: Any) -> str:
    """What an attention module has that `RotaryAttention` has not; empty where there is nothing."""
    cls = type(child)
    if list(inspect.signature(cls.forward).parameters) != _ARGUMENTS:
        return f"the forward method of {cls.__name__} takes other arguments"
    if not set(child._modules) <= _PROJECTIONS | {"q_norm", "k_norm"} or child._parameters:
        return f"{cls.__name__} has other modules or parameters"
    if vars(child).get("num_key_value_groups") is None or not hasattr(sys.modules[cls.__module__], _EAGER):
        return f"{cls.__name__} does not use transformers' attention functions"
    probe = _probe(child)
    x, angles = random(1, 3, 8, seed=16), random(1, 3, child.head_dim // 2, seed=17)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    hidden = torch.tensor([[0, 0, 0, -1e9, -1e9], [0, 0, 0, 0, -1e9], [-1e9, 0, 0, 0, 0]], **PLAIN)[None, None]
    caches = [_Cache(), _Cache()]
    if agrees(
        lambda *given: probe.forward(x, (cos, sin), hidden, caches[0])[0],
        lambda *given: _formula(probe, x, cos, sin, hidden, caches[1]),
    ) and agrees(lambda: caches[0].seen, lambda: caches[1].seen):
        return ""
    return f"{cls.__name__} computes something else than q_proj, norm, rope, attention and o_proj"


_EAGER = "eager_attention_forward"


class _Cache:
    """Two keys that were there before, and what was written."""

    seen: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, layer: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.seen = key, value
        before = random(*key.shape[:2], 2, key.shape[3])
        return torch.cat((before, key), 2), torch.cat((before, value), 2)


def _probe(child: Any) -> Any:
    """A small module of the same class, with transformers' eager attention."""
    width, groups = child.head_dim, child.num_key_value_groups
    sizes = {"q_proj": (8, 2 * groups * width), "k_proj": (8, 2 * width), "v_proj": (8, 2 * width)}
    sizes["o_proj"] = (2 * groups * width, 8)
    replaced = {name: random_linear(*size, seed=i) for i, (name, size) in enumerate(sizes.items())}
    for i, name in enumerate(("q_norm", "k_norm")):
        norm = child._modules.get(name)
        if norm is not None:
            shape = norm._parameters["weight"].shape if norm._parameters else None
            weight = None if shape is None else torch.nn.Parameter(random(*shape, seed=8 + i), requires_grad=False)
            replaced[name] = stand_in(norm, weight=weight)
    probe = stand_in(child, **replaced)
    config = copy.copy(child.config)
    config._attn_implementation_internal = "eager"
    vars(probe)["config"] = config
    return probe


def _formula(probe: Any, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor, cache: _Cache) -> Tensor:
    def heads(name: str) -> Tensor:
        y = probe._modules[f"{name}_proj"](x).view(1, 3, -1, probe.head_dim)
        norm = probe._modules.get(f"{name}_norm")
        return (y if norm is None else norm(y)).transpose(1, 2)

    def turn(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    key, value = cache.update(turn(heads("k")), heads("v"), probe.layer_idx)
    groups = probe.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    p = torch.softmax(turn(heads("q")) @ key.mT * probe.scaling + hidden, -1)
    y = (p @ value).transpose(1, 2).reshape(1, 3, -1)
    found: Tensor = probe.o_proj(y)
    return found


def _turns_otherwise(child: Any) -> str:
    """Why a rotary embedding cannot be a table; empty where it can."""
    name, kind = type(child).__name__, vars(child).get("rope_type", "default")
    if list(inspect.signature(type(child).forward).parameters) != ["self", "x", "position_ids"]:
        return f"the forward method of {name} takes other arguments"
    if kind not in _FIXED:
        return f"rope of kind {kind!r}, whose frequencies depend on the lengths in the batch"
    if child.inv_freq.is_meta:
        return "on the meta device, where there are no frequencies to make tables from"
    if child.inv_freq.dim() != 1 or not isinstance(vars(child).get("max_seq_len_cached"), int):
        return f"{name} has no frequencies in one dimension, or no number of positions"
    probe = stand_in(child)
    for key, buffer in child._buffers.items():
        probe.register_buffer(key, None if buffer is None else buffer.detach().cpu(), persistent=False)
    w, scale = probe.inv_freq.float(), float(getattr(child, "attention_scaling", 1.0))
    positions, x = torch.tensor([[0, 1, 5]], device="cpu"), torch.zeros(1, 1, **PLAIN)

    def formula(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * w
        both = torch.cat((angles, angles), -1)
        return both.cos() * scale, both.sin() * scale

    return "" if agrees(probe.forward, formula, x, positions) else f"{name} is not cos and sin"


def prepare_rotary(child: Any, halves: bool) -> None:
    """Give a `Rotary` its table."""
    scale = float(getattr(child, "attention_scaling", 1.0))
    table = tables(child.inv_freq, scale, vars(child)["max_seq_len_cached"])
    child.register_buffer("table", table, persistent=False)  # a buffer: graphs read it where it lies
    vars(child)["halves"] = halves


def attention_modules(module: Any) -> dict[str, Any]:
    """Attention modules of transformers models in `module`, by name."""
    if "transformers" not in sys.modules:
        return {}
    named = module.named_modules()
    return {name: child for name, child in named if vars(child).keys() >= {"is_causal", "config"}}


def models(module: Any) -> list[str]:
    """Names of the transformers models in `module`."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    return [name for name, child in module.named_modules() if isinstance(child, PreTrainedModel)]


def refusal(module: Any) -> str:
    """Why a model cannot be given an attention function; empty where it can."""
    from transformers import PreTrainedModel

    found = [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    if not found:
        return "masks are made by a transformers model, and this is only a part of one"
    for child in found:
        if not child._can_set_attn_implementation():
            return f"{type(child).__name__} does not use transformers' attention functions"
    for child in attention_modules(module).values():
        if vars(child).get("attn_logit_softcapping") is not None:
            return "attention with capped logits, which is not part of the definition"
        if "sinks" in child._parameters:
            return "attention with sinks, which are not part of the definition"
        if _has_position_bias(type(child).forward):
            return f"{type(child).__name__} adds a position bias, which is not part of the definition"
    return ""


@cache
def _has_position_bias(forward: Any) -> bool:
    """Whether the forward method of attention takes one, or hands one to the attention function."""
    if "position_bias" in inspect.signature(forward).parameters:
        return True
    try:
        return "position_bias=" in inspect.getsource(forward)
    except (OSError, TypeError):  # no source at hand
        return False


def switch(module: Any) -> None:
    """Set the attention function of a model, in a copy of its configuration: others may share the one it had."""
    from transformers import PreTrainedConfig

    register()
    memo: dict[int, Any] = {}
    for child in module.modules():
        config = vars(child).get("config")
        if isinstance(config, PreTrainedConfig):
            child.config = copy.deepcopy(config, memo)
            child.config._attn_implementation = NAME

"""Blocks of transformers that call torch's functions where others have a module or an interface: their own code stays.

- Attention modules that call ``scaled_dot_product_attention`` themselves, as Falcon's.
- Mixtures whose experts are stacks that ``torch.bmm`` multiplies with every token, as Llama 4's.

While their own forward methods run, the functions that they call are isogemm's (`own_code`). Whether that is enough is
seen in a run of a small module of the same class, made from a small configuration, in which every operator has to be
known not to look at the batch.
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch

from ..layers import Converted
from ..names import below
from ..own_code import OwnBlock, unsafe
from ..recognition import Match, mixed, random, touched
from .experts import First
from .modules import refuse_weights
from .recognition import source

_SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_GIVEN = {"hidden_states", "attention_mask", "position_embeddings"}
_CALL = re.compile(r"functional\.scaled_dot_product_attention\(|F\.scaled_dot_product_attention\(")


class OwnAttention(OwnBlock):
    """`OwnBlock` of an attention module. For weights its code has another way, which is not looked at."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own. Raises OptionError: its weights are asked for."""
        refuse_weights(kwargs.get("output_attentions"))
        return super().forward(*args, **kwargs)


def attends_itself(found: dict[str, Any]) -> tuple[dict[str, Match], str]:
    """What attention modules that call torch's function become, all of them, or why they cannot; empty for others."""
    matches: dict[str, Match] = {}
    for name, child in found.items():
        if not _CALL.search(source(type(child).forward)):
            return {}, ""
        why = touched(child) or _attends_otherwise(child)
        if why:
            return {}, f"{type(child).__name__} {why}"
        matches[name] = Match("attention", mixed(OwnAttention, type(child)))
    return matches, ""


def _attends_otherwise(child: Any) -> str:
    config = child.config
    if config._attn_implementation != "sdpa":
        return f'computes attention by "{config._attn_implementation}", and not by "sdpa"'
    if getattr(config, "alibi", False):
        return "adds a position bias (ALiBi)"
    given = inspect.signature(type(child).forward).parameters
    probe = _small(child)
    if probe is None or not given.keys() >= _GIVEN:
        return "cannot be looked into"
    probe.__class__ = mixed(OwnAttention, type(child))
    more = {name: None for name, x in given.items() if x.default is x.empty and name not in {"self", *_GIVEN, "kwargs"}}
    mask = torch.ones(5, 5, dtype=torch.bool, device="cpu").tril().expand(2, 1, 5, 5)
    angles = random(2, 5, probe.head_dim)
    return unsafe(
        lambda x: probe.forward(
            hidden_states=x, attention_mask=mask, position_embeddings=(angles.cos(), angles.sin()), **more
        ),
        random(2, 5, 32),
    )


def stacked(module: Any) -> dict[str, Match]:
    """What the blocks, experts and routers of mixtures that are stacks become, by their names."""
    found: dict[str, Match] = {}
    for name, block in module.named_modules():
        parts = {key: block._modules.get(key) for key in ("experts", "router")}
        if not all(map(_is_alone, parts.values())) or not type(block).__module__.startswith("transformers."):
            continue
        stack = [p.dim() for p in parts["experts"]._parameters.values() if p is not None]
        if isinstance(block, Converted) or stack != [3, 3] or "torch.bmm(" not in source(type(parts["experts"])):
            continue
        why = touched(block) or next((w for w in map(touched, parts.values()) if w), "") or _multiplies_otherwise(block)
        why = f"{type(block).__name__} {why}" if why else ""
        found[name] = Match.unless(why, "experts", OwnBlock, type(block))
        for key, child in parts.items():
            found[below(name, key)] = Match.unless(why, "experts", OwnBlock, type(child))
    return found


def _is_alone(child: Any) -> bool:
    """Whether a module of transformers has weights, and is none of ours."""
    return child is not None and bool(child._parameters) and not isinstance(child, Converted)


def _multiplies_otherwise(block: Any) -> str:
    probe = _small(block)
    if probe is None:
        return "cannot be looked into"
    for key in ("experts", "router"):
        probe._modules[key].__class__ = mixed(OwnBlock, type(probe._modules[key]))
    for key in probe._modules.keys() - {"experts", "router"}:
        probe._modules[key] = First()
    probe.__class__ = mixed(OwnBlock, type(block))
    return unsafe(probe.forward, random(1, 5, 32))


def _small(child: Any) -> Any:
    """A module of the same class from a small configuration, with numbers of our own in its weights; None without."""
    config = vars(child).get("config") or getattr(child._modules.get("shared_expert"), "config", None)
    if config is None:
        return None
    config = copy.deepcopy(config)
    for name, value in _SMALL.items():
        if getattr(config, name, None) is not None and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, value)
    takes = inspect.signature(type(child).__init__).parameters
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            probe = type(child)(config, *[0] * ("layer_idx" in takes))
    except Exception:  # whatever another library's code raises
        return None
    for i, p in enumerate(probe.parameters()):
        p.data = random(*p.shape, seed=i)
        p.requires_grad_(False)
    return probe.eval()

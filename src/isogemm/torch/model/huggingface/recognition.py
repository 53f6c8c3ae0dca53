"""Which modules and models of transformers are what isogemm computes.

As in `isogemm.torch.model.recognition`: by structure, by the operators that their own forward methods call, and by what
these give on small stand-ins.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from functools import cache
from typing import Any

import torch

from ...operator import Tensor
from ..layers import Transposed
from ..recognition import (
    PLAIN,
    Looks,
    Match,
    agrees,
    differs,
    magnitudes,
    no_function,
    random,
    random_linear,
    stand_in,
    touched,
)
from ..traced import Formula, Hidden, Other
from .modules import NAME, CachedAttention, Rotary, RotaryAttention, register
from .rotary import turns_otherwise

_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ARGUMENTS = ["hidden_states", "position_embeddings", "attention_mask"]
_BY_CACHE = {"past_key_values": RotaryAttention, "cache": CachedAttention}  # what is mixed in, by the cache's name
_TURNS: Formula = dict.fromkeys(["add", "addmm", "linear", "mm", "mul", "neg", "sub"], ())
_ATTENTION: Formula = dict.fromkeys(["_softmax", "add", "bmm", "mm", "mul", "softmax"], ())


def known(child: Any, widths: frozenset[int], odd: str, looks: Looks) -> Match | None:
    """What an attention module with rotary embeddings, or a rotary embedding, of transformers is; None for all else.

    `widths` are how much of a head the model's rotary embeddings turn, and `odd` is why their tables do not fit.
    """
    if set(child._modules) >= _PROJECTIONS and vars(child).keys() >= {"head_dim", "scaling", "config"}:
        why = touched(child) or _turns_a_part(child, widths) or odd or _differs(child, looks)
        return Match.unless(why, "rope", _by_cache(child), type(child))
    if type(child).__name__.endswith("RotaryEmbedding") and "inv_freq" in child._buffers:
        why = touched(child) or turns_otherwise(child)
        if not why or touched(child):
            return Match.unless(why, "rope", Rotary, type(child))
        for way in ("once", "joined"):
            if not turns_otherwise(child, way):
                return Match.unless("", "rope", Rotary, type(child), **{way: True})
        return Match("rope", why=why)
    if type(child).__name__ == "Conv1D" and list(child._parameters) == ["weight", "bias"]:
        return Match.unless(touched(child) or looks.at(_no_product, child), "linear", Transposed, type(child))
    return None


def _no_product(child: Any) -> str:
    """Why a module with a transposed weight does not compute x @ weight + bias; empty where it does."""
    weight, bias = random_linear(12, 8, 1).weight, torch.nn.Parameter(random(12, seed=2), requires_grad=False)
    probe = stand_in(child, weight=weight, bias=bias)
    vars(probe).update(nf=12, nx=8)
    operators: Formula = dict.fromkeys(["add", "addmm", "mm"], ())
    shapes, x = ((3, 8), (1, 1, 8), (2, 4096, 8)), magnitudes(random(3, 8))
    why = no_function(probe, operators, shapes, lambda x: x @ weight + bias, x)
    return f"{type(child).__name__} is not x @ weight + bias: {why}" if why else ""


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


def _arguments(child: Any) -> list[str]:
    """Names of what its forward method takes."""
    return list(inspect.signature(type(child).forward).parameters)


def _by_cache(child: Any) -> type[RotaryAttention]:
    return next((_BY_CACHE[name] for name in _arguments(child) if name in _BY_CACHE), RotaryAttention)


def _differs(child: Any, looks: Looks) -> str:
    """What an attention module has that `RotaryAttention` has not; empty where there is nothing."""
    cls = type(child)
    if _arguments(child) not in [["self", *_ARGUMENTS, cache, "kwargs"] for cache in _BY_CACHE]:
        return f"the forward method of {cls.__name__} takes other arguments"
    if not set(child._modules) <= _PROJECTIONS | {"q_norm", "k_norm"} or child._parameters:
        return f"{cls.__name__} has other modules or parameters"
    norms = [child._modules[name] for name in ("q_norm", "k_norm") if child._modules.get(name) is not None]
    if any(p.shape != (child.head_dim,) for norm in norms for p in norm.parameters()):
        return f"{cls.__name__} norms otherwise than each head alone"
    if vars(child).get("num_key_value_groups") is None or not hasattr(sys.modules[cls.__module__], _EAGER):
        return f"{cls.__name__} does not use transformers' attention functions"
    # Layers that differ in their index alone are looked at once, where a look without an index is enough.
    why = looks.at(_computes_otherwise, child, True, without=("layer_idx",)) and _computes_otherwise(child, False)
    return f"{cls.__name__} computes something else than q_proj, norm, rope, attention and o_proj: {why}" if why else ""


_EAGER = "eager_attention_forward"
_TOLD = ("dropout", "scaling", "softcap", "sliding_window", "position_ids")  # `sliding_window` is in the mask


def _computes_otherwise(child: Any, anywhere: bool) -> str:
    """What an attention module does that `RotaryAttention` does not; `anywhere`: without its layer's index."""
    probe = _probe(child)
    if anywhere:
        vars(probe)["layer_idx"] = Hidden()

    def call(empty: Any) -> None:
        for rows, tokens, cached in ((1, 1, True), (2, 3, False), (1, 4096, False)):
            mask = empty(rows, 1, tokens, tokens) if tokens > 1 else None
            cos, sin = (empty(rows, tokens, probe.head_dim) for _ in range(2))
            cache = _Cache(empty(rows, 2, 5, probe.head_dim)) if cached else None
            options = {"position_ids": empty(rows, tokens, dtype=torch.int64)} if rows > 1 else {}
            probe.forward(empty(rows, tokens, 8), (cos, sin), mask, cache, **options)
            _check_told(probe, mask)

    x, angles = magnitudes(random(3, 8, seed=16))[:, None], random(17, 1, child.head_dim // 2, seed=17)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))

    def same() -> bool:
        caches = [_Cache(random(17, 2, 2, child.head_dim)) for _ in range(2)]

        def theirs() -> tuple[Tensor, ...]:
            y = probe.forward(x, (cos, sin), None, caches[0])[0]
            _check_told(probe, None)
            return (y, *caches[0].seen, *vars(probe)[_ATTENDED]["tensors"])

        return agrees(theirs, lambda: _formula(probe, x, cos, sin, caches[1]))

    return differs(probe, _TURNS, call, same)


_PROBE, _ATTENDED = "isogemm's look", "isogemm_attended"


def _attended(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **told: Any) -> Any:
    """An attention function that notes what it is given, and returns the queries."""
    vars(module)[_ATTENDED].update(tensors=(query, key, value), mask=attention_mask, told=told)
    return query.transpose(1, 2).contiguous(), None


def _check_told(probe: Any, mask: Any) -> None:
    """Whether an attention function was told what `RotaryAttention` tells it."""
    attended = vars(probe)[_ATTENDED]
    told = attended.pop("told")
    if attended["mask"] is not mask:
        raise Other("hands another mask to attention")
    if told.get("scaling") != probe.scaling:
        raise Other("scales otherwise")
    if told.get("softcap") != vars(probe).get("attn_logit_softcapping"):
        raise Other("caps logits otherwise")
    if told.get("dropout", 0.0) != (probe.attention_dropout if probe.training else 0.0):
        raise Other("has another dropout")
    if more := [name for name, value in told.items() if name not in _TOLD and value is not None]:
        raise Other(f"hands {more[0]} to attention")


class _HeadNorm(torch.nn.Module):  # type: ignore[misc]
    """Stands in the place of a norm, which is looked at by itself: it shows where and on what a norm is called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(width, seed=8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self.weight):
            raise Other("norms more than one head at once")
        return x * self.weight


class _Cache:
    """Keys that were there before, and what was written."""

    def __init__(self, before: Tensor) -> None:
        self.before = before
        self.seen: tuple[Tensor, ...] = ()

    def update(self, key: Tensor, value: Tensor, layer: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.seen = key, value
        return torch.cat((self.before, key), 2), torch.cat((self.before, value), 2)


def _probe(child: Any) -> Any:
    """A small module of the same class, whose attention function is `_attended`."""
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, _attended)
    width, groups = child.head_dim, child.num_key_value_groups
    sizes = {"q_proj": (8, 2 * groups * width), "k_proj": (8, 2 * width), "v_proj": (8, 2 * width)}
    sizes["o_proj"] = (2 * groups * width, 8)
    replaced: dict[str, Any] = {name: random_linear(*size, seed=i) for i, (name, size) in enumerate(sizes.items())}
    for name in ("q_norm", "k_norm"):
        if child._modules.get(name) is not None:
            replaced[name] = _HeadNorm(width)
    probe = stand_in(child, **replaced)
    config = copy.copy(child.config)
    config._attn_implementation_internal = _PROBE
    vars(probe).update({"config": config, _ATTENDED: {}})
    return probe


def _formula(probe: Any, x: Tensor, cos: Tensor, sin: Tensor, cache: _Cache) -> tuple[Tensor, ...]:
    """The result, what a cache and what an attention function is given."""

    def heads(name: str) -> Tensor:
        y = probe._modules[f"{name}_proj"](x).view(len(x), 1, -1, probe.head_dim).transpose(1, 2)
        norm = probe._modules.get(f"{name}_norm")
        return y if norm is None else norm(y)

    def turn(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    query, (key, value) = turn(heads("q")), cache.update(turn(heads("k")), heads("v"), probe.layer_idx)
    y = probe.o_proj(query.transpose(1, 2).reshape(len(x), 1, -1))
    return y, *cache.seen, query, key, value


def attention_modules(module: Any) -> dict[str, Any]:
    """Attention modules of transformers models in `module`, by name."""
    if "transformers" not in sys.modules:
        return {}
    named = module.named_modules()
    return {name: child for name, child in named if vars(child).keys() >= {"is_causal", "config"}}


def models(module: Any) -> dict[str, Any]:
    """The transformers models in `module`, by name."""
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    return {name: child for name, child in module.named_modules() if isinstance(child, PreTrainedModel)}


def refusal(module: Any, looks: Looks) -> str:
    """Why a model cannot be given an attention function; empty where it can."""
    found = models(module)
    if not found:
        return "masks are made by a transformers model, and this is only a part of one"
    for child in found.values():
        if not child._can_set_attn_implementation():
            return f"{type(child).__name__} does not use transformers' attention functions"
    for name, child in module.named_modules():
        if name not in found and _reads_masks(type(child).forward):
            return f"{type(child).__name__} reads the numbers of masks by itself"
    for child in attention_modules(module).values():
        if "sinks" in child._parameters and "s_aux=self.sinks" not in source(type(child).forward):
            return f"{type(child).__name__} does not hand its sinks to the attention function"
        if more := _hands_more(type(child).forward):
            return f"{type(child).__name__} {more}, which is not part of the definition"
        if why := looks.at(_attends_otherwise, child, without=("layer_idx",)):
            what = "softmax(q @ k.T * scaling + mask) @ v" + (" with sinks" if "sinks" in child._parameters else "")
            return f"the attention of {type(child).__name__} is not {what}: {why}"
    return ""


_READS = re.compile(
    r"[+&] attention_mask\b|\battention_mask (?:[+&]|== 0)|\battention_mask\.(?:dtype|is_floating_point)"
)


@cache
def _reads_masks(forward: Any) -> bool:
    """Whether a forward method computes with the mask of a layer, as a tensor of numbers; ours is packed."""
    code = getattr(forward, "__code__", None)
    return code is not None and "attention_mask" in code.co_varnames and bool(_READS.search(source(forward)))


def source(code: Any) -> str:
    """The text of a function or a class; empty where there is none."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # no source at hand
        return ""


_MORE = {
    "position_bias": "adds a position bias",
    "indices": "chooses keys by their indices",
    "block_indices": "chooses keys by blocks",
}


@cache
def _hands_more(forward: Any) -> str:
    """What the forward method of attention takes, or hands to the attention function, besides the usual."""
    text, taken = source(forward), inspect.signature(forward).parameters
    return next((why for name, why in _MORE.items() if name in taken or f" {name}=" in text), "")


def _attends_otherwise(child: Any) -> str:
    """What the eager attention function of a module's model does besides attention; empty where there is nothing."""
    eager = getattr(sys.modules[type(child).__module__], _EAGER, None)
    if eager is None:
        return ""
    groups, made = getattr(child, "num_key_value_groups", None) or 1, {}
    if "sinks" in child._parameters:
        made["sinks"] = torch.nn.Parameter(random(2 * groups, seed=4), requires_grad=False)
    probe, width, scaling, cap = stand_in(child, **made), 8, 0.3, vars(child).get("attn_logit_softcapping")
    more = {} if cap is None else {"softcap": cap}
    if "layer_idx" in vars(probe):
        vars(probe)["layer_idx"] = Hidden()

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return eager(probe, query, key, value, mask, scaling=scaling, dropout=0.0, **more)[0]

    def call(empty: Any) -> None:
        for rows, tokens in ((1, 1), (2, 3), (1, 300)):
            key, value = (empty(rows, 2, tokens + 2, width) for _ in range(2))
            attend(empty(rows, 2 * groups, tokens, width), key, value, empty(rows, 1, tokens, tokens + 2))

    def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * scaling
        scores = (scores if cap is None else torch.tanh(scores / cap) * cap) + mask
        for sinks in made.values():
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        return (torch.softmax(scores, -1)[..., : key.shape[2]] @ value).transpose(1, 2)

    heads = ((2 * groups, 3), (2, 5), (2, 5))
    given = [random(6, n, tokens, width, seed=i) for i, (n, tokens) in enumerate(heads)]
    given[0] *= torch.tensor([1e-3, 1.0, 30.0, 1e3, 1e6, 1.0], **PLAIN)[:, None, None, None]
    mask = torch.tensor([[0, 0, 0, -1e9, -1e9], [0, 0, 0, 0, -1e9], [-1e9, 0, 0, 0, 0]], **PLAIN)[None, None]
    operators: Formula = {**_ATTENTION, "mul": (scaling,)} | ({"max": (-1,), "sub": ()} if made else {})
    if cap is not None:
        operators = {**operators, "mul": (scaling, cap), "div": (cap,), "tanh": ()}
    return differs(probe, operators, call, lambda: agrees(attend, formula, *given, mask))


_ORDERED = re.compile(r"sigmoid|silu|gelu|softmax|matmul|einsum|bmm|\bmean\(|\bsum\(|norm\(|linear\(|topk|conv| @ ")
_CHILDREN = re.compile(r"self\.\w+\(|\w*attention_interface\w*\(")


@cache
def _computes_by_itself(forward: Any) -> bool:
    text = source(forward)
    return not text or bool(_ORDERED.search(_CHILDREN.sub("", text)))


def moves_alone(child: Any) -> bool:
    """Whether what an attention module computes between its children is additions and products of elements."""
    return set(child._parameters) <= {"sinks"} and not touched(child) and not _computes_by_itself(type(child).forward)


def switch(module: Any) -> list[tuple[Any, str]]:
    """Set the attention function of a model, in a copy of its configuration: others may share the one it had.

    Returns the modules with a configuration and the function that each had before.
    """
    from transformers import PreTrainedConfig

    register()
    memo: dict[int, Any] = {}
    before = []
    for child in module.modules():
        config = vars(child).get("config")
        if isinstance(config, PreTrainedConfig):
            before.append((child, config._attn_implementation))
            child.config = copy.deepcopy(config, memo)
            child.config._attn_implementation = NAME
    return before

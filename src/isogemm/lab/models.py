"""The linears of named models, as shapes: what `isogemm audit --model` and the studies run on.

A linear is ``x[m, k] @ w[n, k].T``; ``n`` outputs, ``k`` inputs. The numbers are those of
the models' public configurations.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..base import arguments
from ..base.arguments import shown
from ..base.disk import read_object
from ..errors import OptionError


class LinearShape(NamedTuple):
    """A linear layer's shape."""

    name: str  # what it is in its model
    # n, k: outputs and inputs: the weight is [n, k]
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a decoder-only transformer that its linears follow from."""

    name: str
    # hidden, intermediate: width of the residual stream and of the gated feed-forward block
    hidden: int
    intermediate: int
    # heads, kv_heads, head_dim: query heads, key and value heads, and the width of a head (never assumed to be hidden /
    # heads)
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    # experts, experts_used: feed-forward experts of a layer, and how many a token visits; 0 for a dense model
    experts: int = 0
    experts_used: int = 0
    expert_intermediate: int = 0  # width of one expert; 0 for a dense model

    def linears(self) -> tuple[LinearShape, ...]:
        """The distinct linears of one layer, with Q, K and V as one product and gate and up as one, and the LM head.

        A mixture of experts lists one expert: the others have its shape.
        """
        block = "expert " if self.experts else ""
        width = self.expert_intermediate or self.intermediate
        return (
            LinearShape("qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            LinearShape("attention output", self.hidden, self.heads * self.head_dim),
            LinearShape(f"{block}gate+up", 2 * width, self.hidden),
            LinearShape(f"{block}down", self.hidden, width),
            LinearShape("lm head", self.vocabulary, self.hidden),
        )


MODELS = MappingProxyType(
    {
        m.name: m
        for m in (
            Model("Qwen2.5-0.5B", 896, 4864, 14, 2, 64, 24, 151936),
            Model("Qwen3-4B", 2560, 9728, 32, 8, 128, 36, 151936),
            Model("Qwen3-8B", 4096, 12288, 32, 8, 128, 36, 151936),
            Model("Qwen2.5-72B", 8192, 29568, 64, 8, 128, 80, 152064),
            Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 32, 128256),
            Model("Llama-3.1-70B", 8192, 28672, 64, 8, 128, 80, 128256),
            Model("Llama-3.1-405B", 16384, 53248, 128, 8, 128, 126, 128256),
            Model(
                "Qwen3-30B-A3B",
                2048,
                6144,
                32,
                4,
                128,
                48,
                151936,
                experts=128,
                experts_used=8,
                expert_intermediate=768,
            ),
        )
    }
)
"""Every named model."""

PROJECTION_SHAPES = (
    LinearShape("up 8B", 12288, 4096),
    LinearShape("attention output 8B", 4096, 4096),
    LinearShape("up Llama 8B", 14336, 4096),
    LinearShape("down Llama 8B", 4096, 14336),
    LinearShape("lm head 32k", 32000, 4096),
)
"""Shapes on which batch-invariant matmuls are commonly compared, as (n, k)."""


def model(name: str) -> Model:
    """The named model; case and the hyphens' exact places do not matter.

    Raises
    ------
    OptionError
        No such model; the error names the closest one.
    """
    arguments.of_type("model", name, str, "a model's name", "'Qwen3-4B'")
    known = {_plain(each): each for each in MODELS}
    if _plain(name) in known:
        return MODELS[known[_plain(name)]]
    close = known[(difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.0) or list(known))[0]]
    raise OptionError("unknown model", limit="one of " + ", ".join(MODELS), value=repr(name), nearest=close)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "vocabulary": "vocab_size",
}
# What gives a decoder linears that a `Model` does not list, where it is more than the number beside it: queries, keys
# and values by way of a low rank, experts that all tokens visit, layers without experts among those that have some.
_UNLISTED = {
    "q_lora_rank": 0,
    "kv_lora_rank": 0,
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": 0,
}


def read_config(path: str) -> Model:
    """The sizes in a ``config.json`` of transformers; named after its folder.

    Raises OptionError: the file cannot be read, lacks a size, or is of a model that has other linears too.
    """
    path = arguments.path("path", path, "'config.json'")
    found = read_object("config", path, f"a config.json, or a named model as {next(iter(MODELS))}")
    found = found if found.get("text_config") is None else found["text_config"]
    if not isinstance(found, dict):
        raise OptionError(
            f"text_config in {path}", limit="an object of JSON", value=shown(found), nearest="a decoder's config"
        )
    for key, listed in _UNLISTED.items():
        value = found.get(key) or 0
        if not (len(value) if isinstance(value, list | str | dict) else value) <= listed:
            limit = f"at most {listed}: linears of such layers are not known here"
            raise OptionError(
                f"{key} in {path}", limit=limit, value=shown(value), nearest="a decoder whose layers are all alike"
            )
    sizes = {name: _whole(found, key, path) for name, key in _KEYS.items()}
    heads = sizes["heads"]
    experts = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if found.get(key)), "")
    if experts:
        sizes["experts"] = _whole(found, experts, path)
        sizes["experts_used"] = _whole(found, "num_experts_per_tok", path)
        sizes["expert_intermediate"] = _whole(found, "moe_intermediate_size", path, sizes["intermediate"])
    kv_heads = _whole(found, "num_key_value_heads", path, heads)
    if heads % kv_heads:
        what, limit = f"num_key_value_heads in {path}", f"a divisor of {heads}, the heads"
        raise OptionError(what, limit=limit, value=kv_heads, nearest=math.gcd(heads, kv_heads))
    return Model(
        str(found.get("_name_or_path") or Path(path).absolute().parent.name),
        **sizes,
        kv_heads=kv_heads,
        # as transformers has it where none is named
        head_dim=_whole(found, "head_dim", path, max(1, sizes["hidden"] // heads)),
    )


def _whole(found: dict[str, Any], key: str, path: str, otherwise: int = 0) -> int:
    """A size; `otherwise`, where that is one, in the place of none or 0."""
    value = (found.get(key) or otherwise) if otherwise else found.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        limit = "a whole number from 1 to 2**31 - 1"
        raise OptionError(f"{key} in {path}", limit=limit, value=shown(value), nearest="a decoder's config")
    return value

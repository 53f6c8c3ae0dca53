"""Models that programs are made of: decoders as Qwen3 and Llama are, and as GPT-2 is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from fnmatch import fnmatchcase
from sys import float_info
from typing import Any

from ..backends.cpu.quant.layout import COLUMNS
from ..base.arguments import extent, number, shown
from ..base.limits import at_most
from ..errors import OptionError, ShapeError
from ..quant.encode import weight_format

ARCHITECTURES = {"qwen3": {"head_norms": True}, "llama": {"head_norms": False}}  # and what else they are
MOST_SIZE, MOST_LAYERS, MOST_NUMBER = 2**31 - 1, 2**8, float_info.max  # a plan names every layer's operations
NORMS, MLPS = ("rms_norm", "layer_norm"), ("silu_mul", "gelu")
# Names in a checkpoint of transformers, by the norm; those of TURNED are stored [k, n] there, as Conv1D has them.
KNOWN = {
    "rms_norm": {
        "embed": "model.embed_tokens", "embed.positions": "model.embed_positions",
        "norm1": "model.layers.{}.input_layernorm", "wqkv": "model.layers.{}.self_attn.qkv_proj",
        "wq": "model.layers.{}.self_attn.q_proj", "wk": "model.layers.{}.self_attn.k_proj",
        "wv": "model.layers.{}.self_attn.v_proj", "qnorm": "model.layers.{}.self_attn.q_norm",
        "knorm": "model.layers.{}.self_attn.k_norm", "wo": "model.layers.{}.self_attn.o_proj",
        "norm2": "model.layers.{}.post_attention_layernorm", "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj", "down": "model.layers.{}.mlp.down_proj", "norm": "model.norm",
        "head": "lm_head",
    },
    "layer_norm": {
        "embed": "transformer.wte", "embed.positions": "transformer.wpe", "norm1": "transformer.h.{}.ln_1",
        "wqkv": "transformer.h.{}.attn.c_attn", "wq": "transformer.h.{}.attn.q_proj",
        "wk": "transformer.h.{}.attn.k_proj", "wv": "transformer.h.{}.attn.v_proj",
        "qnorm": "transformer.h.{}.attn.q_norm", "knorm": "transformer.h.{}.attn.k_norm",
        "wo": "transformer.h.{}.attn.c_proj", "norm2": "transformer.h.{}.ln_2", "gate": "transformer.h.{}.mlp.c_gate",
        "up": "transformer.h.{}.mlp.c_fc", "down": "transformer.h.{}.mlp.c_proj", "norm": "transformer.ln_f",
        "head": "lm_head",
    },
}  # fmt: skip
TURNED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder, named as in the configurations of transformers.

    ``x + o(attention(rope(norm(q(norm(x)))), rope(norm(k(norm(x)))), v(norm(x))))`` and then
    ``x + down(silu(gate(norm(x))) * up(norm(x)))`` in each layer, a norm and the head behind the last. With
    ``positions`` learned embeddings are added to the first x instead of rope, with ``mlp="gelu"`` the second is
    ``x + down(gelu(up(norm(x))))``; ``norm="layer_norm"`` is one with a bias.

    Attributes
    ----------
    rms_norm_eps : float
        Of either norm.
    norm : {"rms_norm", "layer_norm"}
    mlp : {"silu_mul", "gelu"}
        gelu is that by tanh, as ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3))``, with the pinned exp of
        `isogemm.contract.rows`.
    bias : bool
        Linear layers have one, but for the head.
    fused_qkv : bool
        One weight gives queries, keys and values: part of the numbers of gradients. For learned positions.
    positions : int
        Rows of the table of learned positions; 0 for rope.
    dropout : float
        The largest of the model, which has to be 0 where a program trains.

    Raises
    ------
    ShapeError
        A size is not a whole number from 1 to `MOST_SIZE`, there are more layers than `MOST_LAYERS`, heads are no
        multiple of the heads of keys, or a head is odd.
    OptionError
        A number or flag that is none, a norm or MLP of no such kind, or queries, keys and values in one weight with
        rope or norms of heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    head_norms: bool = True
    norm: str = "rms_norm"
    mlp: str = "silu_mul"
    bias: bool = False
    fused_qkv: bool = False
    positions: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim"):  # fmt: skip
            most = MOST_LAYERS if name == "num_hidden_layers" else MOST_SIZE
            object.__setattr__(self, name, at_most(name, extent(name, getattr(self, name)), most))
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise ShapeError("num_attention_heads", limit=f"a multiple of {shared}", value=heads, nearest=shared)
        for name in ("rms_norm_eps", "rope_theta", "dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_NUMBER:
                usual = DecoderConfig.__dataclass_fields__[name].default
                raise OptionError(name, limit="a number of at least 0", value=shown(value), nearest=usual)
            object.__setattr__(self, name, float(value))
        if self.rope_theta == 0:
            raise OptionError("rope_theta", limit="a positive number", value=self.rope_theta, nearest=10000.0)
        for name in ("tie_word_embeddings", "head_norms", "bias", "fused_qkv"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(name, limit="True or False", value=repr(getattr(self, name)), nearest=False)
        for name, legal in (("norm", NORMS), ("mlp", MLPS)):
            if getattr(self, name) not in legal:
                raise OptionError(name, limit=" or ".join(legal), value=getattr(self, name), nearest=legal[0])
        object.__setattr__(self, "positions", at_most("positions", extent("positions", self.positions, 0), MOST_SIZE))
        if self.fused_qkv and (self.head_norms or not self.positions):
            limit = "False with rope or norms of heads"
            raise OptionError("fused_qkv", limit=limit, value=True, nearest=False)
        if self.head_dim % 2 and not self.positions:
            raise ShapeError("head_dim", limit="even", value=self.head_dim, nearest=self.head_dim + 1)

    @property
    def groups(self) -> int:
        """Heads of queries that share one of keys."""
        return self.num_attention_heads // self.num_key_value_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `decoder` takes."""
        return asdict(self)

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name in a program, name in a checkpoint of transformers, shape) of every weight.

        Weights of products are [n, k] in a program; `is_turned` says which are [k, n] in a checkpoint.
        """
        for name, shape in self._weights():
            layer, _, part = name.partition(".") if name[0] == "L" else ("", "", name)
            whole = part.removesuffix(".bias")
            known = KNOWN[self.norm][whole].format(layer[1:])
            yield name, f"{known}.bias" if part != whole else f"{known}.weight", shape

    def _weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        yield "embed", (self.vocab_size, hidden)
        if self.positions:
            yield "embed.positions", (self.positions, hidden)
        for i in range(self.num_hidden_layers):
            for name, shape in self._of_layer():
                yield f"L{i}.{name}", shape
        yield from self._normed("norm", hidden)
        if not self.tie_word_embeddings:
            yield "head", (self.vocab_size, hidden)

    def _of_layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner, width = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * width, self.num_key_value_heads * width
        yield from self._normed("norm1", hidden)
        for name, n in (
            (("wqkv", queries + 2 * keys),) if self.fused_qkv else (("wq", queries), ("wk", keys), ("wv", keys))
        ):
            yield from self._linear(name, n, hidden)
        if self.head_norms:
            yield "qnorm", (width,)
            yield "knorm", (width,)
        yield from self._linear("wo", hidden, queries)
        yield from self._normed("norm2", hidden)
        for name in ("gate", "up")[self.mlp == "gelu" :]:
            yield from self._linear(name, inner, hidden)
        yield from self._linear("down", hidden, inner)

    def _normed(self, name: str, n: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield name, (n,)
        if self.norm == "layer_norm":
            yield f"{name}.bias", (n,)

    def _linear(self, name: str, n: int, k: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield name, (n, k)
        if self.bias:
            yield f"{name}.bias", (n,)


def is_turned(known: str) -> bool:
    """Whether a checkpoint of transformers has this weight as [k, n]."""
    return known.endswith(TURNED)


def weight_formats(model: DecoderConfig, patterns: Mapping[str, str | None], phase: str) -> dict[str, str]:
    """The format of every weight of a product that has one, by patterns of names in a program or in a checkpoint.

    Embeddings stay as they are, and so does a head that is tied to them. Raises OptionError: a pattern that no weight
    has, a format without an integer product, or a program that trains. Raises ShapeError: rows are no whole number of
    blocks, or there are fewer than 16 of them.
    """
    found: dict[str, str] = {}
    if patterns and phase == "train":
        raise OptionError("quantize", limit="None with phase='train'", value=dict(patterns), nearest="phase='prefill'")
    weights = [entry for entry in model.weights() if len(entry[2]) == 2 and entry[0].partition(".")[0] != "embed"]
    for pattern, name in patterns.items():
        fits = [entry for entry in weights if any(fnmatchcase(x, pattern) for x in entry[:2])]
        if not fits:
            raise OptionError("quantize", limit="patterns of weights' names", value=pattern, nearest=weights[0][0])
        fmt = None if name is None else weight_format("quantize", name)
        for weight, known, (n, k) in fits:
            if fmt is not None and weight not in found:
                fmt.row_bytes(k, known)
                if n < COLUMNS:
                    raise ShapeError(
                        f"rows of {known} in blocks", limit=f"at least {COLUMNS}", value=n, nearest=COLUMNS
                    )
            found.setdefault(weight, "float32" if fmt is None else fmt.name)
    return found


def decoder(given: Any) -> DecoderConfig:
    """A `DecoderConfig` from one, from a dict like config.json, or from a configuration of transformers.

    Raises
    ------
    OptionError
        Another architecture or activation, a bias of Qwen3 or Llama, a scaled rotation, or a size that is missing.
    """
    if isinstance(given, DecoderConfig):
        return given
    if not isinstance(given, dict) and not hasattr(given, "to_dict"):
        limit = "a DecoderConfig, a dict like config.json, or a configuration of transformers"
        raise OptionError("model", limit=limit, value=shown(given), nearest="model.config")
    data = dict(given) if isinstance(given, dict) else given.to_dict()
    kind = data.get("model_type", "qwen3")
    if kind == "gpt2":
        return _gpt2(data)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise OptionError("model_type", limit=", ".join([*ARCHITECTURES, "gpt2"]), value=kind, nearest="qwen3")
    data = ARCHITECTURES[kind] | data
    data.setdefault("dropout", data.get("attention_dropout") or 0.0)
    rotation = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(rotation, Mapping) or any(isinstance(part, Mapping) for part in rotation.values()):
        limit, nearest = "one rotation, for all layers", {"rope_type": "default", "rope_theta": 10000.0}
        raise OptionError("rope_parameters or rope_scaling", limit=limit, value=rotation, nearest=nearest)
    kind_of = rotation.get("rope_type", rotation.get("type", "default"))  # older files say type
    whole = rotation.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    for name, value, plain in (("rope_type", kind_of, "default"), ("partial_rotary_factor", whole, 1.0)):
        if value not in (plain, None):
            raise OptionError(name, limit=plain, value=value, nearest=plain)
    if data.get("rope_theta") is None:
        data["rope_theta"] = rotation.get("rope_theta", 10000.0)
    _check_plain(data, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False})
    names = {field.name for field in fields(DecoderConfig)}
    missing = sorted({f.name for f in fields(DecoderConfig) if f.default is MISSING} - set(data))
    if missing:
        raise OptionError("configuration", limit="every size of a decoder", value=f"no {missing[0]}", nearest=missing)
    return DecoderConfig(**{name: data[name] for name in names if name in data})


def _check_plain(data: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Raise where a configuration asks for what programs do not have."""
    for name, value in plain.items():
        if data.get(name, value) != value:
            raise OptionError(name, limit=value, value=data[name], nearest=value)


def _gpt2(data: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of a configuration of GPT-2."""
    _check_plain(data, {
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    })  # fmt: skip
    for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
        if name not in data:
            raise OptionError("configuration", limit="every size of a decoder", value=f"no {name}", nearest=name)
        data = {**data, name: extent(name, data[name])}
    hidden, heads = data["n_embd"], data["n_head"]
    if hidden % heads:
        raise ShapeError(
            "n_embd", limit=f"a multiple of {heads}, its heads", value=hidden, nearest=hidden // heads * heads
        )
    dropout = max(number(f"{x}_pdrop", data.get(f"{x}_pdrop") or 0.0) for x in ("embd", "attn", "resid"))
    return DecoderConfig(
        data["vocab_size"], hidden, data.get("n_inner") or 4 * hidden, data["n_layer"], heads, heads, hidden // heads,
        rms_norm_eps=data.get("layer_norm_epsilon", 1e-5), tie_word_embeddings=data.get("tie_word_embeddings", True),
        positions=data["n_positions"], dropout=dropout,
        head_norms=False, norm="layer_norm", mlp="gelu", bias=True, fused_qkv=True,
    )  # fmt: skip

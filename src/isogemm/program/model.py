"""Models that programs are made of: a decoder with RMSNorm, rotary embeddings, grouped heads and gated blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from ..backends.cpu.quant.layout import COLUMNS
from ..errors import OptionError, ShapeError
from ..formats.blocks import FORMATS, format_of

__all__ = ["DecoderConfig", "decoder", "weight_formats"]

ARCHITECTURES = {"qwen3": True, "llama": False}  # and whether queries and keys have a norm of their own


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder, named as in the configurations of transformers.

    ``x + o(attention(rope(norm(q(norm(x)))), rope(norm(k(norm(x)))), v(norm(x))))`` and then
    ``x + down(silu(gate(norm(x))) * up(norm(x)))`` in each layer, a norm and the head behind the last.

    Raises
    ------
    ShapeError
        A size is not a whole number of at least 1, heads are no multiple of the heads of keys, or a head is odd.
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ShapeError(name, limit="a whole number of at least 1", value=repr(value), nearest=1)
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise ShapeError("num_attention_heads", limit=f"a multiple of {shared}", value=heads, nearest=shared)
        if self.head_dim % 2:
            raise ShapeError("head_dim", limit="even", value=self.head_dim, nearest=self.head_dim + 1)

    @property
    def groups(self) -> int:
        """Heads of queries that share one of keys."""
        return self.num_attention_heads // self.num_key_value_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `decoder` takes."""
        return asdict(self)

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name in a program, name in a checkpoint of transformers, shape) of every weight."""
        hidden, inner, width = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * width, self.num_key_value_heads * width
        yield "embed", "model.embed_tokens.weight", (self.vocab_size, hidden)
        for i in range(self.num_hidden_layers):
            at, block = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            yield f"L{i}.norm1", f"model.layers.{i}.input_layernorm.weight", (hidden,)
            yield f"L{i}.wq", f"{at}.q_proj.weight", (queries, hidden)
            yield f"L{i}.wk", f"{at}.k_proj.weight", (keys, hidden)
            yield f"L{i}.wv", f"{at}.v_proj.weight", (keys, hidden)
            if self.head_norms:
                yield f"L{i}.qnorm", f"{at}.q_norm.weight", (width,)
                yield f"L{i}.knorm", f"{at}.k_norm.weight", (width,)
            yield f"L{i}.wo", f"{at}.o_proj.weight", (hidden, queries)
            yield f"L{i}.norm2", f"model.layers.{i}.post_attention_layernorm.weight", (hidden,)
            yield f"L{i}.gate", f"{block}.gate_proj.weight", (inner, hidden)
            yield f"L{i}.up", f"{block}.up_proj.weight", (inner, hidden)
            yield f"L{i}.down", f"{block}.down_proj.weight", (hidden, inner)
        yield "norm", "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "head", "lm_head.weight", (self.vocab_size, hidden)


def weight_formats(model: DecoderConfig, patterns: Mapping[str, str | None], phase: str) -> dict[str, str]:
    """The format of every weight of a product that has one, by patterns of names in a program or in a checkpoint.

    Embeddings stay as they are, and so does a head that is tied to them.

    Raises
    ------
    OptionError
        A pattern that no weight has, a format without an integer product, or a program that trains.
    ShapeError
        Rows are no whole number of blocks, or there are fewer than 16 of them.
    """
    found: dict[str, str] = {}
    if patterns and phase == "train":
        raise OptionError("quantize", limit="None with phase='train'", value=dict(patterns), nearest="phase='prefill'")
    weights = [entry for entry in model.weights() if len(entry[2]) == 2 and entry[0] != "embed"]
    for pattern, name in patterns.items():
        fits = [entry for entry in weights if any(fnmatchcase(x, pattern) for x in entry[:2])]
        if not fits:
            raise OptionError("quantize", limit="patterns of weights' names", value=pattern, nearest=weights[0][0])
        if name is not None and not format_of(name).activations:
            legal = ", ".join(fmt.name for fmt in FORMATS.values() if fmt.activations)
            raise OptionError("quantize", limit=legal, value=name, nearest="Q8_0")
        for weight, known, (n, k) in fits:
            if name is not None and weight not in found:
                format_of(name).row_bytes(k, known)
                if n < COLUMNS:
                    raise ShapeError(
                        f"rows of {known} in blocks", limit=f"at least {COLUMNS}", value=n, nearest=COLUMNS
                    )
            found.setdefault(weight, "float32" if name is None else format_of(name).name)
    return found


def decoder(given: Any) -> DecoderConfig:
    """A `DecoderConfig` from one, from a dict like config.json, or from a configuration of transformers.

    Raises
    ------
    OptionError
        Another architecture, a bias, a scaled rotation, or a size that is missing.
    """
    if isinstance(given, DecoderConfig):
        return given
    data = dict(given) if isinstance(given, dict) else given.to_dict()
    kind = data.get("model_type", "qwen3")
    if kind not in ARCHITECTURES:
        raise OptionError("model_type", limit=" or ".join(ARCHITECTURES), value=kind, nearest="qwen3")
    data.setdefault("head_norms", ARCHITECTURES[kind])
    rotation = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if rotation.get("rope_type", "default") != "default":
        raise OptionError("rope_type", limit="default", value=rotation["rope_type"], nearest="default")
    data["rope_theta"] = float(data.get("rope_theta") or rotation.get("rope_theta", 10000.0))
    plain = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0,
             "use_sliding_window": False}  # fmt: skip
    for name, value in plain.items():
        if data.get(name, value) != value:
            raise OptionError(name, limit=value, value=data[name], nearest=value)
    names = {field.name for field in fields(DecoderConfig)}
    missing = sorted(
        names - {f.name for f in fields(DecoderConfig) if f.name[:4] in ("rms_", "rope", "tie_")} - set(data)
    )
    if missing:
        raise OptionError("configuration", limit="every size of a decoder", value=f"no {missing[0]}", nearest=missing)
    return DecoderConfig(**{name: data[name] for name in names if name in data})

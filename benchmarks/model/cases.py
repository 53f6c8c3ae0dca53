"""What is measured of whole models and of a training step, and the bars that the project has set itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..common import Worded

__all__ = ["PART", "QWEN3", "SUITES", "TINY", "TORCH", "TRAIN", "Bar", "Case", "Sizes", "cases", "tiny"]

Mode = Literal["eager", "graph", "compile", "compile-graph"]

# The two models: a transformers configuration, and the layers of a larger one.
QWEN3 = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TRAIN = {"hidden": 2560, "intermediate": 9728, "query": 4096, "key": 1024, "tokens": 8192}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
COMPILED_LAYERS = 4

TORCH = "torch"
LINEARS, ROUTED, WHOLE, TREE = "linears", "routed linears", "everything", "everything, tree8"
GRAD, MAIN_GRAD = ".grad", "main_grad"
PART = "isogemm"


@dataclass(frozen=True, slots=True)
class Bar:
    """The least speed of one of our variants relative to plain torch, or to another of ours."""

    variant: str
    value: float
    peer: str = TORCH

    def __str__(self) -> str:
        return f"{self.variant} ≥ {self.value:g} {self.peer}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The models' sizes: `QWEN3` and `TRAIN`, or smaller ones for tests."""

    model: dict[str, object] = field(default_factory=lambda: dict(QWEN3))
    train: dict[str, int] = field(default_factory=lambda: dict(TRAIN))
    dtype: str = "bfloat16"
    leaf: str = "leaf4096"

    @classmethod
    def of_tests(cls) -> Sizes:
        """What a CPU takes milliseconds for."""
        train = {"hidden": 16, "intermediate": 48, "query": 32, "key": 16, "tokens": 64}
        return cls(dict(TINY), train, leaf="leaf32")


@dataclass(frozen=True, slots=True)
class Case(Worded):
    """One measured situation; its words (`words`) are what ``--only`` selects by.

    Attributes
    ----------
    suite : str
        ``model``, ``train``, ``parts``, or ``compiled`` (mostly with few layers: a compiler takes long).
    phase : str
        ``decode`` is one token of each row, with `context` keys; ``prefill`` is a prompt of `tokens`, of which the last
        token's logits are computed; ``mlp`` and ``attention`` are a forward and backward pass of these layers. In
        ``parts`` the operation, where `tokens` are rows and `context` their length, or queries and keys.
    mode : str
        ``eager``, ``graph`` (a replayed CUDA graph), ``compile`` (torch.compile's default), or ``compile-graph`` (a
        CUDA graph of the compiled function).
    batch, tokens, context : int
        Rows, new tokens of each, and keys in the cache, the new ones included.
    layers : int
        Of the model; 0 for all.
    calls : int
        Of the operation in a timed step.
    bars : tuple of Bar
    """

    suite: str
    phase: str
    mode: Mode
    batch: int
    tokens: int
    context: int = 0
    layers: int = 0
    calls: int = 1
    bars: tuple[Bar, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The case in words, unique among all cases."""
        layers = (f"layers={self.layers or 'all'}",) if self.layers or self.suite == "compiled" else ()
        sizes = (f"batch={self.batch}", f"tokens={self.tokens}")
        if self.suite == "parts":
            sizes = (*sizes, f"context={self.context}")
        return (self.suite, self.phase, self.mode, *sizes, *layers)

    @property
    def count(self) -> int:
        """New tokens of one timed step."""
        return self.batch * self.tokens * self.calls


def _model() -> list[Case]:
    eager = (Bar(LINEARS, 0.7), Bar(ROUTED, 0.7))
    graph = (Bar(LINEARS, 0.95), Bar(ROUTED, 0.95), Bar(WHOLE, 0.8), Bar(TREE, 0.95, WHOLE))
    found = []
    for mode, bars in (("graph", graph), ("eager", eager)):
        found += [Case("model", "decode", mode, batch, 1, 1024, bars=bars) for batch in (1, 8, 64)]
        found.append(Case("model", "prefill", mode, 1, 4096, 4096, bars=bars))
    return found


def _compiled() -> list[Case]:
    modes: tuple[Mode, ...] = ("compile", "compile-graph")
    few = [Case("compiled", "decode", mode, 8, 1, 1024, COMPILED_LAYERS) for mode in modes]
    return [*few, Case("compiled", "decode", "compile-graph", 8, 1, 1024)]


def _train() -> list[Case]:
    bars, tokens = (Bar(GRAD, 0.97), Bar(MAIN_GRAD, 0.97)), TRAIN["tokens"]
    modes: tuple[Mode, ...] = ("graph", "eager")
    return [Case("train", phase, mode, 1, tokens, bars=bars) for phase in ("mlp", "attention") for mode in modes]


def _parts() -> list[Case]:
    rows = [(1, 4096), (4096, 1024), (4096, 4096)]
    found = [Case("parts", "rms_norm", "graph", 1, m, n, calls=16) for m, n in rows]
    found += [Case("parts", name, "graph", 1, 4096, 4096, calls=16) for name in ("layer_norm", "softmax")]
    found.append(Case("parts", "softmax", "graph", 1, 4096, 151936, calls=2))
    found.append(Case("parts", "silu_mul", "graph", 1, 4096, 12288, calls=16))
    found += [Case("parts", "attention", "graph", batch, 4096, 4096, calls=4) for batch in (1, 4)]
    found += [
        Case("parts", "attention", "graph", batch, 1, keys, calls=16)
        for batch, keys in ((1, 1024), (8, 1024), (64, 1024), (1, 8192), (8, 8192))
    ]
    return found


SUITES = {"model": _model, "train": _train, "parts": _parts, "compiled": _compiled}  # compiling last: it may take long


def cases(suites: Sequence[str]) -> list[Case]:
    """Every case of some suites."""
    return [case for suite in suites for case in SUITES[suite]()]


def tiny(case: Case) -> Case:
    """The same case at a size that a CPU takes milliseconds for."""
    layers = min(case.layers, 1)
    if case.suite == "train":
        return replace(case, tokens=64)
    if case.suite == "parts":
        return replace(case, tokens=min(case.tokens, 16), context=min(case.context, 32), calls=2)
    if case.phase == "prefill":
        return replace(case, tokens=24, context=24, layers=layers)
    return replace(case, batch={1: 1, 8: 2, 64: 3}[case.batch], context=20, layers=layers)

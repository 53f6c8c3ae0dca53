"""The ``gguf`` package's reader with every look into the file checked: what lies outside is an error with a name."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..base.extras import require_extra
from ..errors import FormatError, IsogemmError, ShapeError
from .blocks import FORMATS, format_of


def package() -> Any:
    """The ``gguf`` package.

    Raises
    ------
    OptionError
        It is not installed.
    """
    require_extra("gguf", "GGUF files", "gguf")
    import gguf

    return gguf


def read(path: Path) -> tuple[list[tuple[str, str, tuple[int, ...], int, int]], dict[str, Any], dict[str, list[int]]]:
    """(name, type, shape, offset, bytes) of every tensor, and the metadata with GGUF's numbers of its types.

    Raises
    ------
    FormatError
        A field or a tensor lies outside the file, or a shape does not fit its type.
    """
    gguf = package()
    found: list[tuple[str, str, tuple[int, ...], int, int]] = []
    at, looked = "header", 0  # in which part of the file, and at which byte last

    class Reader(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            nonlocal looked
            looked = int(offset)
            stop = int(offset) + np.dtype(dtype).itemsize * int(count)
            if stop > self.data.size:
                raise FormatError(
                    f"{path.name}: {at}, at byte {int(offset)}", limit=f"the file's {self.data.size} bytes",
                    value=f"a field that ends at byte {stop}", nearest="download the file again",
                )  # fmt: skip
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            """Arrays as one part, and of text as a view for each: vocabularies have 150,000 of them."""
            found = _array(gguf, self, orig_offs) if int(raw_type) == gguf.GGUFValueType.ARRAY else None
            return super()._get_field_parts(orig_offs, raw_type) if found is None else found

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            nonlocal at
            at = "table of tensors"
            return super()._build_tensor_info(offs, count)

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            for field in fields:
                found.append(_tensor(gguf, field, int(start_offs), self.data.size))
            self.tensors: list[Any] = []

    try:
        reader = Reader(path)
        contents = {name: field.contents() for name, field in reader.fields.items()}
    except IsogemmError:
        raise
    except Exception as error:  # the package raises whatever reading a damaged header leads to
        raise FormatError(
            f"{path.name}: {at}, at byte {looked}", limit="a GGUF file", value=f"{type(error).__name__}: {error}",
            nearest="download or write the file again",
        ) from error  # fmt: skip
    if reader.byte_order != "I":
        raise FormatError(
            f"{path.name}: byte order", limit="this machine's", value="the other one", nearest="convert the file"
        )
    names = [name for name, *_ in found]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise FormatError(f"{path.name}: names of tensors", limit="once each", value=min(twice), nearest="rename one")
    types = {name: [int(t) for t in field.types] for name, field in reader.fields.items()}
    return found, contents, types


def _array(gguf: Any, reader: Any, offset: int) -> tuple[int, list[Any], list[int], list[Any]] | None:
    """(bytes, parts, which of them are values, types) of an array; None where its items are arrays again."""
    kinds = gguf.GGUFValueType
    raw, length = reader._get(offset, np.uint32), reader._get(offset + 4, np.uint64)
    kind, count, start = kinds(int(raw[0])), int(length[0]), offset + 12
    if kind in reader.gguf_scalar_to_np:
        values = reader._get(start, reader.gguf_scalar_to_np[kind], count)
        return 12 + int(values.nbytes), [raw, length, values], [2], [kinds.ARRAY, kind]
    if kind is not kinds.STRING or reader.byte_order != "I":
        return None
    data, parts, at = memoryview(reader.data), [raw, length], start
    for _ in range(count):
        stop = at + 8 + int.from_bytes(data[at : at + 8], sys.byteorder)
        if stop > data.nbytes or at + 8 > data.nbytes:
            reader._get_str(at)  # says where it ends
        parts.append(data[at + 8 : stop])
        at = stop
    return at - offset, parts, list(range(2, len(parts))), [kinds.ARRAY, kind]


def _tensor(gguf: Any, field: Any, start: int, size: int) -> tuple[str, str, tuple[int, ...], int, int]:
    _, raw_name, _, dims, kind, relative = field.parts
    name = bytes(raw_name).decode("utf-8", "replace")
    where = f"{name}: "
    try:
        known = gguf.GGMLQuantizationType(int(kind[0]))
    except ValueError as error:
        raise FormatError(
            f"{where}type, in the table at byte {field.offset}", limit="a type of GGML", value=int(kind[0]),
            nearest=", ".join(FORMATS),
        ) from error  # fmt: skip
    shape = tuple(int(d) for d in reversed(dims))
    block, nbytes = gguf.GGML_QUANT_SIZES[known]
    if (shape[-1] if shape else 1) % block:  # a scalar has no rows
        if known.name in FORMATS and shape:
            _refuse_row(known.name, shape[-1], name, field.offset)
        raise FormatError(
            f"{where}shape, in the table at byte {field.offset}", limit=f"rows of a multiple of {block}",
            value=list(shape), nearest="quantize the tensor again",
        )  # fmt: skip
    total, offset = math.prod(shape) // block * nbytes, start + int(relative[0])
    if offset + total > size:
        whole = max(0, (size - offset) // nbytes)
        raise FormatError(
            f"{where}{known.name} {list(shape)}, bytes {offset} to {offset + total}", limit=f"the file's {size} bytes",
            value=f"{offset + total - size} bytes are missing, from block {whole} on", nearest="download it again",
        )  # fmt: skip
    return name, known.name, shape, offset, total


def _refuse_row(kind: str, k: int, name: str, at: int) -> None:
    """Raise of a row that is no whole number of blocks, naming the byte of the table that says so."""
    try:
        format_of(kind).row_bytes(k, name)
    except ShapeError as error:
        value = f"{error.value}, in the table at byte {at}"
        raise ShapeError(error.what, limit=error.limit, value=value, nearest=error.nearest) from error

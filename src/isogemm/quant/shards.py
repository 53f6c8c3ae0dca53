"""A model's weights in several files: what an index beside them says, or a folder that holds one file or one index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, OptionError
from .tensor_file import Tensor, TensorFile

INDEX = "*.safetensors.index.json"
_KINDS = ("*.safetensors", "*.gguf")
Load = Callable[[Path], TensorFile]


class Shards(TensorFile):
    """The tensors of several mapped files by name, in the order of their index; offsets are those in their files."""

    def __init__(self, path: Path, parts: dict[str, TensorFile]) -> None:
        metadata: dict[str, Any] = {}
        for part in parts.values():
            metadata = {**part.metadata, **metadata}
        super().__init__(
            path, np.empty(0, np.uint8), {name: part.entries[name] for name, part in parts.items()}, metadata
        )
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name][name]

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor's bytes, as a view."""
        return self._parts[name].raw(name)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._parts[name].path

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, once each."""
        return tuple(dict.fromkeys(part.path for part in self._parts.values()))


def load_folder(folder: Path, load: Load) -> TensorFile:
    """The index of a folder, or the one file of weights in it. Raises OptionError: it has neither."""
    found = sorted(folder.glob(INDEX)) or sorted(x for kind in _KINDS for x in folder.glob(kind))
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:4]) + ", ..." * (len(found) > 4)
        raise OptionError(
            f"weights in the folder {folder}", limit="one .safetensors.index.json, one .safetensors or one .gguf file",
            value=names or "none of them", nearest=str(found[0]) if found else "the path of a file",
        )  # fmt: skip
    return load(found[0])


def load_index(path: Path, load: Load) -> Shards:
    """The files that a .safetensors.index.json names, which lie beside it.

    Raises FormatError: it is no index, or names a tensor that is not in its file. Raises OptionError: a file is
    missing.
    """
    files = _listed(path)
    opened: dict[str, TensorFile] = {}
    for file in dict.fromkeys(files.values()):
        if not (path.parent / file).is_file():
            raise OptionError(
                f"{path.name} names a file", limit=f"one in {path.parent}", value=f"{file}, which is not there",
                nearest="download it",
            )  # fmt: skip
        opened[file] = load(path.parent / file)
    for name, file in files.items():
        if name not in opened[file].entries:
            raise FormatError(
                f"{name}: entry of {path.name}", limit=f"a tensor of {file}", value="none of that name",
                nearest="download both again",
            )  # fmt: skip
    return Shards(path, {name: opened[file] for name, file in files.items()})


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError: a name is there twice, of which JSON's readers take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _listed(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    nearest = "the model's .safetensors.index.json, or download it again"
    try:
        files = dict(json.loads(path.read_bytes(), object_pairs_hook=named_once)["weight_map"])
    except OSError as error:
        raise OptionError("cannot open", limit="a readable file", value=str(error), nearest="another path") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{path.name}: index", limit='JSON with a "weight_map" of tensors and their files',
            value=f"{type(error).__name__}: {error}", nearest=nearest,
        ) from error  # fmt: skip
    for name, file in files.items():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise FormatError(
                f"{name}: entry of {path.name}", limit="the name of a file beside it", value=repr(file), nearest=nearest
            )
    return files

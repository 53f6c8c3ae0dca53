"""A rank's part of a model read directly from safetensors: no process holds the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...base import arguments
from ...base.extras import require_extra
from ...errors import OptionError, ShapeError
from ..model.merging import Merging
from ..model.names import below
from .layers import Parallel

INDEX = "model.safetensors.index.json"


class without_weights(TorchFunctionMode):  # type: ignore[misc]
    """A context in which modules are made without memory for their weights: `torch.empty` gives meta tensors.

    Buffers, which are computed, are there. ``with without_weights(): model = Model(config)``, then
    ``convert(model, tp=mesh)`` and `load_shards`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


def load_shards(model: Any, folder: str | Path, *, device: Any = "cpu") -> list[str]:
    """Read the parameters of a model that was cut, each rank its part of each file.

    Parameters
    ----------
    model : torch.nn.Module
        What ``convert(model, tp=...)`` left; its parameters may be meta tensors, and are replaced.
    folder : path
        With ``*.safetensors`` files whose names are those of the parameters, whole.
    device : torch.device or str

    Returns
    -------
    list of str
        Names of what was read.

    Raises
    ------
    OptionError
        A parameter that no file has, or two without an index.
    ShapeError
        One of another shape.
    """
    require_extra("weights", "reading safetensors", "safetensors")
    files, found = _files(Path(arguments.path("folder", folder, "'Qwen3-0.6B'"))), []
    made: dict[int, Any] = {}
    with torch.no_grad():
        for name, layer, key, p in _places(model):
            if id(p) not in made:
                made[id(p)] = (p, torch.nn.Parameter(_read(files, name, layer, key, p).to(device), p.requires_grad))
                found.append(name)
            layer._parameters[key] = made[id(p)][1]
    for child in model.modules():
        if isinstance(child, Merging) and "merged_weight" in child._buffers:  # type: ignore[attr-defined]
            child.merge()
    return found


def _places(model: Any) -> list[tuple[str, Any, str, Any]]:
    """(name, module, the parameter's name there, parameter) of every use."""
    return [
        (below(prefix, key), module, key, p)
        for prefix, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None
    ]


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        names = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                if name in found:
                    raise OptionError(
                        f"files with {name}", limit=f"one, or {INDEX} that says which",
                        value=f"{found[name].name} and {path.name}", nearest="a folder with one model",
                    )  # fmt: skip
                found[name] = path
    return found


def _read(files: dict[str, Path], name: str, layer: Any, key: str, p: Any) -> Any:
    """This rank's part of one tensor, in the parameter's dtype."""
    from safetensors import safe_open

    if name not in files:
        raise OptionError("weights in the files", limit=f"one named {name}", value="none", nearest="the model's folder")
    with safe_open(files[name], "pt") as file:
        whole = file.get_slice(name)
        shape, place = whole.get_shape(), [slice(0, n) for n in whole.get_shape()]
        if isinstance(layer, Parallel) and key in layer.cut:
            dim = layer.cut[key]
            place[dim] = layer.ranks.share(f"dimension {dim} of {name}", shape[dim])
        part = whole[tuple(place)]
    if part.shape != p.shape:
        raise ShapeError(
            f"{name} in {files[name].name}", limit=list(p.shape), value=list(part.shape), nearest="its model"
        )
    return part.to(p.dtype).contiguous()

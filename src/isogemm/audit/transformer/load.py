"""A transformers model from a folder: with its weights, or with random ones from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base import arguments
from ...base.extras import require_extra
from ...errors import DeviceError, OptionError
from ..data import as_dtype, checked_seed

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def load(path: str, *, random: bool = False, dtype: str = "", device: str = "", seed: int = 0) -> Any:
    """The model of a folder, in eval mode: a causal language model where its config says so, else the bare model.

    Parameters
    ----------
    path : str
        A folder with config.json. Nothing is downloaded, and no code of the folder is run.
    random : bool
        Random weights from the config instead of the folder's.
    dtype : str
        Of the weights; by default as the config or the file has them.
    device : str
        By default the CPU.
    seed : int
        Of random weights, which another kind of device draws otherwise; torch's own generators are left as they were.

    Raises
    ------
    OptionError
        transformers or torch is missing, there is no config.json or no weights, or transformers cannot read them.
    DTypeError, DeviceError
        No such dtype, or torch cannot use the device.
    """
    require_extra("hf", "the audit of a model", "torch", "transformers")
    import torch
    import transformers

    config, folder = config_of(path), Path(path)
    if not random and not any(list(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise OptionError(
            f"weights in {path}", limit="a .safetensors file", value="none", nearest="--random, for random weights"
        )
    chosen, seed = getattr(torch, as_dtype(dtype).name) if dtype else None, checked_seed(seed)
    place = _device(device)
    try:
        causal = any(name.endswith("ForCausalLM") for name in config.architectures or ["ForCausalLM"])
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        if random:
            drawing = [place] if place.type == "cuda" else []
            with torch.random.fork_rng(drawing), place:  # made where it will be: a GPU draws in a moment
                torch.manual_seed(seed)
                model = auto.from_config(config, dtype=chosen or config.dtype or torch.float32)
        else:
            model = auto.from_pretrained(folder, dtype=chosen or "auto", local_files_only=True)
    except Exception as error:  # whatever a size or a file that is wrong comes to in there
        raise _unread(path, error) from error
    return model.eval().to(place)


def config_of(path: str) -> Any:
    """The configuration in a model's folder. Raises OptionError: there is none, or none that transformers reads."""
    import transformers

    folder = Path(arguments.path("--hf", path, "a model's folder"))
    if not (folder / "config.json").is_file():
        made = f"the folder made by: hf download {_hub_name(path)} --local-dir {folder.name}"
        raise OptionError(
            "--hf",
            limit="a folder on this machine with config.json; nothing is downloaded",
            value=f"{path}, without one" if folder.is_dir() else path,
            nearest="a folder with config.json and the weights" if folder.is_dir() else made,
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _unread(path, error) from error


def _unread(path: str, error: Exception) -> OptionError:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    nearest = "a config.json as the model's page has it, or download it again"
    return OptionError(f"the model in {path}", limit="one that transformers reads", value=text, nearest=nearest)


def _hub_name(path: str) -> str:
    """A model's name where `path` is one; of a folder's path its last part, whose owner nobody knows."""
    return path if not path.startswith((".", "/", "~")) else f"OWNER/{Path(path).name}"


def _device(name: str) -> Any:
    """The device of a name, tried with one number: a build without CUDA says so only then."""
    import torch

    try:
        return torch.zeros(1, device=name or "cpu").device
    except (RuntimeError, AssertionError) as error:
        text = (str(error).splitlines() or [""])[0]
        raise DeviceError(f"device {name}", limit="one that torch can use here", value=text, nearest="cpu") from error

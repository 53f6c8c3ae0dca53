"""Linear modules of a model swapped for layers with quantized weights: which, in which format, and why not others."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ...api.quantized import ACTIVATIONS
from ...base import arguments
from ...base.progress import progress_bar
from ...contract.spec import Contract
from ...errors import OptionError, ShapeError
from ...formats.blocks import BlockFormat
from ...quant.encode import quantize as encode
from ...quant.encode import weight_format
from ...quant.matrix import QuantizedMatrix
from ..model.merging import Merging
from ..model.names import prefixes
from .linear import QuantizedLinear

Formats = str | BlockFormat | Mapping[str, str | BlockFormat | None]
"""One format, or patterns of modules' names with theirs; None leaves weights as they are."""

METHOD = "isogemm"  # to transformers, of quantized checkpoints
CALLS = "_isogemm_calls"  # the attribute of a model that has the arguments of each `convert` of it
LARGE = 2**28  # weights from which progress is shown
# Above, a scale may be too large for float16: such a weight is quantized before anything is changed.
SAFE = 2.0**14
KEEP = "keep"


@dataclass(slots=True)
class Quantization:
    """What is to be quantized."""

    chosen: dict[str, tuple[Any, BlockFormat]]  # dict of str to (Linear, BlockFormat)
    floats: dict[str, str]  # names of Linear modules that stay as they are, and why
    # activations, contract: as in `QuantizedLinear`
    activations: str | None
    contract: Contract | None
    # weights that might not have been quantizable, and are
    early: dict[str, QuantizedMatrix]

    def run(self, model: Any, progress: bool | None) -> dict[str, str]:
        """Swap them one after the other, which frees memory on the way; the formats by name."""
        shared: dict[tuple[int, str], QuantizedMatrix] = {}
        places = _places(model)
        done = {name: str(fmt) for name, (_, fmt) in self.chosen.items()}
        with progress_bar(shown=_is_shown(self.chosen, progress)) as tell:
            while self.chosen:
                name, (old, fmt) = next(iter(self.chosen.items()))
                tell(len(done) - len(self.chosen) + 1, len(done), name)
                key = id(old.weight), fmt.name
                weight = shared.get(key, self.early.pop(name, None))
                if weight is None:
                    weight = _encoded(name, old, fmt)
                del self.chosen[name]
                if any(other.weight is old.weight and to is fmt for other, to in self.chosen.values()):
                    shared[key] = weight
                new = _swapped(old, weight, self.activations, self.contract)
                for parent, place in places.pop(id(old)):
                    _put(parent, place, new)
                del old
        return done


def check(
    model: Any,
    linears: Mapping[str, Any],
    formats: Formats,
    fallback: str | BlockFormat | None,
    activations: str | None,
    contract: Contract | None,
) -> Quantization:
    """What is to be done with the Linear modules `linears` of a model; everything that is refused, before any change.

    Raises OptionError: an unknown format or pattern, or the model is itself a Linear. Raises ShapeError: rows do not
    fit a format, and no fallback is given. Raises FormatError: an element is no number, or a scale is too large for
    float16.
    """
    wanted = _formats(model, formats)
    keep = isinstance(fallback, str) and fallback == KEEP
    other = None if fallback is None or keep else weight_format("fallback", fallback)
    _check_arithmetic(activations, contract)
    chosen: dict[str, tuple[Any, BlockFormat]] = {}
    floats, unfit, named = dict[str, str](), dict[str, ShapeError](), set[str]()
    for name, layer in linears.items():
        pattern, fmt = next(((p, f) for p, f in wanted if any(fnmatchcase(x, p) for x in prefixes(name))), ("", None))
        if fmt is None:
            floats[name] = "no pattern of quantize has it" if not pattern else f"quantize has None for {pattern!r}"
            continue
        named |= {name} if pattern != "*" else set()
        _check_data(name, layer)
        try:
            chosen[name] = layer, _fitting(name, layer.in_features, fmt, other)
        except ShapeError as error:
            unfit[name] = error
    if unfit and not keep:
        raise _unfit(unfit)
    floats |= {name: f"{error.what}: {error.value} is not {error.limit}" for name, error in unfit.items()}
    for name, owner in _tied(model, chosen, named).items():
        del chosen[name]
        floats[name] = (
            f"its weight is {owner}'s too, which needs it as it is; name it in quantize for a copy of its own"
        )
    early = {name: _encoded(name, *chosen[name]) for name in chosen if not _is_safe(chosen[name][0].weight)}
    return Quantization(chosen, floats, activations, contract, early)


def _formats(model: Any, formats: Formats) -> list[tuple[str, BlockFormat | None]]:
    pairs = formats.items() if isinstance(formats, Mapping) else [("*", formats)]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found = []
    for pattern, fmt in pairs:
        if not isinstance(pattern, str) or (pattern != "*" and not any(fnmatchcase(name, pattern) for name in names)):
            nearest = arguments.nearest(str(pattern), names, "*")
            raise OptionError("quantize", limit="patterns of modules' names", value=pattern, nearest=nearest)
        found.append((pattern, None if fmt is None else weight_format("quantize", fmt)))
    return found


def _check_arithmetic(activations: str | None, contract: Contract | None) -> None:
    if activations is not None:
        arguments.one_of("activations", activations, ACTIVATIONS, "'q8'")
    if activations is not None and contract is not None and (activations == "q8") != (contract.arithmetic == "int32"):
        raise OptionError(
            f"activations with the contract {contract}", limit="'q8' with int32, and int32 with 'q8'",
            value=repr(activations), nearest="None",
        )  # fmt: skip


def _check_data(name: str, layer: Any) -> None:
    if not name:
        raise OptionError(
            "quantize of a Linear alone", limit="a model, whose modules can be swapped", value="the Linear itself",
            nearest="isogemm.torch.QuantizedLinear(isogemm.quantize(layer.weight.detach(), 'Q4_K'), layer.bias)",
        )  # fmt: skip
    extra = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}
    if extra:
        raise OptionError(
            f"what is in {name}", limit="weight and bias", value=", ".join(sorted(extra)), nearest=f"leave=['{name}']"
        )
    if layer.weight.is_meta:
        raise OptionError(f"{name}.weight", limit="a weight with data", value="a meta tensor", nearest="load it first")


def _fitting(name: str, k: int, fmt: BlockFormat, other: BlockFormat | None) -> BlockFormat:
    """The format, or the fallback, whose blocks fill rows of `k`."""
    try:
        fmt.row_bytes(k, name)
        return fmt
    except ShapeError:
        if other is None:
            raise
    other.row_bytes(k, name)
    return other


def _unfit(unfit: dict[str, ShapeError]) -> ShapeError:
    first = next(iter(unfit.values()))
    other = str(first.nearest).split(",")[0]
    return ShapeError(
        "modules whose rows are no whole number of blocks", limit=first.limit,
        value="; ".join(f"{error.what}: {error.value}" for error in unfit.values()),
        nearest=f"{first.nearest}; fallback='{other}', fallback='keep', or leave={list(unfit)}",
    )  # fmt: skip


def _tied(model: Any, chosen: Mapping[str, Any], named: set[str]) -> dict[str, str]:
    """Modules whose weight somebody else keeps as it is, by name, and who; not those that were asked for by name."""
    swapped = {id(layer) for layer, _ in chosen.values()}
    owners: dict[int, str] = {}
    for name, child in model.named_modules():
        for p in child._parameters.values():
            if p is not None and id(child) not in swapped:
                owners.setdefault(id(p), name)
    found = {name: owners.get(id(layer.weight)) for name, (layer, _) in chosen.items() if name not in named}
    return {name: owner for name, owner in found.items() if owner is not None}


def _encoded(name: str, layer: Any, fmt: BlockFormat) -> QuantizedMatrix:
    return encode(layer.weight.detach().cpu(), fmt, name=f"{name}.weight")


def _is_safe(weight: Any) -> bool:
    """Whether quantizing cannot fail."""
    most = weight.detach().abs().amax() if weight.numel() else torch.zeros(())
    return bool(most <= SAFE)  # a NaN is not


def _places(model: Any) -> dict[int, list[tuple[Any, str]]]:
    """Where each module stands: (parent, key), several where it is used several times."""
    found: dict[int, list[tuple[Any, str]]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is not None:
                found.setdefault(id(child), []).append((parent, key))
    return found


def _swapped(old: Any, weight: QuantizedMatrix, activations: str | None, contract: Contract | None) -> Any:
    """A layer in the place of a Linear: its bias, its device, its hooks."""
    device = old.weight.device
    there = weight if device.type == "cpu" else weight.to(device)
    made: Any = QuantizedLinear(there, old.bias, activations=activations, contract=contract)
    for key, value in vars(old).items():
        if "hook" in key:
            vars(made)[key] = value  # the dicts themselves: handles of hooks refer to them
    return made.train(old.training)


def remember(model: Any, *, own: bool) -> None:
    """Say in the configuration of a transformers model which weights are quantized, and how it was converted.

    In a copy, unless the configuration is the model's own. What is said of one product holds for all but the `others`.
    """
    layers = {name: child for name, child in model.named_modules() if isinstance(child, QuantizedLinear)}
    if not layers:
        return
    said = {
        name: {"activations": layer.activations, "contract": None if layer.contract is None else str(layer.contract)}
        for name, layer in layers.items()
    }
    first = next(iter(said.values()))
    if not own:
        model.config = copy.deepcopy(model.config)
    model.config.quantization_config = {
        "quant_method": METHOD, "formats": {name: layer.format for name, layer in layers.items()}, **first,
        "others": {name: how for name, how in said.items() if how != first}, "calls": copy.deepcopy(vars(model)[CALLS]),
    }  # fmt: skip
    if model.get_output_embeddings() in layers.values():
        model.config.tie_word_embeddings = False  # it has a copy of its own


def put(model: Any, name: str, new: Any) -> None:
    """Put a module into a model, under a name."""
    parent, _, key = name.rpartition(".")
    _put(model.get_submodule(parent), key, new)


def _put(parent: Any, key: str, new: Any) -> None:
    parent._modules[key] = new
    if isinstance(parent, Merging) and key in parent.merges:
        for name in ("merged_weight", "merged_bias"):
            vars(parent)["_buffers"].pop(name, None)


def _is_shown(chosen: Mapping[str, Any], progress: bool | None) -> bool:
    """Whether to show how far quantizing is: where it takes its time, and somebody looks."""
    total = sum(layer.weight.numel() for layer, _ in chosen.values())
    return total >= LARGE and sys.stderr.isatty() if progress is None else progress

"""Checkpoints of transformers with quantized weights: `from_pretrained` gives the converted model back, bit for bit.

`convert(model, quantize=...)` writes the formats into the configuration that `save_pretrained` saves, and
`register_quantizer` makes them known to transformers, in the process that loads.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import FormatError
from ..formats.blocks import format_of
from ..quant.matrix import QuantizedMatrix
from .model.convert import convert
from .operator import Tensor
from .quant.convert import METHOD, put
from .quant.linear import QuantizedLinear

try:
    from transformers.quantizers import auto, base
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        'isogemm.torch.register_quantizer needs transformers: pip install "isogemm[hf]"', name="transformers"
    ) from error

__all__ = ["register_quantizer"]


def register_quantizer() -> None:
    """Make checkpoints with isogemm's quantized weights known to transformers, in this process.

    ``from_pretrained`` then builds the model, converts it (`isogemm.torch.convert`) and puts a `QuantizedLinear` over
    the saved bytes where one was saved.
    """
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, SavedFormats)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, Loader)


class SavedFormats(QuantizationConfigMixin):  # type: ignore[misc]
    """What a configuration says of quantized weights: the format of each module, how products are computed, and how the
    model was converted."""

    def __init__(
        self, formats: dict[str, str], activations: str | None = None, contract: str | None = None,
        others: dict[str, dict[str, str | None]] | None = None, calls: list[dict[str, Any]] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        self.quant_method = METHOD
        self.formats, self.activations, self.contract = dict(formats), activations, contract
        self.others, self.calls = dict(others or {}), list(calls or [{"contract": contract}])


class Stored(torch.nn.Module):  # type: ignore[misc]
    """Stands in the place of a Linear while a checkpoint is read: what is saved of a `QuantizedLinear`."""

    def __init__(self, layer: Any, fmt: str) -> None:
        super().__init__()
        self.layer, rows = [layer], (layer.out_features, format_of(fmt).row_bytes(layer.in_features))
        self.register_buffer("weight", torch.empty(rows, dtype=torch.uint8, device="meta"))
        self.register_buffer("format", torch.empty(len(fmt), dtype=torch.uint8, device="meta"))
        self.register_parameter("bias", layer.bias)

    def matrix(self, name: str, fmt: str) -> QuantizedMatrix:
        """The weight, over the bytes that were read."""
        found = bytes(self.format.tolist()).decode("ascii", "replace")
        if found != fmt:
            raise FormatError(f"{name}.format", limit=f"{fmt}, as in config.json", value=found, nearest=fmt)
        rows: Tensor = self.weight.cpu().contiguous()
        shape = self.layer[0].out_features, self.layer[0].in_features
        made = QuantizedMatrix.from_bytes(rows.numpy(), shape=shape, format=fmt, name=f"{name}.weight")
        return made if self.weight.device.type == "cpu" else made.to(self.weight.device)


class Loader(base.HfQuantizer):  # type: ignore[misc]
    """transformers' side of it: modules for what is in a checkpoint before it is read, and layers behind that."""

    def is_serializable(self) -> bool:
        """Whether the model can be saved again."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters beside the quantized weights can be trained."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for name, fmt in self.quantization_config.formats.items():
            put(model, name, Stored(model.get_submodule(name), fmt))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        known = self.quantization_config
        stored = {name: model.get_submodule(name) for name in known.formats}
        for name, child in stored.items():
            put(model, name, child.layer[0])  # blocks are known by their Linear modules
        for call in known.calls:
            convert(model, **call)
        for name, child in stored.items():
            matrix = child.matrix(name, known.formats[name])
            how = known.others.get(name, {"activations": known.activations, "contract": known.contract})
            made = QuantizedLinear(matrix, child.bias, **how)
            put(model, name, made.train(model.training))
        return model

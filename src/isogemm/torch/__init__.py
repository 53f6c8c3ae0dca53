"""isogemm in torch: products with gradients, operators for torch.compile, Linear modules, and routing.

Needs torch (``pip install 'isogemm[torch]'``), which ``import isogemm`` alone never loads.
"""

from __future__ import annotations

from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError('isogemm.torch needs torch: pip install "isogemm[torch]"', name="torch") from error

from . import functional, reductions
from .attention.calls import attention, scaled_dot_product_attention
from .attention.dropout import sequence_seeds
from .functional import addmm, baddbmm, bmm, grouped, grouped_linear, linear, mm
from .gemm.main_grad import collect_main_grad, main_grads, use_main_grad
from .model.convert import convert
from .model.layers import Embedding, LayerNorm, Linear, RMSNorm, SiLU
from .model.report import Conversion, LeftToTorch
from .model.restore import restore
from .model.verify import Verification, verify
from .quant.linear import QuantizedLinear
from .routing.coverage import Coverage, coverage
from .routing.scope import active, disable, enable, enabled, invariant

__all__ = [
    "Conversion",
    "Coverage",
    "Embedding",
    "LayerNorm",
    "LeftToTorch",
    "Linear",
    "QuantizedLinear",
    "RMSNorm",
    "SiLU",
    "Verification",
    "active",
    "addmm",
    "attention",
    "baddbmm",
    "bmm",
    "collect_main_grad",
    "convert",
    "coverage",
    "disable",
    "enable",
    "enabled",
    "functional",
    "grouped",
    "grouped_linear",
    "invariant",
    "linear",
    "main_grads",
    "mm",
    "reductions",
    "restore",
    "scaled_dot_product_attention",
    "sequence_seeds",
    "use_main_grad",
    "verify",
]


# Not in __all__: a star import would load transformers.
_LATE = {"TrainerCallback": ".training", "register_quantizer": ".checkpoint"}


def __getattr__(name: str) -> _Any:
    if name not in _LATE:
        raise AttributeError(f"module 'isogemm.torch' has no attribute {name!r}")
    from importlib import import_module

    try:
        found = getattr(import_module(_LATE[name], __name__), name)
    except ModuleNotFoundError as error:  # for hasattr, help and inspect, which take an AttributeError alone
        raise AttributeError(f"isogemm.torch.{name} cannot be imported: {error}") from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """What is public; the folders that it is made of are not."""
    return sorted((*__all__, *_LATE))

"""isogemm in torch: products with gradients, operators for torch.compile, Linear modules, and routing.

Needs torch (``pip install 'isogemm[torch]'``), which ``import isogemm`` alone never loads.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError('isogemm.torch needs torch: pip install "isogemm[torch]"', name="torch") from error

from . import batching as batching  # registers the rules for vmap
from . import functional, ops, reductions
from .attention_calls import attention, scaled_dot_product_attention
from .coverage import Coverage, coverage
from .functional import addmm, baddbmm, bmm, grouped, linear, mm
from .layers import Embedding, LayerNorm, Linear, RMSNorm, SiLU
from .main_grad import collect_main_grad, main_grads, use_main_grad
from .modules import Conversion, convert
from .quantized import QuantizedLinear
from .routing import active, disable, enable, enabled, invariant

__all__ = [
    "Conversion",
    "Coverage",
    "Embedding",
    "LayerNorm",
    "Linear",
    "QuantizedLinear",
    "RMSNorm",
    "SiLU",
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
    "invariant",
    "linear",
    "main_grads",
    "mm",
    "ops",
    "reductions",
    "scaled_dot_product_attention",
    "use_main_grad",
]

"""isogemm in torch: products with gradients, operators for torch.compile, and Linear modules.

Needs torch (``pip install 'isogemm[torch]'``), which ``import isogemm`` alone never loads.
"""

from __future__ import annotations

from . import batching as batching  # registers the rules for vmap
from . import functional, ops, reductions
from .functional import addmm, baddbmm, bmm, grouped, linear, mm
from .modules import Conversion, Linear, convert, use_main_grad

__all__ = [
    "Conversion",
    "Linear",
    "addmm",
    "baddbmm",
    "bmm",
    "convert",
    "functional",
    "grouped",
    "linear",
    "mm",
    "ops",
    "reductions",
    "use_main_grad",
]

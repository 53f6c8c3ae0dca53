"""isogemm in torch: products with gradients, operators for torch.compile, Linear modules, and routing.

Needs torch (``pip install 'isogemm[torch]'``), which ``import isogemm`` alone never loads.
"""

from __future__ import annotations

from . import batching as batching  # registers the rules for vmap
from . import functional, ops, reductions
from .coverage import Coverage, coverage
from .functional import addmm, baddbmm, bmm, grouped, linear, mm
from .modules import Conversion, Linear, convert, use_main_grad
from .routing import active, disable, enable, enabled, invariant

__all__ = [
    "Conversion",
    "Coverage",
    "Linear",
    "active",
    "addmm",
    "baddbmm",
    "bmm",
    "convert",
    "coverage",
    "disable",
    "enable",
    "enabled",
    "functional",
    "grouped",
    "invariant",
    "linear",
    "mm",
    "ops",
    "reductions",
    "use_main_grad",
]

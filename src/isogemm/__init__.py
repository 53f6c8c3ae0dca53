"""isogemm: matrix products with the same bits whatever the batch, tile, form, layout or schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .contract.spec import Contract
from .errors import (
    AliasError,
    ContractError,
    DeviceError,
    DTypeError,
    FormatError,
    IsogemmError,
    LayoutError,
    LimitError,
    OptionError,
    ShapeError,
)

if TYPE_CHECKING:
    from . import audit as audit
    from . import blas as blas
    from . import contract as contract
    from . import doctor as doctor
    from . import forms as forms
    from . import lab as lab
    from . import quant as quant
    from . import torch as torch
    from .api.packing import pack
    from .api.plan import plan
    from .api.products import gemm, gemm_batched, gemm_grouped, gemm_strided_batched, linear, matmul
    from .api.warm import Warmed, warm
    from .backends.cpu.gemm.packed import PackedWeight
    from .backends.cpu.gemm.plan import Plan
    from .backends.cpu.work import WorkPlan
    from .backends.cuda.pointers import PointerArray
    from .backends.metal import public as metal  # noqa: F401
    from .backends.webgpu import public as webgpu  # noqa: F401
    from .base.threads import get_num_threads, set_num_threads
    from .base.tuning import get_tuning, set_tuning
    from .lab import models as models
    from .quant.encode import quantize
    from .quant.matrix import QuantizedMatrix

__all__ = [
    "AliasError",
    "Contract",
    "ContractError",
    "DTypeError",
    "DeviceError",
    "FormatError",
    "IsogemmError",
    "LayoutError",
    "LimitError",
    "OptionError",
    "PackedWeight",
    "Plan",
    "PointerArray",
    "QuantizedMatrix",
    "ShapeError",
    "Warmed",
    "WorkPlan",
    "__version__",
    "gemm",
    "gemm_batched",
    "gemm_grouped",
    "gemm_strided_batched",
    "get_num_threads",
    "get_tuning",
    "linear",
    "matmul",
    "pack",
    "plan",
    "quantize",
    "set_num_threads",
    "set_tuning",
    "warm",
]

# Resolved on first use, so that importing the package loads neither Numba nor a backend.
_HOMES = {
    "gemm": ".api.products",
    "gemm_batched": ".api.products",
    "gemm_grouped": ".api.products",
    "gemm_strided_batched": ".api.products",
    "linear": ".api.products",
    "matmul": ".api.products",
    "PackedWeight": ".backends.cpu.gemm.packed",
    "pack": ".api.packing",
    "Plan": ".backends.cpu.gemm.plan",
    "WorkPlan": ".backends.cpu.work",
    "PointerArray": ".backends.cuda.pointers",
    "plan": ".api.plan",
    "QuantizedMatrix": ".quant.matrix",
    "quantize": ".quant.encode",
    "get_num_threads": ".base.threads",
    "set_num_threads": ".base.threads",
    "get_tuning": ".base.tuning",
    "set_tuning": ".base.tuning",
    "warm": ".api.warm",
    "Warmed": ".api.warm",
}
# Not in __all__: a star import would load them.
_MODULES = {name: f".{name}" for name in ("audit", "blas", "contract", "doctor", "forms", "lab", "quant", "torch")}
_TORCH = ("attention", "convert", "coverage", "disable", "enable", "invariant", "verify")  # looked for here at first
_MODULES["models"] = ".lab.models"
_MODULES |= {name: f".backends.{name}.public" for name in ("metal", "webgpu")}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        try:
            found = import_module(_MODULES[name], __name__)
        except ModuleNotFoundError as error:  # for hasattr, help and inspect, which take an AttributeError alone
            raise AttributeError(f"isogemm.{name} cannot be imported: {error}") from error
        globals()[name] = found
        return found
    if name not in _HOMES:
        there = f"; isogemm.torch.{name} is there" if name in _TORCH else ""
        raise AttributeError(f"module 'isogemm' has no attribute {name!r}{there}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))

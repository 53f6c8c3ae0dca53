"""The CPU backend: every supported contract on NumPy views."""

from .gemm.execute import gemm, gemm_batched, gemm_items
from .gemm.packed import PackedWeight, prepare

__all__ = ["PackedWeight", "gemm", "gemm_batched", "gemm_items", "prepare"]

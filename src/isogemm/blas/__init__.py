"""The BLAS view of the same calls: leading dimensions, offsets and strides on flat buffers."""

from __future__ import annotations

from .calls import gemm, gemm_batched, gemm_strided_batched
from .description import Call, Operand, describe

__all__ = ["Call", "Operand", "describe", "gemm", "gemm_batched", "gemm_strided_batched"]

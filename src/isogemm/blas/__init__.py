"""The BLAS view of the same calls: leading dimensions, offsets and strides on flat buffers."""

from __future__ import annotations

from .calls import Call, Operand, describe, gemm, gemm_batched, gemm_strided_batched

__all__ = ["Call", "Operand", "describe", "gemm", "gemm_batched", "gemm_strided_batched"]

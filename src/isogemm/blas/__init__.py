"""The BLAS view of the same calls: leading dimensions, offsets and strides on flat buffers, and names in libraries."""

from __future__ import annotations

from .calls import gemm, gemm_batched, gemm_strided_batched
from .description import Call, Operand, describe
from .kernels import KernelName, KernelProduct, parse_kernel
from .names import CALLS, LIBRARIES, CallNames, names_of
from .tensor_cores import Eligibility, tensor_cores

__all__ = [
    "CALLS",
    "LIBRARIES",
    "Call",
    "CallNames",
    "Eligibility",
    "KernelName",
    "KernelProduct",
    "Operand",
    "describe",
    "gemm",
    "gemm_batched",
    "gemm_strided_batched",
    "names_of",
    "parse_kernel",
    "tensor_cores",
]

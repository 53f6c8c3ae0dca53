"""cuBLAS's array of pointers, which torch does not call: `cublasSgemmBatched` through nvmath's bindings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def pointer_products(left: Any, right: Any, out: Any, *, tf32: bool) -> Callable[[int], Any] | None:
    """out[i] = left[i] @ right[i] for stacks of contiguous float32 matrices; None where nvmath is not installed.

    cuBLAS stores by columns, so it is asked for ``out.T = right.T @ left.T``. Pointers lie on the device beforehand.
    """
    if importlib.util.find_spec("nvmath") is None:
        return None
    import numpy as np
    import torch
    from nvmath.bindings import cublas

    handle = cublas.create()
    cublas.set_math_mode(handle, cublas.Math.TF32_TENSOR_OP_MATH if tf32 else cublas.Math.PEDANTIC_MATH)
    (batch, m, k), n = left.shape, right.shape[2]
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    lists = [torch.tensor([x.data_ptr() for x in stack], device=left.device) for stack in (left, right, out)]
    a, b, c = (pointers.data_ptr() for pointers in lists)
    kept = left, right, out, lists, one, zero

    def call(i: int) -> Any:
        cublas.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        cublas.sgemm_batched(
            handle, 0, 0, n, m, k, one.ctypes.data, b, n, a, k, zero.ctypes.data, c, n, batch
        )  # fmt: skip
        return kept[2]

    return call

"""The operators of isogemm's products (`torch.ops.isogemm.mm` and so on), and what stands behind them.

`isogemm.torch.gemm.products` defines them, `isogemm.torch.operator` says which calls need one.
"""

from __future__ import annotations

from .gemm.products import (
    addmm_op,
    baddbmm_op,
    bmm_op,
    grouped,
    grouped_op,
    linear,
    linear_forward_op,
    linear_op,
    mm_op,
    product,
    product_forward_op,
    resolved,
    walk,
    walk_op,
    with_order,
)
from .operator import (
    Reverse,
    Tensor,
    check_no_ddp,
    define_forward,
    forward_alone,
    is_direct,
    is_plain,
    refuse_ddp,
    refuse_forward_mode,
    refuse_meta,
)

__all__ = [
    "Reverse",
    "Tensor",
    "addmm_op",
    "baddbmm_op",
    "bmm_op",
    "check_no_ddp",
    "define_forward",
    "forward_alone",
    "grouped",
    "grouped_op",
    "is_direct",
    "is_plain",
    "linear",
    "linear_forward_op",
    "linear_op",
    "mm_op",
    "product",
    "product_forward_op",
    "refuse_ddp",
    "refuse_forward_mode",
    "refuse_meta",
    "resolved",
    "walk",
    "walk_op",
    "with_order",
]

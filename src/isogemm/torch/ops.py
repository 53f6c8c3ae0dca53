"""The operators of isogemm's products (`torch.ops.isogemm.mm` and so on), and what stands behind them.

`isogemm.torch.gemm.products` defines them, `isogemm.torch.operator` says which calls need one.
"""

from __future__ import annotations

from .gemm.products import *  # noqa: F403
from .operator import *  # noqa: F403

"""Whole attention, softmax(Q K^T / sqrt(d)) V for every head: from two strided batches, and by fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api.products import gemm_strided_batched
from ..base.dtypes import ITEMSIZE
from ..lab import Work
from ..operands.tensors import as_tensor, on_host
from .bits import apart, attended, unpromised
from .declare import StudyCase, Way, Ways
from .site import Site

WIDTH = 128
SAMPLE = 3  # queries of the first and the last head


def whole_case(key: str, facts: dict[str, Any], queries: int, tokens: int) -> StudyCase:
    """A row of attention over so many tokens; `facts` has ``heads`` and ``dtype``. Needs torch."""
    heads, itemsize = facts["heads"], ITEMSIZE[facts["dtype"]]
    work = Work(4 * heads * queries * tokens * WIDTH, itemsize * heads * WIDTH * (2 * queries + 2 * tokens))
    nbytes = 2 * work.nbytes + 6 * heads * queries * tokens * itemsize  # scores, scaled, and probabilities
    make = partial(_make, sizes=(heads, queries, tokens), dtype=facts["dtype"], work=work)
    return StudyCase(key, facts, nbytes, make, ("device", "wall"))


def _make(site: Site, seed: int, *, sizes: tuple[int, int, int], dtype: str, work: Work) -> Ways:
    import torch

    from ..torch import attention

    heads, queries, tokens = sizes
    shapes = (heads, queries, WIDTH), (heads, tokens, WIDTH), (heads, tokens, WIDTH)
    q, k, v = (as_tensor(site.normal(shape, dtype, seed + i)) for i, shape in enumerate(shapes))
    whole = q[None], k[None], v[None]
    fused = torch.nn.functional.scaled_dot_product_attention

    def two_batches(product: Callable[[Any, Any], Any]) -> Any:
        return product(torch.softmax(product(q, k.transpose(1, 2)) * WIDTH**-0.5, -1), v)

    calls: dict[str, Callable[[int], Any]] = {
        "fused isogemm": lambda i: attention(*whole)[0],
        "fused torch": lambda i: fused(*whole)[0],
        "two batches isogemm": lambda i: two_batches(gemm_strided_batched),
        "two batches torch": lambda i: two_batches(torch.bmm),
    }
    ways = {name: Way((call,), work, name.split()[-1]) for name, call in calls.items()}
    return Ways(ways, lambda: _judged(ways, (q, k, v)), {"operands": "not rotated"})


def _judged(ways: dict[str, Way], operands: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Each way's error against float64 on a sample, and in how many elements it differs from the first way.

    These are different orders of addition, so no bits are asked of them; ours fused is the same in any batch, and
    `isogemm audit` holds that.
    """
    exact, first, found = np.stack([_exact(operands, h) for h in (0, -1)]), None, {}
    for name, way in ways.items():
        got = way(0)
        first = got if first is None else first
        sample = np.stack([on_host(got[h][:SAMPLE]) for h in (0, -1)])
        found[name] = unpromised(got, first, exact.size, apart(sample, exact))
    return found


def _exact(operands: Sequence[Any], head: int) -> NDArray[np.float64]:
    q, k, v = (on_host(x[head]).astype(np.float64) for x in operands)
    return attended(q[:SAMPLE], k, v)

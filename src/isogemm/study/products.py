"""One linear layer's product by every library of a machine: what several studies measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..api.products import linear
from ..base.dtypes import ITEMSIZE
from ..lab import Work
from ..operands.tensors import as_tensor
from ..planner.tuning import Wanted
from .bits import judged, poisoned
from .declare import Step, StudyCase, Way, Ways
from .site import Site

Stacks = Sequence[tuple[Any, Any]]
# What studies of one type multiply on each device, and by which contract.
OPERANDS = {"cpu": "float32", "cuda": "bfloat16"}
DEFAULTS = {"cpu": "fma/chain", "cuda": "tensor_core:sm90/chain"}


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """x[m, k] @ w[n, k].T, weights rotated past the cache."""

    m: int
    n: int
    k: int
    dtype: str
    contract: str = ""  # empty for the device's default
    roofline: str = ""  # the ceiling's name; empty for the dtype's
    # settings that the other libraries are called under
    under: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def work(self) -> Work:
        """Least operations and bytes."""
        return Work.gemm(self.m, self.n, self.k, itemsize=ITEMSIZE[self.dtype])

    def case(self, site: Site, key: str, facts: Mapping[str, Any], clocks: tuple[str, ...] = ("device",)) -> StudyCase:
        """The product as a row of a study."""
        weight = ITEMSIZE[self.dtype] * self.n * self.k
        copies = site.copies(weight)
        shape = {"m": self.m, "n": self.n, "k": self.k, "dtype": self.dtype}
        own = {"roofline": self.roofline} if self.roofline else {}
        nbytes = self.work.nbytes + (copies + 1) * weight
        return StudyCase(key, {**shape, **own, **facts}, nbytes, partial(self._make, copies=copies), clocks)

    def _make(self, site: Site, seed: int, *, copies: int) -> Ways:
        x = site.normal((self.m, self.k), self.dtype, seed)
        first = site.normal((self.n, self.k), self.dtype, seed + 1)
        weights = site.alike(first, copies)
        out = site.empty((self.m, self.n), self.dtype)
        contract = self.contract or ("fma/chain" if self.dtype == "float32" else DEFAULTS[site.device])
        site.settle(Wanted("", self.n, self.k), m=self.m, dtype=self.dtype, contract=contract)
        calls: dict[str, Step] = {"isogemm": lambda i: linear(x, weights[i % copies], out=out, contract=contract)}
        if site.torch:
            calls["torch"] = torch_product(x, weights, out)
        if site.device == "cpu" and self.dtype == "float32":
            calls["numpy"] = lambda i: np.matmul(x, weights[i % copies].T, out=out)
        ways = {name: Way((step,), self.work, name, copies=copies) for name, step in calls.items()}
        results = {name: partial(poisoned, way, out[None]) for name, way in ways.items()}
        rotated = {"operands": f"weights rotated over {copies} copies", "contract": contract}
        return Ways(ways, lambda: judged(ways, results, [(x, first.T)], contract), rotated, self.under)


def stacks_of(site: Site, seed: int, sizes: tuple[int, int, int, int], dtype: str, layout: str, copies: int) -> Stacks:
    """Left and right of (items, m, n, k), so many times; with NT the right ones are stored [n, k]."""
    (items, m, n, k), found = sizes, []
    for i in range(copies):
        left = site.normal((items, m, k), dtype, seed + 2 * i)
        right = site.normal((items, n, k) if layout == "NT" else (items, k, n), dtype, seed + 2 * i + 1)
        found.append((left, right.swapaxes(1, 2) if layout == "NT" else right))
    return found


def torch_product(x: Any, weights: Sequence[Any], out: Any) -> Step:
    """torch's x @ w.T with each of the weights in turn."""
    import torch

    left, columns, target, count = as_tensor(x), [as_tensor(w).T for w in weights], as_tensor(out), len(weights)
    return lambda i: torch.mm(left, columns[i % count], out=target)


def torch_batch(pairs: Stacks, out: Any) -> Step:
    """torch's strided batch of each of the pairs of stacks in turn."""
    import torch

    stacks, target = [(as_tensor(a), as_tensor(b)) for a, b in pairs], as_tensor(out)
    return lambda i: torch.bmm(*stacks[i % len(stacks)], out=target)

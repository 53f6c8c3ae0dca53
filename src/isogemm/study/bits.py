"""What results are: bits against the contract on a sample and against each other everywhere, error against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import compare, reference
from ..operands.tensors import on_host, words
from .declare import Way

Array = NDArray[Any]
Item = tuple[Any, Any]
AT_ONCE = 1 << 26  # elements that are compared at once: more would take memory that results fill
ROWS, COLUMNS = 3, 32  # of each product in the sample, both ends among them


def differing(x: Any, y: Any) -> int:
    """Elements of two results of one shape and dtype whose bits differ, counted where the results lie."""
    if isinstance(x, np.ndarray):
        return compare.differing(x, y)
    import torch

    x, y = words(x), words(y)
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    step = max(1, AT_ONCE * len(x) // max(1, x.numel()))
    for i in range(0, len(x), step):
        count += (x[i : i + step] != y[i : i + step]).sum()
    return int(count)


def apart(got: Array, exact: Array) -> float | None:
    """Relative error, in Frobenius' norm; None where a result has NaN or infinities, which are no error's size."""
    error = float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))
    return error if math.isfinite(error) else None


def attended(q: Array, k: Array, v: Array) -> Array:
    """softmax(q k^T / sqrt(d)) v of arrays [..., tokens, d], in their own type."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ v)


def unpromised(got: Any, first: Any, checked: int, error: float | None) -> dict[str, Any]:
    """A result of which no bits are asked, as `judged` has others."""
    return {
        "contract": None, "checked": checked, "differing": None, "from_first": differing(got, first),
        "outputs": got.numel(), "error": error,
    }  # fmt: skip


def poisoned(way: Way, out: Any) -> Any:
    """What a way writes to `out`, which is filled with NaN before."""
    out[:] = float("nan")
    way(0)
    return out


def judged(
    ways: Mapping[str, Way], results: Mapping[str, Callable[[], Any]], items: Sequence[Item], contract: str
) -> dict[str, dict[str, Any]]:
    """Each way's result beside the contract, the first way's, and float64.

    Parameters
    ----------
    ways : mapping of str to Way
    results : mapping of str to callable
        Each runs its way and gives all products, [items, m, n].
    items : sequence of (a, b)
        The operands of each product.
    contract : str
        What ways of isogemm have to be.

    Returns
    -------
    dict of str to dict
        ``contract``, ``checked`` and ``differing`` (elements of the sample; None for other libraries),
        ``from_first`` (elements with other bits than the first way's), ``from_own`` (than those of the first way of
        the same library), ``outputs``, ``error`` (relative, of the sample, in Frobenius' norm).
    """
    picked = sorted({0, len(items) - 1})
    samples = [_Sample(*items[i], contract) for i in picked]
    first = own = None  # of one library at a time: results may fill the memory
    library, found = "", {}
    for name, way in ways.items():
        got = results[name]()
        if way.library != library:
            own = None  # before the next takes as much
            library, own = way.library, got.copy() if isinstance(got, np.ndarray) else got.clone()
        first = own if first is None else first
        ours = way.library == "isogemm"
        parts = [sample.of(got[i]) for sample, i in zip(samples, picked, strict=True)]
        found[name] = {
            "contract": contract if ours else None,
            "checked": sum(x.size for x in parts),
            "differing": sum(map(_Sample.differing, samples, parts)) if ours else None,
            "from_first": differing(got, first),
            "from_own": differing(got, own),
            "outputs": int(np.prod(got.shape)),
            "error": apart(np.concatenate(parts, axis=None), np.concatenate([x.exact for x in samples], axis=None)),
        }
    return found


class _Sample:
    """Some rows and columns of one product, by the contract and in float64."""

    def __init__(self, a: Any, b: Any, contract: str) -> None:
        self.rows = np.unique(np.linspace(0, a.shape[0] - 1, ROWS).astype(int)).tolist()
        self.columns = np.unique(np.linspace(0, b.shape[1] - 1, COLUMNS).astype(int)).tolist()
        left, right = on_host(a[self.rows]), on_host(b[:, self.columns])
        self.exact: Array = left.astype(np.float64) @ right.astype(np.float64)
        self._accumulators = reference.evaluate(left, right, contract)

    def of(self, result: Any) -> Array:
        return on_host(result[self.rows][:, self.columns])

    def differing(self, got: Array) -> int:
        return compare.differing(got, reference.epilogue(self._accumulators, out_dtype=got.dtype))

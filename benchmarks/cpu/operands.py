"""Operands of a case, and the calls of isogemm and its peers on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import isogemm
from isogemm.base.dtypes import NUMPY
from isogemm.lab import Candidate, Run, rotate
from isogemm.operands.tensors import as_tensor

from ..common import compare_bits
from .cases import Case

__all__ = ["PEERS", "Setup", "build", "compare", "have_torch"]

Array = NDArray[Any]
PEERS = ("numpy", "torch")
SAMPLED_ROWS, SAMPLED_COLUMNS = 8, 64


@dataclass(frozen=True, slots=True)
class Setup:
    """A case made ready.

    Attributes
    ----------
    ours : Candidate
    peers : tuple of Candidate
    result : callable or None
        Makes one call of ours on the first operands: a, b and the result, as stacks [batch, ., .].
    operands : str
        Where the operands lie.
    """

    ours: Candidate
    peers: tuple[Candidate, ...]
    result: Callable[[], tuple[Array, Array, Array]] | None
    operands: str


def have_torch() -> bool:
    """Whether torch can be imported; it is only looked for."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def build(case: Case, peers: Sequence[str], seed: int) -> Setup:
    """Make operands and candidates of a case."""
    rng = np.random.default_rng(seed)
    if case.form in ("linear", "packed"):
        return _linear(case, peers, rng)
    if case.form == "reference":
        return _reference(case, rng)
    return _matmul(case, peers, rng)


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, transposed: bool = False) -> Array:
    stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    values: Array = rng.standard_normal(stored, np.float32).astype(NUMPY[dtype])
    return values.swapaxes(-1, -2) if transposed else values


def _matmul(case: Case, peers: Sequence[str], rng: np.random.Generator) -> Setup:
    stack = (case.batch,) if case.batch > 1 else ()
    a = _values(rng, (*stack, case.m, case.k), case.dtype, case.layout[0] == "T")
    b = _values(rng, (*stack, case.k, case.n), case.dtype, case.layout[1] == "T")
    outs = {name: np.empty((*stack, case.m, case.n), a.dtype) for name in ("isogemm", *peers)}
    calls: dict[str, Run] = {"isogemm": _matmul_call(isogemm.matmul, a, b, outs["isogemm"], case.form)}
    if "numpy" in peers:
        calls["numpy"] = _matmul_call(np.matmul, a, b, outs["numpy"], case.form)
    if "torch" in peers:
        import torch

        calls["torch"] = _matmul_call(torch.matmul, as_tensor(a), as_tensor(b), as_tensor(outs["torch"]), case.form)

    def result() -> tuple[Array, Array, Array]:
        outs["isogemm"].fill(np.nan)
        got = calls["isogemm"](0)
        return tuple(np.asarray(x).reshape(case.batch, *x.shape[-2:]) for x in (a, b, got))

    return _setup(calls, result, "in cache")


def _matmul_call(function: Any, a: Any, b: Any, out: Any, form: str) -> Run:
    if form == "call":
        return lambda i: function(a, b)
    return lambda i: function(a, b, out=out)


def _linear(case: Case, peers: Sequence[str], rng: np.random.Generator) -> Setup:
    x, w = _values(rng, (case.m, case.k), case.dtype), _values(rng, (case.n, case.k), case.dtype)
    first = [w]
    weights = rotate(lambda: first.pop() if first else w.copy(), w.nbytes) if case.rotated else first
    count = len(weights)
    ours: Sequence[Any] = [isogemm.pack(v) for v in weights] if case.form == "packed" else weights
    calls: dict[str, Run] = {"isogemm": lambda i: isogemm.linear(x, ours[i % count])}
    if "numpy" in peers and case.dtype == "float32":  # NumPy has no product of bfloat16 worth the name
        out, views = np.empty((case.m, case.n), x.dtype), [v.T for v in weights]
        calls["numpy"] = lambda i: np.matmul(x, views[i % count], out=out)
    if "torch" in peers:
        import torch

        tx, tensors, linear = as_tensor(x), [as_tensor(v) for v in weights], torch.nn.functional.linear
        calls["torch"] = lambda i: linear(tx, tensors[i % count])

    def result() -> tuple[Array, Array, Array]:
        return x[None], w.T[None], np.asarray(calls["isogemm"](0))[None]

    return _setup(calls, result, f"weights rotated over {count} copies" if count > 1 else "in cache")


def _reference(case: Case, rng: np.random.Generator) -> Setup:
    from isogemm.contract import reference

    a, b = _values(rng, (case.m, case.k), case.dtype), _values(rng, (case.k, case.n), case.dtype)
    contract = isogemm.Contract.parse(case.label)
    calls: dict[str, Run] = {"isogemm": lambda i: reference.evaluate(a, b, contract, threads=isogemm.get_num_threads())}
    return _setup(calls, None, "in cache")


def _setup(calls: dict[str, Run], result: Callable[[], tuple[Array, Array, Array]] | None, operands: str) -> Setup:
    candidates = {name: Candidate(name, run) for name, run in calls.items()}
    ours = candidates.pop("isogemm")
    return Setup(ours, tuple(candidates.values()), result, operands)


def compare(a: Array, b: Array, got: Array, rng: np.random.Generator) -> dict[str, Any]:
    """Sampled rows and columns of a stack of products, by `compare_bits` with the default contract's definition.

    An element depends on its row of `a` and its column of `b` alone, so the sampled ones are exact.
    """
    from isogemm.contract import reference

    contract = "fma/chain"
    rows, columns = _sample(got.shape[1], SAMPLED_ROWS, rng), _sample(got.shape[2], SAMPLED_COLUMNS, rng)
    items = _sample(got.shape[0], 4, rng)
    sums = np.stack([reference.evaluate(a[item][rows], b[item][:, columns], contract) for item in items])
    return compare_bits(contract, got[np.ix_(items, rows, columns)], reference.epilogue(sums, out_dtype=got.dtype))


def _sample(size: int, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Ends and random places between, ascending: tails are where kernels go wrong."""
    if size <= count:
        return np.arange(size)
    between = np.sort(rng.choice(size - 2, count - 2, replace=False)) + 1
    return np.concatenate([[0], between, [size - 1]])

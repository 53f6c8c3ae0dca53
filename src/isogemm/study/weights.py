"""One linear's weights in a format of floats or of quantized blocks, and what its products have to be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api.packing import pack
from ..base.dtypes import NUMPY
from ..contract import compare, int32, reference
from ..formats.blocks import format_of
from ..formats.reference import decode
from ..operands.tensors import on_host
from ..quant.encode import quantize
from ..quant.matrix import QuantizedMatrix
from .bits import apart
from .site import Site

FLOATS = {"F32": "float32", "F16": "float16"}
PATTERN = 64  # rows that are drawn and encoded; a weight repeats them, since encoding millions of blocks takes minutes
SAMPLE = 16  # columns of a result that are held against the contract

Array = NDArray[Any]
Weight = Array | QuantizedMatrix


def format_bytes(kind: str, n: int, k: int) -> int:
    """Bytes of a weight [n, k]."""
    return n * format_of(kind).row_bytes(k)


def make_weight(kind: str, n: int, k: int, seed: int) -> Weight:
    """A weight [n, k] in memory of its own, on the host."""
    few = _pattern(kind, min(n, PATTERN), k, seed)
    rows = np.tile(few, (-(-n // len(few)), 1))[:n]
    return rows if kind in FLOATS else QuantizedMatrix.from_bytes(rows, shape=(n, k), format=kind)


@lru_cache(8)  # the sizes of a model's layer: a step has hundreds of weights of four sizes
def _pattern(kind: str, n: int, k: int, seed: int) -> Array:
    """The rows that a weight repeats: numbers, or bytes of blocks."""
    few = np.random.default_rng(seed).standard_normal((n, k), np.float32)
    return few.astype(NUMPY[FLOATS[kind]]) if kind in FLOATS else quantize(few, kind).rows


def ready(site: Site, weight: Weight) -> Any:
    """The weight where and as isogemm multiplies it fastest."""
    if isinstance(weight, QuantizedMatrix):
        if site.device == "cuda":
            return weight.to("cuda")
        weight.panels()
        return weight
    if site.device == "cuda":
        import torch

        return torch.from_numpy(weight).cuda()
    return pack(weight)


def resident_bytes(kind: str, n: int, k: int) -> int:
    """Bytes that a weight takes with the copy that is laid out for the kernels."""
    return 2 * format_bytes(kind, n, k)


def contract_of(site: Site, kind: str) -> str:
    """What products with weights of that format have to be: float32 activations on a CPU, float16 on a GPU."""
    if site.device == "cuda":
        return "tensor_core:sm90/chain"
    return "fma/chain" if kind in FLOATS else "int32/chain"


def checked(weight: Weight, x: Any, results: Sequence[Any], contract: str) -> list[dict[str, Any]]:
    """Each result of ``x @ weight.T`` held against its contract, the first one and float64.

    Each has what `isogemm.study.bits.judged` gives for a way.
    """
    host = on_host(x)
    rows = [0, len(host) - 1] if len(host) > 1 else [0]
    some = weight[:SAMPLE]
    floats = some.dequantize() if isinstance(some, QuantizedMatrix) else np.asarray(some, np.float32)
    exact = host[rows].astype(np.float64) @ floats.T.astype(np.float64)
    if contract.startswith("int32"):
        assert isinstance(some, QuantizedMatrix)
        accumulators = int32.evaluate(host[rows], decode(some.rows, some.format), contract)
    else:
        left = host[rows]
        accumulators = reference.evaluate(left, floats.astype(left.dtype).T, contract)
    found, first = [], on_host(results[0])
    for result in map(on_host, results):
        got = np.ascontiguousarray(result[rows][:, :SAMPLE])
        wanted = reference.epilogue(accumulators, out_dtype=got.dtype)
        found.append(
            {
                "contract": contract,
                "checked": got.size,
                "differing": compare.differing(got, wanted),
                "from_first": compare.differing(result, first),
                "outputs": result.size,
                "error": apart(got, exact),
            }
        )
    return found

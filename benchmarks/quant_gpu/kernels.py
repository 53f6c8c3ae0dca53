"""Which kernel of ours runs with a quantized weight: what one call chooses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from isogemm.lab.gpu.bench import worker_processes

from .cases import Case
from .operands import ALONE, LEAST

__all__ = ["kernel_of", "prepare"]

PLAIN = "dequantized weights, plain product"


def kernel_of(call: Callable[[int], Any]) -> str:
    """Kernels and configurations; where no kernel was chosen, the weights were dequantized for a plain product.

    Whatever goes wrong becomes words: times and bits do not depend on a name.
    """
    try:
        return _watched(call)
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _watched(call: Callable[[int], Any]) -> str:
    from isogemm.backends.cuda.quant import family
    from isogemm.base import seen

    module: Any = family
    true, found = module.choose, list[str]()

    def watched(case: Any, *rest: Any) -> Any:
        chosen = true(case, *rest)
        found.append(PLAIN if chosen is None else _words(case, chosen))
        return chosen

    seen.forget()  # a call that was seen before does not choose again
    module.choose = watched
    try:
        call(0)
    finally:
        module.choose = true
    return "; ".join(dict.fromkeys(found)) or PLAIN


def _words(case: Any, chosen: Any) -> str:
    return f"{case.path} {chosen.kernel.name.removeprefix('quant ')} [{chosen.config}]"


def prepare(chosen: Sequence[Case], *, seconds: float) -> None:
    """Compile and try, side by side, what will be chosen for drawn products; the disk brings it to this process."""
    asked = dict.fromkeys((c.format, m, c.n, c.k) for c in chosen for m in (c.m, ALONE if c.m >= LEAST else LEAST))
    count = max(1, min(15, (os.cpu_count() or 2) - 1))
    with worker_processes(count) as pool:
        wait([pool.submit(_choose, *case) for case in sorted(asked, key=lambda case: case[1])], timeout=seconds)


def _choose(format: str, m: int, n: int, k: int) -> None:
    """Whatever a first call with such operands does, but for the calls; errors show when it is made."""
    from isogemm.backends.cuda.gemm import execute
    from isogemm.backends.cuda.quant import family
    from isogemm.backends.cuda.quant.case import QuantCase
    from isogemm.contract.spec import Contract
    from isogemm.problem.product import Product, Strides

    logging.getLogger("isogemm").setLevel(logging.CRITICAL)
    types, contract = ("bfloat16", "bfloat16"), Contract.parse("tensor_core:sm90/chain")
    for path, arithmetic in (("same", contract.arithmetic), ("q8", "int32")):
        family.choose(QuantCase(path, format, *types, None, m, n, k, arithmetic), None, 0)
    sides = Strides(k, 1), Strides(1, k), Strides(n, 1)
    execute.choose(Product(m, n, k, *types, "bfloat16", contract, *sides), 0)

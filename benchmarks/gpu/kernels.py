"""Which kernel a call of ours really runs: the products that reach the planner, and what it chooses for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["kernel_of"]


def kernel_of(call: Callable[[int], Any]) -> str | None:
    """``family [configuration], reason`` of the products that one call launches; None where no planner was asked."""
    from isogemm.backends.cuda.gemm import execute
    from isogemm.base import seen

    true, products = execute.choose, list[Any]()

    def watched(product: Any, device: int) -> Any:
        products.append((product, device))
        return true(product, device)

    seen.forget()  # a call that was seen before does not ask again
    execute.choose = watched
    try:
        call(0)
    finally:
        execute.choose = true
    return "; ".join(dict.fromkeys(_words(product, device) for product, device in products)) or None


def _words(product: Any, device: int) -> str:
    from isogemm.backends.cuda.gemm.choose import chooser

    choice = chooser(device).choose(product)
    return f"{choice.family} [{choice.config}], {choice.reason}"

"""Which kernel of ours really runs with a quantized weight: what is chosen and launched in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["kernel_of"]


def kernel_of(call: Callable[[int], Any]) -> str:
    """Names and configurations; where no kernel was chosen, the weights were dequantized for a plain product."""
    from isogemm.backends.cuda import quant, quant_choose

    true, found = quant_choose._launch, list[str]()

    def watched(kernel: Any, packed: Any) -> Any:
        found.append(f"{kernel.name} [{kernel.config}]")
        return true(kernel, packed)

    quant.forget()  # a call that was seen before does not choose again
    quant_choose._launch = watched
    try:
        call(0)
    finally:
        quant_choose._launch = true
    return "; ".join(dict.fromkeys(found)) or "dequantized weights, plain product"

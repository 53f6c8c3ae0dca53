"""Which kernel of ours runs with a quantized weight: what one call chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["kernel_of"]

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

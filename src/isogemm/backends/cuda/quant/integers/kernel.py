"""Quantized activations times quantized weights on the device: ``int32/chain``, with the CPU's bits.

Two kernels: one makes codes of x (`activations`), then `few`, `many` or `wide` multiplies them. No configuration
reaches the bits: integers are exact, and the chain over blocks is walked by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ...driver.workspace import workspace
from ...gemm.model import H200, Gpu
from ..case import QuantCase
from ..kernel import Launch, QuantKernel
from ..layout import PackedLayout, layout
from . import activations, few, many, wide
from .few import FewCodes
from .many import ManyCodes
from .wide import WideCodes

FEW = 32  # rows of x for quant/integers/few.cu, where codes of so many fit into shared memory
EACH, PARTS = (8, 16, 24, 32), 16  # rows of x of a part, and parts


Chosen = FewCodes | ManyCodes | WideCodes


@lru_cache(maxsize=4096)
def config(lay: PackedLayout, m: int, n: int, k: int, gpu: Gpu = H200) -> Chosen:
    """The configuration that is likely the fastest."""
    alone = few.usual(lay, m, n, k, gpu.multiprocessors) if m <= FEW else None
    if alone and (m <= 8 or k == 0):
        return alone
    found: list[tuple[float, Chosen]] = [*wide.options(lay, m, n, k, gpu)]
    found = found or [*many.options(lay, m, n, k, gpu)]
    several = (parts(lay, m, each, n, k, gpu) for each in EACH if each < m <= PARTS * each)
    found += [(few.microseconds(lay, c, m, n, k, gpu), c) for c in (alone, *several) if c]
    return min(found, key=lambda pair: pair[0])[1]


def parts(lay: PackedLayout, m: int, each: int, n: int, k: int, gpu: Gpu = H200) -> FewCodes | None:
    """Blocks side by side, each with so many of the rows of x; None where their codes do not fit."""
    found = few.usual(lay, each, n, k, max(1, gpu.multiprocessors // -(-m // each)))
    return found._replace(each=each) if found and found.x == "staged" else None


class QuantIntegers(QuantKernel):
    """x of any type and strides. Its bits: `isogemm.contract.int32.evaluate`.

    Each result is a function of one row of x, one row of W, the format and the bias.
    """

    name, path = "quant int", "q8"

    def configure(self, case: QuantCase, multiprocessors: int) -> Chosen:
        return config(layout(case.format), case.m, case.n, case.k, H200._replace(multiprocessors=multiprocessors))

    def tile(self, config: Chosen) -> int:
        return 8 * (config.tiles if isinstance(config, FewCodes) else config.tiles_x)

    def counted(self, config: Chosen) -> int:
        return 0 if isinstance(config, FewCodes) and config.each else super().counted(config)

    def build(self, case: QuantCase, config: Chosen, device: int) -> Launch:
        lay = layout(case.format)
        product: Callable[..., None] = config.bind(case, device)
        form = config.form(lay)
        if not form:

            def alone(stream: int, x: int, w: int, out: int, bias: int) -> None:
                product(stream, w, x, out, bias)

            return alone
        each = config.each if isinstance(config, FewCodes) else 0
        codes = activations.bind(case, form, device, each)
        places = activations.places(lay, each or case.m, case.k, form)
        nbytes = places.nbytes * (-(-case.m // each) if each else 1)

        def launch(stream: int, x: int, w: int, out: int, bias: int) -> None:
            room = workspace(nbytes, device)
            at = places.at(room.data_ptr())
            codes(stream, x, *at)
            product(stream, w, *at, out, bias)

        return launch


KERNEL = QuantIntegers()

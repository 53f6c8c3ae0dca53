"""Quantized activations times quantized weights on the device: ``int32/chain``, with the CPU's bits.

Two kernels: one makes codes of x (`activations`), then `few`, `many` or `wide` multiplies them. No configuration
reaches the bits: integers are exact, and the chain over blocks is walked by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .....base.dtypes import ITEMSIZE
from .....problem.product import alignment
from ...driver.workspace import workspace
from ..case import QuantCase
from ..kernel import Launch, QuantKernel
from ..layout import ROWS, PackedLayout, layout
from . import activations, few, many, wide
from .few import MULTIPROCESSORS, FewCodes
from .many import ManyCodes
from .wide import WideCodes

__all__ = ["KERNEL", "Parts", "config"]

FEW = 32  # rows of x for quant/integers/few.cu, where codes of so many fit into shared memory


class Parts(NamedTuple):
    """Rows of x in several launches.

    Attributes
    ----------
    each : int
        Rows of a part.
    few : FewCodes
        Of such a part.
    """

    each: int
    few: FewCodes

    def of(self, rows: int) -> FewCodes:
        """For a part of so many rows, the last one of which may have fewer."""
        tiles = -(-rows // 8)
        return self.few._replace(tiles=tiles, split=0 if tiles % 2 else self.few.split)


Chosen = FewCodes | ManyCodes | WideCodes | Parts


def config(lay: PackedLayout, m: int, n: int, k: int) -> Chosen:
    """The configuration for a product."""
    if m <= FEW and (alone := few.usual(lay, m, n, k)):
        return alone
    # Timed on an H200 in Q4_K, Q6_K and Q8_0: reading W again costs less than tiles of 64 rows of x where a
    # multiprocessor has one or two of W, and, up to 64 rows, less than the tiles of `ManyCodes`.
    narrow = lay.format.name in wide.NONE
    if (m <= FEW and -(-n // ROWS) <= 2 * MULTIPROCESSORS) or (m <= 2 * FEW and narrow):
        for rows in (FEW, FEW // 2):
            if rows < m and (part := few.usual(lay, rows, n, k)):
                return Parts(rows, part)
    return wide.config(lay, m, n, k, MULTIPROCESSORS) or many.usual(lay, m)


class QuantIntegers(QuantKernel):
    """x of any type and strides. Its bits: `isogemm.contract.int32.evaluate`.

    Each result is a function of one row of x, one row of W, the format and the bias.
    """

    name, path = "quant int", "q8"

    def configure(self, case: QuantCase, multiprocessors: int) -> Chosen:
        return config(layout(case.format), case.m, case.n, case.k)

    def tile(self, config: Chosen) -> int:
        one = config.few if isinstance(config, Parts) else config
        return 8 * (one.tiles if isinstance(one, FewCodes) else one.tiles_x)

    def counted(self, config: Chosen) -> int:
        return 2**31 if isinstance(config, Parts) else super().counted(config)

    def build(self, case: QuantCase, config: Chosen | None, device: int) -> Launch:
        lay = layout(case.format)
        chosen = config or self.configure(case, MULTIPROCESSORS)
        if isinstance(chosen, Parts):
            return self._several(case, chosen, device)
        product: Callable[..., None] = chosen.bind(case, device)
        form = chosen.form(lay)
        if not form:

            def alone(stream: int, x: int, w: int, out: int, bias: int) -> None:
                product(stream, w, x, out, bias)

            return alone
        codes, places = activations.bind(case, form, device), activations.places(lay, case.m, case.k, form)

        def launch(stream: int, x: int, w: int, out: int, bias: int) -> None:
            room = workspace(places.nbytes, device)
            at = places.at(room.data_ptr())
            codes(stream, x, *at)
            product(stream, w, *at, out, bias)

        return launch

    def _several(self, case: QuantCase, parts: Parts, device: int) -> Launch:
        """Launches of parts of x, with the bytes to their rows of x and of the result."""
        found = []
        for first in range(0, case.m, parts.each):
            rows, at = min(parts.each, case.m - first), first * case.x[0] * ITEMSIZE[case.dtype]
            part = replace(case, m=rows, x_align=alignment(at, most=case.x_align))
            each = self.build(part, parts.of(rows), device)
            found.append((each, at, first * case.out[0] * ITEMSIZE[case.dtype_out]))

        def launch(stream: int, x: int, w: int, out: int, bias: int) -> None:
            for each, x_at, out_at in found:
                each(stream, x + x_at, w, out + out_at, bias)

        return launch


KERNEL = QuantIntegers()

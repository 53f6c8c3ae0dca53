"""A few configurations for all products: built in the background, so that a new product finds a kernel that is ready.

Chosen by the model for an H200: of 612 drawn products (`benchmarks.draw`, 16 bits, NT) each takes the configuration
that is least in the sum of logarithms. The first 6 of them have one that the model expects within 1.15 of the best in
78 % of the products, all 16 in 94 %, at 1.038 of the best in the geometric mean.
"""

from __future__ import annotations

__all__ = ["PALETTE"]

PALETTE = (
    "64x80x64 s12",
    "128x192x64 s5 c1x2 pp",
    "w64x8x128 s12 e",
    "w64x24x128 s10 e",
    "64x192x64 s7",
    "128x256x64 s4 c2x1",
    "128x160x64 s6 c1x2",
    "64x128x64 s9",
    "192x192x64 s4 c1x2",
    "64x48x64 s16",
    "w192x8x64 s9 e",
    "128x208x64 s5 c1x2",
    "64x256x64 s5 c2x1",
    "w64x16x128 s11 e",
    "64x8x256 s6 e",
    "256x176x64 s4 c1x2",
)

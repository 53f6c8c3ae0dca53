"""How kernels of this folder are compiled, and the map by which a copy engine finds packed weights."""

from __future__ import annotations

from ..driver.kernel import Kernel
from ..driver.nvrtc import function_of
from ..driver.tensormap import Encoder, encoder
from .layout import ROWS, PackedLayout

__all__ = ["compiled", "tiles_map"]


def compiled(file: str, name: str, device: int, text: str = "", /, **defines: object) -> Kernel:
    """Compile and load a kernel of a file of this folder, behind some text."""
    return function_of(f"quant/{file}", name, device, defines, before=text)


def tiles_map(lay: PackedLayout, rows: int, k: int, block_rows: int, nbytes: int) -> Encoder:
    """The map of W: tiles of 16 rows, each a run of bytes, of which the rows of a block take `nbytes` at a time."""
    tiles, words = lay.tiles(rows), lay.tile_bytes(k) // 8
    return encoder(
        "float64", sizes=(1, tiles, words), strides=(tiles * words, words, 1), box=(1, block_rows // ROWS, nbytes // 8),
        swizzle=0, promotion=256,
    )  # fmt: skip

"""How kernels of this folder are compiled, and the map by which a copy engine finds packed weights."""

from __future__ import annotations

from ..driver import facts, nvrtc
from ..driver import kernel as launcher
from ..driver.tensormap import Encoder, encoder
from .layout import ROWS, PackedLayout

__all__ = ["compiled", "tiles_map"]


def compiled(file: str, name: str, device: int, text: str = "", /, **defines: object) -> launcher.Kernel:
    """Compile and load a kernel of a file of this folder, behind some text."""
    macros = (f"-D{key}={int(v) if isinstance(v, bool) else v}" for key, v in defines.items())
    cubin = nvrtc.compile_text(
        f'{text}#include "quant/{file}"\n', name=file, arch=facts.device(device).arch, options=("-std=c++17", *macros)
    )
    return launcher.load(cubin, name, device)


def tiles_map(lay: PackedLayout, rows: int, k: int, block_rows: int, nbytes: int) -> Encoder:
    """The map of W: tiles of 16 rows, each a run of bytes, of which the rows of a block take `nbytes` at a time."""
    tiles, words = lay.tiles(rows), lay.tile_bytes(k) // 8
    return encoder(
        "float64", sizes=(1, tiles, words), strides=(tiles * words, words, 1), box=(1, block_rows // ROWS, nbytes // 8),
        swizzle=0, promotion=256,
    )  # fmt: skip

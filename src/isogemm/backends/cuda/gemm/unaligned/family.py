"""Products of few rows with weights whose lines the copy engine cannot step along: they are read once, as they lie.

A copy of the weights (gemm/padded) is as many bytes written and read again, and few rows take no longer than the
weights do to come. Here the words of 16 bytes that hold a line's piece are brought as they lie, and the first operand
of `wgmma` goes through registers, shifted into place (unaligned.cu). The rows of A are copied where no tensor map reads
them: they are few. Figures are in docs/design/0015-operands-out-of-step.md.

A configuration is ``128x16x256 c2``: columns of B that a tile has at most, rows of A, K of a stage, and blocks of a
cluster, which share the rows of A. Tiles have no more columns of B than divide them evenly among waves, and there are
as many stages as there is room for. With 32 columns each warp has 8 of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, Strides
from ...driver import facts
from ...driver.kernel import Bound, ints, longs
from ...driver.nvrtc import function_of
from ...driver.wgmma import mma
from ...driver.workspace import workspace
from ..hopper.config import OPERANDS, turned
from ..hopper.family import encoder_of, epilogue_defines
from ..model import Gpu, gpu_of
from ..padded.family import bind_copies
from .config import UnalignedConfig, UnalignedCut, cut, readable
from .model import PALETTE, expected, ranked


class Unaligned(ProductFamily):
    """The family; see the text of this module."""

    name, home = "unaligned", "backends/cuda/gemm/unaligned"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Configurations worth timing, the fastest by a model of an H200 first."""
        return tuple(str(c) for c in ranked(product)[:8])

    def supports(self, product: Product, config: str) -> bool:
        """A chain over weights that no tensor map reads, few rows, and room for two stages."""
        found, parsed = readable(product), UnalignedConfig.parse(config)
        return found is not None and parsed is not None and cut(found.product, parsed, 132) is not None

    def palette(self, product: Product) -> tuple[str, ...]:
        """A few for all products."""
        return tuple(c for c in PALETTE if self.supports(product, c))

    def microseconds(self, product: Product, config: str, device: int | Gpu) -> float | None:
        """The time to expect, by the model of `isogemm.backends.cuda.gemm.model`."""
        parsed = UnalignedConfig.parse(config)
        return None if parsed is None else expected(product, parsed, gpu_of(device))

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        found, parsed = readable(product), UnalignedConfig.parse(config)
        made = cut(found.product, parsed, facts.device(device).multiprocessors) if found and parsed else None
        assert found is not None, f"{config} does not serve {product}"
        assert made is not None, f"{config} does not serve {product}"
        seen = replace(found.product, alpha=product.alpha)  # as in gemm/padded: equal zeros have signs
        multiply = _bind(seen, made, found.copy is not None, device)
        of_x = encoder_of(found.product, made.geometry.y, made.config.cols, made.config.cluster)
        if found.copy is None:
            return lambda at, stream: multiply(stream, of_x(at.a), at.b, at.out, at.c, at.bias)
        copy, nbytes = bind_copies([found.copy], device), found.copy.nbytes

        def enqueue(at: Addresses, stream: int) -> None:
            memory = workspace(nbytes, device)
            x = memory.data_ptr()
            copy(stream, at.a, x, 0, 0)
            multiply(stream, of_x(x), at.b, at.out, at.c, at.bias)

        return enqueue


def _bind(p: Product, made: UnalignedCut, copied: bool, device: int) -> Bound:
    """``launch(stream, map of x, w, out, c, bias)``."""
    c, g, epilogue = made.config, made.geometry, epilogue_defines(p, made.geometry)
    defines = {
        **epilogue,
        "VECTOR": epilogue["VECTOR"] and p.align >= 16 and made.rows % 8 == 0,
        "BN": c.cols,
        "KS": c.depth // 64,
        "TILE_ROWS": c.rows,
        "CLUSTER": c.cluster,
        "ACROSS": g.x.across,
        "ODD": g.x.step % 2 == 1 or g.x.batch % 2 == 1 or p.align < 4,
        "Y_MN": g.y.across,
        "COPIED": copied,
    }
    strides = p.c or Strides(0, 0)
    of_out = longs(g.out_step, p.out.batch, strides.col, strides.row, strides.batch, p.bias_stride)
    sizes = ints(p.n, p.m, p.k, made.rows, made.stages, made.stage, *made.tiles, p.batch, int(g.y.batch > 0))
    instruction = mma(OPERANDS[p.dtype_a], c.cols, registers=True, y_across=g.y.across)
    return function_of("gemm/unaligned/unaligned.cu", "unaligned", device, defines, before=instruction).bind(
        [
            *("map", "ptr", "ptr", "ptr", "ptr"),
            *longs(g.x.step, g.x.batch), *of_out, *sizes, ("f32", p.alpha), ("f32", p.beta),
        ],
        grid=(min(math.prod(made.tiles) * p.batch, made.clusters) * c.cluster,),
        block=(128 * c.warpgroups + 256,),
        shared=1024 + made.stages * made.stage + turned(c.warpgroups, c.cols),
        cluster=(c.cluster,),
        pdl=True,
    )  # fmt: skip

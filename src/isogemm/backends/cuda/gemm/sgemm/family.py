"""float32 products by fused multiply-adds in ascending k: the CPU's own bits, at the rate of the CUDA cores.

Configurations
--------------
``128x128 k8``     tiles of 128 x 128 and panels of 8 of K through registers: gemm/sgemm/sgemm.cu
``32x64 k64 s3``   tiles of 32 x 64 and panels of 64 of K through a ring of 3 buffers: gemm/sgemm/ring.cu
``... copied``     either, of copies of the operands that it would load or copy in pieces of less than 16 bytes, because
                   of an odd K or odd strides (gemm/tf32/split.cu)

All take any strides; none of it reaches the bits.
"""

from __future__ import annotations

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product
from ...driver import facts
from ...driver.nvrtc import function_of
from ...driver.workspace import workspace
from ..fp32 import epilogue, grid, serves, sides
from ..tf32.split import chain_cut, split_of
from .model import MULTIPROCESSORS, microseconds
from .tiles import COPIED, RINGS, TILES, RingTile, blocks_of, copies, in_step, modes, out_of_step


class Sgemm(ProductFamily):
    """The family; see the text of this module."""

    name, home = "sgemm", "backends/cuda/gemm/sgemm"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Tiles by a model of their time."""
        if not serves(product, ("fma",), ("chain", "leaf")):
            return ()
        names = [name for x in (*TILES, *RINGS) for name in (x, x + COPIED) if self.supports(product, name)]
        return tuple(sorted(names, key=lambda name: microseconds(product, name, MULTIPROCESSORS)))

    def supports(self, product: Product, config: str) -> bool:
        """Any strides."""
        if not serves(product, ("fma",), ("chain", "leaf")):
            return False
        if config.endswith(COPIED):
            chain = product.contract.order.kind == "chain" and product.align >= 16
            inner = config.removesuffix(COPIED)
            return chain and (inner in TILES or inner in RINGS) and any(out_of_step(product, inner))
        return config in TILES or config in RINGS

    def microseconds(self, product: Product, config: str, device: int) -> float | None:
        """What a kernel is expected to take on a device; None where it does not serve the product."""
        if not self.supports(product, config):
            return None
        return microseconds(product, config, facts.device(device).multiprocessors)

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        if config.endswith(COPIED):
            return self._bind_copied(product, config, device)
        ring = RINGS.get(config)
        tile = ring or TILES[config]
        (a, b), order = sides(product), product.contract.order
        leaf = min(order.size, product.k) if order.kind == "leaf" else 0
        strides, types = epilogue(product)
        defines = _ringed(product, ring) if ring else dict(zip(("MODE_A", "MODE_B"), modes(product), strict=True))
        defines |= {"BM": tile.m, "BN": tile.n, "BK": tile.k, "TM": tile.thread_m, "TN": tile.thread_n}
        copiers = int(defines.get("COPIERS", 0))
        fewer = copiers > 1 and tile.blocks < 4  # registers, of wide tiles, for the second warp that copies
        defines |= {"MIN_BLOCKS": 1 if leaf else tile.blocks - fewer, "LEAF": leaf > 0}
        steps = [("i64", x) for x in (a.row, a.k, a.batch, b.row, b.k, b.batch)]
        sizes = [("i32", x) for x in (product.m, product.n, product.k, product.batch, leaf, types)]
        kernel = function_of(f"gemm/sgemm/{'ring' if ring else 'sgemm'}.cu", "sgemm", device, defines)
        shared, blocks = (ring.m + ring.n) * ring.k * 4 * ring.stages if ring else 0, blocks_of(product, tile)
        spread = -(-blocks * product.batch // facts.device(device).multiprocessors)
        if spread < tile.blocks:
            shared = max(shared, kernel.shared_of(spread))
        launch = kernel.bind(
            [*["ptr"] * 5, *steps, *strides, *sizes, ("f32", product.alpha), ("f32", product.beta)],
            grid=grid(blocks, product.batch),
            block=(tile.m * tile.n // (tile.thread_m * tile.thread_n) + 32 * copiers,),
            shared=shared,
            pdl=True,
        )

        def enqueue(at: Addresses, stream: int) -> None:
            launch(stream, *at[:5])

        # Parameters are (a, b, out, c, bias), the order of Addresses.
        return enqueue

    def _bind_copied(self, product: Product, config: str, device: int) -> Launch:
        """Copies of the operands that are out of step, and the product of them."""
        name = config.removesuffix(COPIED)
        inner, odd = in_step(product, name)
        multiply, cut = self.bind(inner, name, device), chain_cut(product)
        a, b = (split_of(product, x, cut, 0, device) if o else None for x, o in zip(sides(product), odd, strict=True))
        first = a.nbytes if a else 0
        nbytes = first + (b.nbytes if b else 0)

        def enqueue(at: Addresses, stream: int) -> None:
            memory = workspace(nbytes, device)
            left = memory.data_ptr()
            if a:
                a.launch(stream, at.a, left)
                at = at._replace(a=left)
            if b:
                b.launch(stream, at.b, left + first)
                at = at._replace(b=left + first)
            multiply(at, stream)

        return enqueue


def _ringed(p: Product, tile: RingTile) -> dict[str, int]:
    """What gemm/sgemm/ring.cu wants to know beside the tile."""
    (deep_a, v_a), (deep_b, v_b) = copies(p, tile)
    copiers = 1 if min(v_a, v_b) == 4 else 2
    made = {"COPIERS": copiers, "DEEP_A": deep_a, "V_A": v_a, "DEEP_B": deep_b, "V_B": v_b}
    return {"LANES_M": tile.lanes, "STAGES": tile.stages, "AHEAD": tile.ahead, **made}

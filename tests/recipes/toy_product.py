"""A kernel for products, as CONTRIBUTING tells to add one: this file, and its row. It multiplies with the reference."""

from __future__ import annotations

from tests.planner.fakes import compute, view

from isogemm.planner.trials import ProductFamily
from isogemm.problem.product import Addresses, Launch, Product


class Toy(ProductFamily):
    """Float32 by fused multiply-adds; ``wrong`` is a configuration with a wrong bit."""

    name, home = "toy", "backends/cuda/gemm/tile"

    def configs(self, product: Product) -> tuple[str, ...]:
        return ("wrong", "right") if self.supports(product, "right") else ()

    def supports(self, product: Product, config: str) -> bool:
        return product.contract.arithmetic == "fma" and {product.dtype_a, product.dtype_b} == {"float32"}

    def bind(self, product: Product, config: str, device: int) -> Launch:
        def launch(at: Addresses, stream: int) -> None:
            value = compute(product, at)
            value.view(f"u{value.itemsize}")[0, 0, 0] ^= config == "wrong"
            view(at.out, product.out, value.shape, product.dtype_out)[...] = value

        return launch

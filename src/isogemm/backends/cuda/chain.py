"""The family "chain": every tensor-core product, in Triton; see `triton_tile`."""

from .triton_tile import CHAIN as FAMILY

__all__ = ["FAMILY"]

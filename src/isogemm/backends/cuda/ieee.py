"""The family "ieee": every product of the ``fma`` arithmetic, in Triton; see `triton_tile`."""

from .triton_tile import IEEE as FAMILY

__all__ = ["FAMILY"]

"""The kernel families of this backend, loaded when they are first asked for; those that cannot load say why."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from ...problem.product import Family

__all__ = ["HOMES", "LIBRARIES", "absent", "families"]

# The plain families first: in this order they are the last resort. ``module:name`` of a family or of its class.
HOMES = MappingProxyType(
    {
        "chain": "gemm.tile.family:CHAIN",
        "ieee": "gemm.tile.family:IEEE",
        "sgemm": "gemm.sgemm.family:Sgemm",
        "tf32": "gemm.tf32.family:Tf32",
        "hopper": "gemm.hopper.family:Hopper",
        "cublaslt": "gemm.cublaslt.family:CublasLt",
        "items": "gemm.lists.family:FAMILY",
    }
)

# Algorithms of a vendor's library: nothing but the exact product says what code they run, so no golden product of
# another size can admit them. They serve what `isogemm tune` found right, and nothing else.
LIBRARIES = frozenset({"cublaslt"})


@cache
def _load() -> tuple[dict[str, Family], dict[str, str]]:
    found: dict[str, Family] = {}
    missing: dict[str, str] = {}
    for name, home in HOMES.items():
        try:
            module, _, attribute = home.partition(":")
            family = getattr(import_module(f".{module}", __package__), attribute)
            found[name] = family() if isinstance(family, type) else family
        except (ImportError, AttributeError, OSError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def families() -> Mapping[str, Family]:
    """Every family that loads here, by name."""
    return _load()[0]


def absent() -> Mapping[str, str]:
    """Why the others do not."""
    return _load()[1]

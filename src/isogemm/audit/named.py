"""Providers by their names, on the CPU or on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .providers import (
    BUILTIN,
    Absent,
    CallableProvider,
    LibraryCalls,
    LibraryProvider,
    Provider,
    TorchProvider,
    function_of,
)
from .tensors import TensorProvider


def load_provider(name: str, device: str = "cpu") -> Provider:
    """The provider of that name: ``isogemm``, ``numpy``, ``torch``, ``module:function`` or ``file.py:function``.

    Parameters
    ----------
    name : str
    device : str
        ``cpu``, or one of torch's: then a function of one's own is given tensors there, and returns one.

    Raises
    ------
    OptionError
        No such provider: an unknown name, no such module or file, or no such callable in it.
    Absent
        It exists but cannot run here: a package is missing, or its module fails when imported.
    """
    if device != "cpu":
        if name == "numpy":
            raise Absent(f"numpy computes on the CPU, not on {device}")
        TorchProvider()  # says why torch is not there, where it is not
    if name not in BUILTIN:
        return provider_of(name, function_of(name), device)
    if device != "cpu":
        return TensorProvider(name, device, BUILTIN[name]())
    return TorchProvider() if name == "torch" else LibraryProvider(name, BUILTIN[name]())


def provider_of(name: str, function: Callable[..., Any], device: str) -> Provider:
    """A function of one's own as a provider: of arrays, or on a device of tensors."""
    if device == "cpu":
        return CallableProvider(name, function)
    return TensorProvider(name, device, LibraryCalls(function, accumulate=getattr(function, "accumulate", None)))

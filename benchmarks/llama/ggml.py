"""ggml's libraries through ctypes: what its backends for CPUs and for CUDA devices share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["INT", "LONG", "POINTER", "SIZE", "TYPES", "Library", "Owner"]

TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
"""ggml's numbers of the types used here."""

POINTER, SIZE, LONG, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_CONTEXT = 4 << 20  # bytes for the descriptions of some tensors and graphs


class _Parameters(ctypes.Structure):
    _fields_ = (("size", SIZE), ("buffer", POINTER), ("no_alloc", ctypes.c_bool))


class Library:
    """ggml's libraries of one build.

    Parameters
    ----------
    folder : path
        Where the shared libraries lie, at any depth.
    backend : str
        ``cpu`` or ``cuda``.

    Raises
    ------
    FileNotFoundError
        There is none of that name.
    """

    def __init__(self, folder: Path, backend: str) -> None:
        names = ("libggml-base", f"libggml-{backend}")
        self._base, self._own = (ctypes.CDLL(str(_find(folder, name)), ctypes.RTLD_GLOBAL) for name in names)
        self.version = str(self.base("ggml_version", ctypes.c_char_p)().decode())

    def base(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the base library."""
        return _function(self._base, name, result, arguments)

    def own(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the backend's library, or of the base library where it has none of that name."""
        return _function(self._own if hasattr(self._own, name) else self._base, name, result, arguments)


class Owner:
    """Contexts and buffers of a library, and how they are given back."""

    def __init__(self, llama: Library) -> None:
        self._llama = llama
        self._free: list[Callable[[], None]] = []

    def free(self) -> None:
        """Give the memory back; views are dead then."""
        while self._free:
            self._free.pop()()

    def _context(self) -> int:
        made = self._llama.base("ggml_init", POINTER, _Parameters)(_Parameters(_CONTEXT, None, True))
        drop = self._llama.base("ggml_free", None, POINTER)
        self._free.append(lambda: drop(made))
        return int(made)

    def _allocate(self, context: int, kind: int | None) -> int:
        """A buffer of that kind for a context's tensors."""
        name = "ggml_backend_alloc_ctx_tensors_from_buft"
        buffer = self._llama.base(name, POINTER, POINTER, POINTER)(context, kind)
        if not buffer:
            raise MemoryError("ggml allocated no buffer")
        drop = self._llama.base("ggml_backend_buffer_free", None, POINTER)
        self._free.append(lambda: drop(buffer))
        return int(buffer)

    def _tensor(self, context: int, kind: str, columns: int, rows: int) -> int:
        new = self._llama.base("ggml_new_tensor_2d", POINTER, POINTER, INT, LONG, LONG)
        return int(new(context, TYPES[kind], columns, rows))

    def _product(self, context: int, w: int, x: int) -> int:
        return int(self._llama.base("ggml_mul_mat", POINTER, POINTER, POINTER, POINTER)(context, w, x))


def _find(folder: Path, name: str) -> Path:
    for ending in (".so", ".dylib"):
        found = sorted(folder.rglob(name + ending))
        if found:
            return found[0]
    raise FileNotFoundError(f"no {name} under {folder}: build ggml there, with shared libraries")


def _function(library: Any, name: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    found = getattr(library, name)
    found.restype, found.argtypes = result, list(arguments)
    return found

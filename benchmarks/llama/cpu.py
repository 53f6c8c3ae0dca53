"""llama.cpp's CPU kernels through ctypes: products of float32 activations with quantized weights, as it runs them.

Build ggml with this machine's flags, from llama.cpp's sources or those that llama-cpp-python's source distribution
brings (vendor/llama.cpp), and give the folder to ``python -m benchmarks.quant --llama``:

    cmake -S llama.cpp/ggml -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_CPU_REPACK=ON \\
        -DGGML_LLAMAFILE=ON
    cmake --build build
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TYPES", "Llama", "Product"]

Array = npt.NDArray[Any]
TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
"""ggml's numbers of the types used here."""

_NAMES = ("libggml-base", "libggml-cpu")
_POINTER, _SIZE, _LONG, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_CONTEXT = 1 << 20  # bytes for the descriptions of a few tensors and a graph of one node


class _Parameters(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("buffer", _POINTER), ("no_alloc", ctypes.c_bool))


class Llama:
    """ggml's libraries of one build.

    Parameters
    ----------
    folder : path
        Where the shared libraries lie, at any depth.

    Raises
    ------
    FileNotFoundError
        There is none of that name.
    """

    def __init__(self, folder: Path) -> None:
        self._base, self._cpu = (ctypes.CDLL(str(_find(folder, name)), ctypes.RTLD_GLOBAL) for name in _NAMES)
        self.version = str(self.base("ggml_version", ctypes.c_char_p)().decode())
        self.cpu("ggml_cpu_init", None)()
        self.backend = self.cpu("ggml_backend_cpu_init", _POINTER)()
        self.plain = self.cpu("ggml_backend_cpu_buffer_type", _POINTER)()
        self.repacked = self._extra("CPU_REPACK")

    def base(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the base library."""
        return _function(self._base, name, result, arguments)

    def cpu(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the CPU library."""
        return _function(self._cpu if hasattr(self._cpu, name) else self._base, name, result, arguments)

    def set_threads(self, count: int) -> None:
        """For all products from now on."""
        self.cpu("ggml_backend_cpu_set_n_threads", None, _POINTER, _INT)(self.backend, count)

    def _extra(self, wanted: str) -> int | None:
        """A buffer type that lays weights out for the kernels."""
        registry = self.cpu("ggml_backend_cpu_reg", _POINTER)()
        find = self.base("ggml_backend_reg_get_proc_address", _POINTER, _POINTER, ctypes.c_char_p)
        address = find(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        device = self.base("ggml_backend_reg_dev_get", _POINTER, _POINTER, _SIZE)(registry, 0)
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)(device)
        name = self.base("ggml_backend_buft_name", ctypes.c_char_p, _POINTER)
        for kind in iter(kinds):  # ends with a null pointer
            if not kind:
                return None
            if name(kind) == wanted.encode():
                return int(kind)
        return None

    def has_repacked(self, format: str) -> bool:
        """Whether its build for this CPU lays weights of a format out anew; all others it reads in place."""
        return self.repacked is not None and format in ("Q4_0", "Q4_K")


class Product:
    """x @ w.T for one weight that stays, and rows of activations that are written in first.

    Parameters
    ----------
    llama : Llama
    rows : uint8 array [n, row bytes]
        The weight's blocks, which are copied.
    format : str
    k, m : int
    repacked : bool
        Laid out for its kernels rather than as in files.
    """

    def __init__(self, llama: Llama, rows: Array, format: str, k: int, m: int, *, repacked: bool = False) -> None:
        self._llama, n = llama, len(rows)
        self._free: list[Callable[[], None]] = []
        tensor = llama.base("ggml_new_tensor_2d", _POINTER, _POINTER, _INT, _LONG, _LONG)
        weights, activations = self._context(), self._context()
        w = tensor(weights, TYPES[format], k, n)
        self._place(weights, llama.repacked if repacked else llama.plain)
        data = np.ascontiguousarray(rows)
        llama.base("ggml_backend_tensor_set", None, _POINTER, _POINTER, _SIZE, _SIZE)(w, data.ctypes.data, 0, data.size)
        x = tensor(activations, TYPES["F32"], k, m)
        y = llama.base("ggml_mul_mat", _POINTER, _POINTER, _POINTER, _POINTER)(activations, w, x)
        self._graph = llama.base("ggml_new_graph", _POINTER, _POINTER)(activations)
        llama.base("ggml_build_forward_expand", None, _POINTER, _POINTER)(self._graph, y)
        self._place(activations, llama.plain)
        self.x, self.y = self._view(x, m, k), self._view(y, m, n)
        self._compute = llama.base("ggml_backend_graph_compute", _INT, _POINTER, _POINTER)

    def run(self) -> None:
        """Multiply: `y` holds the result."""
        status = self._compute(self._llama.backend, self._graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def free(self) -> None:
        """Give the memory back; the views are dead then."""
        while self._free:
            self._free.pop()()

    def _context(self) -> int:
        made = self._llama.base("ggml_init", _POINTER, _Parameters)(_Parameters(_CONTEXT, None, True))
        drop = self._llama.base("ggml_free", None, _POINTER)
        self._free.append(lambda: drop(made))
        return int(made)

    def _place(self, context: int, kind: int | None) -> None:
        buffer = self._llama.base("ggml_backend_alloc_ctx_tensors_from_buft", _POINTER, _POINTER, _POINTER)(
            context, kind
        )
        if not buffer:
            raise MemoryError("ggml allocated no buffer")
        drop = self._llama.base("ggml_backend_buffer_free", None, _POINTER)
        self._free.append(lambda: drop(buffer))

    def _view(self, tensor: int, rows: int, columns: int) -> Array:
        at = self._llama.base("ggml_get_data", _POINTER, _POINTER)(tensor)
        floats = ctypes.cast(at, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, (rows, columns))


def _find(folder: Path, name: str) -> Path:
    for ending in (".so", ".dylib"):
        found = sorted(folder.rglob(name + ending))
        if found:
            return found[0]
    raise FileNotFoundError(f"no {name} under {folder}: build ggml there, with shared libraries")


def _function(library: Any, name: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    found = getattr(library, name)
    found.restype, found.argtypes = result, list(arguments)
    return found  # type: ignore[no-any-return]

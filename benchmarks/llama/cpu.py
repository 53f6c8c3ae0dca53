"""llama.cpp's CPU kernels through ctypes: products of float32 activations with quantized weights, as it runs them.

Build ggml with this machine's flags, from llama.cpp's sources or those that llama-cpp-python's source distribution
brings (vendor/llama.cpp), and give the folder to ``python -m benchmarks.quant --llama``:

    cmake -S llama.cpp/ggml -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_CPU_REPACK=ON \\
        -DGGML_LLAMAFILE=ON
    cmake --build build
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .ggml import INT, POINTER, SIZE, Library, Owner

__all__ = ["Llama", "Product"]

Array = npt.NDArray[Any]


class Llama(Library):
    """ggml's libraries of one build for CPUs; see `Library`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "cpu")
        self.own("ggml_cpu_init", None)()
        self.backend = self.own("ggml_backend_cpu_init", POINTER)()
        self.plain = self.own("ggml_backend_cpu_buffer_type", POINTER)()
        self.repacked = self._extra("CPU_REPACK")

    def set_threads(self, count: int) -> None:
        """For all products from now on."""
        self.own("ggml_backend_cpu_set_n_threads", None, POINTER, INT)(self.backend, count)

    def _extra(self, wanted: str) -> int | None:
        """A buffer type that lays weights out for the kernels."""
        registry = self.own("ggml_backend_cpu_reg", POINTER)()
        find = self.base("ggml_backend_reg_get_proc_address", POINTER, POINTER, ctypes.c_char_p)
        address = find(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        device = self.base("ggml_backend_reg_dev_get", POINTER, POINTER, SIZE)(registry, 0)
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(address)(device)
        name = self.base("ggml_backend_buft_name", ctypes.c_char_p, POINTER)
        for kind in iter(kinds):  # ends with a null pointer
            if not kind:
                return None
            if name(kind) == wanted.encode():
                return int(kind)
        return None

    def has_repacked(self, format: str) -> bool:
        """Whether its build for this CPU lays weights of a format out anew; all others it reads in place."""
        return self.repacked is not None and format in ("Q4_0", "Q4_K")


class Product(Owner):
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
        super().__init__(llama)
        weights, activations, n = self._context(), self._context(), len(rows)
        w = self._tensor(weights, format, k, n)
        self._allocate(weights, llama.repacked if repacked else llama.plain)
        data = np.ascontiguousarray(rows)
        llama.base("ggml_backend_tensor_set", None, POINTER, POINTER, SIZE, SIZE)(w, data.ctypes.data, 0, data.size)
        x = self._tensor(activations, "F32", k, m)
        y = self._product(activations, w, x)
        self._graph = llama.base("ggml_new_graph", POINTER, POINTER)(activations)
        llama.base("ggml_build_forward_expand", None, POINTER, POINTER)(self._graph, y)
        self._allocate(activations, llama.plain)
        self.x, self.y = self._view(x, m, k), self._view(y, m, n)
        compute = llama.base("ggml_backend_graph_compute", INT, POINTER, POINTER)
        self._compute = partial(compute, llama.backend, self._graph)

    def run(self) -> None:
        """Multiply: `y` holds the result."""
        status = self._compute()
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def _view(self, tensor: int, rows: int, columns: int) -> Array:
        at = self._llama.base("ggml_get_data", POINTER, POINTER)(tensor)
        floats = ctypes.cast(at, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, (rows, columns))

"""llama.cpp's CUDA kernels through ctypes: ``mul_mat_vec_q`` up to 8 rows, ``mul_mat_q`` above, as ggml chooses.

Activations and results are float32, as in llama.cpp: they are read, quantized to 8-bit blocks by a kernel of their own
and multiplied in integers; all of it is timed. `benchmarks.llama.build` says how to build the libraries; they need
the CUDA runtime and cuBLAS that torch has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cpu import TYPES, _find, _function, _Parameters

__all__ = ["LlamaCuda", "Products", "Weights"]

_NAMES = ("libggml-base", "libggml-cuda")
_POINTER, _SIZE, _LONG, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_CONTEXT = 4 << 20  # bytes for the descriptions of some tensors and graphs
_NODES = 8  # that a graph has room for
_FOR_WEIGHTS = 1  # ggml's number of that use of a buffer


class LlamaCuda:
    """ggml's libraries of one build, on torch's current device.

    Parameters
    ----------
    folder : path
        Where the shared libraries lie, at any depth.

    Raises
    ------
    FileNotFoundError
        There is none of that name.
    RuntimeError
        ggml sees no such device.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self._base, self._cuda = (ctypes.CDLL(str(_find(folder, name)), ctypes.RTLD_GLOBAL) for name in _NAMES)
        self.version = str(self.base("ggml_version", ctypes.c_char_p)().decode())
        device = torch.cuda.current_device()
        self.backend = self.cuda("ggml_backend_cuda_init", _POINTER, _INT)(device)
        if not self.backend:
            raise RuntimeError(f"ggml sees no CUDA device {device}")
        self.kind = self.cuda("ggml_backend_cuda_buffer_type", _POINTER, _INT)(device)
        self.compute = self.base("ggml_backend_graph_compute_async", _INT, _POINTER, _POINTER)
        self.stream = torch.cuda.ExternalStream(self.cuda("ggml_peer_cuda_stream", _POINTER, _POINTER)(self.backend))

    def base(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the base library."""
        return _function(self._base, name, result, arguments)

    def cuda(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the CUDA library."""
        return _function(self._cuda, name, result, arguments)

    def view(self, tensor: int, shape: tuple[int, ...], kind: str) -> Any:
        """The memory of a ggml tensor as a torch tensor; `kind` is NumPy's, such as ``<f4``."""
        import torch

        at = self.base("ggml_get_data", _POINTER, _POINTER)(tensor)
        return torch.as_tensor(_Memory(at, shape, kind), device="cuda")


class _Memory:
    """What torch reads to see memory of others."""

    def __init__(self, at: int, shape: tuple[int, ...], kind: str) -> None:
        facts = {"shape": shape, "typestr": kind, "data": (at, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = facts


class _Owner:
    """Contexts and buffers, and how they are given back."""

    def __init__(self, llama: LlamaCuda) -> None:
        self._llama = llama
        self._free: list[Callable[[], None]] = []

    def free(self) -> None:
        """Give the memory back; views are dead then."""
        while self._free:
            self._free.pop()()

    def _context(self) -> int:
        made = self._llama.base("ggml_init", _POINTER, _Parameters)(_Parameters(_CONTEXT, None, True))
        drop = self._llama.base("ggml_free", None, _POINTER)
        self._free.append(lambda: drop(made))
        return int(made)

    def _place(self, context: int) -> int:
        name = "ggml_backend_alloc_ctx_tensors_from_buft"
        buffer = self._llama.base(name, _POINTER, _POINTER, _POINTER)(context, self._llama.kind)
        if not buffer:
            raise MemoryError("ggml allocated no buffer")
        drop = self._llama.base("ggml_backend_buffer_free", None, _POINTER)
        self._free.append(lambda: drop(buffer))
        return int(buffer)

    def _tensor(self, context: int, kind: str, columns: int, rows: int) -> int:
        new = self._llama.base("ggml_new_tensor_2d", _POINTER, _POINTER, _INT, _LONG, _LONG)
        return int(new(context, TYPES[kind], columns, rows))


class Weights(_Owner):
    """Copies of one weight, uploaded once.

    Parameters
    ----------
    llama : LlamaCuda
    rows : uint8 tensor [n, row bytes], on the device
        The blocks as a file has them, which are copied.
    format : str
    k, copies : int
    """

    def __init__(self, llama: LlamaCuda, rows: Any, format: str, k: int, copies: int) -> None:
        super().__init__(llama)
        self.n, self.k = len(rows), k
        context = self._context()
        self.tensors = [self._tensor(context, format, k, self.n) for _ in range(copies)]
        buffer = self._place(context)
        llama.base("ggml_backend_buffer_set_usage", None, _POINTER, _INT)(buffer, _FOR_WEIGHTS)
        for tensor in self.tensors:
            llama.view(tensor, tuple(rows.shape), "|u1").copy_(rows)


class Products(_Owner):
    """x @ w.T with each copy of a weight, for rows of activations that are written to `x` first.

    Parameters
    ----------
    llama : LlamaCuda
    weights : Weights
        Outlives this.
    m : int

    Attributes
    ----------
    x, y : float32 tensors [m, k] and [m, n]
        Activations, and the result with the first copy.
    """

    def __init__(self, llama: LlamaCuda, weights: Weights, m: int) -> None:
        super().__init__(llama)
        context = self._context()
        x = self._tensor(context, "F32", weights.k, m)
        multiply = llama.base("ggml_mul_mat", _POINTER, _POINTER, _POINTER, _POINTER)
        results = [multiply(context, w, x) for w in weights.tensors]
        self._graphs = [self._graph(context, y) for y in results]
        self._place(context)
        self.x = llama.view(x, (m, weights.k), "<f4")
        self.y = llama.view(results[0], (m, weights.n), "<f4")

    def run(self, i: int) -> None:
        """Enqueue the product with copy i: after what torch's current stream holds, and before what comes next."""
        import torch

        llama, current = self._llama, torch.cuda.current_stream()
        llama.stream.wait_stream(current)
        status = llama.compute(llama.backend, self._graphs[i % len(self._graphs)])
        current.wait_stream(llama.stream)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute_async returned {status}")

    def _graph(self, context: int, result: int) -> int:
        new = self._llama.base("ggml_new_graph_custom", _POINTER, _POINTER, _SIZE, ctypes.c_bool)
        made = new(context, _NODES, False)
        self._llama.base("ggml_build_forward_expand", None, _POINTER, _POINTER)(made, result)
        return int(made)

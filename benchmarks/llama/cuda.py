"""llama.cpp's CUDA kernels through ctypes: ``mul_mat_vec_q`` up to 8 rows, ``mul_mat_q`` above, as ggml chooses.

Activations and results are float32, as in llama.cpp: they are read, quantized to 8-bit blocks by a kernel of their own
and multiplied in integers; all of it is timed. `benchmarks.llama.build` says how to build the libraries; they need
the CUDA runtime and cuBLAS that torch has loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from .ggml import INT, POINTER, SIZE, Library, Owner

__all__ = ["LlamaCuda", "Products", "Weights"]

_NODES = 8  # that a graph has room for
_FOR_WEIGHTS = 1  # ggml's number of that use of a buffer


class LlamaCuda(Library):
    """ggml's libraries of one build, on torch's current device; see `Library`.

    Raises
    ------
    RuntimeError
        ggml sees no such device.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        super().__init__(folder, "cuda")
        device = torch.cuda.current_device()
        self.backend = self.own("ggml_backend_cuda_init", POINTER, INT)(device)
        if not self.backend:
            raise RuntimeError(f"ggml sees no CUDA device {device}")
        self.kind = self.own("ggml_backend_cuda_buffer_type", POINTER, INT)(device)
        self.compute = self.base("ggml_backend_graph_compute_async", INT, POINTER, POINTER)
        self.stream = torch.cuda.ExternalStream(self.own("ggml_peer_cuda_stream", POINTER, POINTER)(self.backend))

    def view(self, tensor: int, shape: tuple[int, ...], kind: str) -> Any:
        """The memory of a ggml tensor as a torch tensor; `kind` is NumPy's, such as ``<f4``."""
        import torch

        at = self.base("ggml_get_data", POINTER, POINTER)(tensor)
        return torch.as_tensor(_Memory(at, shape, kind), device="cuda")


class _Memory:
    """What torch reads to see memory of others."""

    def __init__(self, at: int, shape: tuple[int, ...], kind: str) -> None:
        facts = {"shape": shape, "typestr": kind, "data": (at, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = facts


class Weights(Owner):
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
        buffer = self._allocate(context, llama.kind)
        llama.base("ggml_backend_buffer_set_usage", None, POINTER, INT)(buffer, _FOR_WEIGHTS)
        for tensor in self.tensors:
            llama.view(tensor, tuple(rows.shape), "|u1").copy_(rows)


class Products(Owner):
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
        self._cuda, context = llama, self._context()
        x = self._tensor(context, "F32", weights.k, m)
        results = [self._product(context, w, x) for w in weights.tensors]
        self._graphs = [self._graph(context, y) for y in results]
        self._allocate(context, llama.kind)
        self.x = llama.view(x, (m, weights.k), "<f4")
        self.y = llama.view(results[0], (m, weights.n), "<f4")

    def run(self, i: int) -> None:
        """Enqueue the product with copy i: after what torch's current stream holds, and before what comes next."""
        import torch

        llama, current = self._cuda, torch.cuda.current_stream()
        llama.stream.wait_stream(current)
        status = llama.compute(llama.backend, self._graphs[i % len(self._graphs)])
        current.wait_stream(llama.stream)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute_async returned {status}")

    def _graph(self, context: int, result: int) -> int:
        new = self._llama.base("ggml_new_graph_custom", POINTER, POINTER, SIZE, ctypes.c_bool)
        made = new(context, _NODES, False)
        self._llama.base("ggml_build_forward_expand", None, POINTER, POINTER)(made, result)
        return int(made)

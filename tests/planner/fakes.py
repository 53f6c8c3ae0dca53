"""Devices and kernel families that run on the host: right ones, and ones that are wrong in a chosen way."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from isogemm.base.dtypes import NUMPY
from isogemm.contract import reference
from isogemm.contract.spec import Contract
from isogemm.operands.device_array import DeviceId, device_array
from isogemm.planner.trials import ProductFamily
from isogemm.problem.product import Addresses, Product, Strides

H200 = {
    "device": "NVIDIA H200",
    "capability": "9.0",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11",
    "triton": "3.6.0",
    "cublaslt": "130000",
}


class HostBuffer:
    """An array whose address kernels write to."""

    def __init__(self, flat: np.ndarray) -> None:
        self.flat = flat.copy()
        self.address = int(self.flat.ctypes.data)

    def read(self) -> np.ndarray:
        return self.flat


@dataclass
class FakeMachine:
    """A device that is this process's memory."""

    parts: Mapping[str, str] = field(default_factory=lambda: dict(H200))
    captures: bool = False
    device: int = 0

    def stamp(self) -> Mapping[str, str]:
        return self.parts

    def capturing(self) -> bool:
        return self.captures

    def put(self, flat: np.ndarray) -> HostBuffer:
        assert not self.captures, "nothing may be uploaded during a capture"
        return HostBuffer(flat)

    def stream(self) -> int:
        return 0


def view(address: int, strides: Strides, shape: tuple[int, int, int], dtype: str) -> np.ndarray:
    """The stack of matrices at an address."""
    kind = NUMPY[dtype]
    steps = (strides.batch * kind.itemsize, strides.row * kind.itemsize, strides.col * kind.itemsize)
    return device_array(address, shape, steps, kind, DeviceId("cuda", 0)).view(np.ndarray)


def compute(p: Product, at: Addresses, arithmetic: str = "") -> np.ndarray:
    """The product by the reference; repeated rows and columns are evaluated once."""
    contract = Contract(arithmetic or p.contract.arithmetic, p.contract.order)
    a, b = view(at.a, p.a, (p.batch, p.m, p.k), p.dtype_a), view(at.b, p.b, (p.batch, p.k, p.n), p.dtype_b)
    c = None if p.c is None else view(at.c, p.c, (p.batch, p.m, p.n), p.dtype_c or "")
    bias = None if p.dtype_bias is None else view(at.bias, Strides(0, p.bias_stride), (1, 1, p.n), p.dtype_bias)[0, 0]
    contents = tuple(zlib.crc32(np.ascontiguousarray(x).view(np.uint8)) for x in (a, b, c, bias) if x is not None)
    key = p, repr((p.alpha, p.beta)), contract, contents  # products of 0.0 and of -0.0 are equal, their results not
    if key not in _results:
        _results[key] = _stack(p, contract, a, b, c, bias)
    return _results[key].copy()


_results: dict[Any, np.ndarray] = {}  # trials of one variant ask for the same products again and again


def _stack(p: Product, contract: Contract, a: Any, b: Any, c: Any, bias: Any) -> np.ndarray:
    out = np.empty((p.batch, p.m, p.n), NUMPY[p.dtype_out])
    for i in range(p.batch):
        out[i] = _one(p, contract, a[i], b[i], None if c is None else c[i], bias)
    return out


def _one(p: Product, contract: Contract, a: Any, b: Any, c: Any, bias: Any) -> np.ndarray:
    if p.dtype_a != p.dtype_b:
        a, b = a.astype(np.float32), b.astype(np.float32)
    if p.accumulate:
        acc = reference.evaluate(a, b, contract, c)
    else:
        (rows, left), (columns, right) = _distinct(a), _distinct(b.T)
        acc = reference.evaluate(rows, columns.T, contract)[np.ix_(left, right)]
    beta = 0.0 if p.accumulate else p.beta
    return reference.epilogue(acc, alpha=p.alpha, beta=beta, c=c, bias=bias, out_dtype=NUMPY[p.dtype_out])


def _distinct(x: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Rows of different bits, and which of them each row is; NumPy's `unique` of rows sorts them, 20 times slower."""
    places: dict[bytes, int] = {}
    which = [places.setdefault(row.tobytes(), len(places)) for row in x]
    return np.frombuffer(b"".join(places), x.dtype).reshape(len(places), x.shape[1]), which


@dataclass
class FakeKernel:
    """A kernel for cases that are texts, and what its trial says; configurations are its code."""

    name: str
    why: str = ""
    tried: list[str] = field(default_factory=list)
    home: str = "sources"

    def configs(self, case: str) -> tuple[str, ...]:
        return ("A=1",)

    def supports(self, case: str, config: str) -> bool:
        return True

    def code(self, case: str, config: str) -> str:
        return config

    def trial(self, bench: Any, case: str, config: str) -> str:
        self.tried.append(self.name)
        time.sleep(0.01)
        return self.why

    def bind(self, case: str, config: str, device: int) -> str:
        return f"built {self.name}"


Fault = Callable[[Product, np.ndarray], None]


@dataclass
class FakeFamily(ProductFamily):
    """Kernels whose configurations are names; `faults` says what each of them does to its result."""

    name: str
    offered: tuple[str, ...] = ("fast", "plain")
    arithmetic: str = ""
    """What it computes, whatever the contract says: a device's own arithmetic."""
    faults: dict[str, Fault] = field(default_factory=dict)
    legal: Callable[[Product, str], bool] = lambda product, config: True
    expects: Callable[[Product, str], float | None] = lambda product, config: None
    source: str = "v1"
    runs: list[tuple[str, Product]] = field(default_factory=list)
    builds: list[tuple[str, Product]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.library = self.name == "library"

    @property
    def home(self) -> str:
        return f"{self.name}-{self.source}"

    def configs(self, product: Product) -> tuple[str, ...]:
        return tuple(c for c in self.offered if self.supports(product, c))

    def supports(self, product: Product, config: str) -> bool:
        return config in self.offered and self.legal(product, config)

    def microseconds(self, product: Product, config: str, device: int) -> float | None:
        return self.expects(product, config)

    def bind(self, product: Product, config: str, device: int) -> Callable[[Addresses, int], None]:
        self.builds.append((config, product))

        def launch(at: Addresses, stream: int) -> None:
            self.runs.append((config, product))
            value = compute(product, at, self.arithmetic)
            if config in self.faults:
                self.faults[config](product, value)
            view(at.out, product.out, value.shape, product.dtype_out)[...] = value

        launch.config = config
        return launch


def flip(where: Callable[[Product], bool] = lambda p: True, index: tuple[int, ...] = (0, 0, 0)) -> Fault:
    """One wrong bit, where a condition holds."""

    def fault(product: Product, value: np.ndarray) -> None:
        if where(product):
            value.view(f"u{value.itemsize}")[index] ^= 1

    return fault


def linear(m: int, n: int, k: int, contract: str = "tensor_core:sm90/chain", **changes: Any) -> Product:
    """x @ w.T in bfloat16, packed."""
    posed = Product(
        m, n, k, "bfloat16", "bfloat16", "bfloat16", Contract.parse(contract),
        Strides(k, 1), Strides(1, k), Strides(n, 1),
    )  # fmt: skip
    return replace(posed, **changes)

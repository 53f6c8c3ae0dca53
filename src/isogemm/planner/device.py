"""What a backend brings: one Device for each of its devices, which is all that the floors above know of it.

A backend is a folder with a module as `Backend` has it, registered by one line of `isogemm.backends.BACKENDS`. Its
Device says where memory is, which bits are the default, and computes products on views. All else is optional: a part
that a backend lacks is a typed error, which names it.

Operands say themselves where they lie: torch's tensors and CUDA arrays by what they are, a backend's own arrays by
``__isogemm_view__`` (see `isogemm.operands.views`).

The columns besides products are modules, loaded when first asked for (`Device.columns`):

- ``quant``: products with quantized weights. ``product(how, x, w, out, bias, contract)`` by kernels that read the
  blocks; where it is False, ``pieces(how, x, w)``: x and the weight as floats [k, columns], for `Device.gemm`. Beside
  the host, ``upload(matrix, place, native=)`` and ``adopt(data, format, n, k)``: the copy that a matrix keeps as its
  own. On the host, ``prepare``, ``gemm``, ``quantize`` and ``dequantize``: what `isogemm.quant` makes of bytes.
- ``rows``: operations along rows, as `isogemm.torch.reductions` calls them.
- ``attention``: attention, as `isogemm.torch.attention` calls it.
- ``row_gradients``: of the host, gradients of operations along rows that a kernel takes; torch makes the others.
- ``row_sums``, ``attention_steps``: of devices whose memory the host cannot read, sums over rows and the steps between
  the products of attention's gradients; elsewhere torch makes both of single operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base.dtypes import INT8
from ..contract.spec import Contract
from ..errors import DeviceError
from ..operands.device_array import DeviceId
from ..operands.prepared import PreparedWeight
from ..problem.settings import Settings

__all__ = ["LISTS", "Backend", "Device", "Item"]

Array = NDArray[Any]
EXACT = Contract("exact")
LISTS = ("gemm_batched", "gemm_grouped")
"""Public functions of lists; others take arrays."""

Item = tuple[Array, Any, Array, Array | None]
"""a, b, out and c of one product of a list."""


class Device:
    """One device. A backend's own has at least what raises `NotImplementedError` here.

    Attributes
    ----------
    place : DeviceId
        Its name and number; that of every array it makes.
    columns : mapping
        Modules of the columns that it has, by name.
    packed : type
        What `pack` returns.
    """

    columns: ClassVar[Mapping[str, str]] = {}
    packed: ClassVar[type] = PreparedWeight
    place: DeviceId

    # Memory.

    def memory(self) -> int:
        """Bytes that this device could hold."""
        raise NotImplementedError(f"{type(self).__name__}.memory")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """New memory in C order; `LimitError` where there is not enough."""
        raise NotImplementedError(f"{type(self).__name__}.empty")

    def assign(self, out: Array, x: Array) -> None:
        """out[...] = x."""
        raise NotImplementedError(f"{type(self).__name__}.assign")

    def contiguous(self, x: Array) -> Array:
        """`x` in C order: itself, or a copy."""
        if x.flags.c_contiguous:
            return x
        copied = self.empty(x.shape, x.dtype)
        self.assign(copied, x)
        return copied

    def result(self, x: Array, operands: tuple[Any, ...]) -> Any:
        """A result as the kind of the caller's operands."""
        raise NotImplementedError(f"{type(self).__name__}.result")

    def release(self, stream: int) -> None:
        """Let another library's stream wait for the work that was enqueued on its operands."""

    # Products.

    def default(self, dtype_a: np.dtype[Any], dtype_b: np.dtype[Any]) -> Contract:
        """The contract of a product of these types for which none was asked."""
        return EXACT if dtype_a == dtype_b == INT8 else Contract()

    def gemm(
        self, a: Array, b: Any, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
    ) -> None:
        """out = alpha * (a @ b) + beta * c + bias on validated views [m, k], [k, n] and [m, n] of any strides.

        `b` may be what `pack` returned. `asked` says the contract, alpha and beta, and with `accumulate` that the walk
        over K starts from the float32 `c`; the result's dtype is that of `out`.

        Raises
        ------
        ContractError
            This device does not have the contract.
        """
        raise NotImplementedError(f"{type(self).__name__}.gemm")

    def gemm_batched(
        self, a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
    ) -> None:
        """`gemm` on each item of 3-D operands; strides of 0 share an item."""
        self.gemm_stack(a, b, out, asked, c=c, bias=bias)

    def gemm_stack(
        self, a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
    ) -> None:
        """`gemm` on each item of operands with leading dimensions, whatever steps lie between items."""
        where = np.ndindex(out.shape[:-2])
        items = [(a[i], b[i], out[i], None if c is None else c[i]) for i in where]
        self.gemm_items(items, asked, bias=bias)

    def gemm_items(self, items: Sequence[Item], asked: Settings, *, bias: Array | None = None) -> None:
        """`gemm` on each (a, b, out, c); sizes may differ."""
        for a, b, out, c in items:
            self.gemm(a, b, out, asked, c=c, bias=bias)

    def pack(self, w: Array) -> Any:
        """A `isogemm.operands.prepared.PreparedWeight` of a validated weight [n, k]."""
        raise self.lacks("packed weights")

    def remember(self, kind: str, operands: tuple[Any, ...], options: tuple[Any, ...], result: Any) -> None:
        """Enter a call of the public function `kind` that this object has just served, for the backend's `recall`."""

    # The other columns, and what plans and tuning need.

    @property
    def quant(self) -> Any:
        """The module of products with quantized weights."""
        return self.column("quant")

    @property
    def rows(self) -> Any:
        """The module of operations along rows."""
        return self.column("rows")

    @property
    def attention(self) -> Any:
        """The module of attention."""
        return self.column("attention")

    def column(self, name: str) -> Any:
        """The module of a column.

        Raises
        ------
        DeviceError
            This backend has none.
        """
        if name not in self.columns:
            raise self.lacks({"quant": "quantized weights", "rows": "operations along rows"}.get(name, name))
        return _loaded(self.columns[name])

    def plan(self, *checked: Any) -> Any:
        """The plan of checked arguments of `isogemm.plan`, where no chooser has it."""
        raise self.lacks("plans")

    def plan_work(self, form: str, *checked: Any, **about: Any) -> Any:
        """The plan of several products, of one with a quantized weight, or of attention."""
        raise self.lacks(f"plans of {form} products")

    @property
    def chooser(self) -> Any:
        """Who chooses among kernels here: tables, families, admissions and machine, for plans and tuning."""
        raise self.lacks("plans and tuning")

    @property
    def facts(self) -> Any:
        """What the hardware is: its name, `l2_bytes` and the like."""
        raise self.lacks("facts of the hardware")

    def stream(self) -> int:
        """The raw handle of the stream on which work is enqueued now."""
        raise self.lacks("streams")

    def lacks(self, what: str) -> DeviceError:
        """The error for a part that this backend does not have."""
        return DeviceError(what, limit="a device whose backend has them", value=str(self.place), nearest="the CPU")


_loaded = cache(import_module)


class Backend(Protocol):
    """A backend's module, as `isogemm.backends` loads it."""

    def count(self) -> int:
        """Devices of this kind in this machine."""
        ...

    def usable(self) -> int:
        """How many of them arrays can be on here."""
        ...

    def current(self) -> int:
        """The number of the device that a name without a number stands for."""
        ...

    def open_device(self, place: DeviceId, tensors: bool) -> Device:
        """The device of one call: with memory that torch allocates, where operands are its tensors."""
        ...

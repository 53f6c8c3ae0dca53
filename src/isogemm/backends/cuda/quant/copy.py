"""Quantized weights on CUDA devices: the copy of a matrix that kernels read, and calls like one before.

`isogemm.api.quantized` checks a call and says what it is; `family` finds the kernel. What both found is kept with the
copy, so that the next call with such operands is a look-up, its result's memory and a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ....base.seen import Seen
from ....errors import DeviceError, LimitError, OptionError
from ....formats.stored import Unmarked
from ....operands.device_array import DeviceId
from ....operands.tensors import is_traced
from .. import calls
from .dequantize import dequantize
from .family import QuantRun
from .layout import FORMATS, ROWS, Packed, layout
from .pack import pack, settle

ALIGN = 128  # of a copy's address


@contextmanager
def _plain() -> Iterator[None]:
    """Tensors made here are no inference tensors, and belong to no transform of torch.func: they outlive both."""
    import torch

    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


class KnownCall(NamedTuple):
    """A call that was made before."""

    run: QuantRun
    launch: Any  # None: `run` is called with tensors
    weight: int  # its address
    rows: tuple[int, int]  # x as a matrix
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    like: dict[str, Any]  # dtype and device of the result, as torch's keywords


class DeviceCopy:
    """The copy of a quantized matrix on a device, laid out for the kernels.

    Attributes
    ----------
    place : DeviceId
    packed : Packed or None
        None where the format has no blocks.
    native : tensor or None
        The bytes of the rows on the device, uint8 [n, row bytes], where they were asked for or are floats.
    shape : (int, int)
    format : str
    """

    __slots__ = ("_host", "calls", "format", "native", "packed", "place", "shape")

    def __init__(
        self, place: DeviceId, host: Any, fmt: str, shape: tuple[int, int], packed: Packed | None,
        native: Any,
    ) -> None:  # fmt: skip
        self.place, self.format, self.shape, self.packed, self.native = place, fmt, shape, packed, native
        self._host = host
        self.calls: Seen[KnownCall] = Seen(512)

    @property
    def host(self) -> Any:
        """The same rows on the host.

        Raises
        ------
        DeviceError
            Nobody holds them any more.
        """
        if self._host is None:
            raise DeviceError(
                f"rows of a {self.format} matrix whose tensor alone was left", limit="those that the host has",
                value=str(self.place), nearest="QuantizedLinear, or the QuantizedMatrix itself, which hold them",
            )  # fmt: skip
        return self._host

    @property
    def tensor(self) -> Any:
        """What torch's operators get of the copy: uint8 [bytes], or the bytes of floats [n, row bytes]."""
        return self.native if self.packed is None else self.packed.data

    @property
    def nbytes(self) -> int:
        """Bytes on the device, those of rows included where they are kept."""
        packed = 0 if self.packed is None else int(self.packed.data.nbytes)
        return packed + (0 if self.native is None else int(self.native.nbytes))

    @_plain()
    def part(self, matrix: Any, rows: range) -> DeviceCopy:
        """The copy of rows that `matrix` holds on the host: over the same memory, where they begin with a tile."""
        n, k = matrix.shape
        native = None
        if self.native is not None:
            if rows.step == 1:
                native = self.native[rows.start : rows.start + n]
            else:
                import torch

                native = self.native[torch.tensor(list(rows), dtype=torch.int64, device=self.native.device)]
        packed = None
        if self.packed is not None:
            if rows.step != 1 or rows.start % ROWS:
                return upload(matrix, self.place, native=native is not None, there=native)
            lay, size = self.packed.layout, self.packed.layout.tile_bytes(k)
            data = self.packed.data.narrow(0, rows.start // ROWS * size if n else 0, lay.nbytes(n, k))
            packed = Packed(data, lay, n, k)
            if data.data_ptr() % ALIGN:
                packed = settle(Packed(data.clone(), lay, n, k))
        return DeviceCopy(self.place, matrix, self.format, (n, k), packed, native)

    @_plain()
    def dequantize(self, dtype: str, rows: slice = slice(None)) -> Any:
        """The weight as a tensor of ``float32``, ``bfloat16`` or ``float16``; of some rows, which begin with a tile.

        Raises
        ------
        LimitError
            Not enough memory.
        """
        import torch

        wanted, at = getattr(torch, dtype), range(*rows.indices(self.shape[0]))
        if self.packed is None:
            found = self.native.view(getattr(torch, _FLOATS[self.format])).view(self.shape)[rows]
            return found.to(wanted, copy=True)
        try:
            out = torch.empty((len(at), self.shape[1]), dtype=wanted, device=self.packed.data.device)
        except torch.OutOfMemoryError as error:
            raise _no_memory(f"dequantized weights on {self.place}", list(self.shape)) from error
        dequantize(self.packed, out, at.start, lambda: self.host[rows].dequantize(dtype))
        return out

    def known(self, x: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> Any:
        """The product of a call like one before; None where there was none, and where the long way has to look."""
        if out is not None or type(x) not in calls.KINDS or is_traced():
            return None
        try:
            at = x.data_ptr()
            key: tuple[Any, ...] = (x.shape, x.stride(), x.dtype, x.get_device(), at & 15, options)
            if bias is not None:
                if type(bias) not in calls.KINDS or bias.is_neg() or (bias.requires_grad and calls._grad_enabled()):
                    return None
                if bias.data_ptr() & 15:  # it is copied
                    return None
                key = (*key, bias.shape, bias.stride(), bias.dtype, bias.get_device())
            call = self.calls.get(key)
        except (RuntimeError, TypeError):  # no address, no strides, no hash
            return None
        if call is None or not at or x.is_neg() or (x.requires_grad and calls._grad_enabled()):
            return None
        run, launch, weight, rows, shape, strides, like = call
        try:
            result = calls._empty_strided(shape, strides, **like)
        except RuntimeError:  # no memory: the long way says so in our words
            return None
        into = result.data_ptr()
        if into & 127:  # not torch's own allocator
            return None
        if launch is None:
            run(x.view(rows), result.view(rows[0], -1), bias)
        else:
            launch(calls._raw_stream(self.place.ordinal), at, weight, into, 0 if bias is None else bias.data_ptr())
        return result

    def remember(self, x: Any, bias: Any, options: tuple[Any, ...], result: Any, run: QuantRun) -> None:
        """Enter a call of contiguous tensors that took the long way."""
        if not calls.ready() or any(type(t) not in calls.KINDS for t in (x, result)) or not x.is_contiguous():
            return
        key: tuple[Any, ...] = (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, options)
        if bias is not None:
            if type(bias) not in calls.KINDS or not bias.is_contiguous():
                return
            key = (*key, bias.shape, bias.stride(), bias.dtype, bias.get_device())
        given, into = x.view(-1, x.shape[-1]), result.view(-1, result.shape[-1])
        if into.data_ptr() & 127 or x.data_ptr() & 15:
            return
        weight = run.packed.data.data_ptr()
        like = {"dtype": result.dtype, "device": result.device}
        rows = (given.shape[0], given.shape[1])
        self.calls.keep(key, KnownCall(run, run.launch, weight, rows, tuple(result.shape), result.stride(), like))


_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def upload(matrix: Any, place: DeviceId, *, native: bool = False, there: Any = None) -> DeviceCopy:
    """The bytes of a matrix on a device, laid out for the kernels.

    Parameters
    ----------
    matrix : QuantizedMatrix
        Whose scales were looked at.
    native : bool
        Keep the bytes of the rows there too.
    there : tensor, optional
        Those bytes, where they are on the device already.

    Raises
    ------
    OptionError
        Of activations: Q8_K has no kernels.
    LimitError
        Not enough memory.
    """
    fmt = matrix.format
    if fmt.quantized and fmt.name not in FORMATS:
        raise OptionError(
            "format of weights on a CUDA device", limit="F32, F16, BF16, " + ", ".join(FORMATS), value=fmt.name,
            nearest="Q8_0",
        )  # fmt: skip
    import torch

    calls.ready()
    try:
        with _plain():
            raw = _uploaded(matrix.rows, place) if there is None else there
            if not fmt.quantized:
                return DeviceCopy(place, matrix, fmt.name, matrix.shape, None, raw)
            packed = pack(raw, fmt.name, *matrix.shape)
    except torch.OutOfMemoryError as error:
        raise _no_memory(f"quantized weights on {place}", f"{matrix.nbytes} bytes") from error
    return DeviceCopy(place, matrix, fmt.name, matrix.shape, packed, raw if native else None)


def adopt(data: Any, fmt: str, n: int, k: int) -> DeviceCopy:
    """A copy that `DeviceCopy.tensor` was taken from, or a copy of it.

    Raises
    ------
    LimitError
        Its bytes are not those of such a matrix.
    """
    place = DeviceId("cuda", data.get_device())
    if fmt in _FLOATS:
        return DeviceCopy(place, None, fmt, (n, k), None, data)
    lay = layout(fmt)
    if data.numel() != lay.nbytes(n, k) or data.data_ptr() % ALIGN or not data.is_contiguous():
        raise LimitError(
            f"bytes of a packed {fmt} matrix of {n} x {k}", limit=f"{lay.nbytes(n, k)}, aligned to {ALIGN}",
            value=f"{data.numel()} at {data.data_ptr():#x}", nearest="QuantizedMatrix.to",
        )  # fmt: skip
    calls.ready()
    return DeviceCopy(place, None, fmt, (n, k), settle(Packed(data, lay, n, k)), None)


def _uploaded(rows: Any, place: DeviceId) -> Any:
    """A host's bytes as a tensor on a device; files mapped read-only too."""
    import torch

    whole = rows if rows.flags.c_contiguous else np.ascontiguousarray(rows)
    if not whole.size:
        return torch.empty(whole.shape, dtype=torch.uint8, device=str(place))
    if not whole.flags.writeable:  # torch would warn, and only reads
        whole = np.asarray(Unmarked(whole))
    return torch.from_numpy(whole).to(str(place))


def _no_memory(what: str, value: Any) -> LimitError:
    return LimitError(f"memory for {what}", limit="what is free", value=value, nearest="a smaller format, or the host")

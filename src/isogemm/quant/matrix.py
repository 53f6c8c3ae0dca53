"""A matrix of quantized blocks over somebody's bytes: shape, format and strides, rows sliced without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends import find, of_tensor, open_device
from ..base.arguments import of_type, whole
from ..base.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, as_dtype
from ..errors import DeviceError, DTypeError, FormatError, OptionError
from ..formats.blocks import BlockFormat, format_of
from ..formats.stored import check_into, checked_shape, prefix, rows_of, writable, wrong_stride
from ..operands import views
from ..operands.aliasing import check_apart, check_no_self_overlap
from ..operands.device_array import HOST, DeviceId
from ..operands.prepared import Weight
from ..operands.tensors import is_tensor

Array = npt.NDArray[Any]
PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}


class QuantizedMatrix(Weight):
    """A weight [n, k] in a block format, over bytes that it does not own.

    Rows are runs of blocks; ``row_offset(i) = i * k / block * bytes per block``, as llama.cpp reads them. Build one
    with `from_bytes`, `isogemm.quantize` or `isogemm.quant.load`; slice its rows with ``w[i:j]``, which shares the
    bytes. Use it as the weight of `isogemm.linear`, with activations of the host, or of a CUDA device after `to`.

    Attributes
    ----------
    name : str
        The tensor's name, for messages; may be empty.
    format : BlockFormat
    shape : tuple of int
        (n, k).
    strides : tuple of int
        Bytes from row to row, and from block to block.
    rows : uint8 array [n, row bytes]
        The bytes, as a view; on the host wherever the matrix is.

    Determinism
    -----------
    A row of results of `isogemm.linear` depends on the row of activations and on each row of this matrix alone: a slice
    of it gives the bits of those columns of the whole.
    """

    __slots__ = (
        "__weakref__", "_checked", "_kept", "_origin", "_packed", "_seen", "_tensor",
        "format", "layout", "name", "rows", "shape",
    )  # fmt: skip

    def __init__(self, rows: Array, shape: tuple[int, int], fmt: BlockFormat, name: str = "", origin: int = 0) -> None:
        self.rows, self.shape, self.format, self.name, self._origin = rows, shape, fmt, name, origin
        self._checked = not fmt.quantized
        self._kept: Any = None  # what a backend made of these bytes for its kernels
        self.layout = "panels"  # or "blocks", see `in_place`
        self._packed: Any = None  # the copy on a device, of a matrix that is there
        self._tensor: Any = None  # the blocks as torch's, once torch asked
        self._seen: int | None = None  # torch's count of writes into them when they were last looked at; None: not told

    @classmethod
    def from_bytes(
        cls,
        data: Any,
        *,
        shape: tuple[int, int],
        format: str | BlockFormat,
        row_stride: int | None = None,
        name: str = "",
        origin: int = 0,
    ) -> QuantizedMatrix:
        """A matrix over bytes that hold exactly its rows, one behind the other.

        Parameters
        ----------
        data : bytes-like, uint8 array
            ``n * row bytes`` bytes; or a uint8 array [n, row bytes], whose rows may lie apart.
        shape : (n, k)
        format : str or BlockFormat
        row_stride : int, optional
            The bytes that the producer put between rows. It has to be the format's: a stride that is off by one block
            is aligned to blocks too, and would be read as shifted weights.
        name : str
            For messages.
        origin : int
            Where `data` begins in its file, for messages.

        Raises
        ------
        ShapeError
            k is no multiple of the block, or shape is not two whole numbers.
        LayoutError
            `row_stride` is not the format's, or `data` cannot be viewed.
        FormatError
            There are too few or too many bytes, or a scale is infinite or no number. The error names tensor and offset.
        DTypeError
            `data` has a mask, or `name` and `origin` are not what a message can say.
        """
        fmt, origin = format_of(format), whole("origin", origin)
        of_type("name", name, str, "text", "''")
        n, k = checked_shape(shape, name)
        row = fmt.row_bytes(k, name)
        if row_stride is not None and not (isinstance(row_stride, int | np.integer) and row_stride == row):
            raise wrong_stride(row_stride, row, fmt, k, name)
        found = views.array("data", data) if isinstance(data, np.ndarray) else data
        made = cls(rows_of(found, n, row, fmt, name, origin), (n, k), fmt, name, origin)
        made.check()
        return made

    @classmethod
    def adopt(cls, data: Any, *, shape: tuple[int, int], format: str | BlockFormat) -> QuantizedMatrix:
        """A matrix over a device's copy of one, whose rows the host need not have: for products and `dequantize` alone.

        Scales are not looked at; what products make of infinite ones and of NaN is not defined.

        Parameters
        ----------
        data : torch.Tensor
            The copy, as torch's operators get it.

        Raises
        ------
        DTypeError
            `data` is no dense tensor of bytes.
        ShapeError, OptionError, LimitError
            It is not of such a matrix.
        """
        if not is_tensor(data) or str(data.layout) != "torch.strided" or str(data.dtype) != "torch.uint8":
            what = f"{data.dtype}, {data.layout}" if is_tensor(data) else type(data).__name__
            raise DTypeError("data", limit="a dense tensor of uint8", value=what, nearest="QuantizedMatrix.to")
        fmt = format_of(format)
        n, k = checked_shape(shape, "")
        nowhere = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (n, fmt.row_bytes(k)), (0, 0), writeable=False)
        made = cls(nowhere, (n, k), fmt)
        made._checked, made._packed = True, _column(of_tensor(data)).adopt(data, fmt.name, n, k)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.shape[0] * self.format.row_bytes(self.shape[1])

    @property
    def bits_per_weight(self) -> float:
        """Bits of one element, scales included."""
        return self.format.bits_per_weight

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from row to row, and from block to block."""
        return self.rows.strides[0], self.format.nbytes

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def place(self) -> DeviceId:
        """Where the matrix is multiplied."""
        return HOST if self._packed is None else self._packed.place

    @property
    def device(self) -> str:
        """Where the matrix is multiplied: ``cpu``, ``cuda:0`` and so on."""
        return str(self.place)

    def to(self, device: Any, *, native: bool = False) -> QuantizedMatrix:
        """This matrix for products on a device: itself, if it is there already.

        On a CUDA device its bytes are uploaded once and laid out for the kernels; that copy stays there and the
        uploaded bytes do not. The host's bytes stay where they are: ``to("cpu")`` copies nothing, and slices whose
        first row is no multiple of 16 are laid out from them.

        Parameters
        ----------
        device : str, int or torch.device
            ``"cpu"``, ``"cuda"`` (torch's current device), ``"cuda:1"``.
        native : bool
            Keep the uploaded bytes on the device too, for slices at any row without another upload.

        Returns
        -------
        QuantizedMatrix
            Over the same host bytes. Its printed form names the device and the bytes of the copy there.

        Raises
        ------
        DeviceError
            No such device, or no torch for CUDA.
        OptionError
            Q8_K, which is for activations.
        LimitError
            The device has not enough memory.
        """
        place = find(device, "device of a quantized matrix")
        if place == self.place and (not native or self._packed is None or self._packed.native is not None):
            return self
        host = self if self._packed is None else self._packed.host
        if place == HOST:
            return host
        host.check()
        return host._on(_column(place).upload(host, place, native=native))

    def _on(self, copy: Any) -> QuantizedMatrix:
        """These rows, where a copy of them is."""
        made = QuantizedMatrix(self.rows, self.shape, self.format, self.name, self._origin)
        made._checked, made.layout, made._packed = self._checked, self.layout, copy
        return made

    def row_offset(self, n: int) -> int:
        """Bytes from the start of the matrix to row `n` of contiguous rows: ``n * k / block * bytes per block``."""
        return self.format.row_offset(n, self.shape[1])

    def dequantize(self, dtype: Any = None) -> Any:
        """The weight as an array [n, k], with the bits of the ``gguf`` package; rounded once to `dtype`.

        Parameters
        ----------
        dtype : dtype, optional
            float32 (the default), bfloat16 or float16.

        Returns
        -------
        array, or torch tensor where the matrix is on a CUDA device

        Raises
        ------
        FormatError
            A scale is infinite or no number.
        DTypeError
            Another type.
        """
        wanted = FLOAT32 if dtype is None else as_dtype(dtype)
        if wanted not in DTYPES:
            raise DTypeError("dtype", limit="float32, bfloat16 or float16", value=str(dtype), nearest="float32")
        if self._packed is not None:
            return self._packed.dequantize(wanted.name)
        out = np.empty(self.shape, wanted)
        self.dequantize_into(out)
        return out

    def dequantize_into(self, out: Array) -> None:
        """`dequantize` into an array [n, k] with adjacent columns.

        Raises
        ------
        DTypeError, LayoutError
            It is no such array of float32, bfloat16 or float16.
        AliasError
            It shares memory with the blocks, or elements of it with one another.
        DeviceError
            The matrix is on another device.
        """
        if self._packed is not None:
            raise DeviceError(
                "dequantize_into()", limit="a matrix on the host", value=self.device, nearest="w.to('cpu')"
            )
        check_into(out, self.shape)
        check_no_self_overlap("out", out)
        check_apart("the blocks", self.rows, out)
        if not self.format.quantized:
            with np.errstate(over="ignore"):
                out[...] = self.array()
            return
        self.check()
        _column(HOST).dequantize(self.rows, self.format, out)

    def panels(self) -> Any:
        """The bytes laid out for the CPU's integer kernels: a second copy, made on first use and kept.

        Its `nbytes` and `seconds` say what it costs. Later changes of the bytes do not reach it, but those that torch
        makes in this very matrix: a slice that was used before keeps its own. `forget` drops it. Where the matrix is
        read in place, there is no copy.
        """
        self._notice()
        kept = self._kept  # once: another thread may forget it
        if kept is None:
            if self._packed is not None:
                raise DeviceError("panels()", limit="a matrix on the host", value=self.device, nearest="w.to('cpu')")
            self.check()
            seen = self._seen
            kept = _column(HOST).prepare(self.rows, self.format, self.shape[1], self.layout == "blocks")
            if seen == self._seen and (seen is None or seen == self._tensor._version):  # else others wrote meanwhile
                self._kept = kept
        return kept

    def in_place(self) -> QuantizedMatrix:
        """This matrix and its slices for products on the CPU that read its own bytes: no second copy, the same bits.

        For integer products, and at its best with few rows of activations; floats dequantize pieces for each product.
        """
        made = self[:]
        made.layout = "blocks"
        return made

    def forget(self) -> None:
        """Drop what `panels` keeps."""
        self._kept = None

    def array(self) -> Array:
        """F32, F16 and BF16: the weight as an array over the same bytes.

        Raises
        ------
        OptionError
            The format has scales; `dequantize` it.
        """
        if self.format.quantized:
            raise OptionError("array()", limit="F32, F16 or BF16", value=self.format, nearest="dequantize()")
        return self.rows.view(PLAIN[self.format.name])

    def check(self) -> None:
        """Look at every scale, once: done before the first use.

        Raises
        ------
        FormatError
            One is infinite or no number: the bytes are damaged, or are no blocks of this format.
        """
        self._notice()
        if self._checked:
            return
        (n, k), fmt = self.shape, self.format
        blocks = self.rows.reshape(n, k // fmt.block, fmt.nbytes)
        for field in fmt.scales:
            wide = field.dtype == "<f4"
            bits = blocks[..., field.offset : field.offset + field.nbytes].view("<u4" if wide else "<u2")[..., 0]
            exponent = 0x7F800000 if wide else 0x7C00
            bad = (bits & exponent) == exponent
            if bad.any():
                row, block = (int(i) for i in np.argwhere(bad)[0])
                at = self._origin + row * self.rows.strides[0] + block * fmt.nbytes + field.offset
                raise FormatError(
                    f"{prefix(self.name)}scale {field.name} of block {block} of row {row}, at byte {at}",
                    limit="a finite number", value=blocks[row, block].view(fmt.dtype)[0][field.name],
                    nearest=f"write the file again; {int(bad.sum())} blocks of {bad.size} are like this",
                )  # fmt: skip
        self._checked = True

    def _show(self, tensor: Any) -> None:
        """Keep what torch sees these bytes as; what torch writes into them is noticed, where torch counts."""
        self._tensor = tensor
        self._seen = None if self._packed is not None or tensor.is_inference() else int(tensor._version)

    def _notice(self) -> None:
        """Drop what was made of bytes that torch has written since."""
        if self._seen is None or self._tensor._version == self._seen:
            return
        seen = int(self._tensor._version)
        self._kept, self._checked = None, not self.format.quantized
        self._seen = seen  # last: other threads that read it take what is kept

    def _own(self) -> None:
        """Rows that may be written: those that are, or a copy of memory that is read-only to this process."""
        if not writable(self.rows):
            self.rows = self.rows.copy()
            self._kept = self._kept if self.layout == "panels" else None

    def __reduce__(self) -> tuple[Any, ...]:
        """The bytes, without what backends made of them."""
        if self._packed is not None:
            return tuple(self._packed.host.__reduce__())
        self._notice()
        state = np.ascontiguousarray(self.rows), self.shape, self.format.name, self.name, self._checked, self.layout
        return _restored, state

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> QuantizedMatrix:
        """Rows, over the same bytes; on a device over the same copy too, where they begin at a multiple of 16."""
        if not isinstance(index, slice):
            raise OptionError(
                "index of a QuantizedMatrix", limit="a slice of rows", value=index, nearest="w[i : i + 1]"
            )
        try:
            rows = self.rows[index]
        except (TypeError, ValueError) as error:
            limit = "whole numbers, and a step other than 0"
            raise OptionError("slice of rows", limit=limit, value=str(index), nearest="w[0:1]") from error
        first = index.indices(len(self))[0] * self.rows.strides[0] if len(rows) else 0
        self._notice()
        part = QuantizedMatrix(rows, (len(rows), self.shape[1]), self.format, self.name, self._origin + first)
        part._checked, part.layout = self._checked, self.layout
        if self._packed is None:
            return part
        self._packed.host  # noqa: B018  rows that the host has
        return part._on(self._packed.part(part, range(*index.indices(len(self)))))

    def __repr__(self) -> str:
        n, k = self.shape
        name = f"{self.name!r}, " if self.name else ""
        apart = "" if self.strides[0] == self.format.row_bytes(k) or n < 2 else f", rows {self.strides[0]} bytes apart"
        there = "" if self._packed is None else f", on {self.device}: {self._packed.nbytes} bytes"
        there += ", read in place" if self.layout == "blocks" else ""
        return f"QuantizedMatrix({name}{n} x {k}, {self.format}, {self.nbytes} bytes{apart}{there})"


def _column(place: DeviceId) -> Any:
    """What a device has for quantized weights."""
    return open_device(place).quant


def _restored(rows: Array, shape: tuple[int, int], fmt: str, name: str, *state: Any) -> QuantizedMatrix:
    made = QuantizedMatrix(rows, shape, format_of(fmt), name)
    made._checked, made.layout = state
    return made

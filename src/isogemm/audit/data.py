"""Operands of an audit: shapes, weights and activations, one weight at a time, the same for the same seed.

Random values use products and sums of normal deviates alone, so a seed gives the same bits on every machine.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import arguments
from ..base.dtypes import BFLOAT16, NUMPY, SHORT_NAMES
from ..base.extras import require_extra
from ..errors import DTypeError, LayoutError, LimitError, OptionError, ShapeError
from ..lab import shapes
from ..lab.models import LinearShape

Array = NDArray[Any]

LAYOUTS = ("C", "F", "padded", "rows", "columns", "unaligned")
_BLOCK_ROWS = 256
_OUTLIER_SHARE, _OUTLIER_SCALE = 0.004, 20.0


def as_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an operand's type by its name, long or short (``bf16``); a DTypeError for any other."""
    full = SHORT_NAMES.get(name, name) if isinstance(name, str) else ""
    if full not in NUMPY:
        value, limit = arguments.shown(name), "one of " + ", ".join(NUMPY)
        raise DTypeError("dtype of an audit", limit=limit, value=value, nearest="float32")
    return NUMPY[full]


def checked_seed(seed: Any) -> int:
    """A seed of random numbers. Raises OptionError: it is none."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OptionError("seed", limit="a whole number of at least 0", value=repr(seed), nearest=0)
    return seed


def portable(path: str) -> str:
    """`path` relative to the current folder where it lies below it, else as it is: for what leaves this machine."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) if os.path.isabs(path) else path


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], *, skip: int = 0) -> Array:
    """An uninitialised C-ordered array whose data start `skip` elements after a multiple of 64 bytes.

    Libraries may choose other code for other alignments; with the alignment fixed, a mismatch replays.
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + 64 + skip * dtype.itemsize, np.uint8)
    start = -raw.ctypes.data % 64 + skip * dtype.itemsize
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def arrange(a: Array, layout: str) -> Array:
    """The values of a 2-D array in another memory layout; what lies between the values is NaN.

    ``C`` and ``F`` are the two dense orders; ``padded`` has three more columns than it shows; ``rows`` and
    ``columns`` show every other row or column of a larger array; ``unaligned`` starts one element off a cache line.
    Raises LayoutError: none of these.
    """
    if layout not in LAYOUTS:
        raise LayoutError("unknown layout", limit="one of " + ", ".join(LAYOUTS), value=repr(layout), nearest="C")
    rows, columns = a.shape
    if layout == "F":
        out = aligned((columns, rows), a.dtype).T
    elif layout == "unaligned":
        out = aligned(a.shape, a.dtype, skip=1)
    elif layout == "C":
        out = aligned(a.shape, a.dtype)
    else:
        step_rows, step_columns = (2 if layout == "rows" else 1), (2 if layout == "columns" else 1)
        spare = 3 if layout == "padded" else 0
        whole = aligned((rows * step_rows, columns * step_columns + spare), a.dtype)
        whole[...] = np.nan
        out = whole[::step_rows, : columns * step_columns : step_columns]
    out[...] = a
    return out


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the weight of a linear comes from: a seed, or a tensor of a safetensors file.

    Attributes
    ----------
    linear : LinearShape
    path : str
        The safetensors file; empty for random weights.
    """

    linear: LinearShape
    path: str = ""

    def load(self, dtype: np.dtype[Any], seed: int) -> Array:
        """The weight [n, k] as a dense, 64-byte aligned array of `dtype`.

        Random weights are normal with variance 1/k. Weights of a file are rounded to nearest even where `dtype` is
        narrower than the file's. Raises LimitError: there is no memory for it.
        """
        _, n, k = self.linear
        try:
            out = aligned((n, k), dtype)
        except MemoryError as error:
            raise LimitError("weight", limit="the free memory", value=self.linear, nearest="a smaller shape") from error
        if self.path:
            tensor = _open(self.path).get_slice(self.linear.name)
            for start in range(0, n, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, n)
                out[start:stop] = tensor[start:stop]
            return out
        rng = np.random.default_rng([seed, 1, n, k])
        scale = np.float32(1.0 / np.sqrt(k))
        for start in range(0, n, _BLOCK_ROWS):
            block = out[start : start + _BLOCK_ROWS]
            block[...] = rng.standard_normal(block.shape, np.float32) * scale
        return out


@dataclass(frozen=True, slots=True)
class ActivationSource:
    """Rows of activations: heavy-tailed random values, or the rows of a ``.npy`` file.

    Random rows are ``z + z**5 / 32`` of normal z, with 0.4% of the channels 20 times larger, as the residual stream of
    a language model has them. The first rows do not depend on how many are asked for.
    """

    # A ``.npy`` file of floats [rows, k], rounded to nearest even where the audit's are narrower; its rows repeat where
    # more are needed. Empty for random values.
    path: str = ""

    def rows(self, m: int, k: int, dtype: np.dtype[Any], seed: int, stream: int = 2) -> Array:
        """`m` rows of width `k`; another `stream` gives other rows.

        Raises OptionError, ShapeError or DTypeError: the file cannot be read, or holds no floats [rows, k].
        """
        if self.path:
            stored = self._stored(k)
            return np.roll(stored, stream - 2, axis=0)[np.arange(m) % len(stored)].astype(dtype)
        rng = np.random.default_rng([seed, stream, k])
        channels = np.where(np.random.default_rng([seed, 3, k]).random(k) < _OUTLIER_SHARE, _OUTLIER_SCALE, 1.0)
        out = np.empty((m, k), dtype)
        for start in range(0, m, _BLOCK_ROWS):
            z = rng.standard_normal((min(_BLOCK_ROWS, m - start), k), np.float32)
            square = z * z
            out[start : start + len(z)] = (z + z * square * square * np.float32(1 / 32)) * channels.astype(np.float32)
        return out

    def _stored(self, k: int) -> Array:
        try:
            stored = np.lib.format.open_memmap(self.path, mode="r")
        except (OSError, ValueError, OverflowError) as error:
            raise OptionError(
                "cannot read activations",
                limit="a .npy file",
                value=f"{self.path} ({error})",
                nearest=shapes.nearest_file(self.path, "no --inputs, for random activations"),
            ) from error
        if stored.ndim != 2 or stored.shape[1] != k or not len(stored):
            raise ShapeError(
                "activations do not fit the linear", limit=f"[rows, {k}]", value=list(stored.shape), nearest=f"[1, {k}]"
            )
        kind = stored.dtype.newbyteorder("=")
        if kind == np.dtype("V2"):  # what numpy.save makes of bfloat16
            return np.asarray(stored).view(BFLOAT16)
        if kind not in (np.float64, *NUMPY.values()):
            limit = "float64, " + ", ".join(NUMPY)
            raise DTypeError("dtype of activations", limit=limit, value=str(stored.dtype), nearest="float32")
        return np.asarray(stored)


def read_shapes(path: str) -> list[WeightSource]:
    """Linears from a shapes file, as `isogemm.lab.shapes.read_shapes` has them, with random weights."""
    return [WeightSource(linear) for linear in shapes.read_shapes(path)]


def weights_of_file(path: str, *, match: Sequence[str] = (), limit: int = 0) -> list[WeightSource]:
    """The 2-D floating-point tensors of a safetensors file as linears, in the file's order.

    Parameters
    ----------
    match : sequence of str
        Globs; a tensor is taken when one matches its name. All, when empty.
    limit : int
        At most so many; 0 for all.

    Raises
    ------
    OptionError
        The file cannot be read, or holds no such tensor.
    """
    path = arguments.path("path", path, "'model.safetensors'")
    handle = _open(path)
    found = []
    for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
        tensor = handle.get_slice(name)
        shape = tensor.get_shape()
        if len(shape) == 2 and min(shape) >= 1 and tensor.get_dtype() in ("F32", "BF16", "F16"):
            found.append(WeightSource(LinearShape(name, *shape), path))
    names = [source.linear.name for source in found]
    if match:
        found = [s for s in found if any(fnmatch.fnmatchcase(s.linear.name, pattern) for pattern in match)]
    if not found:
        raise OptionError(
            "no matching 2-D weight",
            limit=f"a tensor of {path} of type F32, BF16 or F16",
            value=list(match) or "a file without one",
            nearest=names[0] if names else "another file",
        )
    return found[:limit] if limit else found


def weight_named(path: str, name: str) -> WeightSource:
    """One tensor of a safetensors file, by its exact name."""
    return next(iter(weights_of_file(path, match=[re.sub(r"([\[*?])", r"[\1]", name)])))


def _open(path: str) -> Any:
    require_extra("weights", "reading weights", "safetensors")
    from safetensors import safe_open

    try:
        return safe_open(path, framework="numpy")
    except Exception as error:  # safetensors raises its own type, OSError or FileNotFoundError
        raise shapes.unreadable(path, error) from error

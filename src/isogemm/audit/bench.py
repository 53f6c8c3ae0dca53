"""One provider on one linear: guarded calls, and the outputs that several relations share."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract.compare import bits
from ..lab.models import LinearShape
from .data import ActivationSource, Array, aligned, arrange
from .providers import Provider, first_line

_LARGE_BYTES = 128 << 20  # copies of a weight (layouts, packing) take at most so much of it
_GARBAGE = 0.25  # of the norm of a sample: far above the rounding of any dtype here; zeros are off by 1
# Of NumPy, and of torch: rows of w taken for its columns.
_OTHER_WAY = re.compile("core dimension|not aligned|cannot be multiplied")


class ProviderFault(Exception):
    """A provider raised, or broke the protocol; the message is the reason in the report."""


class Disqualified(ProviderFault):
    """A fault after which nothing more can be asked of the provider on this linear."""


class NotApplicable(Exception):
    """A case has no meaning for this provider or this shape; the message says why."""


@dataclass(frozen=True)
class LinearOperands:
    """One linear's operands, shared by the providers."""

    linear: LinearShape
    w: Array  # array [n, k]: dense and aligned
    activations: ActivationSource
    seed: int
    columns: Array  # int array: the output columns that are compared, ascending
    max_m: int  # the most rows that fit the memory limit

    @property
    def dtype(self) -> np.dtype[Any]:
        """The operands' dtype."""
        return self.w.dtype

    def draw(self, m: int, stream: int = 2) -> Array:
        """`m` rows of activations."""
        return self.activations.rows(m, self.linear.k, self.dtype, self.seed, stream)


def sampled_columns(n: int, most: int) -> Array:
    """At most `most` of `n` columns: both edges (where tiles have tails) and an even spread between."""
    if n <= most:
        return np.arange(n)
    edge = min(64, most // 4)
    inner = np.linspace(edge, n - edge - 1, most - 2 * edge).astype(np.int64)
    return np.unique(np.concatenate([np.arange(edge), inner, np.arange(n - edge, n)]))


def copied_rows(k: int, dtype: np.dtype[Any]) -> int:
    """Rows of a weight of width `k` that relations may copy: 128 MiB of them."""
    return max(1, _LARGE_BYTES // (k * dtype.itemsize))


class ProviderBench:
    """Calls one provider on one linear; every relation's cases are evaluated on one of these."""

    def __init__(self, provider: Provider, operands: LinearOperands) -> None:
        self.provider, self.operands = provider, operands
        self.out_dtype: np.dtype[Any] | None = None
        self.relative_error = 0.0
        self._x = aligned((0, operands.linear.k), operands.dtype)
        self._stamp = _stamp(operands.w)
        self.products: dict[int, Array] = {}
        self._alone: dict[int, Array] = {}

    def x(self, m: int) -> Array:
        """A fresh, aligned copy of the first `m` rows of activations."""
        if m > self.operands.max_m:
            raise NotApplicable(f"M={m} is beyond the memory limit for this shape")
        if len(self._x) < m:
            self._x = self.operands.draw(min(max(m, 2 * len(self._x)), self.operands.max_m))
        return arrange(self._x[:m], "C")

    def product(self, m: int) -> Array:
        """The compared columns of the first `m` rows, computed as one batch; computed once."""
        if m not in self.products:
            self.products[m] = self.keep(self.call(self.x(m)))
        return self.products[m]

    def alone(self, row: int) -> Array:
        """The compared columns [1, columns] of one row, computed alone; computed once."""
        if row == 0:
            return self.product(1)
        if row not in self._alone:
            self._alone[row] = self.keep(self.call(arrange(self.x(row + 1)[row:], "C")))
        return self._alone[row]

    def part(self) -> Array:
        """The weight, or as many of its first rows as may be copied."""
        return self.operands.w[: copied_rows(self.operands.linear.k, self.operands.dtype)]

    def part_product(self, m: int) -> tuple[Array, Array]:
        """The product of the first `m` rows with `part`, and the columns compared."""
        columns = self.operands.columns
        part = self.part()
        if len(part) == len(self.operands.w):
            return self.product(m), columns
        columns = columns[columns < len(part)]
        return self.call(self.x(m), part)[:, columns].copy(), columns

    def keep(self, y: Array, columns: Array | None = None) -> Array:
        """A copy of the compared columns of a result: a provider may reuse its output buffer."""
        columns = self.operands.columns if columns is None else columns
        return np.array(y) if len(columns) == y.shape[1] else np.array(y[:, columns])

    def call(
        self,
        x: Array,
        w: Array | None = None,
        run: Callable[[Array, Array], Array] | None = None,
        *,
        sums: bool = False,
    ) -> Array:
        """``run(x, w)``, by default the provider's linear, with the protocol checked; `sums` may have another dtype.

        Raises ProviderFault: it raised, changed x, or returned something else than a NumPy array [m, n] of x's dtype or
        float32. Raises Disqualified: it changed w.
        """
        w = self.operands.w if w is None else w
        x_before = x.copy()
        stamp = self._stamp if w is self.operands.w else _stamp(w)
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
                y = (run or self.provider.linear)(x, w)
        except (Exception, SystemExit) as error:
            text = first_line(error)
            wants_tensors = isinstance(error, TypeError) and "numpy.ndarray" in text
            hint = "; on a CPU it is given NumPy arrays: torch.from_numpy(x)" if wants_tensors else ""
            if isinstance(error, (ValueError, RuntimeError)) and _OTHER_WAY.search(text):
                hint = "; it is given x [rows, k] and w [n, k], as a linear layer has them, and returns x @ w.T"
            raise ProviderFault(f"raised {type(error).__name__}: {text}"[:300] + hint) from error
        finally:
            if not np.array_equal(bits(x), bits(x_before)):
                raise ProviderFault("changed its input x")
            if _stamp(w) != stamp:
                raise Disqualified("changed its input w")
        return self._checked(y, (x.shape[0], w.shape[0]), sums=sums)

    def call_form(self, form: str, x: Array, w: Array, blocks: int) -> Array:
        """The product computed in another form over `blocks` equal blocks of the rows of w."""
        run = self.provider.forms.get(form)
        if run is None:
            raise NotApplicable(f"{self.provider.name} has no {form} form")
        height = len(w) // blocks

        def split(x: Array, w: Array) -> Array:
            return run(x, [w[i * height : (i + 1) * height] for i in range(blocks)])

        return self.call(x, w, split)

    def check_garbage(self) -> None:
        """Refuse a result that is no rounding of ``x @ w.T``.

        Raises Disqualified: an output of finite operands is not finite, or a sample is off by more than a quarter of
        its norm.
        """
        try:
            got = self.product(min(5, self.operands.max_m)).astype(np.float64)
        except ProviderFault as fault:
            raise Disqualified(str(fault)) from fault
        pick = np.linspace(0, len(self.operands.columns) - 1, min(256, len(self.operands.columns))).astype(int)
        exact = self.x(len(got)).astype(np.float64) @ self.operands.w[self.operands.columns[pick]].astype(np.float64).T
        if not np.isfinite(exact).all():
            raise Disqualified("the operands themselves are not finite in this dtype")
        if not np.isfinite(got).all():
            raise Disqualified("garbage: outputs of finite operands are not finite")
        size = float(np.linalg.norm(exact))
        error = float(np.linalg.norm(got[:, pick] - exact))
        self.relative_error = error / size if size else error
        if self.relative_error > _GARBAGE:
            raise Disqualified(f"is not x @ w.T (relative error {self.relative_error:#.2g})")

    def _checked(self, y: object, shape: tuple[int, int], *, sums: bool) -> Array:
        if not isinstance(y, np.ndarray):
            tensor = ": torch's tensors end with .numpy()" if type(y).__name__ == "Tensor" else ""
            raise ProviderFault(f"returned {type(y).__name__}, not a NumPy array{tensor}")
        if y.shape != shape:
            raise ProviderFault(f"returned shape {list(y.shape)} where {list(shape)} was due")
        allowed = (self.operands.dtype, np.dtype(np.float32))
        if y.dtype not in allowed:
            raise ProviderFault(f"returned dtype {y.dtype}, not {' or '.join(dict.fromkeys(map(str, allowed)))}")
        if sums:
            return y
        if self.out_dtype is None:
            self.out_dtype = y.dtype
        if y.dtype != self.out_dtype:
            raise ProviderFault(f"returned dtype {y.dtype} where it returned {self.out_dtype} before")
        return y


def _stamp(w: Array) -> tuple[int, bytes]:
    """A checksum of an array's bits at memory speed: lane sums, so that moved values show too."""
    words = bits(w if w.flags.c_contiguous else w.T)
    if not words.flags.c_contiguous:
        words = np.ascontiguousarray(words)
    flat = words.reshape(-1).view(np.uint8)
    lanes = 8 * 1021  # a prime count of 64-bit lanes: rows of the usual widths do not fall onto the same lanes
    cut = len(flat) // lanes * lanes
    sums = np.add.reduce(flat[:cut].view(np.uint64).reshape(-1, 1021), axis=0, dtype=np.uint64)
    return len(flat), sums.tobytes() + flat[cut:].tobytes()

"""`diagnose`: results in hand, as arrays or as buffers with leading dimensions, offsets and strides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..base import arguments
from ..base.limits import physical_memory
from ..base.progress import Tell
from ..contract import Contract, compare
from ..errors import DTypeError, LayoutError, LimitError, OptionError, ShapeError
from ..formats import reference
from ..operands.tensors import on_host
from ..problem.settings import stored
from ..quant.encode import weight_format
from .bank import caused
from .case import BYTES, Array, Blocks, GemmCall, StoredMatrix, check_floats, matrix_of, resized
from .diagnosis import Diagnosis
from .groups import Product, diagnosed
from .orders import follows, order_of
from .search import search

_VIEW = (
    *("m", "n", "k", "lda", "ldb", "ldc", "offset_a", "offset_b", "offset_c", "stride_a", "stride_b", "stride_c"),
    *("batch_count", "order"),
)


def diagnose(
    observed: Any,
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    trans_a: str = "N",
    trans_b: str = "N",
    bias: Any = None,
    format: str = "",
    row_stride: int | None = None,
    contract: str | None = None,
    pairs: bool = True,
    tell: Tell | None = None,
    **view: Any,
) -> Diagnosis:
    """Name the mistake that made a result of ``C = alpha * op(A) @ op(B) + beta * C + bias``.

    Parameters
    ----------
    observed : array [m, n] or [items, m, n], flat buffer, or a list of them
        What the call left. Several runs of the same call, in a list, show a race.
    a : array [m, k] or [items, m, k], or list of arrays
        [k, m] for ``trans_a="T"``. NumPy's, or a torch tensor on any device (copied to the host). A list is a list of
        products whose sizes may differ, as of `isogemm.gemm_grouped`: `observed`, `b` and `c` then are lists as long,
        and several runs are a list of such lists.
    b : array [k, n] or [items, k, n]
        [n, k] for ``trans_b="T"``; fewer items than A's for groups of heads that share one; a QuantizedMatrix
        [n, k], or with `format` its bytes.
    c : array, optional
        C's memory as it was before the call; without it stale memory cannot be told from noise.
    alpha, beta : float
    trans_a, trans_b : {"N", "T", "C"}
    bias : array [n], optional
    format : str
        Of quantized weights that are given as bytes [n, row bytes], for example Q4_K: the product is ``a @ w.T``.
    row_stride : int, optional
        Bytes that the producer put between rows of weights.
    contract : str, optional
        What was asked for, where it rounds operands: ``tf32:sm90`` makes tf32 right.
    pairs : bool
        Whether two mistakes at once are tried where one explains nothing.
    tell : callable, optional
        ``tell(done, total, text)`` as the search goes on.
    **view
        The BLAS view, for flat buffers: ``m, n, k``, and where they differ from a packed call ``lda, ldb, ldc``,
        ``offset_a`` and the like (a number, or one for each item), ``stride_a`` and the like, ``batch_count``, and
        ``order``, "F" (column-major, the default of a BLAS) or "C".

    Returns
    -------
    Diagnosis

    Raises
    ------
    ShapeError, DTypeError, LayoutError, OptionError, LimitError
        The description contradicts itself, or the memory does not hold so many items. Nothing was looked at.

    Notes
    -----
    The cost is a few float64 products of the same size, and a small fraction of one for each mistake of the bank.
    """
    said: dict[str, Any] = {"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b, "bias": bias}
    said |= {"format": format, "row_stride": row_stride, **view}
    pairs = arguments.flag("pairs", pairs)
    tf32 = contract is not None and Contract.parse(contract).arithmetic.startswith("tf32:")

    def alone(case: GemmCall, buffers: list[Array], both: bool) -> Diagnosis:
        return _diagnosed(replace(case, rounded="tf32") if tf32 else case, buffers, contract, both, tell)

    if isinstance(a, list | tuple):
        return diagnosed(_listed(observed, a, b, c, said), alone, pairs=pairs)
    runs = [on_host(x) for x in observed] if isinstance(observed, list | tuple) else [on_host(observed)]
    return alone(*call_of(runs, a, b, c, **said), pairs)


def _diagnosed(case: GemmCall, buffers: list[Array], contract: str | None, pairs: bool, tell: Tell | None) -> Diagnosis:
    """The diagnosis of one call, by what its runs left."""
    at = case.c.positions().reshape(-1)
    moved = max((compare.differing(buffers[0][at], x[at]) for x in buffers[1:]), default=0)
    found = search(case, buffers[0], pairs=pairs and not moved, moving=moved > 0, tell=tell)
    if found.verdict == "right":
        found = _ordered(found, case, buffers[0], contract)
    return _compared(found, case, buffers, f"{moved} of {at.size} elements differ from run to run") if moved else found


def _listed(observed: Any, a: Any, b: Any, c: Any, said: dict[str, Any]) -> list[Product]:
    """The calls of a list of products, whose runs are lists too."""
    several = isinstance(observed, list | tuple) and observed and isinstance(observed[0], list | tuple)
    runs = list(observed) if several else [observed]
    for name, x in (("b", b), ("c", c), *(("observed", run) for run in runs)):
        there = None if x is None else arguments.items(x)
        if x is not None and (there is None or len(there) != len(a)):
            limit = f"a list of {len(a)}, as a is: one for each product"
            value = arguments.shown(x) if there is None else len(there)
            raise ShapeError(f"items of {name}", limit=limit, value=value, nearest=f"{len(a)}, or np.asarray(a)")
    return [
        call_of([on_host(run[g]) for run in runs], a[g], b[g], None if c is None else c[g], **said)
        for g in range(len(a))
    ]


def call_of(
    runs: list[Array],
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    trans_a: str = "N",
    trans_b: str = "N",
    bias: Any = None,
    format: str = "",
    row_stride: int | None = None,
    **view: Any,
) -> tuple[GemmCall, list[Array]]:
    """The call that `diagnose` was told of, and the flat buffers that it left."""
    ta, tb = stored("trans_a", trans_a), stored("trans_b", trans_b)
    weights = None
    if hasattr(b, "row_offset") or format:
        weights = _blocks(b, format, row_stride)
        b, tb = reference.dequantize(weights.rows(weights.stride), weights.fmt), "T"
    x, y = on_host(a), on_host(b)
    _check(runs, x, y)
    if view:
        matrices, flats = _viewed(runs, x, y, ta, tb, dict(view))
    else:
        matrices, flats = _arrays(runs, x, y, ta, tb)
    before = None if c is None else _before(check_floats("c", on_host(c)), runs[0])
    added = None if bias is None else check_floats("bias", on_host(bias))
    if added is not None and added.shape != (matrices[2].columns,):
        want = [matrices[2].columns]
        raise ShapeError("bias", limit=f"shape {want}", value=list(added.shape), nearest=want)
    alpha, beta = arguments.number("alpha", alpha), arguments.number("beta", beta)
    if beta != 0 and before is None:  # every result would be wrong
        raise OptionError("beta", limit="0 without c", value=beta, nearest="c=, C's memory as it was before the call")
    case = GemmCall(*matrices, before, alpha, beta, added, weights=weights)
    if case.a.columns != case.b.rows:
        raise ShapeError(
            "inner dimensions", limit=f"op(B) with {case.a.columns} rows", value=case.b.rows, nearest=case.a.columns
        )
    if (case.a.rows, case.b.columns) != (case.c.rows, case.c.columns):
        want = [case.a.rows, case.b.columns]
        raise ShapeError(
            "the observed result", limit=f"shape {want}", value=[case.c.rows, case.c.columns], nearest=want
        )
    return case, flats


def _check(runs: list[Array], a: Array, b: Array) -> None:
    """Raise unless runs have one shape and type, and all numbers are floats."""
    kinds = {(x.shape, x.dtype) for x in runs}
    if len(kinds) != 1:
        value = [f"{x.dtype} {list(x.shape)}" for x in runs]
        raise ShapeError("runs of a call", limit="one or more of one shape and type", value=value, nearest=value[:1])
    for name, x in (("observed", runs[0]), ("a", a), ("b", b)):
        check_floats(name, x)


def _blocks(b: Any, format: str, row_stride: int | None) -> Blocks:
    if hasattr(b, "row_offset"):
        fmt, (n, k), data = b.format, b.shape, np.ascontiguousarray(b.rows).reshape(-1)
        return Blocks(data, fmt, n, k, row_stride or fmt.row_bytes(k))
    fmt, data = weight_format("format", format), on_host(b)
    if data.dtype != np.uint8 or data.ndim != 2:
        value = f"{data.dtype} {list(data.shape)}"
        raise LayoutError("quantized weights", limit="uint8 [n, row bytes]", value=value, nearest="a QuantizedMatrix")
    n, size = len(data), data[0].size
    k = size // fmt.nbytes * fmt.block
    return Blocks(np.ascontiguousarray(data).reshape(-1), fmt, n, k, row_stride or size)


def _arrays(
    runs: list[Array], a: Array, b: Array, ta: str, tb: str
) -> tuple[tuple[StoredMatrix, StoredMatrix, StoredMatrix], list[Array]]:
    first = runs[0]
    items = first.shape[0] if first.ndim == 3 else 1
    packed = [np.array(x, order="C") for x in runs]
    matrices = matrix_of("a", a, ta, items), matrix_of("b", b, tb, items), matrix_of("observed", packed[0])
    return matrices, [x.reshape(-1) for x in packed]


def _before(c: Array, observed: Array) -> Array:
    if c.size != observed.size:
        raise ShapeError(
            "c", limit=f"the {observed.size} elements of what was observed", value=c.size, nearest=observed.size
        )
    return np.ascontiguousarray(c).reshape(-1)


def _viewed(runs: list[Array], a: Array, b: Array, ta: str, tb: str, view: dict[str, Any]
            ) -> tuple[tuple[StoredMatrix, StoredMatrix, StoredMatrix], list[Array]]:  # fmt: skip
    """Flat buffers, by extents, leading dimensions, offsets and strides."""
    if unknown := sorted(set(view) - set(_VIEW)):
        raise arguments.unknown("argument of a view of buffers", unknown[0], _VIEW, "none")
    try:
        m, n, k = (arguments.whole(name, view.pop(name)) for name in "mnk")
    except KeyError as missing:
        raise OptionError(
            "a view of buffers", limit="m, n and k", value=f"no {missing}", nearest="m=, n=, k="
        ) from missing
    if min(m, n, k) < 0:
        raise ShapeError("m, n, k", limit="at least 0", value=[m, n, k], nearest=[max(0, x) for x in (m, n, k)])
    order = arguments.one_of("order", view.pop("order", "F"), ("F", "C"), "F, column-major")
    listed = [len(found) for x in "abc" if (found := arguments.items(view.get(f"offset_{x}", 0))) is not None]
    count = _whole("batch_count", view, listed[0] if listed else 1)
    if count < 1:
        raise ShapeError("batch_count", limit="at least 1", value=count, nearest=1)
    most = max(1, physical_memory() // (BYTES * max(1, m * k, k * n, m * n)))
    if count > most:
        limit = f"at most {most} of this size, which this machine's memory holds"
        raise LimitError("batch_count", limit=limit, value=count, nearest=most)
    stored = {"a": (k, m) if ta == "T" else (m, k), "b": (n, k) if tb == "T" else (k, n), "c": (m, n)}
    matrices = []
    for name, flat, trans in (("a", a, ta), ("b", b, tb), ("c", runs[0], "N")):
        rows, columns = stored[name]
        ld = _whole(f"ld{name}", view, rows if order == "F" else columns)
        step = _whole(f"stride_{name}", view, ld * (columns if order == "F" else rows) if count > 1 else 0)
        matrices.append(
            resized(name, flat, stored[name], ld, order, trans, _offsets(f"offset_{name}", view, step, count))
        )
    return (matrices[0], matrices[1], matrices[2]), [x.reshape(-1) for x in runs]


def _whole(name: str, view: dict[str, Any], usual: int) -> int:
    """A whole number of a view, or the usual one where there is none. Raises DTypeError."""
    found = arguments.counted(given := view.get(name, usual))
    if found is None:
        raise DTypeError(name, limit="a whole number", value=arguments.shown(given), nearest=usual)
    return found


def _offsets(name: str, view: dict[str, Any], step: int, count: int) -> list[int]:
    """Where each item begins: as they are listed, or one step after the other."""
    listed = arguments.items(view.get(name, 0))
    if listed is None:
        return [_whole(name, view, 0) + step * p for p in range(count)]
    if len(listed) != count:
        raise ShapeError(name, limit=f"one number, or one for each of {count}", value=len(listed), nearest=count)
    return [arguments.whole(name, offset) for offset in listed]


def _ordered(found: Diagnosis, case: GemmCall, buffer: Array, contract: str | None) -> Diagnosis:
    """A right result with the order of its sum, which is a cause where it is not that of the contract."""
    found = replace(found, order=order_of(case, buffer))
    if contract is None or follows(case, buffer, contract):
        return found
    words = f"right within rounding, but not the bits of {contract}: {found.order or 'an order that is not known'}"
    return replace(found, causes=(caused("other-order", words, found.residual),))


def _compared(found: Diagnosis, case: GemmCall, buffers: list[Array], moved: str) -> Diagnosis:
    """What several runs that differ show beside the first."""
    others = [search(case, x, pairs=False, moving=True) for x in buffers[1:]]
    if {found.verdict, *(x.verdict for x in others)} == {"right"}:
        words = f"{moved}, within rounding: sums meet in an order of chance, as atomics do"
        return replace(found, causes=(caused("other-order", words, found.residual),))
    alike = set.intersection(*({(x.name, x.parameter) for x in y.causes} for y in (found, *others)))
    if alike:  # what it left unwritten differs, or what it read of other people's memory
        return replace(found, causes=tuple(x for x in found.causes if (x.name, x.parameter) in alike))
    worst = max([found, *others], key=lambda x: x.wrong)
    seen = "".join(f"; {cause.parameter}" for cause in worst.causes if cause.name == "race")
    race = caused("race", f"{moved}, beyond rounding{seen}", worst.residual)
    return replace(worst, verdict="wrong", causes=(race,))

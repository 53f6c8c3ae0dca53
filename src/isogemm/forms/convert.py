"""From one form to another: loop, strided batch, pointer array, one wide product. Views only, and the same bits.

Each conversion checks its conditions and says which one fails. The advice: items that share A or B are *one*
wide product (a batch of decoded tokens is one GEMM, not many), a constant stride beats a list of pointers, and
what is neither is a pointer array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..api import dispatch
from ..api import products as api
from ..api.operands import Operands
from ..base.arguments import one_of
from ..contract.spec import ContractLike
from ..errors import LayoutError, ShapeError
from ..operands.shapes import merge

Array = NDArray[Any]
Stack = Sequence[Any] | Any


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of one form: whether it holds, and the evidence."""

    form: str
    holds: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no ':3} {self.form}: {self.why}"


@dataclass(frozen=True, slots=True)
class Advice:
    """The form to use for a batch, why, and what was wrong with the others.

    Attributes
    ----------
    form : {"wide", "gemm_strided_batched", "gemm_batched", "gemm_grouped"}
    conditions : tuple of Condition
    """

    form: str
    conditions: tuple[Condition, ...]
    _a: list[Array] = field(repr=False, compare=False)
    _b: list[Array] = field(repr=False, compare=False)
    _public: Callable[[Array], Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join([f"use {self.form}", *map(str, self.conditions)])

    def run(self, *, contract: ContractLike | None = None, out_dtype: Any = None) -> list[Any]:
        """The products, in the advised form; the bits are those of a loop over `isogemm.gemm`."""
        options: dict[str, Any] = {"contract": contract, "out_dtype": out_dtype}
        if self.form == "wide":
            made = list(_wide(self._a, self._b, **options))
        elif self.form == "gemm_strided_batched":
            made = list(api.gemm_strided_batched(_strided(self._a), _strided(self._b), **options))
        else:
            run = api.gemm_batched if self.form == "gemm_batched" else api.gemm_grouped
            made = run(self._a, self._b, **options)
        return [self._public(x) for x in made]


def advise(a: Stack, b: Stack) -> Advice:
    """Which form suits the products a[i] @ b[i], with the conditions of each checked on the views given.

    Parameters
    ----------
    a, b : list of arrays [rows, columns], or array [batch, rows, columns]

    Returns
    -------
    Advice
        Printable; ``run()`` computes in the advised form.

    Raises
    ------
    ShapeError
        Different numbers of items, or items that have no product.
    """
    here = Operands()
    la, lb = _factors(a, b, here)
    found = [_try("wide", _wide_operands, la, lb), _try("gemm_strided_batched", _strided_pair, la, lb)]
    sizes = {(x.shape, y.shape) for x, y in zip(la, lb, strict=True)}
    same = "items are of one size" if len(sizes) == 1 else f"{len(sizes)} different sizes"
    found.append(Condition("gemm_batched", len(sizes) == 1, same))
    found.append(Condition("gemm_grouped", True, "takes any sizes, anywhere"))
    return Advice(next(c.form for c in found if c.holds), tuple(found), la, lb, partial(here.public, operand=a))


def _factors(a: Stack, b: Stack, here: Operands) -> tuple[list[Array], list[Array]]:
    """The matrices of both, each pair of which has a product."""
    la, lb = dispatch.as_matrices("a", a, here), dispatch.as_matrices("b", b, here)
    if len(la) != len(lb):
        raise ShapeError("items in b", limit="as many as in a", value=len(lb), nearest=len(la))
    for i, (x, y) in enumerate(zip(la, lb, strict=True)):
        if x.shape[1] != y.shape[0]:
            limit = f"{x.shape[1]}, as a[{i}] has columns"
            raise ShapeError(f"rows of b[{i}]", limit=limit, value=y.shape[0], nearest=x.shape[1])
    return la, lb


def _try(form: str, make: Any, a: list[Array], b: list[Array]) -> Condition:
    try:
        return Condition(form, True, make(a, b)[-1])
    except LayoutError as error:
        return Condition(form, False, str(error.value))


def pointer_array(x: Stack) -> list[Any]:
    """The matrices of a batch as a list of views: what `isogemm.gemm_batched` takes. Always possible."""
    here = Operands()
    return [here.public(item, x) for item in dispatch.as_matrices("items", x, here)]


def strided(items: Stack) -> Any:
    """The matrices of a list as one view [batch, rows, columns] with a constant stride; 0 when all are one matrix.

    Raises
    ------
    LayoutError
        They differ in shape, strides or dtype, lie in different buffers, or are not equally far apart.
    """
    here = Operands()
    return here.public(_strided(dispatch.as_matrices("items", items, here)), items)


def _strided(matrices: list[Array]) -> Array:
    if not matrices:
        raise _refused("no items")
    first = matrices[0]
    for i, x in enumerate(matrices):
        if (x.shape, x.strides, x.dtype) != (first.shape, first.strides, first.dtype):
            raise _refused(f"item {i} differs from item 0 in shape, strides or dtype")
        if _owner(x) != _owner(first):
            raise _refused(f"item {i} lies in another buffer than item 0")
    starts = [x.ctypes.data for x in matrices]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    if len(set(gaps)) > 1:
        raise _refused(f"distances between items differ: {_few(sorted(set(gaps)))} bytes")
    step = gaps[0] if gaps else 0
    writeable = all(x.flags.writeable for x in matrices)
    return as_strided(first, (len(matrices), *first.shape), (step, *first.strides), subok=True, writeable=writeable)


def wide(a: Stack, b: Stack, *, contract: ContractLike | None = None, out_dtype: Any = None) -> Any:
    """The products a[i] @ b[i] of items that share a factor, as one product; a view [batch, m, n] of its result.

    With one B for all, the rows of A are stacked: [batch * m, k] @ [k, n]. With one A, the columns of B are
    joined: [m, k] @ [k, batch * n]. Nothing is copied, so the stacked matrices have to be adjacent in memory.

    Raises
    ------
    ShapeError
        Different numbers of items, or items that have no product.
    LayoutError
        No shared factor, or the others are not adjacent.

    Determinism
    -----------
    One wide product has the bits of the loop: an element does not know how wide its matrix is.
    """
    here = Operands()
    return here.public(_wide(*_factors(a, b, here), contract, out_dtype), a)


def _wide(a: list[Array], b: list[Array], contract: ContractLike | None, out_dtype: Any) -> Array:
    left, right, shape, _ = _wide_operands(a, b)
    result: Array = api.matmul(left, right, contract=contract, out_dtype=out_dtype)
    batch, m, n = shape
    if left.shape[0] == m:  # joined columns; with batch == 1 the two readings are the same
        return result.reshape(m, batch, n).transpose(1, 0, 2)
    return result.reshape(batch, m, n)


def _wide_operands(a: list[Array], b: list[Array]) -> tuple[Array, Array, tuple[int, int, int], str]:
    sa, sb = _strided(a), _strided(b)
    (batch, m, _), n = sa.shape, sb.shape[2]
    if batch == 1 or sb.strides[0] == 0:
        rows = merge(sa, 1)
        if rows is None:
            raise _refused("all items share b, but the rows of a are not evenly spaced across items")
        return rows, sb[0], (batch, m, n), "all items share b, and the rows of a stack without a copy"
    if sa.strides[0] == 0:
        columns = merge(sb.swapaxes(1, 2), 1)
        if columns is None:
            raise _refused("all items share a, but the columns of b are not evenly spaced across items")
        return sa[0], columns.T, (batch, m, n), "all items share a, and the columns of b join without a copy"
    raise _refused("items share neither a nor b")


def _strided_pair(a: list[Array], b: list[Array]) -> tuple[Array, Array, str]:
    sa, sb = _strided(a), _strided(b)
    return sa, sb, f"constant strides of {sa.strides[0]} and {sb.strides[0]} bytes"


def gqa_scores(
    q: Any, k: Any, *, form: str = "packed", contract: ContractLike | None = None, out_dtype: Any = None
) -> Any:
    """q[h] @ k[h // group].T for grouped query heads: scores [heads, n, t].

    Parameters
    ----------
    q : array [heads, n, head_dim]
    k : array [kv_heads, t, head_dim]
        heads is a multiple of kv_heads; group = heads / kv_heads query heads read one key head.
    form : {"packed", "broadcast", "pointers", "strided"}
        ``packed``: a strided batch of kv_heads products with group * n rows each, if q's heads are adjacent.
        ``broadcast``: [kv_heads, group, n, head_dim] @ [kv_heads, 1, head_dim, t]. ``pointers``: an array of
        pointers in which each key occurs group times. ``strided`` exists for one group or groups of one; between,
        heads of a group need a key stride of 0 and the step to the next group needs another.

    Raises
    ------
    ShapeError
        heads is not a multiple of kv_heads, or head_dim differs.
    LayoutError
        ``packed`` would take a copy, or there is no constant stride.
    OptionError
        Another form.

    Determinism
    -----------
    All forms have the same bits.
    """
    here = Operands()
    queries, keys = here.view("q", q), here.view("k", k)
    dispatch.check_ndim("q", queries, 3)
    dispatch.check_ndim("k", keys, 3)
    (heads, n, head_dim), (kv_heads, t, depth) = queries.shape, keys.shape
    if head_dim != depth or not kv_heads or heads % kv_heads:
        raise ShapeError(
            "query and key heads",
            limit="heads a multiple of kv_heads, one head_dim",
            value=f"q {list(queries.shape)} and k {list(keys.shape)}",
            nearest=f"q {[max(1, heads // max(kv_heads, 1)) * kv_heads, n, depth]}",
        )
    form, group = one_of("form", form, tuple(_GQA), "broadcast"), heads // kv_heads
    scores = _GQA[form if heads else "broadcast"](
        queries, keys.swapaxes(1, 2), group, {"contract": contract, "out_dtype": out_dtype}
    )
    return here.public(scores.reshape(heads, n, t), q)


def _gqa_packed(q: Array, kt: Array, group: int, options: dict[str, Any]) -> Array:
    heads, n, head_dim = q.shape
    if n > 1 and group > 1 and q.strides[0] != n * q.strides[1]:
        raise LayoutError(
            "packed query", limit="rows evenly spaced across heads", value=f"strides {q.strides}", nearest="broadcast"
        )
    down = q.strides[0] if n == 1 else q.strides[1]
    shape, strides = (heads // group, group * n, head_dim), (group * q.strides[0], down, q.strides[2])
    packed = as_strided(q, shape, strides, subok=True, writeable=False)
    scores: Array = api.gemm_strided_batched(packed, kt, **options)
    return scores


def _gqa_broadcast(q: Array, kt: Array, group: int, options: dict[str, Any]) -> Array:
    by_group = q.reshape(len(kt), group, *q.shape[1:])  # splitting an axis is always a view
    scores: Array = api.matmul(by_group, kt[:, None], **options)
    return scores


def _gqa_pointers(q: Array, kt: Array, group: int, options: dict[str, Any]) -> Array:
    return _strided(api.gemm_batched(list(q), [kt[h // group] for h in range(len(q))], **options))


def _gqa_strided(q: Array, kt: Array, group: int, options: dict[str, Any]) -> Array:
    if group > 1 and len(kt) > 1:
        raise LayoutError(
            "key heads of a strided batch",
            limit="one constant stride",
            value=f"{len(q)} query heads on {len(kt)} key heads: strides of 0 and {kt.strides[0]} bytes",
            nearest="packed, broadcast or pointers",
        )
    shared = np.broadcast_to(kt, (len(q), *kt.shape[1:]), subok=True)
    scores: Array = api.gemm_strided_batched(q, shared, **options)
    return scores


_GQA = {"packed": _gqa_packed, "broadcast": _gqa_broadcast, "pointers": _gqa_pointers, "strided": _gqa_strided}


def _owner(x: Array) -> int:
    """Which buffer a view lies in."""
    owner: Any = x
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    tensor = getattr(owner, "owner", None)  # a device array's holder; views of one tensor are tensors of their own
    return id(owner) if tensor is None else int(tensor.untyped_storage().data_ptr())


def _few(values: list[int]) -> str:
    return ", ".join(map(str, values[:3])) + (", ..." if len(values) > 3 else "")


def _refused(why: str) -> LayoutError:
    limit = "one shape, one buffer, even spacing"
    return LayoutError("items as one view", limit=limit, value=why, nearest="gemm_batched, a pointer array")

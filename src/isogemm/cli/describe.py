"""``isogemm describe``: a product as a BLAS call, a call's names in libraries, or the name of a kernel in words."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from ..errors import IsogemmError, OptionError, ShapeError
from .options import element, refuse_given


def describe_command(
    here: typer.Context,
    what: Annotated[
        list[str], typer.Argument(metavar="M N K | NAME", help="A product's extents, a BLAS call or a kernel.")
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    trans: Annotated[str, typer.Option(help="NN, NT, TN or TT: how A and B are stored, by rows.")] = "NN",
    batch: Annotated[int, typer.Option(min=1, help="Products of this size, one after the other in memory.")] = 1,
    shared: Annotated[str, typer.Option(help="a or b: the same matrix in every product of the batch.")] = "",
    lda: Annotated[int, typer.Option(min=0, help="Elements from row to row of A; 0 for no gaps.")] = 0,
    ldb: Annotated[int, typer.Option(min=0, help="The same for B.")] = 0,
    mode: Annotated[str, typer.Option(help="default, tf32, tf32x3, ieee or pedantic: for tensor cores.")] = "default",
) -> None:
    """Say which BLAS call a product is, what it is called in libraries, and whether tensor cores could take it.

    With the name of a call (cublasSgemmStridedBatched) its names elsewhere, with that of a kernel (gemm_nt_q4_k) what
    it computes and what serves it here. Computes nothing.
    """
    if all(word.isdecimal() for word in what):
        if len(what) != 3:
            raise OptionError("describe", limit="M N K, or one name", value=" ".join(what), nearest="128 512 256")
        m, n, k = map(int, what)
        typer.echo(_product((m, n, k), dtype, trans, batch, shared, (lda, ldb), mode))
        return
    if len(what) != 1:
        raise OptionError("describe", limit="M N K, or one name", value=" ".join(what), nearest="gemm_nt_q4_k")
    unread = ("dtype", "trans", "batch", "shared", "lda", "ldb", "mode")
    refuse_given(here, unread, limit="with M N K", value=what[0], nearest="M N K, or the name alone")
    typer.echo(_named(what[0]))


def _named(name: str) -> str:
    """A kernel's meaning, or a call's names; one that is neither is refused as what it looks most like."""
    from ..blas import names_of, parse_kernel

    try:
        return parse_kernel(name).meaning()
    except IsogemmError:
        if name.lower().startswith(("gemm_", "gemv_")):
            raise
    return "\n\n".join(map(str, names_of(name)))


def _product(
    extents: tuple[int, int, int], dtype: str, trans: str, batch: int, shared: str, lds: tuple[int, int], mode: str
) -> str:
    from ..base.dtypes import FLOAT32, INT8, NUMPY
    from ..base.limits import check_extents
    from ..blas import CALLS, describe

    kind = (NUMPY | {"int8": INT8})[element("--dtype", dtype, "int8")]
    if len(trans) != 2 or not set(trans.upper()) <= set("NT"):
        raise OptionError("--trans", limit="two letters of N, T", value=trans, nearest="NN")
    if shared not in ("", "a", "b") or (shared and batch == 1):
        raise OptionError("--shared", limit="a or b, with --batch", value=shared, nearest="--batch 3 --shared b")
    m, n, k = extents
    if min(extents) < 1:
        raise ShapeError("extents", limit="at least 1", value=extents, nearest=tuple(max(1, x) for x in extents))
    check_extents(m, n, k, 4, batch)  # of int8 the sums have four bytes
    a = _matrix("a", (m, k), trans[0].upper(), lds[0], kind, 0 if shared == "a" else batch)
    b = _matrix("b", (k, n), trans[1].upper(), lds[1], kind, 0 if shared == "b" else batch)
    if batch > 1:
        a, b = (np.broadcast_to(x, (batch, *x.shape[-2:])) for x in (a, b))
    else:
        a, b = a[0], b[0]
    call = describe(a, b)
    names = next(x for x in CALLS if f"isogemm.blas.{call.routine}" in x.here.split(", "))
    lines = [str(call), "", str(names), "", str(call.tensor_cores(mode))]
    if kind != FLOAT32:
        by = ("StridedBatched", "_strided_batched") if batch > 1 else ("", "")
        lines.insert(3, f"these names are float32's; {kind}: cublasGemm{by[0]}Ex, rocblas_gemm{by[1]}_ex")
    return "\n".join(lines)


def _matrix(name: str, shape: tuple[int, int], op: str, ld: int, dtype: Any, batch: int) -> Any:
    """A stack of op's results, of memory that exists no more than it has to: nothing of it is ever read."""
    rows, columns = shape if op == "N" else shape[::-1]
    ld = ld or columns
    if ld < columns:
        raise OptionError(f"--ld{name}", limit=f"at least {columns}, the columns as stored", value=ld, nearest=columns)
    item = np.dtype(dtype).itemsize
    if rows * ld * item * max(1, batch) >= 2**63:
        raise OptionError(f"--ld{name}", limit="a matrix of at most 2**63 - 1 bytes", value=ld, nearest=columns)
    strides = (rows * ld * item if batch else 0, ld * item, item)
    x = np.lib.stride_tricks.as_strided(np.empty(1, dtype), (batch or 1, rows, columns), strides)
    return x if op == "N" else x.swapaxes(1, 2)

"""`isogemm.plan`: what would run, why, and at what bound, without running it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ..backends import planner
from ..base.arguments import extent, flag, of_type
from ..base.dtypes import DTYPES, INT8, INT32, NAMED, DType, as_dtype, name_of
from ..base.limits import check_extents
from ..base.threads import threads_of
from ..contract.spec import ContractLike
from ..errors import DTypeError, OptionError, ShapeError
from ..operands.device_array import HOST
from ..problem.forms import Mask
from ..problem.settings import stored
from ..quant.encode import weight_format

if TYPE_CHECKING:
    from ..backends import DevicePlan, Plan, WorkPlan

MOST_HEADS = 4096  # that are looked through for a number that divides


@overload
def plan(
    m: int,
    n: int,
    k: int,
    *,
    dtype: Any = ...,
    weight_dtype: Any = ...,
    out_dtype: Any = ...,
    trans_a: str = ...,
    trans_b: str = ...,
    packed: bool = ...,
    contract: ContractLike | None = ...,
    threads: int | None = ...,
    device: Literal["cpu"] = ...,
) -> Plan: ...


@overload
def plan(
    m: int,
    n: int,
    k: int,
    *,
    dtype: Any = ...,
    weight_dtype: Any = ...,
    out_dtype: Any = ...,
    trans_a: str = ...,
    trans_b: str = ...,
    contract: ContractLike | None = ...,
    threads: int | None = ...,
    device: str = ...,
    batch: int = ...,
    groups: Sequence[int] | None = ...,
    format: str | None = ...,
    heads: tuple[int, int] | None = ...,
    mask: str = ...,
) -> Plan | DevicePlan | WorkPlan: ...


def plan(
    m: int,
    n: int,
    k: int,
    *,
    dtype: Any = "float32",
    weight_dtype: Any = None,
    out_dtype: Any = None,
    trans_a: str = "N",
    trans_b: str = "T",
    packed: bool = False,
    contract: ContractLike | None = None,
    threads: int | None = None,
    device: str = "cpu",
    batch: int = 1,
    groups: Sequence[int] | None = None,
    format: str | None = None,
    heads: tuple[int, int] | None = None,
    mask: str = "",
) -> Plan | DevicePlan | WorkPlan:
    """Plan C[m, n] = op(A)[m, k] @ op(B)[k, n] without running it: once, in a batch or groups, in blocks, in attention.

    Parameters
    ----------
    m, n, k : int
        Extents, at least 0.
    dtype : {"float32", "bfloat16", "float16", "int8"}
        Element type of A, and of B and C unless `weight_dtype` or `out_dtype` say otherwise; C is float32 where B is,
        and int32 of int8, which a CPU has, for one product with weights that are int8 and not packed.
        A short name, as ``bf16``, or NumPy's or torch's own type is the same.
    trans_a, trans_b : {"N", "T", "C"}
        How the operands are stored; the default is a linear layer's: weights stored [n, k].
    packed : bool
        B was prepared by `isogemm.pack`.
    contract : Contract or str, optional
        Default ``fma/chain``, for int8 ``exact/chain``; on a GPU, 16-bit operands have that of its tensor cores.
    threads : int, optional
        Default `get_num_threads()`.
    device : str
        ``cpu``, or ``cuda`` or ``cuda:1`` for a GPU. ``h200`` and ``h100`` are described: a plan needs none here, and
        neither does ``cuda``, which is the first of them then. Names may be in capitals.
    batch : int
        Items of `gemm_batched` or `gemm_strided_batched`, each [m, n, k]; with `heads` sequences.
    groups : sequence of int, optional
        Rows of each product of `gemm_grouped`, of which `m` is the sum.
    format : str, optional
        Of a quantized weight [n, k], for example Q4_0; activations are quantized.
    heads : (int, int), optional
        Of queries, and of keys and values: attention of m tokens over n keys, of width k.
    mask : {"", "causal", "window:W", "bool", "added"}
        Of attention: none; the last query sees the last key; likewise and the W - 1 keys before; or a tensor.

    Returns
    -------
    Plan, WorkPlan where several products or blocks were asked for, or DevicePlan for a GPU

    Raises
    ------
    ShapeError, DTypeError, ContractError, OptionError, LimitError
        A value out of range; the message names the nearest legal one.
    DeviceError
        A GPU that is not there and has no table, or no kernel of it supports the product.
    """
    m, n, k, batch = extent("m", m, 0), extent("n", n, 0), extent("k", k, 0), extent("batch", batch)
    dtype = _element("dtype", dtype, (*DTYPES, INT8))
    legal, results = ((INT8,), (INT32,)) if dtype == INT8.name else (DTYPES, DTYPES)
    b_type = dtype if weight_dtype is None else _element("weight_dtype", weight_dtype, legal)
    usual = "int32" if dtype == INT8.name else "float32" if b_type == "float32" else dtype
    out_type = usual if out_dtype is None else _element("out_dtype", out_dtype, results)
    of_type("device", device, str, "text: cpu, cuda, cuda:N, h200 and the like", "'cpu'")
    trans, packed = stored("trans_a", trans_a) + stored("trans_b", trans_b), flag("packed", packed)
    if threads is not None:
        threads = threads_of("threads", threads)
    form, about = _several(m, k, batch, groups, format, heads, mask)
    if dtype == INT8.name and (form or device.lower().partition(":")[0] != HOST.kind):
        limit = "float32, bfloat16, float16; int8 for one product, on a CPU"
        raise DTypeError("dtype", limit=limit, value=dtype, nearest="float32, or a plan of one product on 'cpu'")
    check_extents(m, n, k, NAMED[dtype].itemsize, batch)
    what = f"plan of {form} products"
    if form and packed:
        raise OptionError(what, limit="packed=False", value=packed, nearest=False)
    if form in ("quantized", "attention"):
        if trans != "NT":
            limit, got = "trans_a='N' and trans_b='T'", f"{trans_a!r} and {trans_b!r}"
            raise OptionError(what, limit=limit, value=got, nearest="'N' and 'T'")
        if weight_dtype is not None:
            limit = f"weight_dtype=None: {f'the weights are {format}' if format else 'attention has no weights'}"
            raise OptionError(what, limit=limit, value=weight_dtype, nearest=None)
    if form and 0 in (m, n, k):
        raise ShapeError(what, limit="extents of at least 1", value=(m, n, k), nearest=1)
    owner, given = planner(device), ((m, n, k), (dtype, b_type, out_type))
    made: Plan | DevicePlan | WorkPlan = (
        owner.plan_work(form, *given, trans, contract, threads, **about)
        if form
        else owner.plan(*given, trans, packed, contract, threads)
    )
    return made


def _several(
    m: int,
    k: int,
    batch: int,
    groups: Sequence[int] | None,
    format: str | None,
    heads: tuple[int, int] | None,
    mask: str,
) -> tuple[str, dict[str, Any]]:
    """(form, what it is of), empty for one product.

    Raises OptionError or ShapeError: two forms at once, or sizes out of range.
    """
    if Mask.parse(mask).kind and heads is None:
        raise OptionError("mask", limit="with heads", value=mask, nearest="heads=(1, 1)")
    asked = [name for name, x in (("groups", groups), ("format", format), ("heads", heads)) if x is not None]
    if asked and asked != ["heads"] and batch != 1:
        asked.insert(0, "batch")
    if len(asked) > 1:
        raise OptionError("form of a plan", limit="one of batch, groups, format, heads", value=asked, nearest=asked[0])
    groups, heads = _numbers("groups", groups, 1), _numbers("heads", heads, 2)
    for name, sizes, least in (("groups", groups, 0), ("heads", heads, 1)):
        for size in sizes or ():
            extent(name, size, least)
    if groups is not None:
        if sum(groups) != m:
            raise ShapeError("groups", limit=f"rows that sum to m, {m}", value=sum(groups), nearest=f"m={sum(groups)}")
        return "grouped", {"rows": groups}
    if format is not None:
        fmt = weight_format("format", format)
        fmt.row_bytes(k)
        return "quantized", {"format": fmt.name}
    if heads is not None:
        if len(heads) != 2 or heads[0] % heads[1]:
            most = min(*heads, *heads[:1], MOST_HEADS) if heads else 1
            shared = max(x for x in range(1, most + 1) if heads[0] % x == 0) if heads else 8
            nearest = (heads[0] if heads else 8, shared)
            raise ShapeError(
                "heads", limit="two numbers, the first a multiple of the second", value=heads, nearest=nearest
            )
        return "attention", {"sequences": batch, "heads": heads[0], "shared": heads[1], "mask": mask}
    return ("batched", {"items": batch}) if batch > 1 else ("", {})


def _numbers(name: str, given: Any, several: int) -> Any:
    """Numbers one after the other, as a tuple; None as it is. Raises ShapeError: something else."""
    if given is None:
        return None
    try:
        if not isinstance(given, str | bytes | set | frozenset | Mapping):
            return tuple(x if isinstance(x, int) else operator.index(x) for x in given)
    except TypeError:
        pass
    close = (given,) * several if isinstance(given, int) else (8, 8)[:several]
    raise ShapeError(name, limit="whole numbers, one after the other", value=given, nearest=close)


def _element(name: str, dtype: Any, legal: tuple[DType, ...]) -> str:
    """The element type's name, from whatever names one; else a DTypeError."""
    found = as_dtype(dtype, name)
    if found not in legal:
        value = None if found is None else repr(name_of(found))
        raise DTypeError(name, limit=", ".join(map(name_of, legal)), value=value, nearest=name_of(legal[0]))
    return name_of(found)

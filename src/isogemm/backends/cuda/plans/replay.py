"""Replay of a plan on the GPU that it is for: by its kernel and configuration, or a typed error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....base.dtypes import NUMPY, torch_name
from ....contract.attention import factor
from ....errors import ContractError, DeviceError, DTypeError, LayoutError, OptionError, ShapeError
from ....operands import cuda as arrays
from ....operands.device_array import HOST, DeviceId
from ....operands.tensors import is_tensor
from ....planner.family import Family
from ....problem.forms import Mask, operand_shapes, shape_of
from ....problem.settings import Settings
from ..driver import facts
from ..driver.machine import admissions
from ..gemm import choose as products
from ..gemm.execute import pose
from ..gemm.lists import family as lists


def run(plan: Any, *operands: Any) -> Any:
    """See `DevicePlan.run`."""
    wanted, found = operand_shapes(plan.form, dict(plan.about), (plan.m, plan.n, plan.k)), shape_of(operands)
    if found != wanted:
        raise ShapeError("operands of a replay", limit=wanted, value=found, nearest="plan these operands anew")
    replays: dict[str, Callable[..., Any]] = {
        "": _product, "batched": _product, "grouped": _groups, "quantized": _quantized, "attention": _attention
    }  # fmt: skip
    each = [x for some in operands for x in (some if isinstance(some, list | tuple) else (some,))]
    place = _device_of(plan, each)
    return replays[plan.form](plan, place, *operands)


def _device_of(plan: Any, each: Sequence[Any]) -> DeviceId:
    """Where all operands are, which is the plan's device."""
    for x in each:
        place = getattr(x, "place", DeviceId("cuda", x.get_device()) if getattr(x, "is_cuda", False) else HOST)
        name = facts.device(place.ordinal).name if place.kind == "cuda" else "the CPU"
        if name != plan.device:
            raise DeviceError(
                "device of a replay", limit=f"{plan.device}, the plan's", value=name, nearest="a plan for that device"
            )
        dtype = torch_name(getattr(x, "dtype", ""))
        legal = (plan.numeric.dtype_a, plan.numeric.dtype_b, "bool")
        if is_tensor(x) and dtype not in legal:
            raise DTypeError("operands of a replay", limit=", ".join(legal[:2]), value=dtype, nearest=legal[0])
    return DeviceId("cuda", each[0].get_device())


def _require(plan: Any, family: Family[Any, Any], case: Any, config: Any, judge: Callable[..., Any]) -> None:
    """Raise unless the kernel takes the case, and its bits are the contract's here."""
    if not family.supports(case, config):
        raise LayoutError(
            "operands of a replay", limit=f"what {plan.family} [{plan.config}] takes", value=case,
            nearest="contiguous tensors",
        )  # fmt: skip
    found = judge(family, case, config)
    if found.state != "admitted":
        raise ContractError(
            f"{plan.family} on {plan.device}", limit=f"a kernel that has the bits of {plan.contract}",
            value=f"{found.state} {found.detail}".rstrip(), nearest="isogemm.plan(...)",
        )  # fmt: skip


def _empty(plan: Any, shape: tuple[int, ...], place: DeviceId) -> Any:
    return arrays.empty(shape, NUMPY[plan.numeric.out_dtype], place)


def _posed(plan: Any, a: Any, b: Any, out: Any) -> Any:
    x, y = (arrays.from_tensor("operand", each)[0] for each in (a, b))
    return pose(x, y, out, Settings(plan.contract), None, None)


def _product(plan: Any, place: DeviceId, a: Any, b: Any) -> Any:
    out = _empty(plan, (*a.shape[:-1], plan.n), place)
    product, at = _posed(plan, a, b, out)
    here = products.chooser(place.ordinal)
    family = here.families.get(plan.family)
    if family is None:
        raise OptionError("kernel of a replay", limit=list(here.families), value=plan.family, nearest="isogemm.plan")
    _require(plan, family, product, plan.config, here.verdict)
    family.bind(product, plan.config, place.ordinal)(at, arrays.current_stream(place))
    return arrays.tensor(out)


def _groups(plan: Any, place: DeviceId, a: Sequence[Any], b: Sequence[Any]) -> Any:
    """One launch for all items of one layout, as a call has it."""
    outs = [_empty(plan, (len(x), plan.n), place) for x in a]
    parts: dict[Any, list[Any]] = {}
    for item in (_posed(plan, x, y, out) for x, y, out in zip(a, b, outs, strict=True) if len(x)):
        parts.setdefault(lists._looks(item[0]), []).append(item)
    judge = products.chooser(place.ordinal).verdict
    for part in parts.values():
        _require(plan, lists.FAMILY, part[0][0], plan.config, judge)
    for part in parts.values():
        lists._enqueue(part, plan.config, place.ordinal, arrays.current_stream(place))
    return [arrays.tensor(out) for out in outs]


def _quantized(plan: Any, place: DeviceId, x: Any, w: Any) -> Any:
    from ..quant.case import QuantCase
    from ..quant.family import FAMILIES

    (m, n, k), types, copy = (plan.m, plan.n, plan.k), plan.numeric, w._packed
    if copy.format != types.dtype_b:
        raise OptionError("format of a replay", limit=types.dtype_b, value=copy.format, nearest="plan it anew")
    case = QuantCase("q8", types.dtype_b, types.dtype_a, types.out_dtype, None, m, n, k, plan.contract.arithmetic)
    kernel = FAMILIES.found[plan.family]
    config = kernel.configure(case, facts.device(place.ordinal).multiprocessors)
    if str(config) != plan.config:
        raise OptionError("configuration of a replay", limit=str(config), value=plan.config, nearest="isogemm.plan")
    _require(plan, kernel, case, config, admissions(place.ordinal).verdict)
    out = arrays.tensor(_empty(plan, (m, n), place))
    kernel.run(x.contiguous(), copy.packed, out, None, config)
    return out


def _attention(plan: Any, place: DeviceId, q: Any, k: Any, v: Any, shown: Any = None) -> Any:
    import torch

    from ..attention import run as attention

    mask = Mask.parse(dict(plan.about).get("mask", ""))
    if mask.kind == "window":
        shown = torch.from_numpy(mask.shown(plan.m, plan.n)).to(q.device)
    if shown is not None and (shown.dtype is torch.bool) != (mask.kind in ("bool", "window")):
        raise DTypeError("mask of a replay", limit=mask.kind, value=shown.dtype, nearest="the plan's")
    kernel = plan.family.removeprefix("attention ")
    return attention.forward(
        q, k, v, c=float(factor(None, plan.k)), mask=shown, causal_offset=mask.offset(plan.m, plan.n),
        ranged=mask.kind == "window", arithmetic=plan.contract.arithmetic, stats=False, kernel=kernel,
        out_dtype=getattr(torch, plan.numeric.out_dtype),
    )[0]  # fmt: skip

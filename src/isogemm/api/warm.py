"""`isogemm.warm`: what first calls on a GPU would compile, try and time, done ahead of them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..backends import find, of_tensor, open_device
from ..base.arguments import extent, items
from ..base.dtypes import FLOAT32, NUMPY, TORCH, as_dtype, check_dtype
from ..base.progress import progress_bar
from ..base.tuning import BUDGET, get_tuning
from ..contract.spec import ContractLike, as_contract
from ..errors import DeviceError, OptionError, ShapeError
from ..operands.device_array import DeviceId
from ..planner.timed import ProductClass
from ..planner.tuning import Wanted, pose
from ..problem.product import Product

if TYPE_CHECKING:
    from ..backends import DevicePlan

ROWS = range(1, 257)
log = logging.getLogger("isogemm")


@dataclass(frozen=True, slots=True)
class Warmed:
    """What `warm` did.

    Attributes
    ----------
    plans : tuple of DevicePlan
        Of each product and each class of rows: the kernel, why it was chosen, what admitted it, the time to expect.
    admitted, refused : int
        Algorithms of libraries whose bits were right for such a product, and others.
    seconds : float
        All in all.
    """

    plans: tuple[DevicePlan, ...]
    admitted: int
    refused: int
    seconds: float

    def __str__(self) -> str:
        timed = sum(plan.reason.startswith("timed") for plan in self.plans)
        return (
            f"{len(self.plans)} products, the kernels of {timed} by their times; of a library's algorithms "
            f"{self.admitted} admitted, {self.refused} refused; {self.seconds:.1f} s"
        )


def warm(
    model_or_shapes: Any,
    m: int | Iterable[int] = ROWS,
    *,
    dtype: str = "bfloat16",
    contract: ContractLike | None = None,
    device: Any = "cuda",
    progress: bool = True,
) -> Warmed:
    """Choose the kernels of y[m, n] = x[m, k] @ w[n, k].T before the first calls need them.

    Compiles and tries what may be the fastest, compares a library's algorithms with a kernel of ours, and times all of
    them; what is found serves this process and, from the user's records, later ones. No bit of any result depends on
    it. Several processes may do it at once.

    Parameters
    ----------
    model_or_shapes : torch.nn.Module, or sequence of (int, int)
        A model on a GPU, whose linear layers (weights [n, k], with a bias or not) are meant; or pairs of n and k.
    m : int or iterable of int, optional
        Rows of x. Numbers of rows that one kernel serves best count as one: 16 and 10, say, or 1152 and 1030.
    dtype, contract, device
        Of the products of `model_or_shapes` where that is a sequence; a model says its types and device itself. The
        default contract is the device's.
    progress : bool
        Show a bar on standard error, where that is a terminal.

    Returns
    -------
    Warmed

    Raises
    ------
    DeviceError
        No such GPU, or a model that is on none.
    ShapeError, OptionError, DTypeError
        No positive number of rows, n or k; nothing to do.
    """
    started, rows = time.monotonic(), _rows(m)
    layers = list(_layers(model_or_shapes, dtype, device))
    if not layers:
        raise OptionError("warm", limit="a model with linear layers, or pairs", value="none", nearest="[(4096, 4096)]")
    posed: dict[DeviceId, dict[ProductClass, Product]] = {}
    for place, n, k, kind, bias in layers:
        default = open_device(place).default(NUMPY[kind], NUMPY[kind]) if contract is None else as_contract(contract)
        for count in rows:
            product = replace(pose(Wanted("", n, k), m=count, dtype=kind, contract=default), dtype_bias=bias)
            posed.setdefault(place, {})[ProductClass.of(product)] = product
    plans, ranges = [], (0, 0)
    with progress_bar(shown=progress and sys.stderr.isatty()) as tell:
        for place, products in posed.items():
            here = open_device(place)
            chooser, explain_on = here.chooser, here.column("plans").explain_on
            chooser.live.warm(list(products.values()), tell, budget=max(get_tuning(), BUDGET))
            plans += [explain_on(product, chooser) for product in products.values()]
            found = [chooser.live.candidates.found(each) for each in products]
            ranges = ranges[0] + sum(len(x.admitted) for x in found), ranges[1] + sum(len(x.refused) for x in found)
    done = Warmed(tuple(plans), *ranges, time.monotonic() - started)
    log.info("warm: %s", done)
    return done


def _rows(m: int | Iterable[int]) -> Sequence[int]:
    listed = items(m)
    found = [m] if listed is None else listed
    if not found:
        raise ShapeError("m", limit="at least one number of rows", value="none", nearest=1)
    return [extent("m", count) for count in found]


def _layers(x: Any, dtype: str, device: Any) -> Iterator[tuple[DeviceId, int, int, str, str | None]]:
    """(device, n, k, type of the weight, type of the bias) of each linear layer."""
    if hasattr(x, "modules"):
        for layer in x.modules():
            weight: Any = getattr(layer, "weight", None)
            bias: Any = getattr(layer, "bias", None)
            kind = TORCH.get(str(getattr(weight, "dtype", "")))
            if kind is not None and hasattr(layer, "in_features") and weight.ndim == 2:
                n, k = weight.shape
                yield _on_gpu(of_tensor(weight)), n, k, kind.name, None if bias is None else TORCH[str(bias.dtype)].name
        return
    try:
        place = _on_gpu(find(device))
    except DeviceError as error:
        raise _without_gpu(error.value) from error
    found = as_dtype(dtype) or FLOAT32
    check_dtype("weights", found)
    listed = items(x)
    for pair in [x] if listed is None else listed:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise OptionError("warm", limit="a model, or pairs of n and k", value=repr(pair), nearest="[(4096, 4096)]")
        n, k = (extent(what, size) for what, size in zip("nk", pair, strict=True))
        yield place, n, k, found.name, None


def _on_gpu(place: DeviceId) -> DeviceId:
    if place.kind != "cuda":
        raise _without_gpu(place)
    return place


def _without_gpu(value: object) -> DeviceError:
    nearest = "a model moved to 'cuda'; a CPU's kernels are compiled ahead by the command isogemm warm"
    return DeviceError("warm", limit="a GPU that can be used here", value=value, nearest=nearest)

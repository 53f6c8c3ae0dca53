"""The kernels for products on CUDA devices, a row each, and who chooses among them on each device."""

from __future__ import annotations

import threading

from ....contract.spec import Contract
from ....planner.choose import Choice
from ....planner.family import Families
from ....planner.live import Live
from ....planner.products import Chooser
from ....planner.tables import load, shipped_tables, user_table_path
from ....planner.trials import ProductFamily
from ....problem.numeric import default_contract
from ....problem.product import Launch, Product
from ..driver.machine import admissions
from .live import CudaLive

# The plain families first: in this order they are the last resort.
FAMILIES: Families[ProductFamily] = Families(
    __package__,
    {
        "chain": "tile.family:CHAIN",
        "ieee": "tile.family:IEEE",
        "sgemm": "sgemm.family:Sgemm",
        "tf32": "tf32.family:Tf32",
        "hopper": "hopper.family:Hopper",
        "padded": "padded.family:Padded",
        "unaligned": "unaligned.family:Unaligned",
        "leaves": "leaves.family:Leaves",
        "cublaslt": "cublaslt.family:CublasLt",
        "items": "lists.family:FAMILY",
    },
)

_choosers: dict[int, Chooser] = {}
_lock = threading.RLock()


def chooser(device: int) -> Chooser:
    """The chooser of a device, made at first use from the user's table, the shipped ones and the user's records."""
    found = _choosers.get(device)
    if found is None:
        with _lock:
            found = _choosers.get(device) or _choosers.setdefault(device, _make(device))
    return found


def forget() -> None:
    """Forget choosers, so that new tables are read."""
    with _lock:
        _choosers.clear()


def choose(product: Product, device: int) -> Choice[Launch]:
    """The kernel for `product` on a device. What it returns for a product never changes its bits.

    Raises
    ------
    ContractError, DeviceError
        See `Chooser.choose`.
    TableError
        The user's tuning table is damaged; the message names the file and the field.
    """
    return chooser(device).choose(product)


def expected_us(product: Product, device: int) -> float | None:
    """Microseconds of the kernel that comes first for a product, as timed or by a model; None where nothing says."""
    hints = chooser(device).hints(product)
    return next((hint.expected_us for hint in hints if hint.expected_us is not None), None)


def arithmetic_of(device: int) -> str:
    """The arithmetic of a device's tensor cores, found by its bits; ``tensor_core:native`` where no model has them."""
    return chooser(device).arithmetic()


def default_contract_of(device: int, dtype: str) -> Contract:
    """The contract of operands of `dtype` on a device where none is asked for."""
    if dtype == "float32":
        return default_contract("cuda", dtype)
    return default_contract("cuda", dtype, arithmetic_of(device) or "tensor_core:sm90")


def _make(device: int) -> Chooser:
    here = admissions(device)
    own = user_table_path(here.stamp["device"])
    tables = [*([load(own)] if own and own.exists() else []), *shipped_tables()]
    found = Chooser(here, FAMILIES.found, tables, FAMILIES.absent)
    found.live = Live(found, CudaLive(device))
    return found

"""Which kernel serves a product on this device: tables first, then their nearest rows, then plain kernels.

What the numbers are was settled before, without M (`isogemm.problem.numeric`). Here M picks among kernels that have
those numbers: a candidate serves only where it is supported and admitted, whatever a table says about its speed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...contract.spec import Contract
from ...errors import ContractError, DeviceError
from ...planner.admission import Admissions, Records, Verdict, notice, same_stamp
from ...planner.ranking import Candidate, recommended
from ...planner.tables import Table, Use, load, shipped_tables, user_table_path
from ...planner.trials import Machine
from ...problem.numeric import default_contract, numeric_key
from ...problem.product import Family, Launch, Product
from .families import LIBRARIES, absent, families

__all__ = ["Choice", "Chooser", "arithmetic_of", "choose", "chooser", "default_contract_of", "reload"]


class Choice(NamedTuple):
    """The kernel for a product.

    Attributes
    ----------
    family, config : str
    launch : Launch
        Compiled and bound.
    reason : str
        Why this one.
    expected_us : float or None
        Microseconds, where this product's N and K were timed.
    """

    family: str
    config: str
    launch: Launch
    reason: str
    expected_us: float | None


class Chooser:
    """Chooses kernels on one device.

    Parameters
    ----------
    machine : Machine
    families : mapping of str to Family
        The plain ones first.
    tables : sequence of Table
        The user's first. Those of other devices give hints on speed alone.
    records : Records
        This user's verdicts.
    libraries : collection of str
        Families that only a table can admit.
    """

    def __init__(
        self,
        machine: Machine,
        families: Mapping[str, Family],
        tables: Sequence[Table],
        records: Records,
        libraries: Collection[str] = LIBRARIES,
    ) -> None:
        self.machine, self.families, self.libraries = machine, families, libraries
        self.admissions = Admissions(machine, families, libraries, tables, records)
        stamp = self.admissions.stamp
        alike = [t for t in tables if t.stamp.get("capability") == stamp.get("capability")]
        self.tables = sorted(alike, key=lambda t: t.stamp.get("device") != stamp.get("device"))  # stable: user's first
        if not any(t.stamp.get("device") == stamp.get("device") for t in alike):
            name = stamp.get("device", "this device")
            notice(f"no tuning table for {name}: kernels are chosen by other measurements; `isogemm tune` makes one")

    def candidates(self, product: Product) -> Iterator[Candidate]:
        """Kernels to consider, the likeliest first; the schedule is the only place that looks at M."""
        seen: set[Use] = set()
        for candidate in recommended(self.tables, product):
            seen.add(candidate.use)
            yield candidate
        for name, family in self.families.items():
            if name not in self.libraries:
                for config in family.configs(product):
                    if Use(name, config) not in seen:
                        yield Candidate(Use(name, config), "safe: no table has a kernel for it")

    def judged(self, product: Product, *, trial: bool = True) -> Iterator[tuple[Candidate, Verdict]]:
        """Supported candidates with their verdicts; those that are not here are passed over."""
        for candidate in self.candidates(product):
            name, config = candidate.use
            family = self.families.get(name)
            if family is not None and family.supports(product, config):
                yield candidate, self.admissions.verdict(name, config, product, trial=trial)

    def choose(self, product: Product) -> Choice:
        """The first supported and admitted candidate, built.

        Raises
        ------
        ContractError
            No kernel here has the contract's bits; the message names what was refused.
        DeviceError
            While a graph is captured: kernels that could serve have not been admitted yet.
        """
        self.check_arithmetic(product.contract)
        passed: list[str] = []
        unbuilt: list[str] = []
        waiting = False
        for candidate, verdict in self.judged(product):
            name, config = candidate.use
            if verdict.state == "stale":
                self._say_stale(name)
            if verdict.state == "admitted":
                try:
                    launch = self.families[name].build(product, config, self.machine.device)
                except Exception as error:
                    unbuilt.append(f"{name} [{config}]: {error}")
                    passed.append(unbuilt[-1])
                    continue
                if unbuilt:
                    _say_unbuilt(product, unbuilt, f"{name} [{config}]")
                return Choice(name, config, launch, candidate.reason, candidate.expected_us)
            waiting = waiting or (verdict.state == "unknown" and name not in self.libraries)
            passed.append(f"{name} [{config}]: {verdict.state} {verdict.detail}".rstrip())
        raise self._refusal(product, passed, waiting)

    def check_arithmetic(self, contract: Contract) -> None:
        """Raise `ContractError` for a tensor-core arithmetic that is not this device's."""
        if not contract.arithmetic.startswith("tensor_core:"):
            return
        own = self.admissions.arithmetic()
        if own and contract.arithmetic != own:
            raise ContractError(
                f"contract on {self.admissions.stamp.get('device', 'this device')}",
                limit=f"{own}, the arithmetic of its tensor cores",
                value=str(contract),
                nearest=f"{own}/{contract.order}",
            )

    def _say_stale(self, family: str) -> None:
        old = next(
            (
                t.stamp
                for t in self.tables
                if t.library and not same_stamp(t.stamp, self.admissions.stamp, library=True)
            ),
            {},
        )
        changed = [
            f"{name} {old[name]}, now {self.admissions.stamp.get(name, 'absent')}"
            for name in ("driver", "cublaslt")
            if name in old and old[name] != self.admissions.stamp.get(name)
        ]
        notice(
            f"algorithms of {family} were admitted with other software ({'; '.join(changed) or 'other sources'}) and "
            "are left out; other kernels serve. `isogemm tune` admits them anew"
        )

    def _refusal(self, product: Product, passed: Sequence[str], waiting: bool) -> Exception:
        if waiting and self.machine.capturing():
            return DeviceError(
                "graph capture",
                limit="kernels that were admitted before: a trial cannot run while a stream is captured",
                value=f"first call for {numeric_key(product)}",
                nearest="call once with these shapes before capturing",
            )
        missing = [f"{name} ({why})" for name, why in absent().items() if name not in self.families]
        return ContractError(
            f"no kernel on {self.admissions.stamp.get('device', 'this device')}",
            limit=f"one admitted for {numeric_key(product)}",
            value="; ".join(passed[:6])
            or f"none supports it; families that do not load: {', '.join(missing) or 'none'}",
            nearest="fma/chain, or the CPU, which has every contract",
        )


def _say_unbuilt(product: Product, unbuilt: Sequence[str], serving: str) -> None:
    """One line for a product, whatever its M: kernels of a table for other sizes are refused for one reason."""
    key = numeric_key(product)
    several = f"{len(unbuilt)} admitted kernels" if len(unbuilt) > 1 else "an admitted kernel"
    text = f"{several} cannot be built for {key}, and {serving} serves. The first was {unbuilt[0]}"
    notice(text, about=f"unbuilt for {key}")


_choosers: dict[int, Chooser] = {}
_lock = threading.RLock()


def chooser(device: int) -> Chooser:
    """The chooser of a device, made at first use from the user's table, the shipped ones and the user's records."""
    found = _choosers.get(device)
    if found is None:
        with _lock:
            found = _choosers.get(device) or _choosers.setdefault(device, _make(device))
    return found


def reload() -> None:
    """Forget choosers and launches, so that new tables are read."""
    with _lock:
        _choosers.clear()
    for name in (
        "calls",
        "gemm.list_calls",
        "quant.copy",
    ):  # by name: loaded later, and above this
        module = sys.modules.get(f"{__package__}.{name}")
        if module is not None:
            module.forget()


def choose(product: Product, device: int) -> Choice:
    """The kernel for `product` on a device. What it returns for a product never changes its bits.

    Raises
    ------
    ContractError, DeviceError
        See `Chooser.choose`.
    TableError
        The user's tuning table is damaged; the message names the file and the field.
    """
    return chooser(device).choose(product)


def arithmetic_of(device: int) -> str:
    """The arithmetic of a device's tensor cores, found by its bits; ``tensor_core:native`` where no model has them."""
    return chooser(device).admissions.arithmetic()


def default_contract_of(device: int, dtype: str) -> Contract:
    """The contract of operands of `dtype` on a device where none is asked for."""
    if dtype == "float32":
        return default_contract("cuda", dtype)
    return default_contract("cuda", dtype, arithmetic_of(device) or "tensor_core:sm90")


def _make(device: int) -> Chooser:
    from ...base.disk import cache_folder
    from .driver.machine import TorchMachine

    machine = TorchMachine(device)
    own = user_table_path(machine.stamp()["device"])
    tables = [*([load(own)] if own and own.exists() else []), *shipped_tables()]
    return Chooser(machine, families(), tables, Records(cache_folder("admissions")))
